"""Tars in WebDataset's layout: what is read of them, and what is refused."""

import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as PILImage

from conversations.loading import load_rows, stream_fingerprint
from conversations.pictures import open_images
from conversations.rows import row_images, row_turns
from conversations.streams import RowStream
from row_files import NO_TOKENS, check_stream, one_token, turns


def picture(shade: int, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    PILImage.new("L", (4, 4), shade).save(file, kind)
    return file.getvalue()


def asked(pictures: int, answer: str = "Yes.") -> list[dict[str, str]]:
    return turns("<image>" * pictures + "What?", answer)


def write_tar(path: Path, members: dict[str, Any]) -> Path:
    """A tar of bytes, or of what is written as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def write_tars(folder: Path) -> Path:
    """Two tars whose samples have one picture, none, or several; the json a record or the turns alone."""
    write_tar(
        folder / "train-0.tar",
        {
            "a.jpg": picture(10, "JPEG"),
            "a.json": {"id": 1, "image": "a.jpg", "conversations": asked(1, "a")},
            "b.json": {"id": "text", "conversations": asked(0, "b")},
            "c.10.png": picture(30),
            "c.2.png": picture(20),
            "c.json": asked(2, "c"),
        },
    )
    write_tar(
        folder / "train-1.tar",
        {
            "part/d.json": asked(1, "d"),
            "part/d.txt": b"a caption",
            "part/d.png": picture(40),
            "part/e.json": b"{torn",
        },
    )
    return folder


@pytest.mark.parametrize("name", ["tars", "tars/*.tar"])
def test_tars_are_read_as_a_stream(tmp_path: Path, name: str) -> None:
    folder = write_tars(tmp_path / "tars")
    stream = load_rows(str(tmp_path / name), streaming=True)
    assert isinstance(stream, RowStream)
    assert stream.num_shards == 2
    rows = list(check_stream(stream, NO_TOKENS, one_token, "skip", tmp_path / "bad.jsonl"))
    assert [row_turns(row)[1]["value"] for row in rows] == ["a", "b", "c", "d"]
    shades = [[image.getpixel((0, 0))[0] for image in open_images(row)] for row in rows]
    assert shades == [[10], [], [20, 30], [40]]  # by their numbers, which the tar holds in another order
    tars = [f"{folder}/train-{number}.tar" for number in range(2)]
    assert [row["source"] for row in rows] == [f"{tars[0]}, {key}" for key in "abc"] + [f"{tars[1]}, part/d"]
    (bad,) = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert bad == {"source": f"{tars[1]}, part/e", "problem": "`conversations` is text that is not JSON"}
    for shard in range(2):
        read = list(stream.read(shard))
        assert [list(stream.read(shard, start)) for start in range(len(read))] == [
            read[start:] for start in range(len(read))
        ]


def test_the_fingerprint_of_tars_is_of_their_names_and_sizes(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "tars")
    first = stream_fingerprint(str(folder), None, "train")
    assert stream_fingerprint(str(write_tars(tmp_path / "tars")), None, "train") == first
    write_tar(folder / "train-2.tar", {"f.json": asked(0)})
    assert stream_fingerprint(str(folder), None, "train") != first
    assert stream_fingerprint(f"{folder}/*.tar", None, "train") not in (
        first,
        stream_fingerprint(f"{folder}/train-0*.tar", None, "train"),
    )


REFUSED: dict[str, dict[str, Any]] = {
    r"member 7\.mp4: neither a picture nor json": {"7.mp4": b"", "7.json": asked(0)},
    r"0 json files for 7\.png, not one": {"7.png": picture(1), "8.json": asked(0), "7.json": asked(1)},
    r"2 json files for 7\.json, 7\.meta\.json": {"7.json": asked(0), "7.meta.json": {"height": 3}},
    r"members 7\.left\.png, 7\.right\.png: pictures without an order": {
        "7.left.png": picture(1), "7.right.png": picture(1), "7.json": asked(2),
    },
    r"member 7\.json: no `conversations` among \['caption', 'url'\]": {"7.json": {"caption": "a cat", "url": "x"}},
}  # fmt: skip


@pytest.mark.parametrize("message", REFUSED)
def test_another_layout_is_refused_by_the_names_of_tar_and_member(tmp_path: Path, message: str) -> None:
    tar = write_tar(tmp_path / "tars" / "train-0.tar", REFUSED[message])
    with pytest.raises(ValueError, match=rf"{re.escape(str(tar))}[:,] {message}.*A sample is key\.json"):
        load_rows(str(tmp_path / "tars"), streaming=True)


def test_tars_that_are_torn_or_not_there_are_refused(tmp_path: Path) -> None:
    folder = write_tars(tmp_path / "tars")
    tar = folder / "train-1.tar"
    whole = tar.read_bytes()
    for size in (1200, 1600):  # inside a header, at which tarfile ends without a word, and inside a member
        tar.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"train-1\.tar is truncated: it has no end-of-archive marker"):
            load_rows(str(folder), streaming=True)
    tar.write_bytes(b"no tar at all")
    with pytest.raises(ValueError, match=r"train-1\.tar can't be read"):
        list(load_rows(str(folder), streaming=True))
    tar.write_bytes(whole)
    with pytest.raises(ValueError, match=r"other-\*\.tar has no rows"):
        load_rows(str(folder / "other-*.tar"), streaming=True)
    with pytest.raises(ValueError, match=r"a glob must end in one of \.parquet, \.tar"):
        load_rows(str(folder / "*.zip"), streaming=True)
    with pytest.raises(
        ValueError, match=r"tars: tars can only be streamed, which training does with --dataset_streaming true"
    ):
        load_rows(str(folder))
    with pytest.raises(ValueError, match="dev"):
        load_rows(str(folder), split="dev", streaming=True)


def test_pictures_of_a_row_are_those_of_its_members_alone(tmp_path: Path) -> None:
    # A json that names a picture elsewhere on the disk gives no way to it.
    (tmp_path / "secret.png").write_bytes(picture(1))
    record = {"image": str(tmp_path / "secret.png"), "conversations": asked(1)}
    write_tar(tmp_path / "tars" / "train.tar", {"a.json": record})
    (row,) = load_rows(str(tmp_path / "tars"), streaming=True)
    assert row_images(row) == []
