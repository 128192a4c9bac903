"""Models whose pictures are cut into tiles: composing, checking rows, batches, and runs of the training script."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.conversations.checked_rows import RowCheck, tokenize_rows
from normllava.conversations.loading import load_rows
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.errors import UserError
from script_runs import INSTRUCT, PACKED, changed_weights, run
from training.compose import compose, describe_model, main
from training.composing.align import align
from training.rows.collator import VisionLanguageCollator


TILE = 28  # pixels of a side; a tile has four image tokens
# The width and height of each picture.
SIZES = {"square": (TILE, TILE), "wide": (3 * TILE, TILE), "tall": (TILE, 2 * TILE)}
# The number of tiles of each picture. The wide picture is cut into three tiles and the tall picture into two, and each
# has one more tile that shows the whole picture.
NUM_TILES = {"square": 1, "wide": 4, "tall": 3}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The path of a file with a row for each picture of `SIZES`, a row with all three, and a row of text alone."""
    rows = []
    for name, size in SIZES.items():
        Image.effect_noise(size, 80).convert("RGB").save(tmp_path / f"{name}.png")
        rows.append(make_row(f"{name}.png"))
    rows.append(make_row("square.png", "wide.png", "tall.png"))
    rows.append(make_row())
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    return path


def make_row(*pictures: str) -> dict[str, Any]:
    """A row that asks about its pictures."""
    turns = [{"from": "human", "value": "<image>" * len(pictures) + "What?"}, {"from": "gpt", "value": "noise"}]
    return {"image": list(pictures), "conversations": turns}


@pytest.fixture
def folder(make_model_folder: Callable[..., Path]) -> Path:
    """The folder of a model that cuts a picture into four tiles at most."""
    return make_model_folder(max_tiles=4)


def check_rows(folder: Path, data: Path, max_tiles: int | None = None) -> tuple[Dataset, RowTokenizer]:
    """The checked rows, with their tokens, and the tokenizer that gave the tokens."""
    processor = AutoProcessor.from_pretrained(folder)
    tokenize = RowTokenizer(processor, processor.chat_template, max_tiles=max_tiles)
    return tokenize_rows(load_rows(str(data)), RowCheck(tokenize)), tokenize


def collate_rows(
    tokenize: RowTokenizer, rows: Dataset, data: Path, row_numbers: list[int], packed: bool = False
) -> dict[str, Any]:
    """The batch of the checked rows with these numbers."""
    raw_rows = load_rows(str(data))  # these have the pictures, and the checked rows have the tokens
    collator = VisionLanguageCollator(tokenize, packed)
    return collator([raw_rows[number] | rows[number] for number in row_numbers])


def test_the_check_of_rows_counts_the_tokens_of_all_tiles(folder: Path, data: Path) -> None:
    rows, tokenize = check_rows(folder, data)
    square, wide, tall = NUM_TILES.values()
    expected = [[square], [wide], [tall], [square, wide, tall], []]  # for each row, the tiles of its pictures
    assert rows["tiles_per_image"][:] == expected
    assert rows["num_tiles"][:] == [sum(tiles) for tiles in expected]
    for row in rows:
        # `input_ids` has one token for each picture, and `length` counts the four tokens of each tile instead.
        num_images = len(row["tiles_per_image"])
        assert row["length"] == len(row["input_ids"]) - num_images + 4 * row["num_tiles"]
        assert row["length"] == len(tokenize.repeat_at_pictures(row["input_ids"], row))


def test_a_run_can_take_fewer_tiles_than_the_model(folder: Path, data: Path) -> None:
    # The rows that are checked with up to four tiles are cached, but must not be taken for a run with one tile.
    check_rows(folder, data)
    rows, tokenize = check_rows(folder, data, max_tiles=1)
    assert rows["tiles_per_image"][:] == [[1], [1], [1], [1, 1, 1], []]

    # Row 1 has one picture and row 3 has three. A picture has four image tokens.
    batch = collate_rows(tokenize, rows, data, row_numbers=[1, 3])
    assert len(batch["pixel_values"]) == 4
    assert (batch["input_ids"] == tokenize.processor.image_token_id).sum() == 4 * 4


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_batch_is_what_the_processor_makes_of_the_conversation(folder: Path, data: Path, packed: bool) -> None:
    rows, tokenize = check_rows(folder, data)
    batch = collate_rows(tokenize, rows, data, row_numbers=[3], packed=packed)  # row 3 has all three pictures

    processor = tokenize.processor
    pictures = [Image.open(data.parent / f"{name}.png") for name in SIZES]
    content = [{"type": "image"}] * 3 + [{"type": "text", "text": "What?"}]
    messages = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "noise"}]},
    ]
    text = processor.apply_chat_template(messages)
    expected = processor(images=pictures, text=text, return_tensors="pt")
    assert torch.equal(batch["input_ids"], expected["input_ids"])
    assert torch.equal(batch["pixel_values"], expected["pixel_values"])


def test_a_blank_picture_is_one_tile(folder: Path, data: Path) -> None:
    rows, tokenize = check_rows(folder, data)
    batch = collate_rows(tokenize, rows, data, row_numbers=[4])  # row 4 has no picture
    assert len(batch["pixel_values"]) == 1
    assert (batch["input_ids"] == tokenize.processor.image_token_id).sum() == 4


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_both_stages_train(folder: Path, data: Path, tmp_path: Path, packing: dict[str, Any]) -> None:
    stage1 = tmp_path / "stage1"
    stage2 = tmp_path / "stage2"
    source = {"dataset_name": str(data)}
    # With `max_tiles` 1, stage 1 doesn't cut pictures. Stage 2 does, since the model was composed for tiles.
    run(tmp_path, **source, stage="align", max_tiles=1, model_name_or_path=str(folder), output_dir=str(stage1))
    run(tmp_path, **source, **INSTRUCT, **packing, model_name_or_path=str(stage1), output_dir=str(stage2))

    assert any("language_model" in name for name in changed_weights(stage1, stage2))
    processor = AutoProcessor.from_pretrained(stage2)
    assert processor.image_processor.max_patches == 4
    # The folder has the processor's code, for users who load the processor without this repository.
    assert (stage2 / "processing_normllava.py").exists()

    inputs = processor(
        images=Image.open(tmp_path / "wide.png"), text=f"{processor.image_token}What?", return_tensors="pt"
    )
    model = AutoModelForImageTextToText.from_pretrained(stage2)
    assert model.generate(**inputs, max_new_tokens=2).shape[1] > inputs["input_ids"].shape[1]


def test_a_run_does_not_go_on_with_other_tiles(folder: Path, data: Path, tmp_path: Path) -> None:
    fields = {**INSTRUCT, "dataset_name": str(data), "model_name_or_path": str(folder)}
    fields |= {"output_dir": str(tmp_path / "out"), "save_steps": 1}
    run(tmp_path, **fields, max_tiles=1, max_steps=1)
    with pytest.raises(UserError, match="max_tiles: 1 before, 2 now"):
        run(tmp_path, **fields, max_tiles=2, max_steps=1, resume_from_checkpoint=str(tmp_path / "out/checkpoint-1"))


def test_a_projector_is_aligned_on_whole_pictures(backbones: Callable[[str], Path], data: Path) -> None:
    model, processor = compose(str(backbones("siglip")), str(backbones("qwen2")), max_tiles=4)
    rows = load_rows(str(data)).select(range(3))  # aligning takes one picture a row
    shapes = []
    model.model.vision_tower.register_forward_pre_hook(lambda module, args: shapes.append(args[0].shape))
    align(model, processor, rows, seed=0, steps=1)
    # The encoder is called once, for three pictures of one tile each. A tile has three colour channels.
    assert shapes == [(3, 3, TILE, TILE)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tiles": 5}, r"max_tiles 5: the model was composed with --max_tiles 4"),
        ({"open_pictures": False}, r"open_pictures must be true: .* their sizes must be known"),
        ({"max_tiles": 0}, r"max_tiles must be 1 or more"),
    ],
    ids=["more than the model's", "closed pictures", "no tiles"],
)
def test_what_a_run_cannot_do_with_tiles_is_refused(
    folder: Path, data: Path, tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    given = {"dataset_name": str(data), "model_name_or_path": str(folder), "output_dir": str(tmp_path / "out")}
    with pytest.raises(UserError, match=message):
        run(tmp_path, **INSTRUCT, **fields, **given)


def test_max_tiles_needs_a_model_that_cuts_pictures(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path
) -> None:
    given = {
        "dataset_name": str(data),
        "model_name_or_path": str(make_model_folder()),
        "output_dir": str(tmp_path / "out"),
    }
    with pytest.raises(UserError, match="max_tiles: this model doesn't cut pictures into tiles"):
        run(tmp_path, **INSTRUCT, **given, max_tiles=2)


def test_composing_refuses_tiles_that_do_not_fit(
    backbones: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backbone_folders = (str(backbones("clip")), str(backbones("qwen2")))
    with pytest.raises(UserError, match="max_tiles 0: it is at least 1"):
        compose(*backbone_folders, max_tiles=0)
    with pytest.raises(UserError, match="center_crop leaves out a picture's edges"):
        compose(*backbone_folders, max_tiles=2, center_crop=True)

    with pytest.raises(SystemExit):
        main(["--llava_model=x", "--projector_norm=gwc", f"--output_dir={tmp_path}", "--max_tiles=2"])
    assert "--max_tiles is for a new model" in capsys.readouterr().err


def test_composing_says_what_becomes_of_a_picture(folder: Path) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    table = describe_model(model, processor)
    assert "4 tokens a tile" in table
    assert "a picture is cut into up to 4 tiles of 28 x 28 pixels" in table
