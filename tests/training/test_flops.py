"""The arithmetic that MFU is read from, against torch's own count of what a step really does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_normllava import NormLlavaForConditionalGeneration
from training import flops
from training.adapters import add_adapters
from training.stages import LearningRates, Stage, prepare_stage


def test_a_part_of_a_gpu_has_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peak in (
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("a GPU", None),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert flops.device_peak(torch.device("cuda")) == peak
    assert flops.device_peak(torch.device("cpu")) is None


@pytest.mark.parametrize("stage", list(Stage))
def test_counted_as_torch_counts_it(model: NormLlavaForConditionalGeneration, stage: Stage) -> None:
    model.train()
    if stage is Stage.ADAPT:
        add_adapters(model, rank=4, alpha=8)
    prepare_stage(model, stage, LearningRates(1e-3, 1e-3, 1e-3))
    model.set_attn_implementation("eager")  # of which torch counts every product, masked or not
    input_ids = torch.tensor([[*[model.config.image_token_id] * 4, *range(5, 25)]])
    labels = torch.where(input_ids == model.config.image_token_id, -100, input_ids)
    with FlopCounterMode(display=False) as counter:
        output = model.model(input_ids=input_ids, pixel_values=torch.rand(1, 3, 28, 28), use_cache=False)
        supervised = output.last_hidden_state[:, :-1][labels[:, 1:] != -100]
        model.lm_head(supervised).sum().backward()

    of_token, of_square, of_picture, of_supervised = flops.unit_flops(model, stage)
    length = input_ids.shape[1]
    # We count half of a causal matrix; torch all of it.
    counted = of_token * length + 2 * of_square * length**2 + of_picture + of_supervised * len(supervised)
    # What is left out: products that no gradient needs, of the patches' own gradient in stage 2.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)
