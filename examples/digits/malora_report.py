"""Write up the MaLoRA-style arms: what they cost, and how far apart keys and values are before and after.

    python examples/digits/malora_report.py

Measures the finished models of `malora.py` on the same questions, and writes
`benchmarks/results/malora.json`, `examples/digits/MALORA.md` and its figure. The numbers of the page are filled in
from the results; what they mean is written in `malora_page.md`.
"""

import json
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import matplotlib.pyplot as plt
import numpy as np
from ablation import SEEDS, read_folder
from ablation_report import RESULTS, load_probe, over_seeds, write_results
from malora import ADAPTATIONS, NORMS
from malora_measure import START, Case, Change, Measured, measure_case
from matplotlib.figure import Figure
from tqdm import tqdm

from diagnostics.plots import FAINT, MODELS, WIDTH, save, styled
from diagnostics.report import table


logger = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("malora_page.md")
TITLES = {START: "before", **{arm.name: arm.title for arm in ADAPTATIONS}}
KINDS = ("keys", "values")
MEASURES = {"mmd": "MMD²", "js": "Jensen-Shannon", "probe": "probe"}


@dataclass(frozen=True)
class MaloraResults:
    """What `benchmarks/results/malora.json` holds."""

    command: str
    seeds: list[int]
    num_pictures: int
    cases: list[Case]


Number = Callable[[Measured], float | None]
# Text of a table cell, from the cases of a norm and the name of a model.
Cell = Callable[[Sequence[Case], str], str]


def values_of(cases: Sequence[Case], name: str, number: Number) -> list[float]:
    """A number of an arm's models by seed; models without it are left out."""
    found = [number(case.models[name]) for case in cases if name in case.models]
    return [value for value in found if value is not None]


def plain(number: Number, digits: int, factor: float = 1.0) -> Cell:
    """A number over the seeds."""
    return lambda cases, name: over_seeds(values_of(cases, name, number), digits, factor)


def to_lora(
    number: Number, digits: int, factor: float = 1.0, compare: Callable[[float, float], float] = operator.sub
) -> Cell:
    """A number compared with that of plain LoRA of the same seed, over the seeds."""

    def cell(cases: Sequence[Case], name: str) -> str:
        both = [[values_of([case], arm, number) for arm in (name, "lora")] for case in cases]
        return over_seeds([compare(arm[0], lora[0]) for arm, lora in both if arm and lora], digits, factor)

    return cell


def pictures(model: Measured) -> float:
    """Share of right answers about pictures."""
    return model.evaluation.about_pictures["all"]


def texts(model: Measured) -> float:
    """Share of right answers about descriptions."""
    return model.evaluation.about_texts["all"]


def attention(model: Measured) -> float:
    """Share of text queries' attention on pictures, mean over layers."""
    return mean(model.attention)


def of_change(number: Callable[[Change], float | None]) -> Number:
    """A number of the adaptation's change, which the start doesn't have."""
    return lambda model: None if model.change is None else number(model.change)


def apart(kind: str, measure: str, layer: int | None = None) -> Callable[[Measured], float]:
    """A measure of keys or values at a layer, or its mean over the layers."""

    def number(model: Measured) -> float:
        values = getattr(getattr(model, kind), measure)
        return mean(values) if layer is None else values[layer]

    return number


def cosine(kind: str, modality: str) -> Number:
    """Cosine of keys, or values, before and after, mean over layers."""
    return of_change(lambda change: mean(getattr(getattr(change, kind), modality)))


def parameters(cases: Sequence[Case], name: str) -> str:
    """Number of trained parameters, the same for all seeds."""
    counts = values_of(cases, name, of_change(lambda change: change.trained_parameters))
    return f"{counts[0]:,}" if counts else "–"


SECONDS, LOSS = of_change(lambda change: change.seconds), of_change(lambda change: change.loss)
LAYERS = range(3)


def rows_of(cases: Sequence[Case], names: Mapping[str, str], cells: Sequence[Cell]) -> list[list[str]]:
    """A row for each norm and each model; `names` maps models to titles."""
    by_norm = {norm.title: [case for case in cases if case.norm == norm.name] for norm in NORMS}
    return [
        [f"{norm}: {title}", *(cell(of, name) for cell in cells)]
        for norm, of in by_norm.items()
        for name, title in names.items()
    ]


def space_table(cases: Sequence[Case], measure: str) -> str:
    """A measure of keys and of values by layer, before and after, and of halves of a modality if measured."""
    places = [(kind, layer) for kind in KINDS for layer in LAYERS]
    rows = rows_of(cases, TITLES, [plain(apart(kind, measure, layer), 3) for kind, layer in places])
    if measure != "probe":
        halves = [plain(apart(kind, f"{measure}_baseline", layer), 3) for kind, layer in places]
        rows += rows_of(cases, {START: "halves of one modality, before"}, halves)
    return table([MEASURES[measure], *(f"{kind}, layer {layer}" for kind, layer in places)], rows)


def norm_table(cases: Sequence[Case]) -> str:
    """GWC minus no norm before adaptation, by seed."""
    by_norm = [{case.seed: case.models[START] for case in cases if case.norm == norm.name} for norm in NORMS]
    pairs = [(by_norm[0][seed], by_norm[1][seed]) for seed in by_norm[0] if seed in by_norm[1]]
    rows = []
    for kind in KINDS:
        for layer in (*LAYERS, None):
            numbers = [apart(kind, measure, layer) for measure in MEASURES]
            cells = [over_seeds([of(gwc) - of(none) for none, gwc in pairs], 3) for of in numbers]
            rows.append([f"{kind}, {'mean of layers' if layer is None else f'layer {layer}'}", *cells])
    return table(["GWC less no norm, before", *MEASURES.values()], rows)


def rescaled_table(cases: Sequence[Case]) -> str:
    """Cosines of keys and values before and after rescaling alone, by layer, over the seeds without a norm."""
    found = [case.rescaled for case in cases if case.rescaled is not None]
    rows = []
    for kind in KINDS:
        for modality in ("visual", "text"):
            by_layer = zip(*(getattr(getattr(of, kind), modality) for of in found), strict=True)
            rows.append([f"{kind}, {modality}", *(over_seeds(values, 3) for values in by_layer)])
    return table(["cosine, before and after rescaling", *(f"layer {layer}" for layer in LAYERS)], rows)


def make_tables(cases: Sequence[Case]) -> dict[str, str]:
    """The tables by their names on the page."""
    costs = {
        "exact match on pictures": plain(pictures, 1, 100),
        "on texts": plain(texts, 1, 100),
        "trained parameters": parameters,
        "training time over plain LoRA's": to_lora(SECONDS, 2, compare=operator.truediv),
        "last loss": plain(LOSS, 3),
        "last MMD² in training": plain(of_change(lambda change: change.mmd), 3),
        "last Gram distance": plain(of_change(lambda change: change.gram), 4),
    }
    looks = {"attention on pictures, %": plain(attention, 1, 100)} | {
        f"cosine of {kind}, {modality}": plain(cosine(kind, modality), 3)
        for kind in KINDS
        for modality in ("visual", "text")
    }
    differences = {"exact match on pictures, points": to_lora(pictures, 2, 100)}
    differences |= {"exact match on texts, points": to_lora(texts, 2, 100), "last loss": to_lora(LOSS, 3)}
    differences |= {
        f"{title} of {kind}": to_lora(apart(kind, name), 3) for kind in KINDS for name, title in MEASURES.items()
    }
    differences |= {"attention on pictures, points": to_lora(attention, 1, 100)}
    others = {name: title for name, title in TITLES.items() if name not in (START, "lora")}
    columns = [["less plain LoRA", *differences], *rows_of(cases, others, list(differences.values()))]
    header, *rows = zip(*columns, strict=True)
    return {
        "costs": table(["", *costs], rows_of(cases, TITLES, list(costs.values()))),
        **{name: space_table(cases, name) for name in MEASURES},
        "looks": table(["", *looks], rows_of(cases, TITLES, list(looks.values()))),
        "norms": norm_table(cases),
        "rescaled": rescaled_table(cases),
        "differences": table(header, rows),
    }


def costs_elsewhere() -> dict[str, str]:
    """Time of a training pass over plain LoRA's, smallest and largest ratio over the benchmark's lengths."""
    lengths = json.loads((RESULTS / "key_alignment_cpu.json").read_text(encoding="utf-8"))["lengths"]
    texts = {}
    for arm in ("keys", "losses"):
        ratios = [row[arm]["ratio"] for row in lengths]
        texts[f"{arm}_cost"] = f"{min(ratios):.2f} to {max(ratios):.2f}"
    return texts


@styled
def draw(cases: Sequence[Case]) -> Figure:
    """MMD² of keys and of values by layer, before and after each arm: mean and range over the seeds."""
    figure, axes = plt.subplots(
        len(KINDS), len(NORMS), figsize=(WIDTH, 4.4), sharex=True, sharey="row", layout="constrained"
    )
    styles = [{"color": FAINT, "marker": "x", "linestyle": ":"}, *MODELS]
    for row, kind in zip(axes, KINDS, strict=True):
        for axis, norm in zip(row, NORMS, strict=True):
            of_norm = [case for case in cases if case.norm == norm.name]
            for number, ((name, title), style) in enumerate(zip(TITLES.items(), styles, strict=True)):
                values = np.array([values_of(of_norm, name, apart(kind, "mmd", layer)) for layer in LAYERS])
                if not values.size:
                    continue
                x = np.array(LAYERS) + 0.08 * (number - len(styles) // 2)  # so that they don't hide each other
                axis.plot(x, values.mean(axis=1), label=title, **style)
                axis.vlines(x, values.min(axis=1), values.max(axis=1), color=style["color"], linewidth=0.8)
            axis.axhline(0, color=FAINT, linewidth=0.6, zorder=0)
            axis.set(xlabel="layer", xticks=LAYERS)
        row[0].set_ylabel(f"MMD² of {kind}")
    for axis, norm in zip(axes[0], NORMS, strict=True):
        axis.set_title(norm.title)
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=5, handlelength=3)
    return figure


def main() -> None:
    """Run the command line."""
    root = read_folder(__doc__, "--run_dir", "malora")
    plt.switch_backend("agg")
    questions = load_probe()
    jobs = [(norm, seed) for norm in NORMS for seed in SEEDS]
    found = [measure_case(norm, seed, root, questions) for norm, seed in tqdm(jobs, desc="Measuring", unit="case")]
    cases = [case for case in found if case is not None]
    if not cases:
        raise SystemExit(f"No arm is finished in {root}: run `make malora`.")
    save(draw(cases), PAGE.with_name("malora_keys.png"))
    tables = make_tables(cases)
    counts = costs_elsewhere() | {
        "runs": str(sum(len(case.models) - 1 for case in cases)),
        "planned": str(len(NORMS) * len(SEEDS) * len(ADAPTATIONS)),
        "num_pictures": str(len(questions)),
        "even": plain(lambda model: mean(model.even_attention), 1, 100)(cases, START),
        "num_tokens": str(cases[0].models[START].num_tokens),
    }
    summary = MaloraResults("make malora", list(SEEDS), len(questions), cases)
    write_results(summary, tables | counts, PAGE, PAGE.with_name("MALORA.md"), RESULTS / "malora.json")
    logger.info("%s", "\n\n".join(tables.values()))


if __name__ == "__main__":
    main()
