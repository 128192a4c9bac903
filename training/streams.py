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

from common.errors import UserError
from common.files import write_whole
from conversations.measured import RowCheck
from conversations.rows import BadRowError, Row
from training.arguments import TrainingConfig
from training.data import BAD_ROWS_FILE


STREAM_FILE = "stream.json"
# Key of a batch's place.
PLACE = "place"
# A reader stops after so many, since a stream of bad rows alone would never end.
MAX_CONSECUTIVE_BAD_ROWS = 1000


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """The endless batches of one process. Each holds the place after it, as `place`.

    Args:
        rows: The rows, unchecked.
        check: Checks and tokenizes a row.
        collate: Makes a batch of rows.
        bad_rows: `"error"` raises `BadRowError` at a bad row, `"skip"` only after `MAX_CONSECUTIVE_BAD_ROWS` of them.
        args: Name the rows of a batch, the processes and the workers; with no worker the process itself reads.
    """

    rows: datasets.IterableDataset
    check: RowCheck
    collate: Callable[[list[Row]], dict[str, Any]]
    bad_rows: Literal["error", "skip"]
    args: TrainingConfig
    # datasets' state of each reader of this process, after the last batch that was trained on.
    places: list[dict[str, Any] | None] = field(init=False)
    # The reader whose batch comes next; they take turns.
    next_reader: int = 0

    def __post_init__(self) -> None:
        self.places = [None] * max(self.args.dataloader_num_workers, 1)

    def loader(self) -> DataLoader:
        """The batches, read ahead by workers if there are any."""
        return DataLoader(
            self,
            batch_size=None,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            generator=torch.Generator(),  # otherwise it takes one of training's random numbers
        )

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        reader = self._this_reader()
        share = self._share_of(reader)
        batch: list[Row] = []
        for row in self.good_rows(share):
            batch.append(row)
            if len(batch) == self.args.per_device_train_batch_size:
                place = {"reader": reader, "rows": share.state_dict()}
                yield {**self.collate(batch), PLACE: place}
                batch = []

    def _this_reader(self) -> int:
        """Which of the process's readers this worker is. A data loader begins with its first worker, which therefore
        acts as the reader whose turn it is."""
        worker = get_worker_info()
        if worker is None:
            return self.next_reader
        fsspec.asyn.reset_lock()  # files of the Hub would wait for a thread that only the parent process has
        return (worker.id + self.next_reader) % len(self.places)

    def _share_of(self, reader: int) -> datasets.IterableDataset:
        """The rows of a reader, without end, from its place."""
        num_readers = len(self.places)
        share = split_dataset_by_node(
            self.rows.repeat(None),
            rank=self.args.process_index * num_readers + reader,
            world_size=self.args.world_size * num_readers,
        )
        place = self.places[reader]
        if place is not None:
            share.load_state_dict(place)
        return share

    def good_rows(self, share: datasets.IterableDataset) -> Iterator[Row]:
        """The good rows of a share with their tokens; bad ones are listed.

        Raises:
            BadRowError: at a bad row that is not to be left out, or after too many of them.
        """
        num_bad = 0
        # In batches of one: iterating itself would split the share among a data loader's workers again.
        for columns in share.iter(batch_size=1):
            row = {name: values[0] for name, values in columns.items()}
            try:
                good_row = self.check(row)
            except BadRowError as error:
                num_bad += 1
                if self.bad_rows == "error" or num_bad == MAX_CONSECUTIVE_BAD_ROWS:
                    raise
                self._list_bad_row(error)
            else:
                num_bad = 0
                yield good_row

    def _list_bad_row(self, error: BadRowError) -> None:
        with Path(self.args.output_dir, BAD_ROWS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"source": error.source, "problem": error.problem}) + "\n")

    def trained_on(self, place: dict[str, Any]) -> None:
        """Record that a batch was trained on, by its place."""
        reader = place["reader"]
        self.places[reader] = place["rows"]
        self.next_reader = (reader + 1) % len(self.places)

    def write_place(self, folder: Path, is_main_process: bool) -> None:
        """Write how far all processes are into a folder. Every process must call this."""
        own = {"places": self.places, "next_reader": self.next_reader}
        processes = gather_object([own])
        if is_main_process:
            write_whole(folder / STREAM_FILE, json.dumps(processes) + "\n")

    def read_place(self, checkpoint: Path) -> None:
        """Take the place that a checkpoint holds, for the next batch to come after it.

        Raises:
            UserError: if it is of another version, or of other readers.
        """
        processes = json.loads((checkpoint / STREAM_FILE).read_text(encoding="utf-8"))
        readers_before = [len(process.get("places", [])) for process in processes]
        readers_now = [len(self.places)] * self.args.world_size
        if readers_before != readers_now:
            raise UserError(
                f"{checkpoint} is of another version, or of other processes and workers (readers of each: "
                f"{readers_before}, now {readers_now}): resume as before, or train its model from the stream's start "
                "with another output_dir."
            )
        own = processes[self.args.process_index]
        self.places = own["places"]
        self.next_reader = own["next_reader"]
