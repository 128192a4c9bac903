"""Batches of a stream. Each batch carries its place in the stream, so that a resumed run goes on at the next row.

The library `datasets` reads the stream, repeats it without end, splits it into shares, and can save and restore the
place in a share. Each data loader worker of each process is a reader: it has a share of its own, whose rows it checks
and tokenizes. Rows keep the stream's order, because the place in a shuffle buffer can't be restored.
"""

import json
import logging
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

from normllava.conversations.checked_rows import RowCheck
from normllava.conversations.rows import BadRowError, Row
from normllava.errors import UserError
from normllava.files import write_whole
from training.options.arguments import TrainingConfig
from training.rows.data import BAD_ROWS_FILE


logger = logging.getLogger(__name__)

# The file of a checkpoint with the places of all readers.
STREAM_FILE = "stream.json"
# The key under which a batch carries its place in the stream.
PLACE = "place"
# A reader gives up after this many bad rows without a good row between them. Otherwise it would search forever in a
# stream whose rows are all bad.
MAX_CONSECUTIVE_BAD_ROWS = 1000


@dataclass(eq=False)
class StreamBatches(IterableDataset):
    """The endless batches of one process.

    Under the key `place`, a batch has the number of its reader, and the reader's place after the batch's last row.

    Args:
        rows: The stream's rows, unchecked.
        check: Checks and tokenizes a row.
        collate: Makes a batch of rows.
        is_local: Whether the rows lie on this machine's disk. If so, readers take rows in turn, so that each row is
            trained as often as any other. Rows that come through a network are dealt by shards (files), since each
            reader would otherwise fetch all of them.
        bad_rows: When bad rows raise `BadRowError`: with `"error"` at the first bad row, with `"skip"` only after
            `MAX_CONSECUTIVE_BAD_ROWS` bad rows without a good row between them.
        args: The arguments of training, which tell the number of rows in a batch, of processes, and of workers in each
            process. Without workers the process itself is its only reader.
    """

    rows: datasets.IterableDataset
    check: RowCheck
    collate: Callable[[list[Row]], dict[str, Any]]
    is_local: bool
    bad_rows: Literal["error", "skip"]
    args: TrainingConfig
    # The place of each reader of this process: the state of its share (datasets' `state_dict`) after the reader's last
    # batch that was trained on; `None` before the first batch.
    places: list[dict[str, Any] | None] = field(init=False)
    # The number of the reader whose batch comes next. The readers of a process take turns.
    next_reader: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        num_readers = max(self.args.dataloader_num_workers, 1)  # without workers, the process itself is the reader
        self.places = [None] * num_readers

        num_all_readers = num_readers * self.args.world_size
        deals_shards = not self.is_local and self.rows.num_shards % num_all_readers == 0
        if deals_shards and num_all_readers > 1 and self.args.process_index == 0:
            logger.warning(
                "The stream's %d shards are dealt to %d readers (processes x workers). If a reader gets fewer rows "
                "than another, each of its rows is trained more often; shards of equal size give equal shares.",
                self.rows.num_shards,
                num_all_readers,
            )

    def loader(self) -> DataLoader:
        """A data loader of the batches. If it has workers, they read ahead."""
        return DataLoader(
            self,
            batch_size=None,  # the items of this dataset are batches already
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            generator=torch.Generator(),  # otherwise the loader would draw from the random numbers of training
        )

    @override
    def __iter__(self) -> Iterator[dict[str, Any]]:
        reader = self._this_reader()
        share = self._share_of_reader(reader)
        rows: list[Row] = []
        for row in self.good_rows(share):
            rows.append(row)
            if len(rows) == self.args.per_device_train_batch_size:
                batch = self.collate(rows)
                # `record_trained` gets this place when the batch has been trained on.
                place = {"reader": reader, "share_state": share.state_dict()}
                yield {**batch, PLACE: place}
                rows = []

    def _this_reader(self) -> int:
        """The number that this worker has as a reader of its process."""
        worker = get_worker_info()
        if worker is None:  # the process itself is its only reader
            return 0

        # A forked worker inherits fsspec's lock, but not the thread that would release it. Without the reset, reading
        # a file of the Hub would wait forever.
        fsspec.asyn.reset_lock()
        # A data loader takes its first batch from worker 0, so worker 0 must be the reader whose turn it is.
        return (worker.id + self.next_reader) % len(self.places)

    def _share_of_reader(self, reader: int) -> datasets.IterableDataset:
        """The endless rows of a reader, from the reader's place on."""
        readers_per_process = len(self.places)
        share = split_dataset_by_node(
            self.rows.repeat(None),  # without end
            rank=self.args.process_index * readers_per_process + reader,
            world_size=self.args.world_size * readers_per_process,
            strategy="examples" if self.is_local else "auto",
        )
        share_state = self.places[reader]
        if share_state is not None:
            share.load_state_dict(share_state)
        return share

    def good_rows(self, share: datasets.IterableDataset) -> Iterator[Row]:
        """The good rows of a share, with their tokens. Bad rows that are left out are listed in `BAD_ROWS_FILE`.

        Raises:
            BadRowError: at a bad row if `bad_rows` is `"error"`, otherwise after `MAX_CONSECUTIVE_BAD_ROWS` bad rows
                without a good row between them.
        """
        num_consecutive_bad = 0
        # The rows are read in batches of one row, because `iter(share)` would split the share among the workers again.
        for batch_of_one in share.iter(batch_size=1):
            row = {name: column[0] for name, column in batch_of_one.items()}
            try:
                good_row = self.check(row)
            except BadRowError as error:
                num_consecutive_bad += 1
                if self.bad_rows == "error" or num_consecutive_bad == MAX_CONSECUTIVE_BAD_ROWS:
                    raise
                self._list_bad_row(error)
            else:
                num_consecutive_bad = 0
                yield good_row

    def _list_bad_row(self, error: BadRowError) -> None:
        """Add a line to the list of bad rows."""
        with Path(self.args.output_dir, BAD_ROWS_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"source": error.source, "problem": error.problem}) + "\n")

    def record_trained(self, place: dict[str, Any]) -> None:
        """Record that the run has trained on the batch with this place."""
        reader = place["reader"]
        self.places[reader] = place["share_state"]
        self.next_reader = (reader + 1) % len(self.places)

    def write_place(self, folder: Path, is_main_process: bool) -> None:
        """Write the places of the readers of all processes into a folder. Every process must call this."""
        own_state = {"places": self.places, "next_reader": self.next_reader}
        states = gather_object([own_state])
        if is_main_process:
            write_whole(folder / STREAM_FILE, json.dumps(states) + "\n")

    def read_place(self, checkpoint: Path) -> None:
        """Restore the places that [`write_place`] wrote into a checkpoint.

        Raises:
            UserError: if the places are from a run with another number of processes or workers.
        """
        states = json.loads((checkpoint / STREAM_FILE).read_text(encoding="utf-8"))
        readers_before = [len(state["places"]) for state in states]
        readers_now = [len(self.places)] * self.args.world_size
        if readers_before != readers_now:
            raise UserError(
                f"{checkpoint} was saved with another number of processes or workers (readers of each: "
                f"{readers_before}, now {readers_now}): resume as before, or train its model from the stream's start "
                "with another output_dir."
            )
        own_state = states[self.args.process_index]
        self.places = own_state["places"]
        self.next_reader = own_state["next_reader"]
