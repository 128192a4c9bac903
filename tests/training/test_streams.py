"""Streams in training: which process reads which rows, how bad rows are treated, and how a resumed run goes on.

A stream is read by the data loader's workers of each process, or by the process itself if it has no workers. These
workers and processes are called readers. Resuming restores the place of each reader in the stream.
"""

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

from normllava.conversations.loading import load_rows
from normllava.conversations.rows import BadRowError, Row, row_turns
from training.rows import streams
from training.rows.streams import StreamBatches


Turns = list[dict[str, str]]


def is_bad(number: int) -> bool:
    """Whether row `number` of a shard is bad. In these tests every fifth row of a shard is bad."""
    return number % 5 == 4


def make_turns(shard: int, number: int) -> Turns:
    """The turns of row `number` of a shard. The question is the row's name. A bad row has an empty answer."""
    answer = "" if is_bad(number) else "x"
    return [{"from": "human", "value": f"{shard}.{number}"}, {"from": "gpt", "value": answer}]


def write_parquet(folder: Path, sizes: list[int]) -> Path:
    """Write a dataset of Parquet files, one for each shard, with these numbers of rows, and return its folder."""
    folder.mkdir()
    image_type = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    for shard, size in enumerate(sizes):
        no_images = [[]] * size
        table = pa.table(
            {
                "images": pa.array(no_images, pa.list_(image_type)),
                "conversations": [make_turns(shard, number) for number in range(size)],
            }
        )
        # As in real files, the rows are in several groups.
        pq.write_table(table, folder / f"train-{shard:05d}.parquet", row_group_size=4)
    return folder


def write_json(folder: Path, sizes: list[int]) -> Path:
    """Write the same rows as `write_parquet` into one JSON file, and return its path."""
    folder.mkdir()
    rows = []
    for shard, size in enumerate(sizes):
        rows += [{"conversations": make_turns(shard, number)} for number in range(size)]
    (folder / "rows.json").write_text(json.dumps(rows))
    return folder / "rows.json"


WRITERS: dict[str, Callable[[Path, list[int]], Path]] = {"parquet": write_parquet, "JSON": write_json}


def check_answer(row: Row) -> Row:
    """Stands for `RowCheck`, by which training checks a row. A row with an empty answer is bad."""
    _, answer = row_turns(row)
    if answer["value"] == "":
        raise BadRowError(row["source"], "no answer")
    return row


def collate_names(rows: list[Row]) -> dict[str, Any]:
    """Stands for the collator. A batch has the names of its rows, such as "3.0" for row 0 of shard 3."""
    names = []
    for row in rows:
        question, _ = row_turns(row)
        names.append(question["value"])
    return {"names": names}


def make_batches(
    path: Path,
    bad_rows: Any = "skip",
    process: int = 0,
    num_processes: int = 1,
    num_workers: int = 0,
    is_local: bool = True,
) -> StreamBatches:
    """The batches of one process. A batch has two rows. Bad rows are listed in the folder of `path`."""
    args: Any = SimpleNamespace(
        per_device_train_batch_size=2,
        process_index=process,
        world_size=num_processes,
        dataloader_num_workers=num_workers,
        dataloader_pin_memory=False,
        dataloader_prefetch_factor=None,
        output_dir=path.parent,
    )
    rows = load_rows(str(path), streaming=True)
    return StreamBatches(rows, check_answer, collate_names, is_local, bad_rows, args)


def read_batches(batches: StreamBatches) -> Iterator[dict[str, Any]]:
    """An endless iterator over batches, by the data loader of training."""
    return iter(batches.loader())


def good_row_names(sizes: list[int]) -> list[str]:
    """The names of all good rows of shards with these numbers of rows."""
    names = []
    for shard, size in enumerate(sizes):
        names += [f"{shard}.{number}" for number in range(size) if not is_bad(number)]
    return names


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("num_processes", [1, 2, 5, 7])
def test_each_good_row_is_read_once_by_one_process(tmp_path: Path, kind: str, num_processes: int) -> None:
    sizes = [19, 14, 17, 16, 18]  # five shards: with seven processes, there are fewer shards than processes
    path = WRITERS[kind](tmp_path / "rows", sizes)
    names_read = []
    for process in range(num_processes):
        batches = make_batches(path, process=process, num_processes=num_processes)
        # `batches.rows` are the rows of all processes, of which the data loader of a process selects its own.
        rows_of_process = split_dataset_by_node(batches.rows, process, num_processes)
        good_rows = list(batches.good_rows(rows_of_process))
        names_read += collate_names(good_rows)["names"]
    assert sorted(names_read) == sorted(good_row_names(sizes))


@pytest.mark.parametrize(("num_workers", "num_processes"), [(2, 1), (0, 2)], ids=["two workers", "two processes"])
def test_a_row_of_a_small_shard_is_read_as_often_as_any_other(
    tmp_path: Path, num_workers: int, num_processes: int
) -> None:
    sizes = [12, 2]  # the last shard has what is left
    path = write_parquet(tmp_path / "rows", sizes)
    names_read = []
    for process in range(num_processes):
        batches = make_batches(path, process=process, num_processes=num_processes, num_workers=num_workers)
        # Twelve rows are good, so two passes are twelve batches of two rows.
        for batch in islice(read_batches(batches), 12 // num_processes):
            names_read += batch["names"]
    assert Counter(names_read) == dict.fromkeys(good_row_names(sizes), 2)


def test_a_stream_from_the_hub_says_that_shares_may_be_unequal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_parquet(tmp_path / "rows", [12, 2])
    make_batches(path, num_workers=2, is_local=False)
    assert "2 shards are dealt to 2 readers" in caplog.text
    caplog.clear()
    # With a single reader, or rows on this disk, all rows are read equally often.
    make_batches(path, is_local=False)
    make_batches(path, num_workers=2)
    assert caplog.text == ""


# The number of rows of each shard. There are enough shards for all readers of these tests.
MANY_SHARDS = [5] * 40


def test_the_place_is_restored_for_the_same_number_of_readers(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows", MANY_SHARDS)
    make_batches(path, num_workers=2).write_place(tmp_path, is_main_process=True)
    # Reading a place that doesn't fit would raise an error.
    make_batches(path, num_workers=2).read_place(tmp_path)


@pytest.mark.parametrize(
    ("num_workers", "num_processes", "readers"),
    [(3, 1, "[3]"), (2, 2, "[2, 2]")],
    ids=["more workers", "more processes"],
)
def test_a_place_of_another_number_of_readers_is_refused(
    tmp_path: Path, num_workers: int, num_processes: int, readers: str
) -> None:
    """The error lists how many readers each process had when the place was written, and how many it has now."""
    path = write_parquet(tmp_path / "rows", MANY_SHARDS)
    make_batches(path, num_workers=2).write_place(tmp_path, is_main_process=True)
    batches = make_batches(path, num_workers=num_workers, num_processes=num_processes)
    with pytest.raises(ValueError, match=re.escape(f"readers of each: [2], now {readers}): resume as before")):
        batches.read_place(tmp_path)


def test_bad_rows_of_a_stream_are_skipped_and_listed(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [5, 5])
    batches = read_batches(make_batches(path, bad_rows="skip"))
    for _ in range(4):  # the eight rows of these batches are rows 0 to 3 and 5 to 8
        next(batches)
    lines = (path.parent / "bad_rows.jsonl").read_text().splitlines()
    bad_row = {"source": f"{path}, row 4", "problem": "no answer"}
    assert [json.loads(line) for line in lines] == [bad_row]


def test_a_bad_row_stops_a_stream_if_the_recipe_says_so(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [5, 5])
    batches = read_batches(make_batches(path, bad_rows="error"))
    with pytest.raises(BadRowError, match=r"row 4: no answer\.$"):
        list(islice(batches, 4))


def test_a_stream_of_nothing_but_bad_rows_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream begins anew at its end, so without a limit this stream would be read forever."""
    bad_row = {"conversations": make_turns(shard=0, number=4)}  # has no answer
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([bad_row] * 3))
    monkeypatch.setattr(streams, "MAX_CONSECUTIVE_BAD_ROWS", 10)
    batches = read_batches(make_batches(path, bad_rows="skip"))
    with pytest.raises(BadRowError, match="no answer"):
        next(batches)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_reading_batches_leaves_the_random_numbers_of_training_as_they_are(tmp_path: Path, num_workers: int) -> None:
    path = write_json(tmp_path / "rows", [3])
    state_before = torch.get_rng_state()
    next(read_batches(make_batches(path, num_workers=num_workers)))
    assert torch.equal(torch.get_rng_state(), state_before)
