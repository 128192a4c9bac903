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
# A reader stops after this many bad rows on end, since a stream of bad rows alone would never end.
MOST_BAD = 1000


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """The endless batches of one process. Each holds the place after it, as `place`.

    Args:
        rows: The rows, unchecked.
        check: Checks and tokenizes a row.
        collate: Makes a batch of rows.
        bad_rows: `"error"` raises `BadRowError` at a bad row, `"skip"` only after `MOST_BAD` of them on end.
        args: Name the rows of a batch, the processes and the workers; with no worker the process itself reads.
    """

    rows: datasets.IterableDataset
    check: RowCheck
    collate: Callable[[list[Row]], dict[str, Any]]
    bad_rows: Literal["error", "skip"]
    args: TrainingConfig
    # datasets' state of each reader, after the last batch that was trained on.
    places: list[dict[str, Any] | None] = field(init=False)
    # The reader whose batch comes next; they take turns.
    next_reader: int = 0

    def __post_init__(self) -> None:
        self.places = [None] * max(self.args.dataloader_num_workers, 1)

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        worker, num_readers = get_worker_info(), len(self.places)
        # A data loader begins with its first worker, which acts as the reader whose turn it is.
        reader = self.next_reader if worker is None else (worker.id + self.next_reader) % num_readers
        if worker is not None:
            fsspec.asyn.reset_lock()  # files of the Hub would wait for a thread that only the parent process has
        number, count = self.args.process_index * num_readers + reader, self.args.world_size * num_readers
        share, place = split_dataset_by_node(self.rows.repeat(None), number, count), self.places[reader]
        if place is not None:
            share.load_state_dict(place)
        batch: list[Row] = []
        for row in self.good_rows(share):
            batch.append(row)
            if len(batch) == self.args.per_device_train_batch_size:
                yield {**self.collate(batch), PLACE: {"reader": reader, "rows": share.state_dict()}}
                batch = []

    def good_rows(self, share: datasets.IterableDataset) -> Iterator[Row]:
        """The good rows of a share with their tokens; bad ones are listed. Raises `BadRowError` at a bad row, or at
        many on end."""
        num_bad = 0
        for row in share.iter(batch_size=1):  # iterating itself would split it among a data loader's workers again
            try:
                good = self.check({name: values[0] for name, values in row.items()})
            except BadRowError as error:
                num_bad += 1
                if self.bad_rows == "error" or num_bad == MOST_BAD:
                    raise
                with Path(self.args.output_dir, BAD_ROWS_FILE).open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"source": error.source, "problem": error.problem}) + "\n")
            else:
                num_bad = 0
                yield good

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

    def trained_on(self, place: dict[str, Any]) -> None:
        """Record that a batch was trained on, by its place."""
        self.places[place["reader"]] = place["rows"]
        self.next_reader = (place["reader"] + 1) % len(self.places)

    def write_place(self, folder: Path, is_main_process: bool) -> None:
        """Write how far all processes are into a folder. Every process must call this."""
        processes = gather_object([{"places": self.places, "next_reader": self.next_reader}])
        if is_main_process:
            write_whole(folder / STREAM_FILE, json.dumps(processes) + "\n")

    def go_on(self, checkpoint: Path) -> None:
        """Resume at a checkpoint's place. Raises `UserError` if it is of another version, or of other readers."""
        processes = json.loads((checkpoint / STREAM_FILE).read_text(encoding="utf-8"))
        before, now = [len(of.get("places", [])) for of in processes], [len(self.places)] * self.args.world_size
        if before != now:
            raise UserError(
                f"{checkpoint} is of another version, or of other processes and workers (readers of each: {before}, "
                f"now {now}): resume as before, or train its model from the stream's start with another output_dir."
            )
        own = processes[self.args.process_index]
        self.places, self.next_reader = own["places"], own["next_reader"]
