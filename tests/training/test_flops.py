"""The arithmetic of a plan, against torch's own count of what a step really does."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from modeling_normllava import NormLlavaForConditionalGeneration
from training.adapters import add_adapters
from training.flops import step_flops
from training.stages import LearningRates, Stage, prepare_stage


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

    length = input_ids.shape[1]
    counted = step_flops(model, stage, [length], pictures=1, supervised=len(supervised))
    # We count half of a causal matrix; torch all of it.
    text = model.config.text_config
    counted += 6 * text.num_attention_heads * text.head_dim * text.num_hidden_layers * length**2
    # What is left out: products that no gradient needs, of the patches' own gradient in stage 2.
    assert counted == pytest.approx(counter.get_total_flops(), rel=0.03)
