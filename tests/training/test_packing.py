"""Packed rows: the same training as padded ones, nothing lost, rows even and within their limit."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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

from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from training.batches import (
    Batches,
    PackedBatches,
    RowSizes,
    fill,
    partition,
    plan_packing,
    require_separate_samples,
)
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


def collate(folder: Path, rows: list[dict[str, Any]], packed: bool = False) -> dict[str, Any]:
    """A batch of rows, tokenized with a model's processor."""
    processor = AutoProcessor.from_pretrained(folder)
    tokenize = RowTokenizer(processor, processor.chat_template)
    return VisionLanguageCollator(tokenize, packed)(list(map(tokenize, rows)))


def sizes_of(count: int, blank: int = 0) -> RowSizes:
    """Sizes of samples, every third of them without pictures."""
    return RowSizes(lengths_of(count), np.arange(count) % 3, blank)


def lengths_of(count: int, seed: int = 0) -> np.ndarray:
    generator = torch.Generator().manual_seed(seed)
    return (700 + 300 * torch.rand(count, generator=generator) ** 4 * 10).long().numpy()


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


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("text", ["qwen2", "qwen3", "llama", "gemma3"])
def test_packed_and_padded_batches_have_the_same_loss_and_gradients(
    composed: Callable[..., Path], rows: list[dict[str, Any]], attention: str, text: str
) -> None:
    folder = composed(text=text)
    set_seed(0)
    padded = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    packed = NormLlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation={"text_config": attention, "vision_config": "sdpa"}
    )
    batch, row = collate(folder, rows), collate(folder, rows, packed=True)
    assert "attention_mask" not in row
    assert row["input_ids"].shape == (1, batch["attention_mask"].sum())
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


@pytest.mark.parametrize("vision", ["siglip", "siglip2", "clip"])
def test_every_encoder_gives_as_many_features_as_there_are_tokens(
    composed: Callable[..., Path], rows: list[dict[str, Any]], vision: str
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(composed(vision=vision))
    assert model(**collate(composed(vision=vision), rows, packed=True), use_cache=False).loss.isfinite()


@pytest.mark.parametrize("config", [Lfm2Config(full_attn_idxs=[1]), FalconH1Config(), BioGptConfig()])
def test_decoders_that_mix_the_samples_of_a_row_are_refused(config: PreTrainedConfig) -> None:
    """They read the samples before; the loss was off by hundredths, and nothing was said."""
    with pytest.raises(ValueError, match=f"packed_length: the decoder .{config.model_type}. mixes the samples"):
        require_separate_samples(config)
    require_separate_samples(Gemma3TextConfig())
    require_separate_samples(LlamaConfig())


def test_rows_are_even() -> None:
    lengths = lengths_of(128)
    totals = [sum(lengths[member] for member in row) for row in partition(lengths.tolist(), 8)]
    assert totals == sorted(totals, reverse=True)
    # Longest-first dealing leaves a difference of one of the shorter samples at most.
    assert max(totals) - min(totals) <= min(lengths)


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("count", [64, 67, 79])
def test_every_sample_once_in_an_epoch_and_the_same_steps_on_any_number_of_processes(
    num_processes: int, count: int
) -> None:
    sizes = sizes_of(count, blank=729)
    deal = plan_packing(sizes, 16, num_processes, 42, 1, 5000)
    samplers = [Batches(deal, num_processes, rank) for rank in range(num_processes)]
    rows = [list(sampler) for sampler in samplers]
    assert all(len(of_process) == len(samplers[0]) for of_process in rows)
    assert sorted(sample for of_process in rows for row in of_process for sample in row) == list(range(count))
    samplers[0].set_epoch(1)
    assert list(samplers[0]) != rows[0]
    assert all(sizes.packed(row) <= 5000 for of_process in rows for row in of_process)
    # The samples of a step don't depend on who shares it.
    single = PackedBatches(sizes, 16, 1, 16, 42).steps(0)
    for number, step in enumerate(single[: count // 16 - 1]):
        window = slice(number * deal.accumulation_steps, (number + 1) * deal.accumulation_steps)
        assert sorted(sample for of_process in rows for row in of_process[window] for sample in row) == sorted(step)


def test_the_fewest_accumulation_steps_that_fit() -> None:
    sizes = sizes_of(512)
    for packed_length in (4000, 6000, 16000):
        deal = plan_packing(sizes, 64, 2, 42, 2, packed_length)
        assert all(sizes.packed(row) <= packed_length for epoch in range(2) for row in deal(epoch))
        if deal.accumulation_steps > 1:
            fewer = PackedBatches(sizes, 64, 2, deal.accumulation_steps - 1, 42)
            assert any(sizes.packed(row) > packed_length for epoch in range(2) for row in fewer(epoch))


def test_plans_that_cannot_be_met() -> None:
    def plan(lengths: list[int], samples: int, processes: int, packed_length: int, blank: int = 0) -> None:
        sizes = RowSizes(np.array(lengths), np.zeros(len(lengths), dtype=int), blank)
        plan_packing(sizes, samples, processes, 42, 1, packed_length)

    with pytest.raises(ValueError, match="longest sample has 900 tokens, a packed row 800"):
        plan([100, 900], 2, 1, 800)
    with pytest.raises(ValueError, match=r"longest sample has 829 tokens.*Text alone gets a blank picture of 729"):
        plan([100, 50], 2, 1, 800, blank=729)
    with pytest.raises(ValueError, match="2 samples a step can't be shared by 4 processes"):
        plan([100] * 4, 2, 4, 800)
    with pytest.raises(ValueError, match="fits the last samples of an epoch"):
        plan([400] * 9, 4, 4, 700)


def test_a_packed_row_without_pictures_leaves_room_for_the_blank_one(
    composed: Callable[..., Path], rows: list[dict[str, Any]]
) -> None:
    """4,096 tokens became 4,825."""
    texts = [rows[1], rows[4]] * 3
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    tokenized = list(map(tokenize, texts))
    lengths = np.array([row["length"] for row in tokenized])
    sizes = RowSizes(lengths, np.zeros(6, dtype=int), tokenize.tokens_per_image)
    packed_length = int(lengths[0] + lengths[1]) + 2  # two texts fit only without the blank picture
    for packs in (fill(sizes, packed_length), plan_packing(sizes, 6, 1, 0, 1, packed_length)(0)):
        assert sorted(member for pack in packs for member in pack) == list(range(6))
        for pack in packs:
            batch = VisionLanguageCollator(tokenize, packed=True)([tokenized[member] for member in pack])
            assert batch["input_ids"].shape[1] == sizes.packed(pack) <= packed_length


def test_held_out_rows_are_packed_in_order_without_a_loss() -> None:
    sizes = sizes_of(50)
    packs = fill(sizes, 4000)
    assert [member for pack in packs for member in pack] == list(range(50))
    assert all(sizes.packed(pack) <= 4000 for pack in packs)
    for pack, later in pairwise(packs):
        assert sizes.packed([*pack, later[0]]) > 4000
    with pytest.raises(ValueError, match="longest row of eval_dataset_name has"):
        fill(sizes, 800)


@pytest.mark.slow
def test_flex_attention_masks_by_sample_too(composed: Callable[..., Path], rows: list[dict[str, Any]]) -> None:
    # On CPU it has no backward pass.
    row, logits = collate(composed(), rows, packed=True), []
    for name in ("flex_attention", "sdpa"):
        model = NormLlavaForConditionalGeneration.from_pretrained(
            composed(), attn_implementation={"text_config": name, "vision_config": "sdpa"}
        )
        with torch.no_grad():
            logits.append(model(**row, use_cache=False).logits)
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)
