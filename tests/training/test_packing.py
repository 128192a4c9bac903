"""Packed rows: they train as padded rows do, have every sample once in an epoch, and are not longer than allowed.

A packed row joins several rows of the data, which are called its samples.
"""

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from hypothesis import assume, example, given, settings, strategies
from PIL import Image
from transformers import (
    AutoProcessor,
    BioGptConfig,
    FalconH1Config,
    Gemma3TextConfig,
    Lfm2Config,
    LlamaConfig,
    PreTrainedConfig,
)
from transformers.modeling_flash_attention_utils import prepare_fa_kwargs_from_position_ids

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava import NormMonitor
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.errors import UserError
from script_runs import collate
from training.rows.batches import deal_held_out, packed_batches, plan_packing, require_separate_samples
from training.rows.collator import VisionLanguageCollator


@pytest.fixture
def rows(tmp_path: Path) -> list[dict[str, Any]]:
    """Five rows of different lengths, with 1, 0, 2, 1 and 0 pictures.

    Row 0 has a square picture. The pictures of the rows 2 and 3 are three and four times as wide as high.
    """
    rows = []
    for number, num_images in enumerate([1, 0, 2, 1, 0]):
        paths = []
        for image_number in range(num_images):
            path = tmp_path / f"{number}-{image_number}.png"
            width = 28 * (number + 1)
            strength = 40 + 20 * number + image_number  # of the noise, different in each picture
            noise = Image.effect_noise((width, 28), strength)
            noise.convert("RGB").save(path)
            paths.append(str(path))
        question = "<image>\n" * num_images + "What" + " really" * number + "?"
        answer = f"answer {number}" + " and more" * (5 - number)
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows.append({"images": paths, "conversations": turns, "source": f"row {number}"})
    return rows


def random_sizes(num_samples: int) -> Dataset:
    """Random lengths of samples, from 700 to 3,700 tokens and mostly short, with 0, 1 or 2 tiles a sample."""
    generator = torch.Generator().manual_seed(0)
    lengths = 700 + 3000 * torch.rand(num_samples, generator=generator) ** 4
    return Dataset.from_dict({"length": lengths.long().numpy(), "num_tiles": np.arange(num_samples) % 3})


def packed_row_length(sizes: Dataset, sample_numbers: list[int], blank: int) -> int:
    """The number of tokens in a packed row of these samples.

    If no sample has a picture, the row gets a blank picture, which has `blank` tokens.
    """
    samples = sizes.select(sample_numbers)
    length = sum(samples["length"])
    if not any(samples["num_tiles"]):
        length += blank
    return length


def loss_and_gradients(
    model: NormLlavaForConditionalGeneration, inputs: dict[str, Any]
) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of a batch, and its gradients by the parameters' names.

    The loss is computed here in float64, because the model itself would compute it in float32.
    """
    inputs = dict(inputs)  # a copy, since entries are changed and taken out
    inputs["pixel_values"] = inputs["pixel_values"].double()
    next_tokens = inputs.pop("labels")[:, 1:]
    # As in training, there is no cache: with a cache, transformers would take a packed row for one sample.
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), next_tokens.flatten())
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("attention", ["eager", "sdpa", "varlen"])
@pytest.mark.parametrize(
    ("text", "spatial_merge_size", "max_tiles"),
    [("qwen2", 1, 1), ("qwen2", 2, 1), ("qwen2", 1, 4), ("qwen3", 1, 1), ("llama", 1, 1), ("gemma3", 1, 1)],
    ids=["qwen2", "qwen2 with merged patches", "qwen2 with tiles", "qwen3", "llama", "gemma3"],
)
def test_packed_and_padded_batches_have_the_same_loss_and_gradients(
    make_model_folder: Callable[..., Path],
    rows: list[dict[str, Any]],
    attention: str,
    text: str,
    spatial_merge_size: int,
    max_tiles: int,
) -> None:
    folder = make_model_folder(text=text, spatial_merge_size=spatial_merge_size, max_tiles=max_tiles)
    padded_batch = collate(folder, rows)
    packed_batch = collate(folder, rows, packed=True)
    assert "attention_mask" not in packed_batch
    assert packed_batch["input_ids"].shape == (1, padded_batch["attention_mask"].sum())

    # The collator gives what transformers would find in the positions: where samples start, and the longest length.
    cu_seq_lens, max_lengths = prepare_fa_kwargs_from_position_ids(packed_batch["position_ids"])
    cu_seq_lens_q, cu_seq_lens_k = cu_seq_lens
    max_length_q, max_length_k = max_lengths
    assert torch.equal(packed_batch["cu_seq_lens_q"], cu_seq_lens_q)
    assert torch.equal(packed_batch["cu_seq_lens_k"], cu_seq_lens_k)
    assert packed_batch["max_length_q"] == max_length_q
    assert packed_batch["max_length_k"] == max_length_k

    model = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float64)
    expected_loss, expected_gradients = loss_and_gradients(model, padded_batch)
    model = NormLlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float64, attn_implementation={"text_config": attention, "vision_config": "sdpa"}
    )
    loss, gradients = loss_and_gradients(model, packed_batch)

    assert loss == pytest.approx(expected_loss, rel=1e-9)
    assert gradients.keys() == expected_gradients.keys()
    for name, expected in expected_gradients.items():
        # The relative tolerance is for RMSNorm layers, which compute in float32 whatever the model's dtype. The
        # absolute tolerance is for the bias of keys, which the softmax cancels, so that the gradient is only rounding.
        error = (gradients[name] - expected).norm()
        assert error <= 1e-6 * expected.norm() + 1e-9, f"{name}: {error:.1e} of {expected.norm():.1e}"


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_norms_of_a_blank_picture_are_not_logged(
    make_model_folder: Callable[..., Path], rows: list[dict[str, Any]], packed: bool
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).train()
    monitor = NormMonitor(model, processor)

    def measure_norms(rows_of_batch: list[dict[str, Any]]) -> dict[str, float]:
        inputs = collate(make_model_folder(), rows_of_batch, packed)
        del inputs["labels"]
        monitor.watch()
        model.model(**inputs, use_cache=False)
        return monitor.collect()

    row_without_pictures = rows[1]
    assert "norm/image" not in measure_norms([row_without_pictures])

    # After the norm layer, a token's L2 norm is about the norm of the layer's gain.
    expected = model.model.multi_modal_projector.norm.weight.norm().item()
    assert measure_norms(rows)["norm/image"] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    "config",
    [Lfm2Config(full_attn_idxs=[1]), FalconH1Config(), BioGptConfig()],
    ids=lambda config: config.model_type,
)
def test_decoders_that_mix_the_samples_of_a_row_are_refused(config: PreTrainedConfig) -> None:
    """Tokens would read earlier samples of the row, and training would have a wrong loss without a warning."""
    with pytest.raises(ValueError, match=f"packed_length: the decoder .{config.model_type}. mixes the samples"):
        require_separate_samples(config)


def test_decoders_that_keep_the_samples_of_a_row_apart_are_accepted() -> None:
    require_separate_samples(Gemma3TextConfig())
    require_separate_samples(LlamaConfig())


@pytest.mark.parametrize("num_processes", [1, 2, 4])
@pytest.mark.parametrize("num_samples", [64, 67, 79])
def test_an_epoch_has_every_sample_once_and_the_same_steps_on_any_number_of_processes(
    num_processes: int, num_samples: int
) -> None:
    samples_per_step = 16
    packed_length = 5000
    blank = 729  # tokens of a blank picture
    sizes = random_sizes(num_samples)
    lengths = np.array(sizes["length"])
    accumulation_steps = plan_packing(
        sizes, blank, samples_per_step, num_processes, seeds=[42, 43], packed_length=packed_length
    )

    def pack_epoch(accumulation_steps: int, seed: int) -> list[list[int]]:
        """The packed rows of the epoch with this seed, each a list of sample numbers."""
        return packed_batches(lengths, samples_per_step, num_processes, accumulation_steps, seed)

    def is_too_long(packed_row: list[int]) -> bool:
        return packed_row_length(sizes, packed_row, blank) > packed_length

    first_epoch = pack_epoch(accumulation_steps, seed=42)
    second_epoch = pack_epoch(accumulation_steps, seed=43)
    assert first_epoch != second_epoch
    assert not any(is_too_long(packed_row) for packed_row in first_epoch + second_epoch)
    sample_numbers = [number for packed_row in first_epoch for number in packed_row]
    assert sorted(sample_numbers) == list(range(num_samples))

    # Each optimizer step has the same samples as with one process and one packed row a step.
    rows_per_step = accumulation_steps * num_processes
    samples_of_steps = packed_batches(lengths, samples_per_step, num_processes=1, accumulation_steps=1, seed=42)
    assert len(samples_of_steps) == math.ceil(num_samples / samples_per_step)
    assert len(samples_of_steps) == math.ceil(len(first_epoch) / rows_per_step)
    for step, expected_samples in enumerate(samples_of_steps):
        start = step * rows_per_step
        rows_of_step = first_epoch[start : start + rows_per_step]
        samples = [number for packed_row in rows_of_step for number in packed_row]
        assert sorted(samples) == sorted(expected_samples)

    # With fewer accumulation steps, some packed row would be too long.
    if accumulation_steps > 1:
        fewer_steps = accumulation_steps - 1
        packed_rows = pack_epoch(fewer_steps, seed=42) + pack_epoch(fewer_steps, seed=43)
        assert any(is_too_long(packed_row) for packed_row in packed_rows)


@given(
    samples=strategies.lists(
        strategies.tuples(strategies.integers(1, 60), strategies.booleans()), min_size=1, max_size=30
    ),
    samples_per_step=strategies.integers(1, 8),
    num_processes=strategies.integers(1, 3),
    packed_length=strategies.integers(60, 150),
    blank=strategies.integers(0, 20),
)
# A text of 49 tokens that fits beside a picture, and not with the blank picture that it would get by itself.
@example(
    samples=[(1, True), *[(1, False)] * 5, (49, False)],
    samples_per_step=2,
    num_processes=1,
    packed_length=60,
    blank=12,
)
@settings(deadline=None)
def test_packing_loses_no_sample_and_is_refused_only_if_nothing_fits(
    samples: list[tuple[int, bool]], samples_per_step: int, num_processes: int, packed_length: int, blank: int
) -> None:
    """Or if a sample would not fit into a row of its own: then no order of the rows may decide."""
    assume(samples_per_step >= num_processes)
    lengths, has_pictures = zip(*samples, strict=True)
    sizes = Dataset.from_dict({"length": lengths, "num_tiles": [int(has_picture) for has_picture in has_pictures]})

    def pack(accumulation_steps: int) -> list[list[int]]:
        return packed_batches(np.array(lengths), samples_per_step, num_processes, accumulation_steps, seed=1)

    def fits(packed_rows: list[list[int]]) -> bool:
        return all(packed_row_length(sizes, row, blank) <= packed_length for row in packed_rows)

    try:
        accumulation_steps = plan_packing(
            sizes, blank, samples_per_step, num_processes, seeds=[1], packed_length=packed_length
        )
    except UserError:
        most_steps = samples_per_step // num_processes
        has_too_long_sample = not fits([[number] for number in range(len(samples))])
        assert has_too_long_sample or not any(fits(pack(number)) for number in range(1, most_steps + 1))
        return

    packed_rows = pack(accumulation_steps)
    assert sorted(number for row in packed_rows for number in row) == list(range(len(samples)))
    assert fits(packed_rows)
    assert not any(fits(pack(fewer)) for fewer in range(1, accumulation_steps))


def test_a_sample_that_is_too_long_with_the_blank_picture_is_refused() -> None:
    sizes = Dataset.from_dict({"length": [100, 50], "num_tiles": [0, 0]})
    with pytest.raises(ValueError, match=r"the longest has 829 .text alone gets a blank picture of 729"):
        plan_packing(sizes, num_blank_tokens=729, samples_per_step=2, num_processes=1, seeds=[42], packed_length=800)


def test_a_step_whose_samples_do_not_fit_is_refused() -> None:
    """A step has four samples of 500 tokens, and each of three processes has packed rows of 800 tokens.

    With one accumulation step, a packed row would have two samples. With two accumulation steps, there would be six
    packed rows for four samples.
    """
    sizes = Dataset.from_dict({"length": [500] * 9, "num_tiles": [0] * 9})
    with pytest.raises(ValueError, match="samples of a step can't be packed into rows of 800 tokens on 3 process"):
        plan_packing(sizes, num_blank_tokens=0, samples_per_step=4, num_processes=3, seeds=[42], packed_length=800)


def test_a_last_short_step_takes_as_many_passes_as_it_needs() -> None:
    """Four samples make a step of two passes on two processes. The last three need two passes as well."""
    sizes = Dataset.from_dict({"length": [700] * 7, "num_tiles": [1] * 7})
    options = {"samples_per_step": 4, "num_processes": 2}
    accumulation_steps = plan_packing(sizes, num_blank_tokens=0, **options, seeds=[42], packed_length=800)
    assert accumulation_steps == 2
    rows = packed_batches(np.array(sizes["length"]), **options, accumulation_steps=accumulation_steps, seed=42)
    assert [len(row) for row in rows] == [1, 1, 1, 1, 1, 1, 1, 0]


@pytest.mark.parametrize(("packed_length", "num_rows"), [(None, [3, 3, 1]), (100, [2, 1, 2, 2])])
def test_held_out_rows_are_packed_into_rows_of_the_packed_length(
    packed_length: int | None, num_rows: list[int]
) -> None:
    sizes = Dataset.from_dict({"length": [40, 60, 85, 90, 10, 20, 30], "num_tiles": [0, 1, 0, 1, 0, 0, 1]})
    args: Any = SimpleNamespace(per_device_eval_batch_size=3, world_size=1, process_index=0)
    batches = list(deal_held_out(args, sizes, num_blank_tokens=10, packed_length=packed_length))
    assert [len(batch) for batch in batches] == num_rows
    assert [row for batch in batches for row in batch] == list(range(7))
    if packed_length is not None:
        assert all(packed_row_length(sizes, batch, blank=10) <= packed_length for batch in batches)


def test_a_held_out_row_that_is_too_long_to_be_packed_is_refused() -> None:
    sizes = Dataset.from_dict({"length": [40, 95], "num_tiles": [1, 0]})
    args: Any = SimpleNamespace(per_device_eval_batch_size=3)
    with pytest.raises(UserError, match="held-out row has 105 tokens, more than packed_length 100"):
        deal_held_out(args, sizes, num_blank_tokens=10, packed_length=100)


def test_a_packed_row_without_pictures_leaves_room_for_the_blank_picture(
    make_model_folder: Callable[..., Path], rows: list[dict[str, Any]]
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    tokenize = RowTokenizer(processor, processor.chat_template)
    collator = VisionLanguageCollator(tokenize, packed=True)
    rows_without_pictures = [rows[1], rows[4]] * 3
    samples = [tokenize(row) for row in rows_without_pictures]
    lengths = [sample["length"] for sample in samples]
    sizes = Dataset.from_dict({"length": lengths, "num_tiles": [0] * 6})
    # Two samples leave room for two more tokens in a packed row, but not for the four of the blank picture.
    packed_length = lengths[0] + lengths[1] + 2
    blank = tokenize.tokens_per_tile
    assert blank == 4

    accumulation_steps = plan_packing(
        sizes, blank, samples_per_step=6, num_processes=1, seeds=[0], packed_length=packed_length
    )
    packed_rows = packed_batches(
        np.array(lengths), samples_per_step=6, num_processes=1, accumulation_steps=accumulation_steps, seed=0
    )
    for packed_row in packed_rows:
        batch = collator([samples[number] for number in packed_row])
        length = batch["input_ids"].shape[1]
        assert length == packed_row_length(sizes, packed_row, blank)
        assert length <= packed_length
