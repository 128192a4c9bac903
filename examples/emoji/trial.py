"""The study of docs/trial.md: does aligning norms help a pretrained decoder to see?

Run `python -m examples.emoji.trial` after the first two steps of `examples.emoji.run`. It goes on where it stopped.
"""

import json
import logging
import random
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from PIL import Image
from scipy import stats
from transformers import AutoProcessor

from diagnostics.answers import answer, ask, distributions, encode, read
from diagnostics.plots import save
from diagnostics.scaling import scaled
from examples.emoji.evaluate import name_pictures, open_picture, perplexity
from examples.emoji.parts import RUN
from examples.emoji.pictures import GROUP, HELD_OUT, NAME, Record
from examples.emoji.run import STEPS
from examples.results import draw_lengths
from examples.steps import ROOT
from modeling_normllava import NormLlavaForConditionalGeneration
from training.run import Run


logger = logging.getLogger(__name__)

RECORDS, WORK = Path(__file__).with_name("trial.jsonl"), RUN.with_name("trial")
PLAIN, NORM, LONG, STARTED = "no norm", "GWC at T", "GWC at 30 T", "started at T, no norm"
ARMS = {PLAIN: ["--projector_norm=none"], NORM: [], LONG: ["--norm_target_ratio=30"]}
ARMS[STARTED] = ["--projector_norm=none", "--scale_projector"]
RATES = (1.25e-5, 5e-5, 2e-4)  # of the projector, searched with seed 0; the norm's is 0.6 of it, as in the recipe
SCALES, DOSED, ASKED = (0.03, 0.1, 0.3, 1, 3, 10, 30), 24, 64
# Names whose drawings nearly agree, among those that are trained on: they count as one.
ONE_NAME = {
    "ram": "ewe", "two hump camel": "camel", "spouting whale": "whale", "nest with eggs": "empty nest",
    "front facing baby chick": "baby chick", "guide dog": "dog", "service dog": "dog",
}  # fmt: skip


def differences(records: Sequence[Record], arm: str) -> list[np.ndarray]:
    """An arm's right names less those of no norm on the same processor, in points by drawing: an array a pair."""
    hits = {(row["arm"], row["seed"], row["processor"]): row["hits"] for row in records if "hits" in row}
    pairs = [(hits[key], hits.get((PLAIN, *key[1:]))) for key in sorted(hits) if key[0] == arm]
    return [100 * (np.array([*named], float) - np.array([*plain], float)) for named, plain in pairs if plain]


def num_pairs(pairs: Sequence[np.ndarray]) -> int:
    """How many decide, 8 to 16: the fewest whose interval reaches 1.5 points by the deviation of the first four."""
    if len(pairs) < 4:
        return 8
    deviation = np.std([pair.mean() for pair in pairs[:4]], ddof=1)
    return next((n for n in range(8, 16) if stats.t.ppf(0.975, n - 1) * deviation / n**0.5 <= 1.5), 16)


def compare(pairs: Sequence[np.ndarray]) -> dict[str, float]:
    """Mean of two or more `differences`, its 95% t interval, p of all sign flips, two-sided, and the 95% interval when
    pairs and drawings are drawn anew together, which is too narrow for few pairs."""
    points, values = np.array(pairs), np.array([pair.mean() for pair in pairs])  # [num_pairs, num_drawings]
    low, high = stats.ttest_1samp(values, 0).confidence_interval()
    flips = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=2**17)  # all of them
    found = {"pairs": len(values), "mean": values.mean(), "low": low, "high": high, "p": flips.pvalue}
    draw = np.random.default_rng(0)
    anew = [points[np.ix_(*(draw.integers(n, size=n) for n in points.shape))].mean() for _ in range(10_000)]
    return found | dict(zip(("low, redrawn", "high, redrawn"), np.percentile(anew, (2.5, 97.5)), strict=True))


def judge(found: Mapping[str, float], planned: int) -> str:
    """The verdict on the deciding comparison."""
    if found["pairs"] < planned:
        return f"undecided, after {found['pairs']:.0f} of {planned} pairs"
    if found["p"] < 0.05:
        return "ahead" if found["mean"] > 0 else "behind"
    return "equivalent within 2 points" if max(-found["low"], found["high"]) <= 2 else "undecided"


def report(records: Sequence[Record], at_end: bool = False) -> str:
    """What the pairs show that there are; OpenMoji at the end alone."""
    rows = {arm: compare(values) for arm in ARMS if arm != PLAIN and len(values := differences(records, arm)) > 1}
    if NORM not in rows:
        return "There are no two pairs yet."
    raised, others = 0.0, sorted((row["p"], arm) for arm, row in rows.items() if arm != NORM)
    for number, (p, arm) in enumerate(others):
        rows[arm]["Holm's p"] = raised = min(1, max(raised, p * (2 - number)))
    runs = pd.DataFrame([row for row in records if "names" in row]).groupby(["arm", "processor"], sort=False)
    means = runs.mean(numeric_only=True).drop(columns=["seed", "rate", *([] if at_end else ["OpenMoji"])])
    verdict = judge(rows[NORM], num_pairs(differences(records, NORM)))
    runs, less = (table.T.to_string(float_format="%.3f") for table in (means, pd.DataFrame(rows)))
    return f"{runs}\n\nLess no norm:\n{less}\n\n{NORM}: {verdict}"


def plan(records: Sequence[Record]) -> list[tuple[str, int, float]]:
    """All runs, in order: rates, then pairs with the best, of equals the smallest; the arms that decide come first."""
    scores = {(row["arm"], row["rate"]): row["searched"] for row in records if "searched" in row}
    best = {arm: max(RATES, key=lambda rate: scores.get((arm, rate), -1)) for arm in ARMS}
    cells = []  # arm, seed, and the projector's rate
    for arms in ((PLAIN, NORM), (LONG,), (STARTED,)):
        pairs = 8 if STARTED in arms else num_pairs(differences(records, NORM))
        cells += [(arm, 0, rate) for arm in arms for rate in RATES]
        cells += [(arm, seed, best[arm]) for seed in range(1, pairs + 1) for arm in arms]
    return cells


@torch.no_grad()
def evaluate(trained: Path, search: bool) -> Record:
    """The figures of a trained model, shares in percent: of a search by EmojiOne alone."""
    model: Any = NormLlavaForConditionalGeneration.from_pretrained(trained).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    processor = AutoProcessor.from_pretrained(trained)
    records = json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))
    random.Random(0).shuffle(records)  # the first of a set are drawn by lot, in every run the same
    names = sorted({row["name"] for row in records})
    searched, tested, last = ([row for row in records if row["set"] == of] for of in ("emojione", *HELD_OUT))

    def right(rows: Sequence[Record]) -> list[bool]:
        given = name_pictures(model, processor, [open_picture(row) for row in rows], names)
        wanted = [row["name"] for row in rows]
        return [ONE_NAME.get(name, name) == ONE_NAME.get(of, of) for name, of in zip(given, wanted, strict=True)]

    def loss(image: Image.Image, row: Record) -> float:
        name = processor.tokenizer(f"{row['name']}{processor.tokenizer.eos_token}", add_special_tokens=False).input_ids
        prompt = read(model, encode(processor, [ask(NAME, image)]).to(model.device))
        return -distributions(model, prompt, [name])[0][range(len(name)), name].mean().item()

    if search:
        return {"searched": 100 * np.mean(right(searched))}
    hits, asked, images = right(tested), tested[:ASKED], [open_picture(row) for row in tested[:ASKED]]
    figures: Record = {"names": 100 * np.mean(hits), "hits": "".join("01"[hit] for hit in hits)}
    blank = Image.new("RGB", images[0].size, "white")
    for field, question in (("name", NAME), ("group", GROUP)):
        said = answer(model, processor, [ask(question, image) for image in images], question)
        figures[f"{field}, free"] = 100 * np.mean([text == row[field] for text, row in zip(said, asked, strict=True)])
    figures["loss"] = np.mean([loss(image, row) for image, row in zip(images, asked, strict=True)])
    figures["loss, blank"] = np.mean([loss(blank, row) for row in asked])
    is_visual = encode(processor, [ask(NAME, blank)])["input_ids"] == model.config.image_token_id
    for scale in SCALES:
        with scaled(model, is_visual, scale):
            figures[f"names, x {scale}"] = 100 * np.mean(right(asked[:DOSED]))
    figures |= {"OpenMoji": 100 * np.mean(right(last[:ASKED])), "perplexity": perplexity(model, processor.tokenizer)}
    return figures


def run(cell: tuple[str, int, float]) -> Record:
    """Compose and train as the real model is, without EmojiOne; the record. A search composes once for its rates."""
    (arm, seed, rate), pictures = cell, RUN / "pictures"
    aligned, trained = (WORK / f"{list(ARMS).index(arm)}-{seed}{end}" for end in ("", f"-{rate:g}"))
    for name in ("captions.json", "train.json"):
        rows = json.loads((pictures / name).read_text(encoding="utf-8"))
        kept = [row for row in rows if not row.get("image", "").startswith("emojione/")]
        (WORK / name).write_text(json.dumps(kept), encoding="utf-8")
    compose, sft = ([*command, f"--image_folder={pictures}", f"--seed={seed}"] for *_, command in STEPS[2:4])
    if not (aligned / "processor_config.json").exists():
        shutil.rmtree(aligned, ignore_errors=True)
        compose += [f"--captions={WORK / 'captions.json'}", f"--output_dir={aligned}", *ARMS[arm]]
        subprocess.run([sys.executable, *compose], cwd=ROOT, check=True)
    sft += [f"--dataset_name={WORK / 'train.json'}", f"--model_name_or_path={aligned}", f"--output_dir={trained}"]
    rates = [f"--projector_learning_rate={rate}", f"--norm_learning_rate={0.6 * rate}"]
    sft += [*rates, "--max_steps=146", "--bf16=false"]
    subprocess.run([sys.executable, *sft], cwd=ROOT, check=True)
    steps = pd.read_json(trained / "metrics.jsonl", lines=True).dropna(subset="loss")
    done = Run.read(trained)
    record = {"arm": arm, "seed": seed, "rate": rate, "commit": done.environment.commit, "data": done.data}
    record |= {"processor": f"{done.environment.device} {torch.backends.cpu.get_cpu_capability()}"}
    record |= {"length": steps["norm/ratio"].iloc[-1], "losses": [*steps["loss"]]} | evaluate(trained, seed == 0)
    for folder in [trained, aligned] if seed else [trained]:
        shutil.rmtree(folder)
    return record


def main(max_runs: int = 1000) -> None:
    """Do the runs that are missing, or so many of them, and report."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    WORK.mkdir(parents=True, exist_ok=True)
    RECORDS.touch()
    for number in range(max_runs + 1):
        lines = RECORDS.read_text(encoding="utf-8").splitlines()
        records = [row for row in map(json.loads, lines) if row["arm"] in ARMS]  # the others are earlier runs
        done = {(row["arm"], row["seed"], row["rate"]) for row in records}
        left = [cell for cell in plan(records) if cell not in done]
        logger.info("%s\n\n%d done, %d left: %s", report(records, at_end=not left), len(done), len(left), left[:1])
        if rows := [row for row in records if "names" in row]:
            save(draw_lengths(pd.DataFrame(rows), SCALES), RECORDS.with_suffix(".png"))
        if not left or number == max_runs:
            break
        with RECORDS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(run(left[0])) + "\n")


if __name__ == "__main__":
    main()
