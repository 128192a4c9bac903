"""Streams in training: who reads which rows, and going on at the place where a run was."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset
from test_tars import picture, write_tar

from conversations.checks import BadRowList, StreamCheck
from conversations.loading import load_rows
from script_runs import INSTRUCT, PACKED, logged, moved, run
from training import streams
from training.arguments import TrainingConfig
from training.streams import Place, StreamBatches, deal_shards


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


def write_tars(folder: Path, sizes: list[int]) -> Path:
    for shard, size in enumerate(sizes):
        write_tar(folder / f"train-{shard}.tar", {f"{n}.json": said(shard, n) for n in range(size)})
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
    "parquet": write_parquet, "tars": write_tars, "JSON": write_json, "saved": write_saved,
}  # fmt: skip


def letters(row: dict[str, Any]) -> tuple[list[int], list[int]]:
    turns = row["conversations"]
    turns = json.loads(turns) if isinstance(turns, str) else turns
    return [0] * len(turns[1]["value"]), []


def asked(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Instead of a batch, what its rows ask, which is their shard and number."""
    turns = [json.loads(turns) if isinstance(turns := row["conversations"], str) else turns for row in rows]
    return {"asked": [turn[0]["value"] for turn in turns]}


def batches_of(path: Path, packed_length: int | None = None, **readers: int) -> StreamBatches:
    check = StreamCheck(frozenset(), letters, "skip", BadRowList(path.parent / "bad.jsonl"))
    return StreamBatches(load_rows(str(path), streaming=True), check, asked, 2, packed_length, **readers)


def read(batches: StreamBatches) -> Iterator[dict[str, Any]]:
    return iter(batches.loader(TrainingConfig(output_dir="unused", use_cpu=True, bf16=False)))


def good(sizes: list[int]) -> list[str]:
    return [f"{shard}.{number}" for shard, size in enumerate(sizes) for number in range(size) if number % 5 != 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_readers", [1, 2, 3, 5, 7])
def test_each_row_is_read_once_a_round_by_one_of_the_readers(tmp_path: Path, kind: str, num_readers: int) -> None:
    sizes = [19, 14, 17, 16, 18]
    path = KINDS[kind](tmp_path / "rows", sizes)
    counts: Counter[str] = Counter()
    for reader in range(num_readers):
        batches = batches_of(path, process_index=reader, num_processes=num_readers)
        first = [asked([row])["asked"][0] for row, place in rounds(batches, 2)]
        again = first[: len(first) // 2]
        assert first == again * 2
        counts.update(again)
    assert counts == Counter(good(sizes))


def rounds(batches: StreamBatches, number: int) -> Iterator[tuple[dict[str, Any], Place]]:
    for row, place in batches._read(0, Place()):
        if place.epoch == number:
            return
        yield row, place


def test_shards_are_dealt_out_evenly_and_the_rest_of_them_by_rows() -> None:
    assert deal_shards(5, 0, 1) == [(shard, True) for shard in range(5)]
    assert [deal_shards(5, reader, 2) for reader in range(2)] == [
        [(0, True), (2, True), (4, False)],
        [(1, True), (3, True), (4, False)],
    ]
    assert deal_shards(2, 3, 4) == [(0, False), (1, False)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("packed_length", [None, 22], ids=["padded", "packed"])
def test_a_stream_goes_on_at_any_batch_as_if_it_had_never_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, num_workers: int, packed_length: int | None
) -> None:
    monkeypatch.setattr(streams, "PACKING_WINDOW", 7)  # windows that end inside a shard and reach into the next
    path = KINDS[kind](tmp_path / "rows", [9, 4, 7])
    readers = {"num_workers": num_workers, "process_index": 1, "num_processes": 2}
    unbroken = list(islice(read(batches_of(path, packed_length, **readers)), 24))
    assert max(batch["place"]["epoch"] for batch in unbroken) >= 1
    assert (len({len(batch["asked"]) for batch in unbroken}) > 1) == (packed_length is not None)
    every = kind == "parquet" and num_workers == 0  # the others take their time to open, and workers to start
    stops = range(24) if every else (0, 1, 4, 7, 13)
    for stop in stops:
        broken = batches_of(path, packed_length, **readers)
        trained = list(islice(read(broken), stop))  # and workers have read ahead
        for batch in trained:
            broken.trained_on(batch["place"])
        resumed = batches_of(path, packed_length, **readers)
        resumed.place = broken.place
        assert trained + list(islice(read(resumed), 24 - stop)) == unbroken


def test_the_place_is_small_and_read_back(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows", [5] * 40)
    batches = batches_of(path, num_workers=2)
    for batch in islice(read(batches), 5):
        batches.trained_on(batch["place"])
    batches.write_place(tmp_path, is_main_process=True)
    assert (tmp_path / "stream.json").stat().st_size < 400
    again = batches_of(path, num_workers=2)
    again.go_on(tmp_path)
    assert again.place == batches.place
    assert again.place.next_reader == 1
    assert again.place.readers[0] == Place(epoch=0, shard=1, row=2)


def test_a_place_among_other_readers_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows", [5] * 3)
    for readers, difference in (
        ({"num_workers": 2}, "1 dataloader workers a process before, 2 now"),
        ({"num_processes": 2}, "1 processes before, 2 now"),
    ):
        batches_of(path).write_place(tmp_path, is_main_process=True)
        with pytest.raises(ValueError, match=rf"stream.json was written with other readers: .*{difference}.*Their"):
            batches_of(path, **readers).go_on(tmp_path)
    write_parquet(tmp_path / "more", [5] * 4)
    with pytest.raises(ValueError, match="3 shards before, 4 now"):
        batches_of(tmp_path / "more").go_on(tmp_path)


def test_more_readers_than_rows_are_refused(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [3])
    with pytest.raises(ValueError, match=r"no row for one of 4 readers, 1 in each of 4 processes: use fewer"):
        next(read(batches_of(path, process_index=3, num_processes=4)))


def test_reading_ahead_takes_none_of_the_random_numbers_of_training(tmp_path: Path) -> None:
    path = write_json(tmp_path / "rows", [3])
    before = torch.get_rng_state()
    for num_workers in (0, 2):
        next(read(batches_of(path, num_workers=num_workers)))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_checkpoint_without_a_place_in_the_stream_is_not_gone_on_from(
    composed: Callable[..., Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {**INSTRUCT, "model_name_or_path": str(composed()), "dataset_name": str(data), "dataset_streaming": True}
    out = tmp_path / "out"
    fields |= {"max_steps": 2, "save_steps": 1, "output_dir": str(out)}
    run(monkeypatch, tmp_path, **fields)
    (out / "checkpoint-1" / "stream.json").unlink()
    fields |= {"resume_from_checkpoint": str(out / "checkpoint-1")}
    left = sorted(path.name for path in out.iterdir())
    with pytest.raises(
        ValueError, match=r"checkpoint-1 has no stream.json, .* Resume the way it was written. Or continue training"
    ):
        run(monkeypatch, tmp_path, **fields)
    assert sorted(path.name for path in out.iterdir()) == left  # nothing was moved aside
    fields |= {"resume_from_checkpoint": str(out / "checkpoint-2"), "max_steps": 3, "resume_changed": True}
    with pytest.raises(ValueError, match="1 dataloader workers a process before, 2 now"):
        run(monkeypatch, tmp_path, **fields, dataloader_num_workers=2)


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_tars_train_as_the_same_rows_of_parquet_do(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packing: dict[str, Any]
) -> None:
    members: dict[str, Any] = {}
    images, conversations = [], []
    for number in range(12):
        pictures = [picture(20 * number + shade) for shade in range(number % 3)]
        asks = {"from": "human", "value": "<image>" * len(pictures) + "What?"}
        turns = [asks, {"from": "gpt", "value": f"number {number}"}]
        members |= {f"{number}.{place}.png": data for place, data in enumerate(pictures)} | {f"{number}.json": turns}
        images.append([{"bytes": data, "path": None} for data in pictures])
        conversations.append(turns)
    write_tar(tmp_path / "tars" / "train.tar", members)
    (tmp_path / "parquet").mkdir()
    struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"images": pa.array(images, pa.list_(struct)), "conversations": conversations})
    pq.write_table(table, tmp_path / "parquet" / "train.parquet")
    fields = {**INSTRUCT, **packing, "model_name_or_path": str(composed()), "dataset_streaming": True}
    fields |= {"max_steps": 4, "global_batch_size": None, "gradient_accumulation_steps": 2}
    for kind in ("tars", "parquet"):
        run(
            monkeypatch,
            tmp_path,
            **fields,
            dataset_name=str(tmp_path / kind),
            output_dir=str(tmp_path / f"{kind} out"),
        )
    assert moved(tmp_path / "tars out", tmp_path / "parquet out") == set()
    assert logged(tmp_path / "tars out")[-1]["train_loss"] == logged(tmp_path / "parquet out")[-1]["train_loss"]
