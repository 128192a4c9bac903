"""Several sources in one run: how often each row comes, whatever its source's types, and what is recorded."""

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
from conversations.tokens import RowTokenizer
from script_runs import INSTRUCT, PACKED, logged, run
from training import sft
from training.arguments import RunArguments, TrainingConfig
from training.data import read_held_out, read_rows
from training.run import Run


@pytest.fixture
def stored(data: Path, tmp_path: Path) -> Path:
    """A dataset of 8 rows with pictures inside, one a row, and turns that are no text."""
    pictures = [str(data.parent / f"{number}.png") for number in range(8)]
    texts = [[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"stored {n}"}] for n in range(8)]
    dataset = Dataset.from_dict({"image": pictures, "conversations": texts}).cast_column("image", Image())
    DatasetDict({"train": dataset, "test": dataset.select([7])}).save_to_disk(tmp_path / "stored")
    return tmp_path / "stored"


def test_rows_of_sources_of_other_types_stay_as_they_are(
    composed: Callable[..., Path], data: Path, stored: Path, tmp_path: Path
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    args = TrainingConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)

    def read(*entries: dict[str, Any]) -> Any:
        return read_rows(RunArguments(datasets=list(entries)), args, tokenize)

    one, other = {"path": str(data)}, {"path": str(stored), "weight": 1.5}
    rows, fingerprint, sources = read(one, other)
    assert [(source.rows, source.good_rows, source.drawn) for source in sources] == [(30, 30, 30), (8, 8, 12)]
    assert len(rows) == 42
    for row in rows:
        (whole,) = (load_rows(str(path))[int(row["source"].rpartition(" ")[2])] for path in (data, stored)
                    if row["source"].startswith(str(path)))  # fmt: skip
        assert row["length"] == tokenize(whole)["length"]
        assert [image.tobytes() for image in open_images(row)] == [image.tobytes() for image in open_images(whole)]
    assert read(one, other)[1] == fingerprint
    named = RunArguments(dataset_name=str(stored), eval_dataset_name=str(stored))
    assert len(read_held_out(named, args, tokenize)) == len(read({"path": str(stored), "split": "test"})[0]) == 1
    for changed in ((other, one), (one, {**other, "weight": 1.6})):
        assert read(*changed)[1] != fingerprint
    for weight, total in ((1, 30), (2, 60), (0.3, 9), (2.5, 75), (0.01, 1)):
        mixed, _, (source, _) = read({**one, "weight": weight}, other)
        times = Counter(mixed["source"][:total])
        assert source.drawn == sum(times.values()) == len(mixed) - 12 == total
        assert set(times.values()) <= {int(weight), int(weight) + 1}
        assert weight != 0.3 or set(times) != set(rows["source"][:9])  # not the head of the file
        assert (read({**one, "weight": weight}, other)[0]["source"]) == mixed["source"]  # the same by the seed


def test_a_run_on_a_mixture_says_what_it_drew_and_goes_on_with_that_alone(
    composed: Callable[..., Path],
    data: Path,
    stored: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    entries = [{"path": str(data), "weight": 0.5}, {"path": str(stored), "weight": 2}]
    fields = {**INSTRUCT, **PACKED, "dataloader_num_workers": 1, "save_steps": 4, "datasets": entries}
    fields["model_name_or_path"] = str(composed())
    out = tmp_path / "out"
    with caplog.at_level(logging.INFO):
        run(monkeypatch, tmp_path, **fields, output_dir=str(out))
    assert f"{stored}: 8 rows, 8 good, 16 an epoch" in caplog.text
    assert [line["step"] for line in logged(out)][-1] == 8
    sources = [(s.path, s.rows, s.good_rows, s.weight, s.drawn, s.is_local) for s in Run.read(out).sources]
    assert sources == [(str(data), 30, 30, 0.5, 15, True), (str(stored), 8, 8, 2, 16, True)]
    entries[1]["weight"] = 3
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: "):
        run(monkeypatch, tmp_path, **fields, output_dir=str(out), resume_from_checkpoint=True)


def test_bad_rows_of_all_sources_are_listed(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = []
    for name in ("first", "second"):
        rows = [*json.loads(data.read_text())[:6], {"conversations": []}]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))
        entries.append({"path": str(tmp_path / f"{name}.json"), "image_folder": str(data.parent)})
    fields = {"stage": "align", "model_name_or_path": str(composed()), "datasets": entries, "max_steps": 1}
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        patched.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
        with pytest.raises(ValueError, match=r"first.json, row 6: .* 1 of 7 rows are bad"):
            run(patched, tmp_path, **fields, output_dir=str(out))
    for resume in (False, True):
        run(monkeypatch, tmp_path, **fields, output_dir=str(out), bad_rows="skip", resume_from_checkpoint=resume)
        listed = [json.loads(line)["source"] for line in (out / "bad_rows.jsonl").read_text().splitlines()]
        assert listed == [f"{tmp_path}/{name}.json, row 6" for name in ("first", "second")]
    assert [(source.rows, source.good_rows) for source in Run.read(out).sources] == [(7, 6), (7, 6)]


def test_stage_align_needs_a_picture(composed: Callable[..., Path], tmp_path: Path, monkeypatch: Any) -> None:
    turns = [{"from": "human", "value": "Hi."}, {"from": "gpt", "value": "Hello."}]
    (tmp_path / "texts.json").write_text(json.dumps([{"conversations": turns}] * 4))
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "texts.json")}
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="Stage 'align' trains the projector alone, and no row has a picture"):
        run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "out"))


def test_a_row_longer_than_the_decoders_positions_is_bad(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = [{"from": "human", "value": "Count."}, {"from": "gpt", "value": "one " * 200}]
    (tmp_path / "long.json").write_text(json.dumps([{"conversations": turns}] * 4))
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(tmp_path / "long.json")}
    with pytest.raises(ValueError, match="tokens, but the decoder has 512 positions; max_length can only lower that"):
        run(monkeypatch, tmp_path, **fields, output_dir=str(tmp_path / "out"))
