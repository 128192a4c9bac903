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
from datasets.distributed import split_dataset_by_node

from conversations.loading import load_rows
from conversations.rows import BadRowError, Row, row_turns
from training import streams
from training.streams import StreamBatches


Turns = list[dict[str, str]]


def said(shard: int, number: int) -> Turns:
    """Turns of a length of their own; every fifth row has no answer, which makes it a bad one."""
    answer = "" if number % 5 == 4 else "x" * ((7 * shard + 3 * number) % 11 + 1)
    return [{"from": "human", "value": f"{shard}.{number}"}, {"from": "gpt", "value": answer}]


def write_parquet(folder: Path, sizes: list[int]) -> Path:
    folder.mkdir()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for shard, size in enumerate(sizes):
        table = pa.table(
            {
                "images": pa.array([[]] * size, pa.list_(struct)),
                "conversations": [said(shard, number) for number in range(size)],
            }
        )
        pq.write_table(table, folder / f"train-{shard:05d}.parquet", row_group_size=4)
    return folder


def write_json(folder: Path, sizes: list[int]) -> Path:
    folder.mkdir()
    rows = [{"conversations": said(shard, number)} for shard, size in enumerate(sizes) for number in range(size)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


KINDS: dict[str, Callable[[Path, list[int]], Path]] = {"parquet": write_parquet, "JSON": write_json}


def check(row: Row) -> Row:
    """A row without an answer is bad."""
    if not row_turns(row)[1]["value"]:
        raise BadRowError(row["source"], "no answer")
    return row


def asked(rows: list[Row]) -> dict[str, Any]:
    """Instead of a batch, what its rows ask, which is their shard and number."""
    return {"asked": [row_turns(row)[0]["value"] for row in rows]}


def batches_of(
    path: Path, bad_rows: Any = "skip", process: int = 0, processes: int = 1, workers: int = 0
) -> StreamBatches:
    """Batches of two rows."""
    args: Any = SimpleNamespace(
        per_device_train_batch_size=2, process_index=process, world_size=processes, dataloader_num_workers=workers,
        dataloader_pin_memory=False, dataloader_prefetch_factor=None, output_dir=path.parent,
    )  # fmt: skip
    return StreamBatches(load_rows(str(path), streaming=True), check, asked, bad_rows, args)


def read(batches: StreamBatches) -> Iterator[dict[str, Any]]:
    return iter(batches.loader())


def good(sizes: list[int]) -> list[str]:
    return [f"{shard}.{number}" for shard, size in enumerate(sizes) for number in range(size) if number % 5 != 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("processes", [1, 2, 5, 7])
def test_each_row_is_read_as_often_as_any_other_and_by_one_reader(tmp_path: Path, kind: str, processes: int) -> None:
    sizes = [19, 14, 17, 16, 18]
    path, counts = KINDS[kind](tmp_path / "rows", sizes), Counter[str]()
    for process in range(processes):
        batches = batches_of(path, process=process, processes=processes)
        share = split_dataset_by_node(batches.rows, process, processes)
        counts.update(asked(list(batches.good_rows(share)))["asked"])
    assert counts == Counter(good(sizes))


def test_the_place_is_read_back_by_as_many_readers_and_no_others(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows", [5] * 40)
    batches_of(path, workers=2).write_place(tmp_path, is_main_process=True)
    batches_of(path, workers=2).read_place(tmp_path)
    for readers, now in (({"workers": 3}, "[3]"), ({"workers": 2, "processes": 2}, "[2, 2]")):
        with pytest.raises(ValueError, match=re.escape(f"readers of each: [2], now {now}): resume as before")):
            batches_of(path, **readers).read_place(tmp_path)


def test_bad_rows_of_a_stream_are_listed_or_stop_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(tmp_path / "rows", [5, 5])
    assert len(list(islice(read(batches_of(path)), 4))) == 4
    listed = [json.loads(line) for line in (path.parent / "bad_rows.jsonl").read_text().splitlines()]
    assert listed == [{"source": f"{path}, row 4", "problem": "no answer"}]
    with pytest.raises(BadRowError, match=r"row 4: no answer\.$"):
        list(islice(read(batches_of(path, bad_rows="error")), 12))
    path.write_text(json.dumps([{"conversations": said(0, 4)}] * 3))
    monkeypatch.setattr(streams, "MAX_CONSECUTIVE_BAD_ROWS", 10)
    with pytest.raises(BadRowError, match="no answer"):
        next(read(batches_of(path)))


def test_reading_ahead_takes_none_of_the_random_numbers_of_training(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [3])
    before = torch.get_rng_state()
    for workers in (0, 2):
        next(read(batches_of(path, workers=workers)))
    assert torch.equal(torch.get_rng_state(), before)
