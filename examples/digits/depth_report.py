"""Fill in the results of DEPTH.md from `benchmarks/results/depth.json`, and draw its figures.

    python examples/digits/depth_report.py
    python examples/digits/depth_report.py --results mine.json --output_dir runs/mine    # a page of your own

A comparison is shown once all of its seeds have run, and not before: what is not there yet says "not run yet".
"""

import argparse
import logging
from collections.abc import Callable, Mapping, Sequence
from math import inf, log
from pathlib import Path
from statistics import mean, median

import matplotlib.pyplot as plt
from depth import RESULTS
from depth_figures import draw_figures
from depth_plan import ARMS, PAIR, VARIANTS, Case, Record, Study, answerable, read_records
from depth_results import NOT_RUN, BySeed, Results, interval, less, pair_of, side
from depth_scenes import KINDS
from scipy.stats import spearmanr

from conversations.files import write_whole
from diagnostics.report import table


logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("DEPTH.md")
LOSSES = (0.5, 0.2)  # of stage 2, that speed is read at
STARTS = ("small-start", "scale", "decay")
LONG = ("gain1", "gwc-3t", "gwc-10t")  # arms with a norm whose visual tokens start longer than T
INSIDE_TERMS = """\
- *norm ratio*: mean norm of visual over text tokens where they enter the decoder.
- *turning*: 1 - cosine of a token's states before and after a layer. *Gap of cosines*: visual less text tokens, over a
  third of the layers.
- *reads as its digit*: of the ten words ` zero` to ` nine`, the final norm and the head give the digit's that a visual
  token stands on the highest logit. Guessing is right in a tenth.
- *attention* and *gradient*: at the last token of a `both` question, whose first answer word is the colour.
- *seeds*: arms that have five are compared with none on these five; the score of none is over all of its own."""
# What a record says of a trained model, and digits to show.
INSIDE: dict[str, tuple[Callable[[Record], float], int]] = {
    "loss, stage 1": (lambda record: record["stage1"]["loss"], 3),
    "loss, stage 2": (lambda record: record["stage2"]["loss"], 3),
    "norm ratio, stage 1": (lambda record: record["inside"]["stage1"]["ratio"], 2),
    "norm ratio, stage 2": (lambda record: record["inside"]["stage2"]["ratio"], 2),
    "gap of cosines, first third": (lambda record: record["inside"]["stage2"]["gap"][0], 3),
    "last third": (lambda record: record["inside"]["stage2"]["gap"][-1], 3),
    "in words": (lambda record: 100 * record["words"]["all"], 1),
    "picture blanked": (lambda record: 100 * record["blanked"]["all"], 1),
}


def verdict(gains: BySeed, decoder: str) -> str:
    """What the comparison that decides says."""
    if not gains:
        return "**Not run yet.**"
    word = {1: "The norm helps", -1: "The norm hurts", 0: "No clear difference"}[side(gains)]
    where = "at {} layers of width {}".format(*decoder.split("x"))
    return f"**{word} {where}**: GWC less no norm is {interval(gains)} points over {len(gains)} seeds."


def by_seed_table(results: Results) -> str:
    """The comparison that decides, seed by seed."""
    main = results.study.main
    lines = {ARMS[case[1]].title: results.scores(case) for case in pair_of(main, "plain")}
    lines["difference"] = results.gains(main)
    rows = [[title, *(f"{value:.1f}" for value in values.values())] for title, values in lines.items()]
    return table(["seed", *map(str, results.study.seeds)], rows)


def gate_table(results: Results) -> str:
    """Language models on descriptions in words."""
    models = results.records["language_models"]
    rows = []
    for decoder in models:
        settings, gate = models[decoder]["settings"], models[decoder]["gate"]
        made = f"{settings['num_steps']} steps at {settings['learning_rate']:g}"
        rows.append([decoder, made, *(f"{100 * gate[kind]:.1f}" for kind in KINDS)])
    return table(["layers x width", "trained for", *KINDS], rows)


def pair_table(results: Results) -> str:
    """Scores of both arms and their difference, by decoder and variant."""
    rows = []
    for decoder, variant in results.pairs:
        cases = pair_of(decoder, variant)
        scores = [f"{mean(results.scores(case).values()):.1f}" for case in cases]
        rates = ["{:g}, {:g}".format(*results.runs(case)[0].rates) for case in cases]
        rows.append([decoder, VARIANTS[variant].title, *scores, interval(results.gains(decoder, variant)), *rates])
    header = [
        "layers x width",
        "trained",
        "none",
        "GWC",
        "GWC less none (95%)",
        "rates of stages 1 and 2, none",
        "GWC",
    ]
    return table(header, rows)


def change_table(results: Results) -> str:
    """What another way of training changes in both arms and in their difference."""
    rows = []
    for decoder, variant in results.pairs:
        if variant != "plain" and (decoder, "plain") in results.pairs:
            after, before = (
                [*(results.scores(case) for case in pair_of(decoder, of)), results.gains(decoder, of)]
                for of in (variant, "plain")
            )
            cells = [interval(less(*values)) for values in zip(after, before, strict=True)]
            rows.append([decoder, VARIANTS[variant].title, *cells])
    return table(["layers x width", "trained", "none", "GWC", "GWC less none"], rows)


def kind_table(results: Results, asked: str) -> str:
    """Each arm less no norm by kind of question, about pictures or in words; what a language model couldn't answer in
    words before it saw a picture says nothing."""
    rows = []
    for case in results.shown:
        decoder, arm, variant = case
        if arm == "none":
            continue
        cells = []
        for kind in KINDS:
            says = kind in answerable(results.records, decoder)
            cells.append(interval(results.less_none(case, kind, asked)) if says else "says nothing")
        rows.append([decoder, VARIANTS[variant].title, ARMS[arm].title, *cells])
    return table(["layers x width", "trained", "arm less no norm", *KINDS], rows)


def guessing(results: Results) -> str:
    """What the commonest answers score."""
    shares = results.records["data"]["test"]["guessing"]
    return ", ".join(f"{kind} {100 * shares[kind]:.0f}%" for kind in KINDS)


def rate_table(results: Results) -> str:
    """Both arms at both arms' rates of stage 2, as far as they are run, and their differences at each."""

    def columns(case: Case) -> dict[str, BySeed]:
        pictures, words = (results.scores(case, "sum", asked) for asked in ("picture", "words"))
        return {
            "score": results.scores(case),
            "`both`": results.scores(case, "both"),
            "sums about pictures": pictures,
            "sums in words": words,
            "pictures less words": less(pictures, words),
        }

    none, gwc, none_exchanged, gwc_exchanged = (
        case for variant in ("plain", "exchanged") for case in pair_of(results.study.main, variant)
    )
    rows = []
    for case in filter(results.runs, (none, none_exchanged, gwc, gwc_exchanged)):
        jobs = results.runs(case)
        cells = map(interval, columns(case).values())
        rows.append([ARMS[case[1]].title, f"{jobs[0].rates[1]:g}", str(len(jobs)), *cells])
    for title, one, other in (
        ("GWC less no norm, each at its own", gwc, none),
        ("GWC less no norm", gwc_exchanged, none),
        ("GWC less no norm", gwc, none_exchanged),
    ):
        if results.runs(one) and results.runs(other):
            differences = list(map(less, columns(one).values(), columns(other).values()))
            rates = dict.fromkeys(f"{results.runs(case)[0].rates[1]:g}" for case in (one, other))
            rows.append([title, ", ".join(rates), str(len(differences[0])), *map(interval, differences)])
    return table(["arm", "rate of stage 2", "seeds", *columns(none)], rows)


def steps_to(record: Record, loss: float) -> float:
    """Steps of stage 2 after which the logged loss stays below a value; infinite if it never does."""
    if "diverged" in record:
        return inf
    curve = record["stage2"]["curve"]
    above = [number for number, (_, value) in enumerate(curve) if value >= loss]
    reached = above[-1] + 1 if above else 0
    return curve[reached][0] if reached < len(curve) else inf


def speed_table(results: Results) -> str:
    """Steps of stage 2 to given losses."""
    pairs = [*results.pairs, (results.study.main, "exchanged")]
    rows = []
    for case in [case for pair in pairs for case in pair_of(*pair) if results.runs(case)]:
        cells = []
        for loss in LOSSES:
            steps = sorted(steps_to(results.record(job), loss) for job in results.runs(case))
            shown = ["never" if value == inf else f"{value:g}" for value in (median(steps), steps[0], steps[-1])]
            cells.append(f"{shown[0]} ({shown[1]} to {shown[2]})")
        rate = f"{results.runs(case)[0].rates[1]:g}"
        rows.append([case[0], VARIANTS[case[2]].title, ARMS[case[1]].title, rate, *cells])
    losses = [f"steps to a loss below {loss:g}" for loss in LOSSES]
    return table(["layers x width", "trained", "arm", "rate of stage 2", *losses], rows)


def inside_table(results: Results) -> str:
    """What models are like; the difference to no norm of the same kind is on the seeds of both."""

    def decoded(records: Sequence[Record]) -> str:
        layers = list(zip(*(record["inside"]["stage2"]["decoded"] for record in records), strict=True))
        best = max(range(len(layers)), key=lambda layer: mean(layers[layer]))
        return f"{100 * mean(layers[best]):.0f}% at layer {best}"

    rows = []
    for case in results.shown:
        scores, records = results.scores(case), results.trained(case)
        seeds = f"{len(scores)}, {lost} diverged" if (lost := len(scores) - len(records)) else f"{len(scores)}"
        cells = ["–"] * (len(INSIDE) + 1)
        if records:
            cells = [f"{mean(map(of, records)):.{digits}f}" for of, digits in INSIDE.values()]
            cells.append(decoded(records))
        against = "" if case[1] == "none" else interval(results.less_none(case))
        titles = [VARIANTS[case[2]].title, ARMS[case[1]].title]
        rows.append([case[0], *titles, seeds, f"{mean(scores.values()):.1f}", against, *cells])
    header = ["layers x width", "trained", "arm", "seeds", "score", "less none (95%)"]
    return table([*header, *INSIDE, "visual tokens read as their digit"], rows)


def against_table(results: Results) -> str:
    """What came of each point that would count against the mechanism (DEPTH.md)."""
    study, main = results.study, results.study.main

    def growth(deep: str, shallow: str) -> tuple[str, BySeed]:
        return f"gain at {deep} less gain at {shallow}", less(results.gains(deep), results.gains(shallow))

    def lead(arm: str) -> tuple[str, BySeed]:
        gwc, other = ((main, name, "plain") for name in ("gwc", arm))
        return f"GWC at T less {ARMS[arm].title}", less(results.scores(gwc), results.scores(other))

    def judge(values: BySeed) -> str:
        return {1: "no", -1: "yes", 0: "not clear"}[side(values)] if values else ""

    doubled = results.gains(main, "doubled")
    measured = [
        ("1. no gain at the depth that decides", lead("none")),
        *(("2. no growth with depth", growth(main, decoder)) for decoder in study.depths),
        *(("2. no growth with depth", growth(decoder, main)) for decoder in study.deepest),
        *(("3. a start alone does as much", lead(arm)) for arm in STARTS),
        ("4. no gain after twice the steps", ("gain after twice the steps", doubled)),
        (
            "4. no gain after twice the steps",
            ("gain after twice the steps less gain at the recipes' steps", less(doubled, results.gains(main))),
        ),
        *(("5. longer visual tokens do as well", lead(arm)) for arm in LONG),
        *(("7. size does as much as depth", growth(main, decoder)) for decoder in study.wide),
    ]
    rows = [[point, quantity, interval(values), judge(values)] for point, (quantity, values) in measured]
    point = "6. the score does not go with norms and turning"
    rows += [[point, *cells] for cells in correlations(results)]
    return table(["point", "measured", "points (95%)", "counts against"], sorted(rows, key=lambda row: row[0]))


def correlations(results: Results) -> list[list[str]]:
    """How a run's score goes with its ratio of norms and gap of cosines, over all arms' runs at the main depth, and
    without the arm whose visual tokens are the longest."""
    arms = results.arms if len(results.arms) == len(ARMS) else []
    groups = {"": arms, ", no norm left out": [case for case in arms if case[1] != "none"]}
    rows = []
    for title, of in (
        ("distance of the norm ratio from 1", lambda inside: abs(log(inside["ratio"]))),
        ("distance of the first third's gap of cosines from 0", lambda inside: abs(inside["gap"][0])),
    ):
        for without, cases in groups.items():
            runs = [(results.scores(case)[each["seed"]], each) for case in cases for each in results.trained(case)]
            cells = [NOT_RUN, ""]
            if runs:
                found = spearmanr([score for score, _ in runs], [of(record["inside"]["stage2"]) for _, record in runs])
                against = "not clear" if found.pvalue >= 0.05 else "no" if found.statistic < 0 else "yes"
                over = f"{len(runs)} runs of {len(cases)} arms"
                cells = [f"{found.statistic:.2f} over {over}, p = {found.pvalue:.2g} if independent", against]
            rows.append([f"rank correlation of score and {title}{without}", *cells])
    return rows


def search_table(results: Results) -> str:
    """Validation score by rate, for each search that is done."""
    runs = results.records["runs"].values()
    cases = dict.fromkeys((run["decoder"], run["arm"], run["variant"]) for run in runs if run["split"] == "validation")
    searches = {("stage 1", results.study.main, arm, "plain"): results.plan.stage1_search(arm) for arm in PAIR}
    searches |= {("stage 2", *case): results.plan.stage2_search(*case) for case in cases}
    rows = []
    for (stage, decoder, arm, variant), search in searches.items():
        if search.complete:
            scores = ", ".join(f"{rate:g}: {100 * value:.1f}" for rate, value in search.scores.items())
            rows.append([decoder, ARMS[arm].title, VARIANTS[variant].title, stage, scores, f"{search.rate:g}"])
    return table(["layers x width", "arm", "trained", "rate of", "validation score by rate", "chosen"], rows)


def render(results: Results, figures: Mapping[str, Path]) -> dict[str, str]:
    """What stands between the page's marks, by their name."""
    drawn = [f"![{caption}]({path.name})\n\n*{caption}.*" for caption, path in figures.items()]
    main = results.study.main
    summary = [*drawn[:1], verdict(results.gains(main), main)]
    parts = []
    if results.pairs:
        parts += [
            "### The comparison that decides",
            by_seed_table(results),
            "### Depth, steps, clipping, what is trained",
            pair_table(results),
            "Each less the recipes' steps, on the seeds that both have:",
            change_table(results),
            "### What would count against the mechanism",
            "By 95% intervals: no, where the whole interval lies above 0; yes, where it lies below; else not clear.",
            against_table(results),
            "### By kind of question",
            f"Each arm less no norm in points (95% intervals), about pictures. Guessing scores {guessing(results)}.",
            kind_table(results, "picture"),
            "The same about scenes in words, asked after stage 2:",
            kind_table(results, "words"),
            "### At the other's rate of stage 2",
            rate_table(results),
            "### Inside the models",
            *drawn[1:],
            INSIDE_TERMS,
            inside_table(results),
            "### Speed",
            "Steps of stage 2 until the logged loss stays below a value: median over seeds, least and most.",
            speed_table(results),
        ]
    parts += ["### Language models in words", gate_table(results), "### Learning rates", search_table(results)]
    if results.missing:
        number = len(results.missing)
        comparisons = "comparison is" if number == 1 else "comparisons are"
        summary.append(f"{number} {comparisons} [not run yet](#not-run-yet).")
        parts += ["### Not run yet", "\n".join(f"- {case}" for case in results.missing)]
    return {"summary": "\n\n".join(summary), "results": "\n\n".join(parts)}


def fill_in(page: str, texts: Mapping[str, str]) -> str:
    """The page with what stands between its marks replaced."""
    for name, text in texts.items():
        start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, rest = page.split(start)
        page = f"{before}{start}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    plt.switch_backend("agg")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, help="records of `depth.py --results`; needs --output_dir")
    parser.add_argument("--output_dir", type=Path, help="where their page goes")
    args = parser.parse_args()
    if (args.results is None) != (args.output_dir is None):
        parser.error("--results and --output_dir go together: DEPTH.md is about the committed records")
    page = PAGE if args.output_dir is None else args.output_dir / PAGE.name
    page.parent.mkdir(parents=True, exist_ok=True)
    results = Results(Study(), read_records(args.results or RESULTS))
    texts = render(results, draw_figures(results, page.parent))
    filled = fill_in(PAGE.read_text(encoding="utf-8"), texts) if page == PAGE else "\n\n".join(texts.values()) + "\n"
    write_whole(page, filled)
    logger.info("%s", page)


if __name__ == "__main__":
    main()
