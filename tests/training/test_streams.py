"""Streams in training: which reader reads which rows, and how a resumed run finds its place."""

import json
import re
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


def make_turns(shard: int, number: int) -> Turns:
    """The turns of row `number` of a shard. Every fifth row has no answer, which makes it a bad one."""
    length = (7 * shard + 3 * number) % 11 + 1  # any lengths that vary from row to row
    answer = "" if number % 5 == 4 else "x" * length
    return [{"from": "human", "value": f"{shard}.{number}"}, {"from": "gpt", "value": answer}]


def write_parquet(folder: Path, sizes: list[int]) -> Path:
    """A dataset of Parquet files, one for each shard, with these numbers of rows."""
    folder.mkdir()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for shard, size in enumerate(sizes):
        table = pa.table(
            {
                "images": pa.array([[]] * size, pa.list_(struct)),
                "conversations": [make_turns(shard, number) for number in range(size)],
            }
        )
        pq.write_table(table, folder / f"train-{shard:05d}.parquet", row_group_size=4)
    return folder


def write_json(folder: Path, sizes: list[int]) -> Path:
    """A JSON file with the same rows as the files of `write_parquet`."""
    folder.mkdir()
    rows = []
    for shard, size in enumerate(sizes):
        rows += [{"conversations": make_turns(shard, number)} for number in range(size)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


WRITERS: dict[str, Callable[[Path, list[int]], Path]] = {"parquet": write_parquet, "JSON": write_json}


def check_answer(row: Row) -> Row:
    """Stands for `RowCheck`: a row without an answer is bad."""
    if not row_turns(row)[1]["value"]:
        raise BadRowError(row["source"], "no answer")
    return row


def collate_names(rows: list[Row]) -> dict[str, Any]:
    """Stands for the collator: the questions of a batch's rows, which name them as "shard.number"."""
    return {"names": [row_turns(row)[0]["value"] for row in rows]}


def make_batches(
    path: Path, bad_rows: Any = "skip", process: int = 0, processes: int = 1, workers: int = 0
) -> StreamBatches:
    """The batches of one process, of two rows each."""
    args: Any = SimpleNamespace(
        per_device_train_batch_size=2, process_index=process, world_size=processes, dataloader_num_workers=workers,
        dataloader_pin_memory=False, dataloader_prefetch_factor=None, output_dir=path.parent,
    )  # fmt: skip
    rows = load_rows(str(path), streaming=True)
    return StreamBatches(rows, check_answer, collate_names, bad_rows, args)


def read(batches: StreamBatches) -> Iterator[dict[str, Any]]:
    """The batches as training reads them."""
    return iter(batches.loader())


def good_row_names(sizes: list[int]) -> list[str]:
    """The names of all rows with an answer, as `collate_names` has them."""
    names = []
    for shard, size in enumerate(sizes):
        names += [f"{shard}.{number}" for number in range(size) if number % 5 != 4]
    return names


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("processes", [1, 2, 5, 7])
def test_each_good_row_is_read_once_by_one_process(tmp_path: Path, kind: str, processes: int) -> None:
    sizes = [19, 14, 17, 16, 18]
    path = WRITERS[kind](tmp_path / "rows", sizes)
    read_names = []
    for process in range(processes):
        batches = make_batches(path, process=process, processes=processes)
        share = split_dataset_by_node(batches.rows, process, processes)
        read_names += collate_names(list(batches.good_rows(share)))["names"]
    assert sorted(read_names) == sorted(good_row_names(sizes))


def test_the_place_is_restored_only_for_the_same_number_of_readers(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows", [5] * 40)
    make_batches(path, workers=2).write_place(tmp_path, is_main_process=True)
    make_batches(path, workers=2).read_place(tmp_path)

    for settings, readers_now in (({"workers": 3}, "[3]"), ({"workers": 2, "processes": 2}, "[2, 2]")):
        message = re.escape(f"readers of each: [2], now {readers_now}): resume as before")
        with pytest.raises(ValueError, match=message):
            make_batches(path, **settings).read_place(tmp_path)


def test_bad_rows_of_a_stream_are_listed_or_stop_it(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [5, 5])
    assert len(list(islice(read(make_batches(path)), 4))) == 4
    listed = [json.loads(line) for line in (path.parent / "bad_rows.jsonl").read_text().splitlines()]
    assert listed == [{"source": f"{path}, row 4", "problem": "no answer"}]

    with pytest.raises(BadRowError, match=r"row 4: no answer\.$"):
        list(islice(read(make_batches(path, bad_rows="error")), 12))


def test_a_stream_of_nothing_but_bad_rows_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_json(tmp_path / "rows", [1])
    bad_row = {"conversations": make_turns(shard=0, number=4)}
    path.write_text(json.dumps([bad_row] * 3))
    monkeypatch.setattr(streams, "MAX_CONSECUTIVE_BAD_ROWS", 10)
    with pytest.raises(BadRowError, match="no answer"):
        next(read(make_batches(path, bad_rows="skip")))


def test_reading_batches_leaves_the_random_numbers_of_training_as_they_are(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [3])
    before = torch.get_rng_state()
    for workers in (0, 2):
        next(read(make_batches(path, workers=workers)))
    assert torch.equal(torch.get_rng_state(), before)
