"""Rows from tars in WebDataset's layout: the members of a sample share a key and are adjacent."""

import json
import os
import re
import tarfile
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from datasets import DatasetBuilder, DatasetInfo, Features, Image, IterableDataset, List, Value
from datasets.builder import Key
from datasets.packaged_modules.webdataset.webdataset import WebDataset

from conversations.rows import Row


LAYOUT = (
    "A sample is key.json, with LLaVA's `conversations` or the list of turns itself, and its pictures: key.jpg, or "
    "key.0.jpg, key.1.jpg and so on."
)
RECORDS = ("json", "jsn")
# Short texts that some datasets add and that repeat what is in the json.
LABELS = ("txt", "text", "cls", "id", "index")


def is_tars(builder: DatasetBuilder) -> bool:
    """Whether `datasets` found tars."""
    return isinstance(builder, WebDataset)


def stream_tars(builder: DatasetBuilder, split: str) -> IterableDataset:
    """The rows of the tars that `datasets` found, as a stream with a shard for each tar.

    Raises:
        ValueError: if there is no such split, or a local tar is truncated; during reading, if one has another layout.
    """
    for tar in (builder.config.data_files or {}).get(split, ()):
        if os.path.isfile(tar) and _is_torn(tar):
            raise ValueError(f"{tar} is truncated: it has no end-of-archive marker; write or download it again.")
    tars = ConversationTars(
        dataset_name=builder.dataset_name,
        config_name=builder.config.name,
        hash=builder.hash,
        base_path=builder.base_path,
        repo_id=builder.repo_id,
        token=builder.token,
        data_files=builder.config.data_files,
    )
    return tars.as_streaming_dataset(split)


def _is_torn(tar: str) -> bool:
    """Whether a tar has no end-of-archive marker; `tarfile` doesn't report this if the cut is in a header."""
    with open(tar, "rb") as file:
        is_plain = file.read(tarfile.BLOCKSIZE)[257:262] == b"ustar"  # not compressed
        file.seek(-min(tarfile.BLOCKSIZE, file.seek(0, os.SEEK_END)), os.SEEK_END)
        return is_plain and any(file.read())


class ConversationTars(WebDataset):
    """`datasets`' WebDataset reader, but with `conversations.rows` instead of a column for each kind of member.

    The original infers columns from the first five samples and so rejects rows with another number of pictures.
    """

    DECODERS: ClassVar[dict[str, Callable[[bytes], Any]]] = {}  # members are decoded where their names are known

    def _info(self) -> DatasetInfo:
        text = Value("string")
        images = List(Image(decode=False))
        return DatasetInfo(
            features=Features({"images": images, "image_folder": text, "conversations": text, "source": text})
        )

    def _generate_examples(self, tar_paths: list[str], tar_iterators: list[Any]) -> Iterator[tuple[Key, Row]]:
        for number, (tar, members) in enumerate(zip(tar_paths, tar_iterators, strict=True)):
            try:
                for place, sample in enumerate(self._get_pipeline_from_tar(tar, members)):
                    yield Key(number, place), to_row(sample, tar)
            except tarfile.TarError as error:
                raise ValueError(f"{tar} can't be read ({error}); write or download it again.") from error


def to_row(sample: dict[str, Any], tar: str) -> Row:
    """A row from the members of a sample, by their extensions.

    Raises:
        ValueError: if a member is not part of the layout, or one is missing; the message names tar and member.
    """
    key = sample["__key__"]
    pictures, records = [], []
    for member in sample.keys() - {"__key__", "__url__"}:
        extension = member.rsplit(".", 1)[-1].lower()
        if extension in WebDataset.IMAGE_EXTENSIONS:
            pictures.append(member)
        elif extension in RECORDS:
            records.append(member)
        elif extension not in LABELS:
            raise ValueError(f"{tar}, member {key}.{member}: neither a picture nor json. {LAYOUT}")
    if len(records) != 1:
        members = ", ".join(f"{key}.{member}" for member in sorted(sample.keys() - {"__key__", "__url__"}))
        raise ValueError(
            f"{tar}: {len(records)} json files for {members}, not one. {LAYOUT} Members of a sample must be adjacent."
        )
    names = {member: f"{key}.{member}" for member in pictures}
    return {
        "images": [{"bytes": sample[member], "path": names[member]} for member in _in_order(names, tar)],
        "image_folder": tar,  # unused, as the pictures are in the row
        "conversations": _conversations(sample[records[0]], f"{tar}, member {key}.{records[0]}"),
        "source": f"{tar}, {key}",
    }


def _in_order(names: dict[str, str], tar: str) -> list[str]:
    if len(names) < 2:
        return list(names)
    numbers: dict[int, str] = {}
    for member in names:
        found = re.findall(r"\d+", member.rpartition(".")[0])
        if found:
            numbers[int(found[-1])] = member
    if len(numbers) < len(names):
        raise ValueError(f"{tar}, members {', '.join(sorted(names.values()))}: pictures without an order. {LAYOUT}")
    return [numbers[number] for number in sorted(numbers)]


def _conversations(data: bytes, place: str) -> str:
    """The turns as JSON text; empty if the member is not valid JSON, which makes the row a bad one."""
    try:
        record = json.loads(data)
    except (ValueError, RecursionError):
        return ""
    if isinstance(record, dict):
        if "conversations" not in record:
            raise ValueError(f"{place}: no `conversations` among {sorted(record)}. {LAYOUT}")
        record = record["conversations"]
    return json.dumps(record)
