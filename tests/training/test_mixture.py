"""Several sources in one run: how often each row comes, how rows are checked, and what is recorded."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Image
from transformers import AutoProcessor

from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.rows import Row
from conversations.tokens import RowTokenizer
from script_runs import INSTRUCT, PACKED, read_metrics, run
from training import sft
from training.arguments import RunArguments, TrainingConfig
from training.data import read_held_out, read_rows
from training.run import Run


@pytest.fixture
def stored(data: Path, tmp_path: Path) -> Path:
    """A saved dataset of 8 rows. Its columns hold the pictures themselves and lists of turns, where LLaVA JSON has
    paths and text."""
    pictures = []
    conversations = []
    for number in range(8):
        pictures.append(str(data.parent / f"{number}.png"))
        conversations.append([{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"stored {number}"}])
    dataset = Dataset.from_dict({"image": pictures, "conversations": conversations}).cast_column("image", Image())
    DatasetDict({"train": dataset, "test": dataset.select([7])}).save_to_disk(tmp_path / "stored")
    return tmp_path / "stored"


@pytest.fixture
def tokenize(composed: Callable[..., Path]) -> RowTokenizer:
    processor = AutoProcessor.from_pretrained(composed())
    return RowTokenizer(processor, processor.chat_template)


@pytest.fixture
def args(tmp_path: Path) -> TrainingConfig:
    return TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)


@pytest.fixture
def read(tokenize: RowTokenizer, args: TrainingConfig) -> Callable[..., Any]:
    """A function that reads the rows of sources, each given as an entry of a recipe's `datasets`."""
    return lambda *entries: read_rows(RunArguments(datasets=list(entries)), args, tokenize)


def image_bytes(row: Row) -> list[bytes]:
    return [image.tobytes() for image in open_images(row)]


def test_sources_with_columns_of_different_types_are_mixed(
    data: Path, stored: Path, tokenize: RowTokenizer, read: Callable[..., Any]
) -> None:
    rows, _, sources = read({"path": str(data)}, {"path": str(stored), "weight": 1.5})
    drawn = [(source.rows, source.good_rows, source.drawn) for source in sources]
    assert drawn == [(30, 30, 30), (8, 8, 12)]
    assert len(rows) == 42

    # A mixed row is the row of its source. `source` has the source's path and, as its last word, the row's number.
    for row in rows:
        path = data if row["source"].startswith(str(data)) else stored
        number = int(row["source"].split()[-1])
        original = load_rows(str(path))[number]
        assert row["length"] == tokenize(original)["length"]
        assert image_bytes(row) == image_bytes(original)


def test_the_fingerprint_of_a_mixture_depends_on_order_and_weights(
    data: Path, stored: Path, read: Callable[..., Any]
) -> None:
    first = {"path": str(data)}
    second = {"path": str(stored), "weight": 1.5}
    _, fingerprint, _ = read(first, second)
    _, same, _ = read(first, second)
    assert same == fingerprint

    _, swapped, _ = read(second, first)
    assert swapped != fingerprint
    _, reweighted, _ = read(first, {**second, "weight": 1.6})
    assert reweighted != fingerprint


def test_held_out_rows_are_those_of_the_test_split(
    stored: Path, tokenize: RowTokenizer, args: TrainingConfig, read: Callable[..., Any]
) -> None:
    run_args = RunArguments(dataset_name=str(stored), eval_dataset_name=str(stored))
    held_out = read_held_out(run_args, args, tokenize)
    test_rows, _, _ = read({"path": str(stored), "split": "test"})
    assert len(held_out) == 1
    assert len(test_rows) == 1


@pytest.mark.parametrize(("weight", "num_drawn"), [(1, 30), (2, 60), (0.3, 9), (2.5, 75), (0.01, 1)])
def test_a_weight_says_how_often_rows_come(
    data: Path, stored: Path, read: Callable[..., Any], weight: float, num_drawn: int
) -> None:
    weighted = {"path": str(data), "weight": weight}
    other = {"path": str(stored)}  # 8 rows, which follow
    rows, _, sources = read(weighted, other)
    assert sources[0].drawn == num_drawn
    assert len(rows) == num_drawn + 8

    times = Counter(rows["source"][:num_drawn])
    assert set(times.values()) <= {int(weight), int(weight) + 1}
    if weight == 0.3:
        first_rows, _, _ = read({"path": str(data)})
        assert set(times) != set(first_rows["source"][:9])  # a random sample, not the head of the file

    again, _, _ = read(weighted, other)
    assert again["source"] == rows["source"]


def test_a_run_on_a_mixture_records_its_sources_and_resumes_with_the_same_ones_alone(
    composed: Callable[..., Path],
    data: Path,
    stored: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = [{"path": str(data), "weight": 0.5}, {"path": str(stored), "weight": 2}]
    fields = {**INSTRUCT, **PACKED, "dataloader_num_workers": 1, "save_steps": 4, "datasets": entries}
    fields["model_name_or_path"] = str(composed())
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO):
        run(tmp_path, **fields, output_dir=str(out))
    assert f"{stored}: 8 rows, 8 good, 16 an epoch" in caplog.text
    assert read_metrics(out)[-1]["step"] == 8

    first, second = Run.read(out).sources
    assert (first.path, first.is_local) == (str(data), True)
    assert (first.rows, first.good_rows, first.weight, first.drawn) == (30, 30, 0.5, 15)
    assert (second.path, second.is_local) == (str(stored), True)
    assert (second.rows, second.good_rows, second.weight, second.drawn) == (8, 8, 2, 16)

    entries[1]["weight"] = 3
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: "):
        run(tmp_path, **fields, output_dir=str(out), resume_from_checkpoint=True)


def test_bad_rows_of_all_sources_are_listed(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two sources of six good rows, and a bad one at their end.
    entries = []
    rows = [*json.loads(data.read_text())[:6], {"conversations": []}]
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        entries.append({"path": str(tmp_path / f"{name}.json"), "image_folder": str(data.parent)})
    fields = {"stage": "align", "model_name_or_path": str(composed()), "datasets": entries, "max_steps": 1}
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
        with pytest.raises(ValueError, match=r"first.json, row 6: .* 1 of 7 rows are bad"):
            run(tmp_path, **fields, output_dir=str(out))
    for resume in (False, True):
        run(tmp_path, **fields, output_dir=str(out), bad_rows="skip", resume_from_checkpoint=resume)
        lines = (out / "bad_rows.jsonl").read_text().splitlines()
        listed = [json.loads(line)["source"] for line in lines]
        assert listed == [f"{tmp_path}/first.json, row 6", f"{tmp_path}/second.json, row 6"]
    assert [(source.rows, source.good_rows) for source in Run.read(out).sources] == [(7, 6), (7, 6)]


def test_stage_align_needs_a_picture(composed: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> None:
    turns = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    (tmp_path / "texts.json").write_text(json.dumps([{"conversations": turns}] * 4))
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "texts.json")}
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="Stage 'align' trains the projector alone, and no row has a picture"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "out"))


def test_a_row_longer_than_the_decoders_positions_is_bad(composed: Callable[..., Path], tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "Count."}, {"from": "gpt", "value": "one " * 200}]
    (tmp_path / "long.json").write_text(json.dumps([{"conversations": turns}] * 4))
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "long.json")}
    with pytest.raises(ValueError, match="tokens, but the decoder has 512 positions; max_length can only lower that"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
