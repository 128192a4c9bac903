"""Batches of a stream, each with its place there: a run resumes where it was, to the row.

`datasets` reads, splits and repeats the stream without end, and knows its place. Each worker of each process is a
reader with its own share, which it checks and tokenizes. Rows keep their order: a shuffle buffer can't be resumed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import datasets
import fsspec.asyn
import torch
from accelerate.utils import gather_object
from datasets.distributed import split_dataset_by_node
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from typing_extensions import override

from conversations.files import write_whole
from conversations.measured import RowCheck
from conversations.rows import BadRowError, Row
from training.arguments import TrainingConfig


STREAM_FILE = "stream.json"
# Key of a batch's place.
PLACE = "place"
# A reader stops after this many bad rows on end.
MOST_BAD = 1000


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """The endless batches of one process. Each holds the place after it, as `place`.

    Args:
        rows: The rows, unchecked.
        check: Checks and tokenizes a row.
        collate: Makes a batch of rows.
        batch_size: Rows of a padded batch.
        packed_length: Longest packed row, in tokens: it holds the next rows, as many as fit. `None` pads.
        bad_rows: `"error"` raises `BadRowError` at a bad row, `"skip"` only after `MOST_BAD` of them on end.
        report_file: Where bad rows are listed as they are found.
        process_index, num_processes: This process's index, and the number of processes that share the stream.
        num_workers: Workers of this process's data loader; with 0 the process itself reads.
    """

    rows: datasets.IterableDataset
    check: RowCheck
    collate: Callable[[list[Row]], dict[str, Any]]
    batch_size: int
    packed_length: int | None
    bad_rows: Literal["error", "skip"]
    report_file: Path
    process_index: int = 0
    num_processes: int = 1
    num_workers: int = 0
    # datasets' state of each reader, after the last batch that was trained on.
    places: list[dict[str, Any] | None] = field(init=False)
    # The reader whose batch comes next; they take turns.
    next_reader: int = 0
    _listed: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.places = [None] * max(self.num_workers, 1)

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker, num_readers = get_worker_info(), len(self.places)
        # A data loader begins with its first worker, which acts as the reader whose turn it is.
        reader = self.next_reader if worker is None else (worker.id + self.next_reader) % num_readers
        if worker is not None:
            fsspec.asyn.reset_lock()  # files of the Hub would wait for a thread that only the parent process has
        number, count = self.process_index * num_readers + reader, self.num_processes * num_readers
        share, place = split_dataset_by_node(self.rows.repeat(None), number, count), self.places[reader]
        if place is not None:
            share.load_state_dict(place)
        batch: list[Row] = []
        for row in self.good_rows(share):
            if batch and not self._fit([*batch, row]):
                yield {**self.collate(batch), PLACE: {"reader": reader, "rows": place}}
                batch = []
            if not self._fit([row]):
                raise ValueError(
                    f"{row['source']}: {row['length']} tokens, for text with a blank picture, don't fit into "
                    f"a packed row of {self.packed_length}: raise packed_length, or set max_length and bad_rows: skip."
                )
            batch.append(row)
            place = share.state_dict()
        raise ValueError(f"A shard is empty, so one of {count} readers has no row: write the shards anew.")

    def _fit(self, rows: list[Row]) -> bool:
        if self.packed_length is None:
            return len(rows) <= self.batch_size
        blank = 0 if any(row["num_images"] for row in rows) else self.check.tokenize.tokens_per_image
        return sum(row["length"] for row in rows) + blank <= self.packed_length

    def good_rows(self, share: datasets.IterableDataset) -> Iterator[Row]:
        """The good rows of a share with their tokens; bad ones are listed. Raises `BadRowError` at a bad row, or at
        many on end."""
        num_bad = 0
        for row in share.iter(batch_size=1):  # iterating itself would split it among a data loader's workers again
            try:
                good = self.check({name: values[0] for name, values in row.items()})
            except BadRowError as error:
                num_bad += 1
                if self.bad_rows == "error":
                    raise
                if num_bad == MOST_BAD:
                    raise BadRowError(error.source, f"{error.problem}. {MOST_BAD} rows on end are bad") from error
                self._list(error)
            else:
                num_bad = 0
                yield good

    def _list(self, error: BadRowError) -> None:
        if error.source not in self._listed:
            self._listed.add(error.source)
            self.report_file.parent.mkdir(parents=True, exist_ok=True)
            with self.report_file.open("a", encoding="utf-8") as file:  # a line is written whole
                file.write(json.dumps({"source": error.source, "problem": error.problem}) + "\n")

    def loader(self, args: TrainingConfig) -> DataLoader:
        """The batches, read ahead by workers if there are any."""
        return DataLoader(
            self,
            batch_size=None,
            num_workers=self.num_workers,
            pin_memory=args.dataloader_pin_memory,
            prefetch_factor=args.dataloader_prefetch_factor,
            generator=torch.Generator(),  # otherwise it takes one of training's random numbers
        )

    def trained_on(self, place: dict[str, Any]) -> None:
        """Record that a batch was trained on, by its place."""
        self.places[place["reader"]] = place["rows"]
        self.next_reader = (place["reader"] + 1) % len(self.places)

    def write_place(self, folder: Path, is_main_process: bool) -> None:
        """Write how far all processes are into a folder. Every process must call this."""
        own = {"places": self.places, "next_reader": self.next_reader}
        processes = [own] if self.num_processes == 1 else gather_object([own])
        if is_main_process:
            write_whole(folder / STREAM_FILE, json.dumps(processes) + "\n")

    def go_on(self, checkpoint: Path) -> None:
        """Resume at a checkpoint's place. Raises `ValueError` if it is of another version, or of other readers."""
        path = checkpoint / STREAM_FILE
        processes = json.loads(path.read_text(encoding="utf-8"))
        before = [len(process["places"]) for process in processes if "places" in process]
        now = [len(self.places)] * self.num_processes
        if before != now:
            raise ValueError(
                f"{path} is of another version, or of other processes and workers (readers of each: {before}, now "
                f"{now}): resume as before, or train its model from the stream's start with another output_dir."
            )
        own = processes[self.process_index]
        self.places, self.next_reader = own["places"], own["next_reader"]
