"""All measures of one or several models: for the command line, and for Python and notebooks."""

import json
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import transformers
from jinja2 import TemplateError
from matplotlib.figure import Figure
from PIL import Image
from tqdm import tqdm
from transformers import BatchFeature, PreTrainedModel

from common.files import write_whole
from diagnostics.answers import GREEDY, answer_ids, distributions, likeliest, read
from diagnostics.attention_maps import (
    AttentionMap,
    draw_attention_maps,
    map_attention,
    questions_with_word,
    text_after_picture,
    with_answer,
)
from diagnostics.hooks import InterfaceHooks
from diagnostics.key_map import draw_key_map, place_keys
from diagnostics.keys import MAX_TOKENS, draw_positions, measure_space
from diagnostics.loading import QUESTION, Message, Question, Questions, ask_about, load_questions
from diagnostics.measures import measure_all, measure_attention, measure_drift, measure_layers
from diagnostics.parts import DiagnosticsError, find_decoder, image_token_id
from diagnostics.plots import FIGURES, draw_figures
from diagnostics.plots import save as save_figure
from diagnostics.probe import Probe, Record
from diagnostics.report import ModelReport, Report, measured_on, render_html, sentences, tell_sweep
from diagnostics.scaling import CONTROLS, SCALED, TURNED, scaled, update_norms
from diagnostics.table import Summary, by_dose, make_rows
from diagnostics.tokens import Inputs, classify_sample, token_ids


logger = logging.getLogger(__name__)

# Factors of the visual tokens; the first is the model as it is.
DOSES = (1.0, 0.03, 0.1, 0.3, 3.0, 10.0, 30.0)


@dataclass(frozen=True)
class Comparison:
    """What was measured of one or several models on the same questions.

    Attributes:
        report: What was measured, on what.
        rows: All numbers: `model` and the columns of [`~diagnostics.table`].
        swept: With `sweep`, the rows of [`sweep_model`]: `model`, `dose`, `control` and those columns.
        key_map: Keys on a plane: `model` and the columns of [`place_keys`].
        attention_maps: By model, what a word looks at in some pictures.
    """

    report: Report
    rows: pd.DataFrame
    swept: pd.DataFrame = field(default_factory=pd.DataFrame)
    key_map: pd.DataFrame = field(default_factory=pd.DataFrame)
    attention_maps: dict[str, list[AttentionMap]] = field(default_factory=dict)

    def __str__(self) -> str:
        of_models = [
            f"{model.name}: {text}" for model in self.report.models for text in [*model.sweep, *sentences(model)]
        ]
        return "\n".join([measured_on(self.report), *of_models])

    def frame(self) -> pd.DataFrame:
        """A row for each measure, modality and layer of each model, with `mean`, `low`, `high` (its 95% interval) and
        `n` (pictures). Rows without a layer are means over layers, or measures without layers."""
        return pd.concat([of.summary.frame.assign(model=of.name) for of in self.report.models], ignore_index=True)

    def figures(self) -> dict[str, Figure]:
        """The report's figures by name; those without data are left out."""
        doses = {name: by_dose(rows) for name, rows in self.swept.groupby("model")} if len(self.swept) else {}
        summaries = {model.name: model.summary for model in self.report.models}
        figures = draw_figures(summaries, doses)

        if len(self.key_map) > 0:
            with_keys = self.key_map["model"].unique()
            figures["key_map"] = draw_key_map({name: summaries[name] for name in with_keys}, self.key_map)
        if self.attention_maps:
            figures["attention_map"] = draw_attention_maps(self.attention_maps)
        return figures

    def save(self, folder: str | Path) -> None:
        """Write `report.html`, `report.json`, `report.csv` ([`frame`]), `rows.csv` ([`rows`]), `key_map.csv`,
        `sweep.csv`, and below `figures/` all figures as PNG and PDF."""
        folder = Path(folder)
        drawn = folder / "figures"
        drawn.mkdir(parents=True, exist_ok=True)
        for path in drawn.iterdir():
            if path.stem in FIGURES:
                path.unlink()
        write_whole(folder / "report.csv", self.frame().to_csv(index=False))
        write_whole(folder / "rows.csv", self.rows.to_csv(index=False))
        for name, table in (("sweep.csv", self.swept), ("key_map.csv", self.key_map)):
            (folder / name).unlink(missing_ok=True)  # of an earlier report
            if len(table) > 0:
                write_whole(folder / name, table.to_csv(index=False))
        write_whole(folder / "report.json", json.dumps(asdict(self.report), indent=1, allow_nan=False))
        for name, figure in self.figures().items():
            for suffix in ("png", "pdf"):
                save_figure(figure, drawn / f"{name}.{suffix}")
        write_whole(folder / "report.html", render_html(self.report, self.rows, drawn))


def measure(model: PreTrainedModel, processor: Any, data: Any, name: str = "model", **options: Any) -> Comparison:
    """Every measure of one model. Options are those of [`compare`]."""
    return compare({name: (model, processor)}, data, **options)


def sweep(model: PreTrainedModel, processor: Any, data: Any, **options: Any) -> Comparison:
    """[`measure`] that also multiplies visual tokens, as [`sweep_model`] does."""
    return measure(model, processor, data, sweep=True, **options)


def attention_map(
    model: PreTrainedModel,
    processor: Any,
    picture: Image.Image,
    question: str,
    word: str,
    layers: Sequence[int] | None = None,
    answer: str = "",
) -> AttentionMap:
    """What a word of a question looks at in a picture, or a word of its answer.

    Args:
        model: In eval mode; its decoder runs with `attn_implementation="sdpa"`.
        processor: Its processor.
        picture: The picture, which comes before the question.
        question: The question.
        word: A word or some words of the question or the answer; of several places, the first.
        layers: Numbers of layers; four by default, from the first to the last.
        answer: What the model is to have answered, if it is a word of this.

    Returns:
        A map whose `weights` are `(num_layers, num_rows, num_columns)`, as [`AttentionMap`] describes them. Draw some
        by `draw_attention_maps({"before": [...], "after": [...]})` of `diagnostics.attention_maps`.

    Raises:
        DiagnosticsError: if the word is not there, or the model's attention can't be mapped.
    """
    (asked,) = ask_about([picture], question, 1).questions
    inputs = prepare(model, processor, with_answer(asked.prompt, answer))
    return map_attention(model, processor, inputs, word, f"{question} {answer}".strip(), layers)


def compare(
    models: Mapping[str, tuple[PreTrainedModel, Any]],
    data: str | Path | Sequence[Image.Image],
    question: str = QUESTION,
    num_samples: int = 32,
    layers: Sequence[int] | None = None,
    sweep: bool = False,
    attention_word: str | None = None,
) -> Comparison:
    """Measure models side by side on the same questions.

    Args:
        models: Each with its processor, by its name in the report. They are not changed.
        data: Pictures, or what `--data` takes.
        question: Asked about pictures that come without one.
        num_samples: How many pictures at most.
        layers: Layers whose attention and keys are measured; six evenly spread ones by default.
        sweep: Also multiply visual tokens, see [`sweep_model`].
        attention_word: Also draw what this word of the questions or answers looks at, see [`attention_map`].

    Raises:
        DiagnosticsError: if a model can't be measured on this data; the message says why.
        UserError: if no row can be read.
    """
    loaded = ((name, model, processor) for name, (model, processor) in models.items())
    if isinstance(data, str | Path):
        questions, origin = load_questions(data, num_samples, question), Path(data).name
    else:
        questions, origin = ask_about(data, question, num_samples), "pictures in memory"
    *_, measured = measure_models(loaded, questions, origin, layers, sweep=sweep, attention_word=attention_word)
    return measured


def measure_models(
    models: Iterable[tuple[str, PreTrainedModel, Any]],
    questions: Questions,
    data: str,
    layers: Sequence[int] | None = None,
    command: str = "diagnostics.compare",
    sweep: bool = False,
    attention_word: str | None = None,
) -> Iterator[Comparison]:
    """Measure models, given as name, model and processor, one after the other, so that only one has to be in memory.
    After each comes the comparison so far, for its caller to keep. `data` and `command` are shown in the report."""
    reports: list[ModelReport] = []
    of_models: list[pd.DataFrame] = []
    swept = [pd.DataFrame()]
    key_maps = [pd.DataFrame()]
    maps: dict[str, list[AttentionMap]] = {}
    mapped = [] if attention_word is None else questions_with_word(questions.questions, attention_word)
    for name, model, processor in models:
        try:
            if attention_word is not None:  # first, since it's quick and refuses some models
                maps[name] = map_questions(model, processor, mapped, attention_word, layers)
            report, rows, key_map = measure_model(model, processor, questions.questions, name, layers)
            if sweep:
                swept.append(sweep_model(model, processor, questions.questions, name).assign(model=name))
                report = replace(report, sweep=tell_sweep(swept[-1]))
        except DiagnosticsError as error:
            raise type(error)(f"{name}: {error}") from error
        del model, processor  # before the next one is loaded
        reports.append(report)
        of_models.append(rows.assign(model=name))
        key_maps.append(key_map.assign(model=name))
        table = pd.concat(of_models, ignore_index=True)
        whole = Report(
            command=command,
            versions={"torch": torch.__version__, "transformers": transformers.__version__},
            data=data,
            passed_over=questions.passed_over,
            unreadable=questions.unreadable,
            models=[*reports],
        )
        yield Comparison(
            report=whole,
            rows=table[["model", *table.columns.drop("model")]],
            swept=pd.concat(swept),
            key_map=pd.concat(key_maps, ignore_index=True),
            attention_maps=dict(maps),
        )


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    layers: Sequence[int] | None = None,
) -> tuple[ModelReport, pd.DataFrame, pd.DataFrame]:
    """Every measure of one model: its report, its rows, and its keys on a plane.

    Attention and keys are measured in `layers`, by default in six that are evenly spread. Raises `DiagnosticsError` if
    one does not exist, or a question can't be measured.
    """
    num_layers = len(find_decoder(model).layers)
    chosen = sorted(set(spread(num_layers) if layers is None else layers))
    if not set(chosen) <= set(range(num_layers)):
        raise DiagnosticsError(f"It has layers 0 to {num_layers - 1}, got --layers {' '.join(map(str, chosen))}.")
    records = record_questions(model, processor, questions, chosen, f"{name}: pictures")
    spaces = (measure_space(space, records) for space in ("keys", "values"))
    rows = pd.concat([measure_all(model, records), *spaces], ignore_index=True)
    is_quantized = getattr(model.config, "quantization_config", None) is not None
    report = ModelReport(
        name=name,
        model_class=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch.") + (", quantized" if is_quantized else ""),
        num_layers=num_layers,
        hidden_size=model.config.get_text_config().hidden_size,
        num_pictures=len(records),
        num_tokens=count_tokens([{"visual": of.tokens.visual, "text": of.tokens.text} for of in records]),
        excluded=count_tokens([record.tokens.excluded for record in records]),
        notes=sorted({note for record in records for note in record.notes}),
        summary=Summary.of(rows),
    )
    return report, rows, place_keys(records, rows)


def map_questions(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    word: str,
    layers: Sequence[int] | None,
) -> list[AttentionMap]:
    """What a word of each question, or of its answer, looks at. Raises `DiagnosticsError` as [`attention_map`]."""
    maps = []
    for question in questions:
        inputs = prepare(model, processor, with_answer(question.prompt, question.answer))
        maps.append(map_attention(model, processor, inputs, word, text_after_picture(question), layers))
    return maps


def spread(num_layers: int) -> list[int]:
    """Numbers of six layers, evenly spread, or of all."""
    return sorted({*np.linspace(0, num_layers - 1, 6).round().astype(int).tolist()})


def count_tokens(masks: Sequence[dict[str, torch.Tensor]]) -> dict[str, int]:
    """Number of tokens of all samples by the names of their masks."""
    return {name: sum(int(of[name].sum()) for of in masks) for name in masks[0]}


@torch.no_grad()
def sweep_model(model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str) -> pd.DataFrame:
    """Rows of a model in eval mode whose visual tokens are multiplied by each dose, with columns `dose` and `control`;
    lengths are multiples of the mean norm of the text tokens that enter the decoder. Raises `DiagnosticsError` for
    fewer than three pictures, whose intervals say nothing, a model that trains, or one that can't score answers."""
    if len(questions) < 3:
        raise DiagnosticsError(f"A sweep compares pictures, and there are {len(questions)}: give at least 3.")
    if model.training:
        raise DiagnosticsError("The model is in training mode, where dropout changes its answers: call model.eval().")
    layers, started = spread(len(find_decoder(model).layers)), time.perf_counter()
    plain, found, rows = [], [], []
    layer_1: list[dict[str, float]] = []  # of each picture
    for question in tqdm(questions, desc=f"{name}: x 1", unit="picture"):
        states: dict[str, torch.Tensor] = {}
        with InterfaceHooks(model, states.__setitem__):
            plain += record_questions(model, processor, [question], layers, "")
        layer_1.append(update_norms(states, plain[-1].tokens.visual))
    norms = Summary.of(measure_layers(plain))
    visual, text = (norms.curve("norm", modality)["mean"].iloc[0] for modality in ("visual", "text"))
    doses = [*DOSES, text / visual]
    passes = len(doses) * (3 + len(CONTROLS)) + 4
    minutes = 1.5 * passes * (time.perf_counter() - started) / 60  # with the passes over answers
    logger.info("%s: %d passes for each of %d pictures: %.1f minutes", name, passes, len(questions), minutes)
    for number in tqdm(range(len(questions)), desc=f"{name}: answers", unit="picture"):
        found += [(number, *of) for of in ask_at_doses(model, processor, questions, number, doses)]
    for dose in doses:  # one after the other, since records are large
        records: list[Record] = []
        for number, question in enumerate(tqdm(questions, desc=f"{name}: x {dose:.2g}", unit="picture")):
            with scaled(model, plain[number].input_ids == image_token_id(model), dose):
                records += record_questions(model, processor, [question], layers, "")
            drift = measure_drift(records[-1], plain[number])
            found += [(number, measure, value, dose, SCALED) for measure, value in drift.items()]
            records[-1].keys.clear()
            records[-1].values.clear()
        turned = measure_layers(records)
        first = turned.query("measure == 'turning' and layer == 0").assign(measure="turning, layer 1", layer=pd.NA)
        rows.append(pd.concat([turned, first, measure_attention(records)]).assign(dose=dose, control=SCALED))
    answers = pd.DataFrame(found, columns=["picture", "measure", "value", "dose", "control"])
    if "before_mlp" not in states:
        answers = answers[answers["control"] != TURNED]  # there was no place to turn anything
    rows.append(answers.assign(modality="", layer=pd.NA))

    # The norm of a token whose mean square is the eps of layer 1's norm.
    config = model.config.get_text_config()
    eps = (config.hidden_size * getattr(config, "rms_norm_eps", 0)) ** 0.5
    for norms_of_picture in layer_1:
        norms_of_picture["eps"] = eps
    for measure in layer_1[0]:
        measured = np.array([norms_of_picture[measure] for norms_of_picture in layer_1])
        rows.append(make_rows(measure, measured / text).assign(dose=1.0, control=SCALED))
    return pd.concat(rows, ignore_index=True).astype({"layer": "Int64", "picture": "Int64"})


def ask_at_doses(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], number: int, doses: Sequence[float]
) -> Iterator[tuple[str, float, float, str]]:
    """Measure, value, dose and control of answers to one question, also about a blank and another's picture; the right
    answer competes with those to the same question. A `_change` is from the first dose and the own picture."""
    question = questions[number]
    answers = sorted({of.answer for of in questions if of.about(None) == question.about(None)} - {""})
    tokens = [answer_ids(processor, question.prompt, answer) for answer in answers]
    right = tokens[answers.index(question.answer)] if question.answer else []
    own, other = question.image, questions[number - 1].image
    others = {"blank": Image.new("RGB", own.size, "white"), "another's": other} if right else {}
    plain: dict[str, float] = {}
    for control, image in {**dict.fromkeys(CONTROLS, own), **others}.items():
        inputs = prepare(model, processor, question.prompt if image is own else question.about(image))
        is_visual = inputs["input_ids"][0] == image_token_id(model)
        if not plain:
            generated = model.generate(**inputs, **GREEDY, max_new_tokens=8)
            greedy = generated[0, len(is_visual) :].tolist()
            (expected,) = distributions(model, read(model, inputs), [greedy])
        for dose in doses:
            numbers = {}
            with scaled(model, is_visual, dose, control):
                prompt = read(model, inputs)
            given = distributions(model, prompt, [greedy, right or greedy])
            if image is own:
                numbers["kl"] = (expected.exp() * (expected - given[0])).sum(-1).mean().item()
                numbers["changed"] = float(given[0].argmax(-1).tolist() != greedy)
            if right:
                numbers["loss"] = -given[1][range(len(right)), right].mean().item()
            if image is own and len(tokens) > 1 and right:
                numbers["named"] = float(tokens[likeliest(model, prompt, tokens)] == right)
            plain = plain or numbers
            for measure, value in numbers.items():
                yield measure, value, dose, control
                yield f"{measure}_change", value - plain[measure], dose, control


@torch.no_grad()
def record_questions(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], layers: Collection[int], title: str
) -> list[Record]:
    """A record of each question up to where its answer begins, with attention, keys and values of `layers`.

    The model runs in eval mode, and is in its own mode again afterwards. Its head is not run: nothing after the
    decoder is measured. `title` is what the progress bar says.

    Raises:
        DiagnosticsError: if a question can't be measured; the message names it.
    """
    ids, num_kept = token_ids(model, processor), max(1, MAX_TOKENS // len(questions))
    training = [module for module in model.modules() if module.training]
    model.eval()
    records = []
    try:
        for question in tqdm(questions, desc=title, unit="picture", disable=not title):
            inputs = prepare(model, processor, question.prompt)
            tokens = classify_sample(inputs, ids)
            with Probe(model, inputs, tokens, layers, draw_positions(tokens, question.picture, num_kept)) as probe:
                model.base_model(**inputs)
            records.append(probe.record())
    except DiagnosticsError as error:
        raise type(error)(f"{question.source}: {error}") from error
    finally:
        for module in training:
            module.training = True
    return records


def prepare(model: PreTrainedModel, processor: Any, messages: list[Message]) -> Inputs:
    """What a model is given for chat messages; without a template, for their texts and pictures, one per line."""
    try:
        if getattr(processor, "chat_template", None):
            prepared = processor.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
            )
        else:
            mark = getattr(processor, "image_token", "<image>")
            parts = [part for message in messages for part in message["content"]]
            text = "\n".join(part["text"] if part["type"] == "text" else mark for part in parts)
            images = [part["image"] for part in parts if part["type"] == "image"]
            prepared = processor(images=images or None, text=text, return_tensors="pt")
        inputs = {name: of for name, of in prepared.items() if name != "labels"}  # PaliGemma's, for training
        return dict(BatchFeature(inputs).to(model.device, dtype=model.dtype))
    except (TemplateError, ValueError) as error:  # roles that a template does not know, a picture that is too small
        raise DiagnosticsError(f"The processor can't prepare it: {error}") from error
