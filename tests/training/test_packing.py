"""Packed rows: the same training as padded ones, nothing lost, rows even and within their limit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    AutoProcessor,
    BioGptConfig,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
    set_seed,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import collate
from training.batches import packed_batches, plan_packing, require_separate_samples
from training.collator import VisionLanguageCollator
from training.monitor import InterfaceMonitor


NUM_IMAGES = [1, 0, 2, 1, 0]


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Rows with one picture, two and none, of different lengths."""
    rows = []
    for number, num_images in enumerate(NUM_IMAGES):
        paths = [str(tmp_path / f"{number}-{image}.png") for image in range(num_images)]
        for image, path in enumerate(paths):
            Image.effect_noise((28, 28), 40 + 20 * number + image).convert("RGB").save(path)
        turns = [
            {"from": "human", "value": "<image>\n" * num_images + "What" + " really" * number + "?"},
            {"from": "gpt", "value": f"answer {number}" + " and more" * (5 - number)},
        ]
        rows.append({"images": paths, "conversations": turns, "source": f"row {number}"})
    return rows


def sizes_of(count: int) -> Dataset:
    """Sizes of samples, every third of them without pictures."""
    generator = torch.Generator().manual_seed(0)
    lengths = (700 + 300 * torch.rand(count, generator=generator) ** 4 * 10).long().numpy()
    return Dataset.from_dict({"length": lengths, "num_images": np.arange(count) % 3})


def packed_size(rows: Dataset, members: list[int], blank: int) -> int:
    """Tokens of a packed row."""
    chosen = rows.select(members)
    return sum(chosen["length"]) + blank * (not any(chosen["num_images"]))


def backward(model: NormLlavaForConditionalGeneration, inputs: dict[str, Any]) -> float:
    """Backward pass of a loss in float64, which the model's own is not; returns the loss."""
    labels = inputs["labels"][:, 1:]
    inputs = {name: value.double() if name == "pixel_values" else value for name, value in inputs.items()}
    inputs.pop("labels")
    # As in training: with a cache transformers doesn't look for packed samples.
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return loss.item()


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize(
    ("text", "spatial_merge_size"), [("qwen2", 1), ("qwen2", 2), ("qwen3", 1), ("llama", 1), ("gemma3", 1)]
)
def test_packed_and_padded_batches_have_the_same_loss_and_gradients(
    composed: Callable[..., Path], rows: list[dict[str, Any]], attention: str, text: str, spatial_merge_size: int
) -> None:
    folder = composed(text=text, spatial_merge_size=spatial_merge_size)
    set_seed(0)
    padded = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    packed = NormLlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation={"text_config": attention, "vision_config": "sdpa"}
    )
    batch, row = collate(folder, rows), collate(folder, rows, packed=True)
    assert "attention_mask" not in row
    assert row["input_ids"].shape == (1, batch["attention_mask"].sum())
    (q, k), longest = prepare_fa_kwargs_from_position_ids(row["position_ids"])  # flash attention reads these alone
    assert torch.equal(row["cu_seq_lens_q"], q)
    assert torch.equal(row["cu_seq_lens_k"], k)
    assert (row["max_length_q"], row["max_length_k"]) == longest
    losses = [backward(model, inputs) for model, inputs in ((padded, batch), (packed, row))]
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)
    gradients = [
        {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        for model in (padded, packed)
    ]
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        # Root mean square norms are computed in float32 whatever the model's dtype.
        # A key's bias has no gradient but rounding: the softmax takes it out.
        error = (gradient - gradients[1][name]).norm()
        assert error <= 1e-6 * gradient.norm() + 1e-9, f"{name}: {error:.1e} of {gradient.norm():.1e}"


@pytest.mark.parametrize("packed", [False, True])
def test_a_blank_picture_is_not_measured(
    composed: Callable[..., Path], rows: list[dict[str, Any]], packed: bool
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).train()
    monitor = InterfaceMonitor(model, processor)
    monitor.active = True
    inputs = collate(composed(), [rows[1]], packed)
    del inputs["labels"]
    model.model(**inputs, use_cache=False)
    assert "norm/visual" not in monitor.collect(lambda sums: sums)
    inputs = collate(composed(), rows, packed)
    del inputs["labels"]
    model.model(**inputs, use_cache=False)
    metrics = monitor.collect(lambda sums: sums)
    target = model.model.multi_modal_projector.norm.weight.norm().item()
    assert metrics["norm/visual"] == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("config", [Lfm2Config(full_attn_idxs=[1]), FalconH1Config(), BioGptConfig()])
def test_decoders_that_mix_the_samples_of_a_row_are_refused(config: PreTrainedConfig) -> None:
    """They read the samples before; the loss was off by hundredths, and nothing was said."""
    with pytest.raises(ValueError, match=f"packed_length: the decoder .{config.model_type}. mixes the samples"):
        require_separate_samples(config)
    require_separate_samples(Gemma3TextConfig())
    require_separate_samples(LlamaConfig())


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("count", [64, 67, 79])
def test_every_sample_once_in_an_epoch_and_the_same_steps_on_any_number_of_processes(
    num_processes: int, count: int
) -> None:
    rows, lengths = sizes_of(count), np.array(sizes_of(count)["length"])
    steps = plan_packing(rows, 729, 16, num_processes, [42, 43], 5000)
    first, second = (packed_batches(lengths, 16, num_processes, steps, seed) for seed in (42, 43))
    assert sorted(sample for row in first for sample in row) == list(range(count))
    assert first != second
    assert all(packed_size(rows, row, 729) <= 5000 for row in (*first, *second) if row)
    # The samples of a step don't depend on who shares it.
    alone, width = packed_batches(lengths, 16, 1, 1, 42), steps * num_processes
    assert len(alone) == -(-count // 16) == -(-len(first) // width)
    for number, step in enumerate(alone):
        assert sorted(sample for row in first[number * width :][:width] for sample in row) == sorted(step)
    # Nor is there a row more than needed.
    if steps > 1:
        fewer = packed_batches(lengths, 16, num_processes, steps - 1, 42)
        fewer += packed_batches(lengths, 16, num_processes, steps - 1, 43)
        assert any(packed_size(rows, row, 729) > 5000 for row in fewer)


def test_plans_that_cannot_be_met() -> None:
    def plan(lengths: list[int], samples: int, processes: int, blank: int = 0) -> int:
        rows = Dataset.from_dict({"length": lengths, "num_images": [0] * len(lengths)})
        return plan_packing(rows, blank, samples, processes, [42], 800)

    with pytest.raises(ValueError, match=r"the longest has 829 .text alone gets a blank picture of 729"):
        plan([100, 50], 2, 1, blank=729)
    with pytest.raises(ValueError, match="samples of a step can't be packed into rows of 800 tokens on 3 process"):
        plan([500] * 9, 4, 3)


def test_a_packed_row_without_pictures_leaves_room_for_the_blank_one(
    composed: Callable[..., Path], rows: list[dict[str, Any]]
) -> None:
    """4,096 tokens became 4,825."""
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    tokenized = [tokenize(row) for row in [rows[1], rows[4]] * 3]
    sizes, blank = Dataset.from_list([{name: row[name] for name in ("length", "num_images")} for row in tokenized]), 4
    packed_length = sum(sizes["length"][:2]) + 2  # two texts fit only without the blank picture
    steps = plan_packing(sizes, blank, 6, 1, [0], packed_length)
    for pack in packed_batches(np.array(sizes["length"]), 6, 1, steps, 0):
        batch = VisionLanguageCollator(tokenize, packed=True)([tokenized[member] for member in pack])
        assert batch["input_ids"].shape[1] == packed_size(sizes, pack, blank) <= packed_length
