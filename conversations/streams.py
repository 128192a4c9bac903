"""Rows that are read on demand, shard by shard, starting at any row."""

from collections.abc import Iterator
from dataclasses import dataclass

from datasets import IterableDataset

from conversations.rows import Row


@dataclass(frozen=True)
class RowStream:
    """A stream of `conversations.rows`, shard after shard.

    Attributes:
        dataset: `conversations`, `images` or `image`, undecoded; perhaps `image_folder` and `source` too.
        name: With the numbers of shard and row, the `source` of rows that have none.
        image_folder: What their picture paths are relative to.
    """

    dataset: IterableDataset
    name: str
    image_folder: str

    @property
    def num_shards(self) -> int:
        """Number of parts that can be read separately."""
        return self.dataset.num_shards

    def read(self, shard: int, start: int = 0) -> Iterator[Row]:
        """The rows of a shard from number `start` on. Earlier ones are skipped, whole tables at a time if possible."""
        part = self.dataset.shard(self.num_shards, shard)
        # With `iter`: iterating over the dataset itself would split its shards among a data loader's workers.
        for number, batch in enumerate((part.skip(start) if start else part).iter(batch_size=1), start):
            row = {column: values[0] for column, values in batch.items()}
            yield row if "source" in row else self._named(row, shard, number)

    def __iter__(self) -> Iterator[Row]:
        for shard in range(self.num_shards):
            yield from self.read(shard)

    def _named(self, row: Row, shard: int, number: int) -> Row:
        """The row with a `source` that is the same in every process."""
        place = f"{self.name}, shard {shard}" if self.num_shards > 1 else self.name
        return {
            "images": row["images"] if "images" in row else row["image"],
            "image_folder": self.image_folder,
            "conversations": row["conversations"],
            "source": f"{place}, row {number}",
        }
