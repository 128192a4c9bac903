"""Rows that are read shard by shard as they are needed, from any row on."""

from collections.abc import Iterator
from dataclasses import dataclass

from datasets import IterableDataset

from conversations.rows import Row


@dataclass(frozen=True)
class RowStream:
    """A stream of `conversations.rows`, shard after shard.

    Attributes:
        dataset: `conversations`, `images` or `image`, undecoded; perhaps `image_folder` and `source` too.
        name: What rows that have no `source` are called, with the numbers of shard and row.
        image_folder: Where the paths of their pictures start.
    """

    dataset: IterableDataset
    name: str
    image_folder: str

    @property
    def num_shards(self) -> int:
        """How many parts can be read one by one."""
        return self.dataset.num_shards

    def read(self, shard: int, start: int = 0) -> Iterator[Row]:
        """The rows of a shard from a number on. Those before are passed over, in tables where they come in tables."""
        part = self.dataset.shard(self.num_shards, shard)
        # By `iter`, since a dataset shares its shards among the workers of a data loader where it is iterated over.
        for number, batch in enumerate((part.skip(start) if start else part).iter(batch_size=1), start):
            row = {column: values[0] for column, values in batch.items()}
            yield row if "source" in row else self._named(row, shard, number)

    def __iter__(self) -> Iterator[Row]:
        for shard in range(self.num_shards):
            yield from self.read(shard)

    def _named(self, row: Row, shard: int, number: int) -> Row:
        """Its place by shard, which is the same whoever reads it."""
        place = f"{self.name}, shard {shard}" if self.num_shards > 1 else self.name
        return {
            "images": row["images"] if "images" in row else row["image"],
            "image_folder": self.image_folder,
            "conversations": row["conversations"],
            "source": f"{place}, row {number}",
        }
