"""Packed rows train as padded rows do, contain every sample once, and are within their limit."""

import math
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


# The number of pictures of each row.
NUM_IMAGES = [1, 0, 2, 1, 0]


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Five rows of different lengths: two without pictures, two with one picture, and one with two pictures.

    Row 0 has a square picture. Those of the rows 2 and 3 are three and four times as wide as high.
    """
    rows = []
    for number, num_images in enumerate(NUM_IMAGES):
        paths = []
        for image in range(num_images):
            path = tmp_path / f"{number}-{image}.png"
            width = 28 * (number + 1)
            Image.effect_noise((width, 28), 40 + 20 * number + image).convert("RGB").save(path)
            paths.append(str(path))
        question = "<image>\n" * num_images + "What" + " really" * number + "?"
        answer = f"answer {number}" + " and more" * (5 - number)
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({"images": paths, "conversations": turns, "source": f"row {number}"})
    return rows


def random_sizes(num_samples: int) -> Dataset:
    """Lengths of samples from 700 to 3,700, most of them short, and numbers of pictures from 0 to 2."""
    generator = torch.Generator().manual_seed(0)
    lengths = 700 + 3000 * torch.rand(num_samples, generator=generator) ** 4
    return Dataset.from_dict({"length": lengths.long().numpy(), "num_tiles": np.arange(num_samples) % 3})


def packed_size(sizes: Dataset, samples: list[int], blank: int) -> int:
    """Number of tokens of a packed row, with a blank picture if the row has no other."""
    row = sizes.select(samples)
    if any(row["num_tiles"]):
        return sum(row["length"])
    return sum(row["length"]) + blank


def loss_and_gradients(
    model: NormLlavaForConditionalGeneration, inputs: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """A batch's loss, and the gradients. The loss is computed in float64; the model itself would use float32."""
    inputs = dict(inputs)
    inputs["pixel_values"] = inputs["pixel_values"].double()
    next_tokens = inputs.pop("labels")[:, 1:]
    # As in training, there is no cache: with one, transformers wouldn't look for packed samples.
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize(
    ("text", "spatial_merge_size", "max_tiles"),
    [("qwen2", 1, 1), ("qwen2", 2, 1), ("qwen2", 1, 4), ("qwen3", 1, 1), ("llama", 1, 1), ("gemma3", 1, 1)],
)
def test_packed_and_padded_batches_have_the_same_loss_and_gradients(
    composed: Callable[..., Path],
    rows: list[dict[str, Any]],
    attention: str,
    text: str,
    spatial_merge_size: int,
    max_tiles: int,
) -> None:
    folder = composed(text=text, spatial_merge_size=spatial_merge_size, max_tiles=max_tiles)
    set_seed(0)
    padded_batch = collate(folder, rows)
    packed_batch = collate(folder, rows, packed=True)
    assert "attention_mask" not in packed_batch
    assert packed_batch["input_ids"].shape == (1, padded_batch["attention_mask"].sum())

    # The collator says the same of the samples as transformers finds in their positions.
    cu_seq_lens, max_lengths = prepare_fa_kwargs_from_position_ids(packed_batch["position_ids"])
    assert torch.equal(packed_batch["cu_seq_lens_q"], cu_seq_lens[0])
    assert torch.equal(packed_batch["cu_seq_lens_k"], cu_seq_lens[1])
    assert (packed_batch["max_length_q"], packed_batch["max_length_k"]) == max_lengths

    model = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    expected_loss, expected_gradients = loss_and_gradients(model, padded_batch)
    model = NormLlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation={"text_config": attention, "vision_config": "sdpa"}
    )
    loss, gradients = loss_and_gradients(model, packed_batch)

    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        # The relative tolerance is for root mean square norms, which compute in float32 whatever the model's dtype.
        # The absolute one is for a key's bias: the softmax cancels it, so that its gradient is only rounding.
        error = (gradients[name] - expected).norm()
        assert error <= 1e-6 * expected.norm() + 1e-9, f"{name}: {error:.1e} of {expected.norm():.1e}"


@pytest.mark.parametrize("packed", [False, True])
def test_a_blank_picture_is_not_measured(
    composed: Callable[..., Path], rows: list[dict[str, Any]], packed: bool
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).train()
    monitor = InterfaceMonitor(model, processor)
    monitor.active = True

    def measure(some_rows: list[dict[str, Any]]) -> dict[str, float]:
        inputs = collate(composed(), some_rows, packed)
        del inputs["labels"]
        model.model(**inputs, use_cache=False)
        return monitor.collect(lambda sums: sums)

    row_without_pictures = rows[1]
    assert "norm/visual" not in measure([row_without_pictures])
    metrics = measure(rows)
    target = model.model.multi_modal_projector.norm.weight.norm().item()
    assert metrics["norm/visual"] == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("config", [Lfm2Config(full_attn_idxs=[1]), FalconH1Config(), BioGptConfig()])
def test_decoders_that_mix_the_samples_of_a_row_are_refused(config: PreTrainedConfig) -> None:
    """Their tokens would read earlier samples of the row, and training would have a wrong loss without a warning."""
    with pytest.raises(ValueError, match=f"packed_length: the decoder .{config.model_type}. mixes the samples"):
        require_separate_samples(config)
    require_separate_samples(Gemma3TextConfig())
    require_separate_samples(LlamaConfig())


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [64, 67, 79])
def test_every_sample_once_in_an_epoch_and_the_same_steps_on_any_number_of_processes(
    num_processes: int, num_samples: int
) -> None:
    sizes = random_sizes(num_samples)
    lengths = np.array(sizes["length"])
    samples_per_step, packed_length, blank = 16, 5000, 729
    accumulation_steps = plan_packing(sizes, blank, samples_per_step, num_processes, [42, 43], packed_length)

    def pack(accumulation_steps: int, seed: int) -> list[list[int]]:
        return packed_batches(lengths, samples_per_step, num_processes, accumulation_steps, seed)

    def is_too_long(row: list[int]) -> bool:
        return packed_size(sizes, row, blank) > packed_length

    first_epoch = pack(accumulation_steps, seed=42)
    second_epoch = pack(accumulation_steps, seed=43)
    assert sorted(sample for row in first_epoch for sample in row) == list(range(num_samples))
    assert first_epoch != second_epoch
    assert not any(is_too_long(row) for row in first_epoch + second_epoch)

    # The samples of an optimizer step don't depend on the number of processes, nor on that of accumulation steps.
    samples_of_steps = packed_batches(lengths, samples_per_step, num_processes=1, accumulation_steps=1, seed=42)
    rows_per_step = accumulation_steps * num_processes
    assert len(samples_of_steps) == math.ceil(num_samples / samples_per_step)
    assert len(samples_of_steps) == math.ceil(len(first_epoch) / rows_per_step)
    for number, samples in enumerate(samples_of_steps):
        rows_of_step = first_epoch[number * rows_per_step : (number + 1) * rows_per_step]
        assert sorted(sample for row in rows_of_step for sample in row) == sorted(samples)

    # With fewer accumulation steps, some row would be too long.
    if accumulation_steps > 1:
        rows = pack(accumulation_steps - 1, seed=42) + pack(accumulation_steps - 1, seed=43)
        assert any(is_too_long(row) for row in rows)


def test_plans_that_cannot_be_met() -> None:
    def plan(lengths: list[int], samples_per_step: int, num_processes: int, blank: int = 0) -> int:
        sizes = Dataset.from_dict({"length": lengths, "num_tiles": [0] * len(lengths)})
        return plan_packing(sizes, blank, samples_per_step, num_processes, seeds=[42], packed_length=800)

    with pytest.raises(ValueError, match=r"the longest has 829 .text alone gets a blank picture of 729"):
        plan([100, 50], samples_per_step=2, num_processes=1, blank=729)
    with pytest.raises(ValueError, match="samples of a step can't be packed into rows of 800 tokens on 3 process"):
        plan([500] * 9, samples_per_step=4, num_processes=3)


def test_a_packed_row_without_pictures_leaves_room_for_the_blank_one(
    composed: Callable[..., Path], rows: list[dict[str, Any]]
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    samples = [tokenize(row) for row in [rows[1], rows[4]] * 3]  # the rows without pictures
    lengths = [sample["length"] for sample in samples]
    sizes = Dataset.from_dict({"length": lengths, "num_tiles": [0] * 6})
    blank = tokenize.tokens_per_tile
    packed_length = lengths[0] + lengths[1] + 2
    assert blank > 2  # so two samples would fit into a row only without the blank picture

    accumulation_steps = plan_packing(sizes, blank, 6, 1, [0], packed_length)
    for row in packed_batches(np.array(lengths), 6, 1, accumulation_steps, 0):
        batch = VisionLanguageCollator(tokenize, packed=True)([samples[number] for number in row])
        assert batch["input_ids"].shape[1] == packed_size(sizes, row, blank)
        assert batch["input_ids"].shape[1] <= packed_length
