"""Seconds until a run resumed at a step of a stream has its first batch, and the size of its place there.

    nice python -m benchmarks.stream --output benchmarks/results/stream_cpu.json

Two ways: reading and dropping every batch up to there, as Trainer does by default, and resuming at the place that a
checkpoint holds. The rows are tiny (a picture of 8 x 8 pixels and a few words), so that the first way takes bearable
time. They come as tars and parquet in 40 shards, as one JSON file with separate pictures, and as a single tar, which
has to be read up to the place.
"""

import argparse
import dataclasses
import io
import json
import logging
import statistics
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from datasets import disable_progress_bars
from PIL import Image

from benchmarks.synthetic import SIZES, synthetic_processor
from conversations.chat_template import plain_template
from conversations.checks import BadRowList, StreamCheck, control_tokens
from conversations.files import write_whole
from conversations.loading import load_rows
from training.arguments import TrainingConfig
from training.collator import VisionLanguageCollator
from training.run import describe_environment
from training.streams import STREAM_FILE, StreamBatches
from training.tokenization import RowTokenizer


logger = logging.getLogger(__name__)

NUM_SHARDS = 40
ROWS_PER_BATCH = 1
# Two rows of 81 tokens for a picture and a few words fit.
PACKED_LENGTH = 200
# Kinds of data, and whether rows are packed.
ARMS = (("tars", False), ("tars", True), ("parquet", False), ("JSON", False), ("one tar", False))
Rows = list[tuple[bytes, list[dict[str, str]]]]


def make_rows(count: int) -> Rows:
    """Encoded pictures and their turns."""
    rng = np.random.default_rng(0)
    pictures = []
    for _ in range(64):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(file, "PNG")
        pictures.append(file.getvalue())
    rows = []
    for number in range(count):
        words = " ".join(f"w{word}" for word in rng.integers(0, 1000, 4))
        rows.append((pictures[number % 64], [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": words}]))
    return rows


def write(kind: str, rows: Rows, folder: Path) -> Path:
    """The rows as data of a kind."""
    folder.mkdir()
    if kind == "JSON":
        for number in range(64):
            (folder / f"{number}.png").write_bytes(rows[number][0])
        written = [{"image": f"{number % 64}.png", "conversations": turns} for number, (_, turns) in enumerate(rows)]
        (folder / "rows.json").write_text(json.dumps(written))
        return folder / "rows.json"
    num_shards = 1 if kind == "one tar" else NUM_SHARDS
    per_shard = -(-len(rows) // num_shards)
    for shard in range(num_shards):
        part = rows[shard * per_shard : (shard + 1) * per_shard]
        if kind == "parquet":
            struct = pa.struct({"bytes": pa.binary(), "path": pa.string()})
            images = pa.array([[{"bytes": picture, "path": None}] for picture, _ in part], pa.list_(struct))
            table = pa.table({"images": images, "conversations": [turns for _, turns in part]})
            pq.write_table(table, folder / f"train-{shard:03d}.parquet", row_group_size=100)
        else:
            write_tar(folder / f"train-{shard:03d}.tar", part)
    return folder


def write_tar(path: Path, rows: Rows) -> None:
    """A tar in WebDataset's layout."""
    with tarfile.open(path, "w") as tar:
        for number, (picture, turns) in enumerate(rows):
            for name, data in ((f"{number:06d}.png", picture), (f"{number:06d}.json", json.dumps(turns).encode())):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))


def open_batches(path: Path, packed: bool, output_dir: Path) -> StreamBatches:
    """The batches of one process without workers, as training makes them."""
    processor = synthetic_processor(SIZES["small"])
    tokenize = RowTokenizer(processor, plain_template(processor.tokenizer, processor.image_token))
    tokens = control_tokens(processor.tokenizer, processor.image_token)
    check = StreamCheck(tokens, tokenize, "error", BadRowList(output_dir / "bad_rows.jsonl"))
    collate = VisionLanguageCollator(tokenize, packed)
    rows: Any = load_rows(str(path), streaming=True)
    return StreamBatches(rows, check, collate, ROWS_PER_BATCH, PACKED_LENGTH if packed else None)


def measure(path: Path, packed: bool, steps: list[int], repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Both ways at each step, and the size of the place."""
    args = TrainingConfig(output_dir=str(folder), use_cpu=True, bf16=False)
    batches, results = open_batches(path, packed, folder), []
    started = time.perf_counter()
    for step, batch in enumerate(batches.loader(args)):
        if step in steps:
            dropping, seconds = time.perf_counter() - started, []
            batches.write_place(folder, is_main_process=True)
            for _ in range(repeats):
                again = dataclasses.replace(batches)  # with a separate place
                began = time.perf_counter()
                again.go_on(folder)
                first = next(iter(again.loader(args)))
                seconds.append(time.perf_counter() - began)
                assert torch.equal(first["input_ids"], batch["input_ids"])
            results.append(
                {
                    "step": step,
                    "seconds_dropping": dropping,
                    "seconds_at_place": statistics.median(seconds),
                    "range_at_place": [min(seconds), max(seconds)],
                    "bytes_of_place": (folder / STREAM_FILE).stat().st_size,
                }
            )
            started += time.perf_counter() - started - dropping  # the first way's time must not include measuring
            if step == max(steps):
                break
        batches.trained_on(batch["place"])
    return results


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Time to resume in a stream.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 1000, 10000], help="batches before the stop")
    parser.add_argument("--repeats", type=int, default=5, help="times to resume at each place")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    disable_progress_bars()
    environment = describe_environment("cpu", 1, resumed=False)
    # Two rows per batch when packed, plus the window that is read ahead.
    rows, arms = make_rows(2 * max(args.steps) + 600), []
    with tempfile.TemporaryDirectory() as folder:
        for kind, packed in ARMS:
            path = write(kind, rows, Path(folder) / f"{kind} {packed}")
            for entry in measure(path, packed, args.steps, args.repeats, Path(folder)):
                arms.append({"kind": kind, "packed": packed, **entry})
                logger.info(
                    "%-8s %-6s step %6d: %8.2f s dropping, %5.2f s (%.2f to %.2f) at the place of %d bytes",
                    kind, "packed" if packed else "padded", entry["step"], entry["seconds_dropping"],
                    entry["seconds_at_place"], *entry["range_at_place"], entry["bytes_of_place"],
                )  # fmt: skip
    if args.output is not None:
        settings = {"rows": len(rows), "shards": NUM_SHARDS, "rows_per_batch": ROWS_PER_BATCH,
                    "packed_length": PACKED_LENGTH, "repeats": args.repeats}  # fmt: skip
        results = {"settings": settings, "arms": arms, "environment": {**vars(environment)}}
        write_whole(args.output, json.dumps(results, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
