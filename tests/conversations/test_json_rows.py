"""JSON files read a piece at a time: the rows and messages of `json.loads`, kept by content, never torn."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset

from conversations import json_rows
from conversations.json_rows import iterate_rows, read_json
from conversations.loading import load_rows
from row_files import turns


def reference(path: Path) -> list[Any]:
    """The values of a file by `json.loads` of its whole text; the messages that the files' readers have always had."""
    text = path.read_text(encoding="utf-8-sig")
    if not text or text.isspace():
        raise ValueError(f"{path} is empty.")
    if path.suffix == ".json":
        rows = parse(text, f"{path} is not valid JSON")
        if not isinstance(rows, list):
            raise ValueError(
                f'{path} is not a list of rows. LLaVA\'s layout is [{{"image": ..., "conversations": [...]}}].'
            )
        return rows
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    return [parse(line, f"{path} is not valid JSONL: line {number}") for number, line in lines]


def parse(text: str, complaint: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(error.pos - 30, 0) : error.pos + 30]
        hint = " If each line is a row, name the file .jsonl." if error.msg == "Extra data" else ""
        raise ValueError(f"{complaint}: {error}, near {near!r}.{hint}") from error


def outcome(read: Any, path: Path) -> str:
    """What a reader gives, as text in which NaN equals itself, or its message."""
    try:
        return json.dumps(list(read(path)))
    except ValueError as error:
        return str(error)


VALUES: list[Any] = [
    {"id": 1, "image": "a.png", "conversations": turns("<image>\nWas?", 'Ein "Hund" \\ ä 漢 😀 \u2028 \x7f')},
    {"id": "zwei", "images": ["a.png", None, 7, "", "half \ud83d"], "conversations": turns("\ud83d\ude00", "\udc00")},
    {"id": 10**30, "image": None, "conversations": None, "more": [1.5e300, -0.0, float("nan"), float("-inf"), {}]},
    {"id": [], "conversations": {"from": [[[["deep"]]]]}, "image": {"path": "a.png"}},
    {},
]
ROUGH = [7, -12.5e-3, "text", None, True, [], [[1], {"a": []}], 12345678901234567890, float("nan")]


@pytest.mark.parametrize("piece", [1, 3, 40, 1 << 20])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_values_are_those_of_json_wherever_the_text_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int
) -> None:
    monkeypatch.setattr(json_rows, "PIECE", piece)
    path = tmp_path / name
    for ascii_only in (True, False):
        values = [*VALUES, *ROUGH] if ascii_only else [VALUES[0], *VALUES[2:], *ROUGH]
        for indent in (None, 2) if name.endswith("json") else (None,):
            texts = [json.dumps(value, ensure_ascii=ascii_only, indent=indent) for value in values]
            text = (
                "\ufeff \r\n[" + " ,\r\n\t".join(texts) + "]\n \n" if name.endswith("json") else "\n\r\n".join(texts)
            )
            path.write_bytes(text.encode())
            assert outcome(lambda path: [value for _, value in read_json(path)], path) == outcome(reference, path)
            assert len(list(read_json(path))) == len(values)
    if name.endswith("json"):
        assert [place for place, _ in read_json(path)][:2] == ["row 0", "row 1"]


@pytest.mark.parametrize("piece", [1, 16, 1 << 20])
def test_messages_are_those_of_json_wherever_the_text_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(json_rows, "PIECE", piece)
    text = json.dumps([*VALUES[:2], *ROUGH], indent=1).replace("\\u2028", "\\u00e4")
    rng = random.Random(0)
    broken = [text[:length] for length in range(0, len(text), 3)]
    for _ in range(200):
        place = rng.randrange(len(text))
        broken.append(text[:place] + rng.choice('",]}[{\\x\n\t1-e:') + text[place + rng.randrange(2) :])
    broken += ["{}", "{} {}", "[] []", "[1 2]", "[1,]", "nul", "[nul", "-", "[-Infinit", '["\\ud83d\\u"]', '["\\', " "]
    for number, content in enumerate(broken):
        for name in ("rows.json", "rows.jsonl"):
            (tmp_path / name).write_text(content)
            expected = outcome(reference, tmp_path / name)
            found = outcome(lambda path: [value for _, value in read_json(path)], tmp_path / name)
            assert found == expected, (number, content)


def test_the_place_of_a_byte_that_is_no_utf8_is_that_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    for start in (5, 8190, 8192, 300_000):
        for mark in (b"", b"\xef\xbb\xbf"):
            path.write_bytes(mark + b"[" + b" " * start + b"\xff]")
            with pytest.raises(ValueError, match=f"is not UTF-8, see byte {len(mark) + 1 + start};"):
                list(read_json(path))


def test_rows_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "rows.json").write_text(json.dumps(VALUES))
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, VALUES)))
    for name in ("rows.json", "rows.jsonl"):
        rows = load_rows(str(tmp_path / name))
        assert list(rows["source"]) == [f"{tmp_path / name}, row {number}" for number in range(len(VALUES))]
        assert list(rows["conversations"]) == [json.dumps(value.get("conversations")) for value in VALUES]
        assert set(rows["image_folder"]) == {str(tmp_path)}
        unreadable = ["null", "7", '""', '"half \\ud83d"']
        assert list(rows["images"]) == [
            ["a.png"],
            ["a.png", *(f"{name} (not a path)" for name in unreadable)],
            [],
            ['{"path": "a.png"} (not a path)'],
            [],
        ]


def test_only_a_piece_of_a_file_is_held(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    row = json.dumps({"conversations": turns("word " * 200, "word " * 200)})
    path.write_text("[" + ",\n".join([row] * 10_000) + "]")
    assert path.stat().st_size > 20e6
    tracemalloc.start()
    assert sum(1 for _ in iterate_rows(str(path), str(tmp_path), json_rows.sha256(path))) == 10_000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


def written(rows: Dataset) -> list[str]:
    return [file["filename"] for file in rows.cache_files]


def test_a_file_is_converted_once_and_again_when_its_content_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([{"conversations": turns("Hello.", "One.")}]))
    stamp = path.stat().st_mtime_ns
    first = load_rows(str(path))
    assert all(Path(name).is_relative_to(datasets.config.HF_DATASETS_CACHE) for name in written(first))
    monkeypatch.setattr(json_rows, "read_json", lambda path: pytest.fail("it was read again"))
    assert written(load_rows(str(path))) == written(first)
    monkeypatch.undo()
    path.write_text(json.dumps([{"conversations": turns("Hello.", "Two.")}]))  # of the same size and time
    os.utime(path, ns=(stamp, stamp))
    assert "Two." in load_rows(str(path))[0]["conversations"]
    assert "One." in first[0]["conversations"]
    (tmp_path / "pictures").mkdir()
    assert load_rows(str(path), str(tmp_path / "pictures"))[0]["image_folder"] == str(tmp_path / "pictures")
    with pytest.raises(ValueError, match=r"rows.json changed while it was read"):
        list(iterate_rows(str(path), str(tmp_path), "another content"))


OPEN = "import sys; from conversations.loading import load_rows; print(len(load_rows(sys.argv[1])))"


def test_a_process_that_is_killed_leaves_nothing_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "rows.json", tmp_path / "cache"
    path.write_text(json.dumps([{"conversations": turns("Hello.", f"{number}")} for number in range(40_000)]))
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    command = [sys.executable, "-c", OPEN, str(path)]
    process = subprocess.Popen(command, env=environment)
    begun: list[Path] = []
    while not begun and process.poll() is None:
        begun = [file for file in cache.rglob("*.incomplete/*.arrow") if file.stat().st_size > 0]
        time.sleep(0.005)
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert begun[0].exists()
    # Two at once: one converts, the other waits.
    others = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [other.communicate()[0] for other in others] == ["40000\n"] * 2
    assert not list(cache.rglob("*.incomplete"))
    assert len(list(cache.rglob("*.arrow"))) == 1
