"""Fill in the results of DEPTH.md from `benchmarks/results/depth.json`, and draw the map.

    python examples/digits/depth_report.py

A comparison is shown once all of its seeds have run, and not before: what is not there yet says "not run yet".
"""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from depth import RESULTS
from depth_plan import (
    ARMS,
    PAIR,
    VARIANTS,
    Case,
    Job,
    Plan,
    Record,
    Study,
    answerable,
    read_records,
    score,
    t_interval,
)
from depth_scenes import KINDS

from conversations.files import write_whole
from diagnostics.report import table


logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("DEPTH.md")
MAP = PAGE.with_name("depth_map.png")
MARKS = ("<!-- results -->", "<!-- /results -->")


class Results:
    """The runs of a study that are done, by what is compared."""

    def __init__(self, study: Study, records: dict) -> None:
        self.study, self.records, self.plan = study, records, Plan(study, records)
        main, few = study.main, True
        others = [arm for arm in ARMS if arm not in PAIR]
        # Case and whether it takes the fewer seeds, in the order of the protocol.
        self.pairs: list[tuple[str, str, bool]] = [
            (main, "plain", False),
            *((decoder, "plain", False) for decoder in study.depths),
            (main, "doubled", few),
            *((decoder, "plain", few) for decoder in study.wide),
            *((main, variant, few) for variant in VARIANTS if variant not in ("plain", "doubled")),
            *((decoder, "plain", few) for decoder in study.deepest),
        ]
        self.others: list[tuple[Case, bool]] = [((main, arm, "plain"), few) for arm in others]

    def runs(self, case: Case, few: bool = False) -> list[Job]:
        """The runs of a case; none before its last one is done, nor before the comparison that decides is."""
        jobs = self.plan.runs(*case, few=few)
        done = all(job.key in self.records["runs"] for job in [*self.plan.deciding(), *jobs])
        return jobs if done else []

    def values(self, case: Case, few: bool, of: Callable[[Job], float]) -> list[float]:
        """A number of each run of a case."""
        return [of(job) for job in self.runs(case, few)]

    def scores(self, kind: str) -> Callable[[Job], float]:
        """Percent right about pictures, of a kind or `"score"`, the mean over the answerable ones."""

        def of(job: Job) -> float:
            return 100 * (score(self.records, job) if kind == "score" else self.record(job)["picture"][kind])

        return of

    def record(self, job: Job) -> Record:
        """What a run recorded."""
        return self.records["runs"][job.key]

    def inside(self, case: Case, few: bool, of: Callable[[Record], float]) -> list[float]:
        """A number of each record of a case; a run that diverged has none."""
        records = [self.record(job) for job in self.runs(case, few)]
        return [of(record) for record in records if "diverged" not in record]

    def differences(self, decoder: str, variant: str, few: bool, kind: str) -> list[float]:
        """GWC less no norm by seed, in points."""
        none, gwc = (self.values((decoder, arm, variant), few, self.scores(kind)) for arm in PAIR)
        return [b - a for a, b in zip(none, gwc, strict=True)] if none and gwc else []


def interval(values: Sequence[float], digits: int = 1) -> str:
    """Mean and 95% t interval over seeds."""
    if not values:
        return "not run yet"
    center, low, high = t_interval(values)
    return f"{center:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def plain_mean(values: Sequence[float], digits: int) -> str:
    """The mean alone."""
    return f"{np.mean(values):.{digits}f}" if values else "not run yet"


def verdict(differences: Sequence[float]) -> str:
    """What the comparison that decides says."""
    if not differences:
        return "**Not run yet.**"
    _, low, high = t_interval(differences)
    word = "The norm helps" if low > 0 else "The norm hurts" if high < 0 else "No clear difference"
    return f"**{word}**: GWC less no norm {interval(differences)} points over {len(differences)} seeds."


def by_seed_table(results: Results) -> str:
    """The comparison that decides, seed by seed."""
    main = results.study.main
    rows = [
        [title, *(f"{value:.1f}" for value in values)]
        for title, values in (
            *((ARMS[arm].title, results.values((main, arm, "plain"), False, results.scores("score"))) for arm in PAIR),
            ("difference", results.differences(main, "plain", False, "score")),
        )
        if values
    ]
    return table(["seed", *map(str, results.study.seeds)], rows) if rows else ""


def gate_table(results: Results) -> str:
    """Language models on descriptions in words."""
    models = results.records["language_models"]
    rows = []
    for decoder in (results.study.main, *results.study.depths, *results.study.wide, *results.study.deepest):
        if decoder not in models:
            rows.append([decoder, "not run yet", *[""] * len(KINDS)])
            continue
        settings, gate = models[decoder]["settings"], models[decoder]["gate"]
        made = f"{settings['num_steps']} steps at {settings['learning_rate']:g}"
        rows.append([decoder, made, *(f"{100 * gate[kind]:.1f}" for kind in KINDS)])
    return table(["layers x width", "trained for", *KINDS], rows)


def pair_table(results: Results) -> str:
    """Scores of both arms and their difference, by decoder and variant."""
    rows = []
    for decoder, variant, few in results.pairs:
        scores = [results.values((decoder, arm, variant), few, results.scores("score")) for arm in PAIR]
        cells = [plain_mean(values, 1) for values in scores]
        differences = results.differences(decoder, variant, few, "score")
        rates = [
            "{:g}, {:g}".format(*results.runs((decoder, arm, variant), few)[0].rates) if scores[number] else ""
            for number, arm in enumerate(PAIR)
        ]
        rows.append([decoder, VARIANTS[variant].title, *cells, interval(differences), *rates])
    header = ["layers x width", "trained", "none", "GWC", "GWC less none (95%)", "rates, none", "rates, GWC"]
    return table(header, rows)


def kind_table(results: Results) -> str:
    """The difference by kind of question; what a language model can't answer in words says nothing."""
    rows = []
    for decoder, variant, few in results.pairs:
        cells = []
        for kind in KINDS:
            found = results.differences(decoder, variant, few, kind)
            says = found and kind in answerable(results.records, decoder)
            cells.append(interval(found) if says or not found else "says nothing")
        rows.append([decoder, VARIANTS[variant].title, *cells])
    guessing = results.records["data"].get("test", {}).get("guessing", {})
    header = [f"{kind} (guessing {100 * guessing[kind]:.0f}%)" if kind in guessing else kind for kind in KINDS]
    return table(["layers x width", "trained", *header], rows)


def arm_table(results: Results) -> str:
    """All arms at the main depth, on the seeds that all of them have."""
    baseline = results.values((results.study.main, "none", "plain"), True, results.scores("score"))
    rows = []
    for case, few in [(((results.study.main, arm, "plain")), True) for arm in PAIR] + results.others:
        scores = results.values(case, few, results.scores("score"))
        differences = [a - b for a, b in zip(scores, baseline, strict=True)] if scores and baseline else []
        inside = [
            plain_mean(results.inside(case, few, of), digits)
            for of, digits in (
                (lambda record: record["stage1"]["loss"], 3),
                (lambda record: record["stage2"]["loss"], 3),
                (lambda record: record["inside"]["stage1"]["ratio"], 2),
                (lambda record: record["inside"]["stage2"]["ratio"], 2),
                (lambda record: record["inside"]["stage2"]["gap"][0], 3),
                (lambda record: record["inside"]["stage2"]["gap"][-1], 3),
                (lambda record: 100 * record["words"]["all"], 1),
                (lambda record: 100 * record["blanked"]["all"], 1),
            )
        ]
        against = "" if case[1] == "none" else interval(differences)
        rows.append([ARMS[case[1]].title, plain_mean(scores, 1), against, *inside])
    header = ["arm", "score", "less none (95%)", "loss, stage 1", "stage 2", "norm ratio, stage 1", "stage 2",
              "gap of cosines, first third", "last third", "in words", "picture blanked"]  # fmt: skip
    return table(header, rows)


def search_table(results: Results) -> str:
    """Validation score by rate, for each search that is done."""
    rows = []
    cases = [(decoder, arm, variant) for decoder, variant, _ in results.pairs for arm in PAIR]
    cases += [case for case, _ in results.others]
    searches = {("stage 1", results.study.main, arm, "plain"): results.plan.stage1_search(arm) for arm in PAIR}
    searches |= {
        ("stage 2", *case): results.plan.stage2_search(*case)
        for case in cases
        if case[2] in ("plain", "adapters", "projector")
    }
    for (stage, decoder, arm, variant), search in searches.items():
        if search.scores:
            scores = ", ".join(f"{rate:g}: {100 * value:.1f}" for rate, value in search.scores.items())
            rows.append([decoder, ARMS[arm].title, VARIANTS[variant].title, stage, scores, f"{search.rate:g}"])
    header = ["layers x width", "arm", "trained", "rate of", "validation score by rate", "chosen"]
    return table(header, rows) if rows else "Not run yet."


def draw_map(results: Results, path: Path) -> bool:
    """The difference by decoder and kind of question, as far as it is known; whether there was anything to draw."""
    known = {
        f"{decoder}\n{VARIANTS[variant].title}": [
            results.differences(decoder, variant, few, kind) for kind in ("score", *KINDS)
        ]
        for decoder, variant, few in results.pairs
        if results.differences(decoder, variant, few, "score")
    }
    if not known:
        return False
    means = np.array([[np.mean(values) for values in row] for row in known.values()])
    limit = float(np.abs(means).max()) or 1.0
    figure, axis = plt.subplots(figsize=(9, 1.6 + 0.6 * len(known)), layout="constrained")
    picture = axis.imshow(means, cmap="RdBu", vmin=-limit, vmax=limit, aspect="auto")
    for (row, column), mean in np.ndenumerate(means):
        values = list(known.values())[row][column]
        _, low, high = t_interval(values)
        weight = "bold" if low > 0 or high < 0 else "normal"
        axis.text(column, row, f"{mean:+.1f}", ha="center", va="center", fontweight=weight)
    axis.set_xticks(range(len(KINDS) + 1), ["score", *KINDS])
    axis.set_yticks(range(len(known)), list(known))
    figure.colorbar(picture, label="GWC less no norm, points; bold: 95% interval without 0")
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def render(results: Results, with_map: bool) -> str:
    """All that stands between the page's marks."""
    main = results.study.main
    parts = [
        f"![GWC less no norm by depth and kind of question]({MAP.name})" if with_map else "",
        "### What decides",
        verdict(results.differences(main, "plain", False, "score")),
        by_seed_table(results),
        "### Depth, steps, clipping, what is trained",
        pair_table(results),
        "### By kind of question",
        kind_table(results),
        "### The dial and other starts",
        arm_table(results),
        "### Language models in words",
        gate_table(results),
        "### Learning rates",
        search_table(results),
    ]
    return "\n\n".join(part for part in parts if part)


def fill_in(page: str, text: str) -> str:
    """The page with what stands between its marks replaced."""
    before, rest = page.split(MARKS[0])
    return f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}"


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    results = Results(Study(), read_records(RESULTS))
    write_whole(PAGE, fill_in(PAGE.read_text(encoding="utf-8"), render(results, draw_map(results, MAP))))
    logger.info("%s", PAGE)


if __name__ == "__main__":
    main()
