"""Time and memory of opening and checking the rows of a large LLaVA JSON file.

    nice python -m benchmarks.data --rows 1000000 --output benchmarks/results/data_cpu.json

The rows are synthetic, with the lengths of `benchmarks.synthetic`; pictures are files of eight bytes. Every figure is
from a separate process, relative to its state before the task. `held_bytes` are `RssAnon` of /proc, without the pages
of mapped files. `cpu_seconds` depend less than `seconds` on other load. `parse` is how files were opened before: the
whole file through `json.loads`.
"""

import argparse
import json
import logging
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from datasets import Dataset, List, Value

from benchmarks.memory import process_memory
from benchmarks.synthetic import MIXTURE, SIZES, synthetic_processor
from conversations.checks import control_tokens
from conversations.loading import load_rows
from conversations.measured import keep_good_rows, measure_rows, row_lengths
from training.tokenization import RowTokenizer


logger = logging.getLogger(__name__)

FOLDERS = 100
# Number of different texts; later rows repeat them.
TEXTS = 20_000
PARSED_ROWS = 100_000
CHECKED_ROWS = 5_000


def write_rows(folder: Path, count: int, with_pictures: bool) -> Path:
    """A LLaVA JSON file of `count` rows, written row by row; with the files of its pictures if they will be opened."""
    path, rng = folder / f"{count}.json", np.random.default_rng(0)
    shares = np.array([thousands for thousands, _, _ in MIXTURE.values()], dtype=float)
    names = rng.choice(list(MIXTURE), min(count, TEXTS), p=shares / shares.sum())
    words = np.array([f"w{number}" for number in range(1000)])
    texts: list[tuple[bool, str, str]] = []
    for name in names[:TEXTS]:
        _, median, spread = MIXTURE[name]
        length = int(np.clip(median * spread ** rng.normal(), 8, 2048))
        halves = np.split(words[rng.integers(0, 1000, length)], [length // 2])
        texts.append(("no picture" not in name, " ".join(halves[0]), " ".join(halves[1])))
    for number in range(FOLDERS):
        (folder / "pictures" / f"{number}").mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for number in range(count):
            has_picture, question, answer = texts[number % TEXTS]
            row: dict[str, Any] = {"id": number}
            mark, name = "", f"pictures/{number % FOLDERS}/{number:012d}.jpg"
            if has_picture:
                mark, row["image"] = "<image>\n", name
                if with_pictures:
                    (folder / name).write_bytes(b"8 bytes.")
            row["conversations"] = [
                {"from": "human", "value": mark + question},
                {"from": "gpt", "value": answer},
            ]
            file.write(("[" if number == 0 else ", ") + json.dumps(row))
        file.write("]")
    return path


def parse(path: Path) -> Dataset:
    """Rows as they were opened before: the whole text, all of its values, and lists of these."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    return Dataset.from_dict(
        {
            "images": [[row["image"]] if "image" in row else [] for row in rows],
            "image_folder": [str(path.parent)] * len(rows),
            "conversations": [json.dumps(row["conversations"]) for row in rows],
            "source": [f"{path}, row {number}" for number in range(len(rows))],
        }
    ).cast_column("images", List(Value("string")))


def check(path: Path, num_proc: int) -> Callable[[], Any]:
    """A function that checks the rows as training does, and keeps them with their lengths."""
    processor = synthetic_processor(SIZES["Qwen2.5-7B"])
    tokenize = RowTokenizer(processor, processor.chat_template)
    tokens = control_tokens(processor.tokenizer, processor.image_token)
    rows = load_rows(str(path))

    def look() -> tuple[Dataset, np.ndarray]:
        measured = measure_rows(rows, tokens, tokenize, False, num_proc, tokenize.identity())
        good, _ = keep_good_rows(rows, measured, "error", None)
        return good, row_lengths(good)

    return look


def cpu_seconds() -> float:
    """CPU time of this process and its children."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def run_task(name: str, path: Path, num_proc: int) -> dict[str, float]:
    """Seconds and bytes of a task, in this process."""
    tasks = {"parse": lambda: parse(path), "open": lambda: load_rows(str(path))}
    task = check(path, num_proc) if name == "check" else tasks[name]
    held, cpu, started = process_memory("RssAnon"), cpu_seconds(), time.perf_counter()
    result = task()
    figures = {
        "seconds": time.perf_counter() - started,
        "cpu_seconds": cpu_seconds() - cpu,
        "held_bytes": process_memory("RssAnon") - held,
    }
    assert result is not None  # which keeps it in memory until here
    return figures


def in_process(name: str, path: Path, cache: Path, num_proc: int = 1) -> dict[str, float]:
    """The same in a separate process."""
    command = [sys.executable, "-m", "benchmarks.data", "--task", name, "--file", str(path)]
    environment = {**os.environ, "HF_DATASETS_CACHE": str(cache), "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    result = subprocess.run(
        [*command, "--num_proc", str(num_proc)], env=environment, stdout=subprocess.PIPE, check=True, text=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def measure_checks(path: Path, cache: Path, repeats: int) -> dict[str, list[dict[str, float]]]:
    """First checks by one process and by two, and repeated checks of known texts, `repeats` of each."""
    found: dict[str, list[dict[str, float]]] = {"by_1_process": [], "by_2_processes": [], "again": []}
    for repeat in range(repeats):
        found["by_2_processes"].append(in_process("check", path, cache / f"{repeat}-2", 2))
        found["by_1_process"].append(in_process("check", path, cache / f"{repeat}-1"))
        found["again"].append(in_process("check", path, cache / f"{repeat}-1"))
    return found


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where the rows are written and removed again")
    parser.add_argument("--task", choices=("parse", "open", "check"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--num_proc", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task:
        sys.stdout.write(json.dumps(run_task(args.task, args.file, args.num_proc)) + "\n")
        return
    if args.output is None:
        parser.error("--output is missing")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder, cache = Path(name), Path(name) / "cache"
        checks = measure_checks(write_rows(folder, CHECKED_ROWS, with_pictures=True), cache, args.repeats)
        parsed = in_process("parse", write_rows(folder, PARSED_ROWS, with_pictures=False), cache)
        path = write_rows(folder, args.rows, with_pictures=False)
        result = {
            "parse": {"rows": PARSED_ROWS, **parsed},
            "rows": args.rows,
            "file_bytes": path.stat().st_size,
            "first_open": in_process("open", path, cache),
            "second_open": [in_process("open", path, cache) for _ in range(args.repeats)],
            "checks": {"rows": CHECKED_ROWS, **checks},
            "machine": platform.machine(),
            "cores": os.cpu_count(),
        }
    args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    logger.info("%s", json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
