"""Streams in training: who reads which rows, and going on at the place where a run was."""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node

from conversations.loading import load_rows
from conversations.rows import BadRowError, Row, row_turns
from training import streams
from training.arguments import TrainingConfig
from training.streams import StreamBatches


Turns = list[dict[str, str]]


def said(shard: int, number: int) -> Turns:
    """Turns of a length of their own; every fifth row has no answer, which makes it a bad one."""
    answer = "" if number % 5 == 4 else "x" * ((7 * shard + 3 * number) % 11 + 1)
    return [{"from": "human", "value": f"{shard}.{number}"}, {"from": "gpt", "value": answer}]


def write_parquet(folder: Path, sizes: list[int], row_group_size: int = 4) -> Path:
    folder.mkdir()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for shard, size in enumerate(sizes):
        table = pa.table(
            {
                "images": pa.array([[]] * size, pa.list_(struct)),
                "conversations": [said(shard, number) for number in range(size)],
            }
        )
        pq.write_table(table, folder / f"train-{shard:05d}.parquet", row_group_size=row_group_size)
    return folder


def write_json(folder: Path, sizes: list[int]) -> Path:
    folder.mkdir()
    rows = [{"conversations": said(shard, number)} for shard, size in enumerate(sizes) for number in range(size)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


def write_saved(folder: Path, sizes: list[int]) -> Path:
    rows = [said(shard, number) for shard, size in enumerate(sizes) for number in range(size)]
    Dataset.from_dict({"images": [[]] * len(rows), "conversations": rows}).save_to_disk(folder)
    return folder


KINDS: dict[str, Callable[[Path, list[int]], Path]] = {
    "parquet": write_parquet, "JSON": write_json, "saved": write_saved,
}  # fmt: skip


class Letters:
    """A check with a token a letter of the answer; a row without one is bad."""

    tokenize = SimpleNamespace(tokens_per_image=0)

    def __call__(self, row: Row) -> Row:
        answer = row_turns(row)[1]["value"]
        if not answer:
            raise BadRowError(row["source"], "no answer")
        return {**row, "length": len(answer), "num_images": 0}


def asked(rows: list[Row]) -> dict[str, Any]:
    """Instead of a batch, what its rows ask, which is their shard and number."""
    return {"asked": [row_turns(row)[0]["value"] for row in rows]}


def batches_of(path: Path, packed_length: int | None = None, bad_rows: Any = "skip", **readers: int) -> StreamBatches:
    rows, report = load_rows(str(path), streaming=True), path.parent / "bad.jsonl"
    return StreamBatches(rows, Letters(), asked, 2, packed_length, bad_rows, report, **readers)


def read(batches: StreamBatches) -> Iterator[dict[str, Any]]:
    return iter(batches.loader(TrainingConfig(output_dir="unused", use_cpu=True, bf16=False)))


def good(sizes: list[int]) -> list[str]:
    return [f"{shard}.{number}" for shard, size in enumerate(sizes) for number in range(size) if number % 5 != 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_processes", [1, 2, 5, 7])
def test_each_row_is_read_as_often_as_any_other_and_by_one_reader(
    tmp_path: Path, kind: str, num_processes: int
) -> None:
    sizes = [19, 14, 17, 16, 18]
    path, counts = KINDS[kind](tmp_path / "rows", sizes), Counter[str]()
    for process in range(num_processes):
        batches = batches_of(path, process_index=process, num_processes=num_processes)
        share = split_dataset_by_node(batches.rows, process, num_processes)
        counts.update(asked(list(batches.good_rows(share)))["asked"])
    assert counts == Counter(good(sizes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("packed_length", [None, 22], ids=["padded", "packed"])
def test_a_stream_goes_on_at_any_batch_as_if_it_had_never_stopped(
    tmp_path: Path, kind: str, num_workers: int, packed_length: int | None
) -> None:
    path = KINDS[kind](tmp_path / "rows", [9, 4, 7])
    readers = {"num_workers": num_workers, "process_index": 1, "num_processes": 2}
    unbroken = list(islice(read(batches_of(path, packed_length, **readers)), 24))
    counts = Counter(question for batch in unbroken for question in batch["asked"])
    assert max(counts.values()) > 1  # it has gone round
    assert (len({len(batch["asked"]) for batch in unbroken}) > 1) == (packed_length is not None)
    every = kind == "parquet" and num_workers == 0  # the others take their time to open, and workers to start
    for stop in range(24) if every else (1, 13):
        broken = batches_of(path, packed_length, **readers)
        trained = list(islice(read(broken), stop))  # and workers have read ahead
        for batch in trained:
            broken.trained_on(dict(batch["place"]))
        resumed = batches_of(path, packed_length, **readers)
        resumed.places = json.loads(json.dumps(broken.places))  # as a checkpoint keeps them
        resumed.next_reader = broken.next_reader
        read_on = islice(read(resumed), 24 - stop)  # at places that datasets may write in other words
        assert [batch["asked"] for batch in (*trained, *read_on)] == [batch["asked"] for batch in unbroken]


def test_the_place_is_read_back_by_as_many_readers_and_no_others(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows", [5] * 40)
    batches, again = (batches_of(path, num_workers=2) for _ in range(2))
    for batch in islice(read(batches), 5):
        batches.trained_on(batch["place"])
    batches.write_place(tmp_path, is_main_process=True)
    assert (tmp_path / "stream.json").stat().st_size < 2000
    again.go_on(tmp_path)
    assert (again.places, again.next_reader) == (batches.places, 1)
    for readers, now in (({"num_workers": 3}, "[3]"), ({"num_workers": 2, "num_processes": 2}, "[2, 2]")):
        with pytest.raises(ValueError, match=re.escape(f"readers of each: [2], now {now}): resume as before")):
            batches_of(path, **readers).go_on(tmp_path)
    (tmp_path / "stream.json").write_text('[{"readers": [{"rows": null, "batches": 0}], "next_reader": 0}]')
    with pytest.raises(ValueError, match=r"stream.json is of another version"):
        batches_of(path).go_on(tmp_path)


def test_a_row_that_no_packed_row_holds_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows.json, row \d+: \d+ tokens.* don't fit into a packed row of 3"):
        list(islice(read(batches_of(write_json(tmp_path / "rows", [9]), packed_length=3)), 9))


def test_bad_rows_of_a_stream_are_listed_once_or_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(tmp_path / "rows", [5, 5])
    assert len(list(islice(read(batches_of(path)), 12))) == 12  # three rounds
    listed = [json.loads(line) for line in (path.parent / "bad.jsonl").read_text().splitlines()]
    assert listed == [{"source": f"{path}, row {number}", "problem": "no answer"} for number in (4, 9)]
    with pytest.raises(BadRowError, match=r"row 4: no answer\.$"):
        list(islice(read(batches_of(path, bad_rows="error")), 12))
    path.write_text(json.dumps([{"conversations": said(0, 4)}] * 3))
    monkeypatch.setattr(streams, "MOST_BAD", 10)
    with pytest.raises(BadRowError, match=r"no answer\. 10 rows on end are bad"):
        next(read(batches_of(path)))


def test_reading_ahead_takes_none_of_the_random_numbers_of_training(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [3])
    before = torch.get_rng_state()
    for num_workers in (0, 2):
        next(read(batches_of(path, num_workers=num_workers)))
    assert torch.equal(torch.get_rng_state(), before)
