"""A sweep: image tokens are multiplied where they enter the decoder, and the model's answers are scored again.

Nothing else changes, so that what an answer loses is due to the norm of its image tokens. `sweep.csv` has the rows.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from diagnostics.answers import GREEDY, answer_ids, distributions, likeliest, read_prompt
from diagnostics.hooks import InterfaceHooks
from diagnostics.loading import Message, Question
from diagnostics.measures import mean_of_each, measure_attention, measure_drift, measure_layers
from diagnostics.norms import token_norms
from diagnostics.parts import DiagnosticsError, find_decoder, image_token_id, spread_layers
from diagnostics.probe import Record
from diagnostics.recording import prepare_inputs, record_questions
from diagnostics.scaling import ANOTHERS, AS_IT_IS, BLANK, DOSES, OWN, scaled
from diagnostics.table import COLUMNS, make_rows


logger = logging.getLogger(__name__)

# Intervals over fewer pictures say nothing.
MIN_PICTURES = 3
# Of a greedy answer, whose change is measured.
MAX_NEW_TOKENS = 8
# Numbers of one answer by measure.
Scores = dict[str, float]


class Measured(NamedTuple):
    """One number of one picture."""

    picture: int
    measure: str
    value: float
    dose: float
    control: str


class Baseline(NamedTuple):
    """What a sweep records of the model as it is.

    Attributes:
        records: One for each picture, with keys and values.
        layer_1: Of each picture, what [`measure_layer_1`] returns.
        image_norm: Mean norm of the image tokens that enter the decoder.
        text_norm: Mean norm of the text tokens that enter the decoder.
    """

    records: list[Record]
    layer_1: list[dict[str, float]]
    image_norm: float
    text_norm: float


@torch.no_grad()
def sweep_model(model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str) -> pd.DataFrame:
    """Rows of a model whose image tokens are multiplied by each dose, one after the other.

    They have the columns of [`~diagnostics.table`], and `dose` and `control`. Norms are multiples of the mean norm of
    the text tokens that enter the decoder.

    Raises:
        DiagnosticsError: for fewer than three pictures, a model that trains, or one that can't score answers.
    """
    check_sweep(model, questions)

    started = time.perf_counter()
    baseline = record_baseline(model, processor, questions, name)
    seconds = time.perf_counter() - started

    doses = [*DOSES, baseline.text_norm / baseline.image_norm]
    tell_duration(name, len(questions), len(doses), seconds)

    rows = [ask_questions(model, processor, questions, doses, name)]
    for dose in doses:
        # Records are large: those of a dose are measured and dropped before the next.
        rows.append(measure_turning(model, processor, questions, baseline, dose, name))
    rows.append(layer_1_rows(model, baseline))

    table = pd.concat(rows, ignore_index=True)[[*COLUMNS, "dose", "control"]]
    return table.astype({"layer": "Int64", "picture": "Int64"})


def check_sweep(model: PreTrainedModel, questions: Sequence[Question]) -> None:
    """Raise `DiagnosticsError` for what a sweep can't compare."""
    if len(questions) < MIN_PICTURES:
        raise DiagnosticsError(
            f"A sweep compares pictures, and there are {len(questions)}: give at least {MIN_PICTURES}."
        )
    if model.training:
        raise DiagnosticsError("The model is in training mode, where dropout changes its answers: call model.eval().")


def tell_duration(name: str, num_pictures: int, num_doses: int, seconds: float) -> None:
    """Log how long a sweep takes, by the seconds of one pass over all pictures."""
    # For each dose one to record, and answers about three pictures; for the greedy answer about four more.
    passes = 4 * num_doses + 4
    minutes = 1.5 * passes * seconds / 60  # with the passes over answers
    logger.info("%s: %d passes for each of %d pictures: %.1f minutes", name, passes, num_pictures, minutes)


def record_baseline(model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str) -> Baseline:
    """The model as it is: a record of each picture, and norms in its first layer."""
    layers = spread_layers(len(find_decoder(model).layers))
    records = []
    layer_1 = []
    for question in tqdm(questions, desc=f"{name}: x 1", unit="picture"):
        states: dict[str, torch.Tensor] = {}
        with InterfaceHooks(model, states.__setitem__):
            (record,) = record_questions(model, processor, [question], layers, title="")
        records.append(record)
        layer_1.append(measure_layer_1(states, record.tokens.visual))

    image_norms = mean_of_each([record.layer_norms[0, record.tokens.visual] for record in records])
    text_norms = mean_of_each([record.layer_norms[0, record.tokens.text] for record in records])
    return Baseline(records, layer_1, float(image_norms.mean()), float(text_norms.mean()))


def measure_layer_1(states: dict[str, torch.Tensor], is_image_token: torch.Tensor) -> dict[str, float]:
    """Norms in layer 1, means over the image tokens of a sample that [`InterfaceHooks`] saw.

    `length` is the norm of what enters (sweep.csv's name for it), `attention_update` of what attention adds,
    `mlp_update` of what the MLP adds. Without a norm module before the MLP these two can't be told apart, and are
    left out.
    """
    entered = states["decoder"][0, is_image_token].float()
    norms = {"length": mean_norm(entered)}
    if "before_mlp" in states:
        before_mlp = states["before_mlp"][0, is_image_token].float()
        after_mlp = states["after_mlp"][0, is_image_token].float()
        norms["attention_update"] = mean_norm(before_mlp - entered)
        norms["mlp_update"] = mean_norm(after_mlp - before_mlp)
    return norms


def mean_norm(states: torch.Tensor) -> float:
    """Mean L2 norm of tokens, `(num_tokens, hidden_size)`."""
    return token_norms(states).mean().item()


def layer_1_rows(model: PreTrainedModel, baseline: Baseline) -> pd.DataFrame:
    """Rows of the norms in layer 1, and of `eps`: the norm of a token whose mean square is the eps of its RMSNorm."""
    config = model.config.get_text_config()
    eps_norm = (config.hidden_size * getattr(config, "rms_norm_eps", 0)) ** 0.5

    rows = []
    for measure in baseline.layer_1[0]:
        norms = np.array([norms_of_picture[measure] for norms_of_picture in baseline.layer_1])
        rows.append(make_rows(measure, norms / baseline.text_norm))
    rows.append(make_rows("eps", np.full(len(baseline.layer_1), eps_norm) / baseline.text_norm))
    return pd.concat(rows).assign(dose=AS_IT_IS, control=OWN)


def ask_questions(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], doses: Sequence[float], name: str
) -> pd.DataFrame:
    """Rows of the answers to all questions at all doses."""
    measured: list[Measured] = []
    for number in tqdm(range(len(questions)), desc=f"{name}: answers", unit="picture"):
        measured += ask_question(model, processor, questions, number, doses)
    return tabulate_measured(measured)


def tabulate_measured(measured: Sequence[Measured]) -> pd.DataFrame:
    """Numbers of pictures as rows, without a modality or a layer."""
    return pd.DataFrame(measured, columns=Measured._fields).assign(modality="", layer=pd.NA)


def ask_question(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], number: int, doses: Sequence[float]
) -> list[Measured]:
    """Scores of the answers to one question at each dose, the first of which is 1.

    Where its right answer is known, the question is also asked about a blank and about another's picture. A `_change`
    is the difference to the own picture at the first dose.
    """
    question = questions[number]
    choices = find_choices(processor, questions, question)

    scored = {OWN: ask_own_picture(model, processor, question, choices, doses)}
    if choices.right:
        blank = Image.new("RGB", question.image.size, "white")
        anothers = questions[number - 1].image
        scored[BLANK] = ask_other_picture(model, processor, question.about(blank), choices, doses)
        scored[ANOTHERS] = ask_other_picture(model, processor, question.about(anothers), choices, doses)

    as_it_is = scored[OWN][0]
    measured = []
    for control, scores_by_dose in scored.items():
        for dose, scores in zip(doses, scores_by_dose, strict=True):
            for measure, value in scores.items():
                change = value - as_it_is[measure]
                measured.append(Measured(number, measure, value, dose, control))
                measured.append(Measured(number, f"{measure}_change", change, dose, control))
    return measured


class Choices(NamedTuple):
    """The answers that a model can choose from.

    Attributes:
        tokens: Token ids of each different answer to the same question in the data.
        right: Token ids of the question's own answer; empty if it has none.
    """

    tokens: list[list[int]]
    right: list[int]


def find_choices(processor: Any, questions: Sequence[Question], question: Question) -> Choices:
    """The right answer to a question, and all answers to those that differ from it only in the picture."""
    alike = [other for other in questions if other.texts == question.texts]
    answers = sorted({other.answer for other in alike if other.answer})
    tokens = [answer_ids(processor, question.prompt, answer) for answer in answers]
    right = tokens[answers.index(question.answer)] if question.answer else []
    return Choices(tokens, right)


def ask_own_picture(
    model: PreTrainedModel, processor: Any, question: Question, choices: Choices, doses: Sequence[float]
) -> list[Scores]:
    """Scores of a question about its own picture, at each dose.

    `kl` is the mean divergence of the tokens of the greedy answer from those of the model as it is, `changed` whether
    the greedy answer is another. With a right answer, `loss` is its mean loss, and with other answers, too, `named`
    whether the model finds it likelier than all of them.
    """
    inputs = prepare_inputs(model, processor, question.prompt)
    is_image_token = inputs["input_ids"][0] == image_token_id(model)

    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    greedy = generated[0, len(is_image_token) :].tolist()
    (as_it_is,) = distributions(model, read_prompt(model, inputs), [greedy])  # [num_tokens, vocab_size]

    scores_by_dose = []
    for dose in doses:
        with scaled(model, is_image_token, dose):
            prompt = read_prompt(model, inputs)

        # Both in one pass; without a right answer the greedy one stands in for it.
        scaled_greedy, scaled_right = distributions(model, prompt, [greedy, choices.right or greedy])
        divergences = (as_it_is.exp() * (as_it_is - scaled_greedy)).sum(dim=-1)
        scores = {
            "kl": divergences.mean().item(),
            "changed": float(scaled_greedy.argmax(dim=-1).tolist() != greedy),
        }
        if choices.right:
            scores["loss"] = mean_loss(scaled_right, choices.right)
        if choices.right and len(choices.tokens) > 1:
            chosen = likeliest(model, prompt, choices.tokens)
            scores["named"] = float(choices.tokens[chosen] == choices.right)
        scores_by_dose.append(scores)
    return scores_by_dose


def ask_other_picture(
    model: PreTrainedModel, processor: Any, messages: list[Message], choices: Choices, doses: Sequence[float]
) -> list[Scores]:
    """Loss of the right answer where the messages show a picture that says nothing of it, at each dose."""
    inputs = prepare_inputs(model, processor, messages)
    is_image_token = inputs["input_ids"][0] == image_token_id(model)

    scores_by_dose = []
    for dose in doses:
        with scaled(model, is_image_token, dose):
            prompt = read_prompt(model, inputs)
        (log_probabilities,) = distributions(model, prompt, [choices.right])
        scores_by_dose.append({"loss": mean_loss(log_probabilities, choices.right)})
    return scores_by_dose


def mean_loss(log_probabilities: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean loss of an answer's tokens, from log-probabilities at each, `(num_tokens, vocab_size)`."""
    return -log_probabilities[range(len(tokens)), tokens].mean().item()


def measure_turning(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    baseline: Baseline,
    dose: float,
    name: str,
) -> pd.DataFrame:
    """Rows of how far hidden states, keys and values turn at one dose, and of attention."""
    layers = spread_layers(len(find_decoder(model).layers))
    records: list[Record] = []
    drifts: list[Measured] = []
    for number, question in enumerate(tqdm(questions, desc=f"{name}: x {dose:.2g}", unit="picture")):
        as_it_is = baseline.records[number]
        with scaled(model, as_it_is.input_ids == image_token_id(model), dose):
            (record,) = record_questions(model, processor, [question], layers, title="")

        for measure, value in measure_drift(record, as_it_is).items():
            drifts.append(Measured(number, measure, value, dose, OWN))
        record.keys.clear()
        record.values.clear()
        records.append(record)

    by_layer = measure_layers(records)
    is_first = (by_layer["measure"] == "turning") & (by_layer["layer"] == 0)
    first = by_layer[is_first].assign(measure="turning, layer 1", layer=pd.NA)
    rows = pd.concat([by_layer, first, measure_attention(records)]).assign(dose=dose, control=OWN)
    return pd.concat([rows, tabulate_measured(drifts)])
