"""Several sources in one run: how often each row comes, whatever its source's types, and what is recorded."""

import json
import logging
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, Image
from torch.utils.data import DataLoader
from transformers import AutoProcessor

from conversations.loading import load_rows
from conversations.measured import RowCheck, keep_good_rows, row_lengths, tokenize_rows
from conversations.pictures import open_images
from conversations.tokens import RowTokenizer
from script_runs import INSTRUCT, PACKED, logged, moved, run
from training import sft
from training.arguments import SourceArguments
from training.batches import Batches, PaddedBatches
from training.data import draw, mix
from training.run import Run


@pytest.mark.parametrize(("weight", "total"), [(1, 10), (2, 20), (0.3, 3), (2.5, 25), (1.1, 11), (0.04, 0)])
def test_a_weight_is_how_often_a_row_comes(weight: float, total: int) -> None:
    drawn = draw(10, weight, (42, 0))
    times = Counter(drawn.tolist())
    assert len(drawn) == total
    assert all(int(weight) <= times[row] <= int(weight) + 1 for row in range(10))
    assert (draw(10, weight, (42, 0)) == drawn).all()


def test_a_share_is_drawn_evenly_by_the_seed_and_the_source() -> None:
    draws = [draw(20, 0.25, (seed, 1)) for seed in range(400)]
    counts = np.bincount(np.concatenate(draws), minlength=20)
    # 400 draws of a quarter: 100 of each row, with a standard deviation of 8.7.
    assert counts.sum() == 2000
    assert (abs(counts - 100) < 5 * 8.7).all()
    rows = Dataset.from_dict({"number": range(100)})
    entries = [SourceArguments(name, weight=0.5) for name in ("one", "another")]
    mixed, _, _ = mix(entries, [(100, rows, "same"), (100, rows, "same")], seed=0)
    assert mixed["number"][:50] != mixed["number"][50:]


@pytest.fixture
def stored(data: Path, tmp_path: Path) -> Path:
    """A dataset of 8 rows with pictures inside, one a row, and turns that are no text."""
    pictures = [str(data.parent / f"{number}.png") for number in range(8)]
    texts = [[{"from": "human", "value": "<image>"}, {"from": "gpt", "value": f"stored {n}"}] for n in range(8)]
    dataset = Dataset.from_dict({"image": pictures, "conversations": texts}).cast_column("image", Image())
    dataset.save_to_disk(tmp_path / "stored")
    return tmp_path / "stored"


def checked(path: Path, tokenize: RowTokenizer) -> tuple[int, Dataset, str]:
    rows: Any = load_rows(str(path))
    return len(rows), *keep_good_rows(rows, tokenize_rows(rows, RowCheck(tokenize)), "error", None)


def test_rows_of_sources_of_other_types_stay_as_they_are(
    composed: Callable[..., Path], data: Path, stored: Path
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    parts = [checked(data, tokenize), checked(stored, tokenize)]
    entries = [SourceArguments(str(data)), SourceArguments(str(stored), weight=1.5)]
    rows, fingerprint, sources = mix(entries, parts, seed=42)
    assert [(source.rows, source.good_rows, source.drawn) for source in sources] == [(30, 30, 30), (8, 8, 12)]
    assert len(rows) == 42
    lengths = row_lengths(rows)
    for number in (*range(42), -1):
        row = rows[number]
        whole = parts[0 if row["source"].startswith(str(data)) else 1][1][int(row["source"].rpartition(" ")[2])]
        assert {name: row[name] for name in whole} == whole
        assert row["length"] == lengths[number]
        assert len(open_images(row)) == row["num_images"]
    (picture,) = open_images(rows[35])
    assert picture.size == (30, 20)
    # Every row of a weight of 1 exactly once an epoch.
    seen = Counter(rows[n]["source"] for batch in PaddedBatches(lengths, 4, 1, 42)(0) for n in batch)
    assert all(seen[source] == 1 for source in load_rows(str(data))["source"])
    assert sorted(seen[source] for source in load_rows(str(stored))["source"]) == [1, 1, 1, 1, 2, 2, 2, 2]
    # A row is left in the end for the first of two processes, and none for the second.
    dealt = Batches(PaddedBatches(lengths[:41], 5, 2, 42), 2, 1)
    assert [len(batch) for batch in DataLoader(rows, batch_sampler=dealt, collate_fn=list)] == [5, 5, 5, 5, 0]
    for changed in (entries[::-1], [entries[0], SourceArguments(str(stored), weight=1.6)]):
        ordered = parts if changed[0] is entries[0] else parts[::-1]
        assert mix(changed, ordered, seed=42)[1] != fingerprint
    with pytest.raises(ValueError, match=r"datasets, entry 2 .*stored\): a weight of 0.01 draws none of its 8 rows"):
        mix([entries[0], SourceArguments(str(stored), weight=0.01)], parts, seed=42)


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
    assert "31 rows an epoch, drawn with seed 42" in caplog.text
    assert "31 rows; 1 processes" in caplog.text
    assert [line["step"] for line in logged(out)][-1] == 8
    sources = Run.read(out).sources
    assert [(s.path, s.rows, s.good_rows, s.weight, s.drawn, s.is_local) for s in sources] == [
        (str(data), 30, 30, 0.5, 15, True),
        (str(stored), 8, 8, 2, 16, True),
    ]
    assert len({source.fingerprint for source in sources}) == 2

    whole = shutil.copytree(out, tmp_path / "whole")
    for name in ("checkpoint-8", "model.safetensors", "trainer_state.json"):
        path = out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = {**fields, "output_dir": str(out), "resume_from_checkpoint": True}
    entries[1]["weight"] = 3
    with pytest.raises(ValueError, match=r"belongs to a different run:\n  data: "):
        run(monkeypatch, tmp_path, **again)
    entries[1]["weight"] = 2
    run(monkeypatch, tmp_path, **again)
    assert moved(whole, out) == set()


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
    with pytest.raises(ValueError, match=r"datasets, entry 1: .*first.json, row 6: .* 1 of 7 rows are bad"):
        run(monkeypatch, tmp_path, **fields, output_dir=str(out))
    for resume in (False, True):
        run(monkeypatch, tmp_path, **fields, output_dir=str(out), bad_rows="skip", resume_from_checkpoint=resume)
        listed = [json.loads(line)["source"] for line in (out / "bad_rows.jsonl").read_text().splitlines()]
        assert listed == [f"{tmp_path}/{name}.json, row 6" for name in ("first", "second")]
    assert [(source.rows, source.good_rows) for source in Run.read(out).sources] == [(7, 6), (7, 6)]


def test_what_is_wrong_with_a_source_names_its_entry(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "A dog."}]
    (tmp_path / "out.json").write_text(json.dumps([{"image": "../a.png", "conversations": turns}]))
    fields = {"stage": "align", "model_name_or_path": str(composed()), "output_dir": str(tmp_path / "out")}
    for entry, message in (
        ({"path": str(tmp_path / "gone.json")}, r"datasets, entry 2: .*No such file.*gone.json"),
        ({"path": str(data), "split": "dev"}, "datasets, entry 2: .*has one split, train, so there is no 'dev'"),
        ({"path": str(data), "name": "large"}, "datasets, entry 2: .*has no configurations, so there is no 'large'"),
        ({"path": str(data), "image_folder": "gone"}, "datasets, entry 2: .* gone does not exist"),
        ({"path": str(tmp_path / "out.json")}, "datasets, entry 2: .* is outside the image folder"),
    ):
        with pytest.raises(ValueError, match=message):
            run(monkeypatch, tmp_path, **fields, datasets=[{"path": str(data)}, entry])
