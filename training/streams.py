"""Batches of a stream, each with its place there: a run resumes where it was, at once, however far it had come.

A stream is read by one reader in each worker of each process. Whole shards are dealt out evenly to the readers; of the
shards that are left over, each of n readers reads every n-th row. Each reads its share repeatedly. So a row is read
once in each round of its reader, whatever the numbers of shards, processes and workers.
"""

import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec.asyn
import torch
from accelerate.utils import gather_object
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from conversations.checks import StreamCheck
from conversations.files import write_whole
from conversations.rows import Row
from conversations.streams import RowStream
from diagnostics.results import from_json
from training.arguments import TrainingConfig
from training.packing import pack_window


STREAM_FILE = "stream.json"
# Rows of a stream that are packed together.
PACKING_WINDOW = 512
# Key of a batch's place.
PLACE = "place"


@dataclass(frozen=True)
class Place:
    """How far a reader of a stream is."""

    epoch: int = 0
    """Rounds of its share that it has finished."""
    shard: int = 0
    """Shards of the share that it has finished in this round."""
    row: int = 0
    """Rows of the next shard that it has read."""
    packs: int = 0
    """Packed rows that it has yielded from the window that begins there."""


@dataclass
class ProcessPlace:
    """How far the readers of a process are."""

    readers: list[Place]
    next_reader: int = 0
    """The reader whose batch comes next; they take turns."""


@dataclass(frozen=True)
class StreamPlace:
    """How far a run is in its stream, stored as `stream.json` in a checkpoint."""

    num_shards: int
    processes: list[ProcessPlace]

    def write(self, folder: Path) -> None:
        """Write `stream.json` into a folder."""
        write_whole(folder / STREAM_FILE, json.dumps(dataclasses.asdict(self)) + "\n")

    @classmethod
    def read(cls, checkpoint: Path, num_shards: int, num_processes: int, num_readers: int) -> "StreamPlace":
        """Read `stream.json` of a checkpoint, to resume from it with `num_readers` readers in each process.

        Raises:
            ValueError: if there is none, or other numbers of shards, processes or readers wrote it.
        """
        way_on = (
            f"Or continue training its model: give --model_name_or_path {checkpoint} (for an adapter, the output of "
            "training/merge.py) and another output_dir, which reads the stream from its start."
        )
        path = checkpoint / STREAM_FILE
        if not path.exists():
            raise ValueError(
                f"{checkpoint} has no {STREAM_FILE}, its place in the stream: an older version wrote it, or its run "
                f"read no stream. Resume the way it was written. {way_on}"
            )
        place = from_json(cls, json.loads(path.read_text(encoding="utf-8")), path)
        before = {
            "shards": place.num_shards,
            "processes": len(place.processes),
            "dataloader workers a process": len(place.processes[0].readers),
        }
        now = dict(zip(before, (num_shards, num_processes, num_readers), strict=True))
        if before != now:
            differences = ", ".join(f"{before[name]} {name} before, {now[name]} now" for name in before)
            raise ValueError(
                f"{path} was written with other readers: {differences}. Their places can't be redistributed: resume "
                f"with the numbers of before. {way_on}"
            )
        return place


def deal_shards(num_shards: int, reader: int, num_readers: int) -> list[tuple[int, bool]]:
    """The shards that a reader reads, and for each whether it reads all of it or every `num_readers`-th row."""
    num_whole = num_shards - num_shards % num_readers
    whole = [(shard, True) for shard in range(reader, num_whole, num_readers)]
    return whole + [(shard, False) for shard in range(num_whole, num_shards)]


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """The endless batches of one process. Each holds the place after it, as `place`.

    Args:
        rows: The rows, unchecked.
        check: Checks a row and gives a good one its length.
        collate: Makes a batch of rows.
        batch_size: Rows of a batch; one packed row where rows are packed.
        packed_length: Longest packed row, in tokens; `None` pads.
        process_index, num_processes: This process's index, and the number of processes that share the stream.
        num_workers: Workers of this process's data loader; with 0 the process itself reads.
    """

    rows: RowStream
    check: StreamCheck
    collate: Callable[[list[Row]], dict[str, Any]]
    batch_size: int
    packed_length: int | None
    process_index: int = 0
    num_processes: int = 1
    num_workers: int = 0
    place: ProcessPlace = field(init=False)

    def __post_init__(self) -> None:
        self.place = ProcessPlace([Place()] * self.num_readers)

    @property
    def num_readers(self) -> int:
        """Readers of this process."""
        return max(self.num_workers, 1)

    def go_on(self, checkpoint: Path) -> None:
        """Resume at a checkpoint's place. Raises `ValueError` as `StreamPlace.read` does."""
        place = StreamPlace.read(checkpoint, self.rows.num_shards, self.num_processes, self.num_readers)
        self.place = place.processes[self.process_index]

    def trained_on(self, place: dict[str, int]) -> None:
        """Record that a batch was trained on, by its place."""
        reader = place["reader"]
        self.place.readers[reader] = Place(**{name: place[name] for name in place if name != "reader"})
        self.place.next_reader = (reader + 1) % self.num_readers

    def write_place(self, folder: Path, is_main_process: bool) -> None:
        """Write how far all processes are into a folder. Every process must call this."""
        processes = [self.place] if self.num_processes == 1 else gather_object([self.place])
        if is_main_process:
            StreamPlace(self.rows.num_shards, processes).write(folder)

    def loader(self, args: TrainingConfig) -> DataLoader:
        """The batches, read ahead by workers if there are any."""
        return DataLoader(
            self,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=args.dataloader_pin_memory,
            persistent_workers=args.dataloader_persistent_workers,
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            generator=torch.Generator(),  # otherwise it takes one of training's random numbers
        )

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker = get_worker_info()
        # A data loader begins with its first worker, which acts as the reader whose turn it is.
        reader = self.place.next_reader if worker is None else (worker.id + self.place.next_reader) % self.num_readers
        if worker is not None:
            fsspec.asyn.reset_lock()  # files of the Hub would wait for a thread that only the parent process has
        batches = self._pad if self.packed_length is None else self._pack
        for rows, place in batches(reader, self.place.readers[reader]):
            yield {**self.collate(rows), PLACE: {"reader": reader, **dataclasses.asdict(place)}}

    def _pad(self, reader: int, place: Place) -> Iterator[tuple[list[Row], Place]]:
        rows = self._read(reader, place)
        while True:
            batch = list(islice(rows, self.batch_size))
            yield [row for row, _ in batch], batch[-1][1]

    def _pack(self, reader: int, place: Place) -> Iterator[tuple[list[Row], Place]]:
        assert self.packed_length is not None
        given = place.packs
        begin = dataclasses.replace(place, packs=0)
        rows = self._read(reader, begin)
        while True:
            window = list(islice(rows, PACKING_WINDOW))
            packs = pack_window([row for row, _ in window], self.packed_length)
            end = window[-1][1]
            for number, pack in enumerate(packs[given:], given + 1):
                yield pack, end if number == len(packs) else dataclasses.replace(begin, packs=number)
            begin, given = end, 0

    def _read(self, reader: int, place: Place) -> Iterator[tuple[Row, Place]]:
        """Good rows from a place on, each with the place after it; never ends.

        Raises:
            BadRowError: as `check` does.
            ValueError: if there is no row for this reader.
        """
        num_readers = self.num_processes * self.num_readers
        position = self.process_index * self.num_readers + reader
        shards = deal_shards(self.rows.num_shards, position, num_readers)
        while True:
            begin, num_read = place, 0
            for number in range(place.shard, len(shards)):
                shard, whole = shards[number]
                start = begin.row if number == begin.shard else 0
                for row_number, row in enumerate(self.rows.read(shard, start), start):
                    if whole or row_number % num_readers == position:
                        num_read += 1
                        good = self.check(row)
                        if good is not None:
                            yield good, Place(begin.epoch, number, row_number + 1)
            if not num_read and begin == Place(begin.epoch):
                raise ValueError(
                    f"{self.rows.name} has no row for one of {num_readers} readers, {self.num_readers} in each of "
                    f"{self.num_processes} processes: use fewer processes or dataloader workers."
                )
            place = Place(begin.epoch + 1)
