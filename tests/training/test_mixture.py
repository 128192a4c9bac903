"""Several sources of rows in one run: how often each row comes, how rows are checked, and what is recorded."""

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict, Image
from transformers import AutoProcessor

from normllava.conversations.loading import load_rows
from normllava.conversations.pictures import open_images
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.rows import Row
from script_runs import INSTRUCT, PACKED, read_metrics, run
from training import sft
from training.folders.run import Run
from training.options.arguments import RunArguments, TrainingConfig
from training.rows.data import read_held_out, read_rows


@pytest.fixture
def stored(data: Path, tmp_path: Path) -> Path:
    """The folder of a dataset of 8 rows, saved by `datasets`, with a split "test" that has only the last row.

    The column "image" has pictures, where the rows of the fixture `data` have paths.
    """
    pictures = []
    conversations = []
    for number in range(8):
        pictures.append(str(data.parent / f"{number}.png"))
        conversations.append([{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"stored {number}"}])
    dataset = Dataset.from_dict({"image": pictures, "conversations": conversations}).cast_column("image", Image())
    DatasetDict({"train": dataset, "test": dataset.select([7])}).save_to_disk(tmp_path / "stored")
    return tmp_path / "stored"


@pytest.fixture
def tokenize(make_model_folder: Callable[..., Path]) -> RowTokenizer:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    return RowTokenizer(processor, processor.chat_template)


@pytest.fixture
def args(tmp_path: Path) -> TrainingConfig:
    """The arguments of a run in float32 on the CPU."""
    return TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)


@pytest.fixture
def read_sources(tokenize: RowTokenizer, args: TrainingConfig) -> Callable[..., Any]:
    """A function that calls `read_rows` for sources, each given as an entry of a recipe's `datasets`.

    It returns the rows, the fingerprint of the mixture, and what an epoch takes from each source.
    """
    return lambda *entries: read_rows(RunArguments(datasets=list(entries)), args, tokenize)


def image_bytes(row: Row) -> list[bytes]:
    return [image.tobytes() for image in open_images(row)]


def test_sources_with_columns_of_different_types_are_mixed(
    data: Path, stored: Path, tokenize: RowTokenizer, read_sources: Callable[..., Any]
) -> None:
    rows, _, sources = read_sources({"path": str(data)}, {"path": str(stored), "weight": 1.5})
    first, second = sources
    assert first.good_rows == 30
    assert first.drawn == 30  # rows that an epoch takes from the source
    assert second.good_rows == 8
    assert second.drawn == 12  # 1.5 times 8
    assert len(rows) == 42

    # Each row has the length and the pictures of its original, which `row["source"]` names, for example as
    # "/tmp/data.json, row 7".
    for row in rows:
        path = data if row["source"].startswith(str(data)) else stored
        number = int(row["source"].split()[-1])
        original = load_rows(str(path))[number]
        assert row["length"] == tokenize(original)["length"]
        assert image_bytes(row) == image_bytes(original)


def test_the_fingerprint_of_a_mixture_depends_on_order_and_weights(
    data: Path, stored: Path, read_sources: Callable[..., Any]
) -> None:
    def fingerprint(*entries: dict[str, Any]) -> str:
        _, mixture_fingerprint, _ = read_sources(*entries)
        return mixture_fingerprint

    first = {"path": str(data)}
    second = {"path": str(stored), "weight": 1.5}
    expected = fingerprint(first, second)
    assert fingerprint(first, second) == expected
    assert fingerprint(second, first) != expected
    assert fingerprint(first, {**second, "weight": 1.6}) != expected


def test_held_out_rows_come_from_the_split_test(stored: Path, tokenize: RowTokenizer, args: TrainingConfig) -> None:
    run_args = RunArguments(dataset_name=str(stored), eval_dataset_name=str(stored))
    held_out = read_held_out(run_args, args, tokenize)
    assert len(held_out) == 1  # the split "test" has one row, and "train" has 8


def test_a_source_can_name_its_split(stored: Path, read_sources: Callable[..., Any]) -> None:
    rows, _, _ = read_sources({"path": str(stored), "split": "test"})
    assert len(rows) == 1


# `num_drawn` is the weight times 30 rows, but at least 1.
@pytest.mark.parametrize(("weight", "num_drawn"), [(1, 30), (2, 60), (0.3, 9), (2.5, 75), (0.01, 1)])
def test_a_weight_says_how_often_rows_come(
    data: Path, stored: Path, read_sources: Callable[..., Any], weight: float, num_drawn: int
) -> None:
    weighted = {"path": str(data), "weight": weight}
    other = {"path": str(stored)}  # its 8 rows follow
    rows, _, sources = read_sources(weighted, other)
    assert sources[0].drawn == num_drawn
    assert len(rows) == num_drawn + 8

    # With weight 2.5, for example, each row comes two or three times.
    counts = Counter(rows["source"][:num_drawn])
    assert set(counts.values()) <= {int(weight), int(weight) + 1}
    if weight == 0.3:
        # The 9 rows are a random sample, and not the first rows of the file.
        all_rows, _, _ = read_sources({"path": str(data)})
        assert set(counts) != set(all_rows["source"][:9])

    rows_again, _, _ = read_sources(weighted, other)
    assert rows_again["source"] == rows["source"]


def test_a_run_on_a_mixture_records_its_sources_and_does_not_resume_with_others(
    make_model_folder: Callable[..., Path],
    data: Path,
    stored: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = [{"path": str(data), "weight": 0.5}, {"path": str(stored), "weight": 2}]
    fields = {**INSTRUCT, **PACKED, "dataloader_num_workers": 1, "save_steps": 4, "datasets": entries}
    fields["model_name_or_path"] = str(make_model_folder())
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO):
        run(tmp_path, **fields, output_dir=str(out))
    assert f"{stored}: 8 rows, 8 good, 16 an epoch" in caplog.text
    assert read_metrics(out)[-1]["step"] == 8  # 31 rows, in global batches of 4

    sources = Run.read(out).sources
    assert [source.path for source in sources] == [str(data), str(stored)]
    assert [source.is_local for source in sources] == [True, True]
    assert [source.rows for source in sources] == [30, 8]
    assert [source.good_rows for source in sources] == [30, 8]
    assert [source.weight for source in sources] == [0.5, 2]
    assert [source.drawn for source in sources] == [15, 16]

    entries[1]["weight"] = 3
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: "):
        run(tmp_path, **fields, output_dir=str(out), resume_from_checkpoint=True)


def test_bad_rows_of_all_sources_are_listed(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each of the two sources has six good rows and then a bad row.
    entries = []
    rows = [*json.loads(data.read_text())[:6], {"conversations": []}]
    for name in ("first", "second"):
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        entries.append({"path": str(tmp_path / f"{name}.json"), "image_folder": str(data.parent)})
    fields = {"stage": "align", "model_name_or_path": str(make_model_folder()), "datasets": entries, "max_steps": 1}
    out = tmp_path / "out"

    # By default, bad rows end the run before the model is loaded.
    with monkeypatch.context() as patched:
        patched.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
        with pytest.raises(ValueError, match=r"first.json, row 6: .* 1 of 7 rows are bad"):
            run(tmp_path, **fields, output_dir=str(out))

    # With `bad_rows` "skip", bad rows are listed. A resumed run writes the list anew.
    for resume in (False, True):
        run(tmp_path, **fields, output_dir=str(out), bad_rows="skip", resume_from_checkpoint=resume)
        lines = (out / "bad_rows.jsonl").read_text().splitlines()
        listed = [json.loads(line)["source"] for line in lines]
        assert listed == [f"{tmp_path}/first.json, row 6", f"{tmp_path}/second.json, row 6"]
    for source in Run.read(out).sources:
        assert source.rows == 7
        assert source.good_rows == 6


def test_stage_align_needs_a_picture(
    make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    (tmp_path / "texts.json").write_text(json.dumps([{"conversations": turns}] * 4))
    fields = {
        "stage": "align",
        "model_name_or_path": str(make_model_folder()),
        "dataset_name": str(tmp_path / "texts.json"),
    }
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="Stage 'align' trains the projector alone, and no row has a picture"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "out"))


def test_a_row_longer_than_the_decoders_positions_is_bad(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    turns = [{"from": "human", "value": "Count."}, {"from": "gpt", "value": "one " * 200}]  # each byte is a token
    (tmp_path / "long.json").write_text(json.dumps([{"conversations": turns}] * 4))
    fields = {**INSTRUCT, "model_name_or_path": str(make_model_folder()), "dataset_name": str(tmp_path / "long.json")}
    with pytest.raises(ValueError, match="tokens, but the decoder has 512 positions; max_length can only lower that"):
        run(tmp_path, **fields, output_dir=str(tmp_path / "out"))
