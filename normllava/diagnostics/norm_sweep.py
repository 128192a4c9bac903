"""Sweeps the norm of a model's image tokens, and scores the model's answers at each norm.

Image tokens are multiplied where they enter the decoder, by several factors in turn. These factors are called doses.
Nothing else changes, so any change of the answers comes from the norm of the image tokens. The rows are written to
`sweep.csv`.
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

from normllava.diagnostics.answers import GREEDY, answer_ids, distributions, likeliest, read_prompt
from normllava.diagnostics.loading import Question
from normllava.diagnostics.measures import mean_by_sample, measure_attention, measure_drift, measure_layers
from normllava.diagnostics.probe import Record
from normllava.diagnostics.recording import record_questions
from normllava.diagnostics.scaling import BLANK_PICTURE, DOSES, OTHER_PICTURE, OWN_PICTURE, UNCHANGED_DOSE, scaled
from normllava.diagnostics.table import COLUMNS, make_rows
from normllava.hooks import InterfaceHooks
from normllava.inputs import Message, prepare_inputs
from normllava.norms import token_norms
from normllava.parts import DiagnosticsError, find_decoder, image_token_id, spread_layers


logger = logging.getLogger(__name__)

# The fewest pictures of a sweep. Over fewer, intervals are so wide that they say nothing.
MIN_PICTURES = 3
# Length, in tokens, at which a greedy answer is cut off.
MAX_NEW_TOKENS = 8
# Scores of the answers to one question, by name of the measure.
Scores = dict[str, float]


class MeasuredValue(NamedTuple):
    """The value of one measure for one picture.

    Attributes:
        picture: Index of the question, and so of its picture.
        measure: Name of the measure.
        value: The value.
        dose: The factor by which the image tokens were multiplied.
        control: The picture that the model was shown: `OWN_PICTURE`, `BLANK_PICTURE` or `OTHER_PICTURE`.
    """

    picture: int
    measure: str
    value: float
    dose: float
    control: str


class Baseline(NamedTuple):
    """What a sweep records of the model as it is, with image tokens that are not multiplied.

    Attributes:
        records: The record of each picture, with keys and values.
        first_layer_norms: What [`measure_first_layer`] returns for each picture.
        image_norm: Mean norm of the image tokens that enter the decoder.
        text_norm: Mean norm of the text tokens that enter the decoder.
    """

    records: list[Record]
    first_layer_norms: list[dict[str, float]]
    image_norm: float
    text_norm: float


@torch.no_grad()
def sweep_model(model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str) -> pd.DataFrame:
    """Rows of a model at each dose, with the columns of [`~.table`] and two more, `dose` and `control`.

    Norms in rows of [`first_layer_rows`] are multiples of the mean norm of the text tokens that enter the decoder.
    Rows of the measure `norm` have absolute norms.

    Raises:
        DiagnosticsError: if there are fewer than three pictures, if the model is in training mode, or if its answers
            can't be scored.
    """
    check_sweep(model, questions)

    started = time.perf_counter()
    baseline = record_baseline(model, processor, questions, name)
    seconds = time.perf_counter() - started

    # The last dose gives image tokens the norm of text tokens.
    doses = [*DOSES, baseline.text_norm / baseline.image_norm]
    log_duration(name, len(questions), len(doses), seconds)

    tables = [ask_questions(model, processor, questions, doses, name)]
    for dose in doses:
        # `measure_turning` takes a single dose, because its records are large: they are freed when it returns.
        tables.append(measure_turning(model, processor, questions, baseline, dose, name))
    tables.append(first_layer_rows(model, baseline))

    columns = [*COLUMNS, "dose", "control"]
    rows = pd.concat(tables, ignore_index=True)[columns]
    return rows.astype({"layer": "Int64", "picture": "Int64"})


def check_sweep(model: PreTrainedModel, questions: Sequence[Question]) -> None:
    """Check that a sweep of this model over these questions means something.

    Raises:
        DiagnosticsError: if there are fewer than three pictures, or if the model is in training mode.
    """
    if len(questions) < MIN_PICTURES:
        raise DiagnosticsError(
            f"A sweep compares pictures, and there are {len(questions)}: give at least {MIN_PICTURES}."
        )
    if model.training:
        raise DiagnosticsError("The model is in training mode, where dropout changes its answers: call model.eval().")


def log_duration(name: str, num_pictures: int, num_doses: int, seconds: float) -> None:
    """Log about how long a sweep will take.

    Args:
        name: Name of the model.
        num_pictures: Number of pictures.
        num_doses: Number of doses.
        seconds: Duration of one pass over all pictures.
    """
    # At each dose the model reads the prompt four times: once for the record, and once with each of three pictures
    # (the question's own, a white picture, another question's). The greedy answer takes about four more passes.
    passes = 4 * num_doses + 4
    # Scoring the answers adds about half of the time that these passes take.
    minutes = 1.5 * passes * seconds / 60
    logger.info("%s: %d passes for each of %d pictures: %.1f minutes", name, passes, num_pictures, minutes)


def record_baseline(model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str) -> Baseline:
    """Record what the decoder does with each picture if nothing is multiplied, and the norms in the first layer."""
    layers = spread_layers(len(find_decoder(model).layers))
    records = []
    first_layer_norms = []
    for question in tqdm(questions, desc=f"{name}: x 1", unit="picture"):
        record, states_by_place = record_with_states(model, processor, question, layers)
        records.append(record)
        first_layer_norms.append(measure_first_layer(states_by_place, record.tokens.image))

    # The norms at index 0 are those of the tokens that enter the decoder's first layer.
    image_norms = mean_by_sample([record.layer_norms[0, record.tokens.image] for record in records])
    text_norms = mean_by_sample([record.layer_norms[0, record.tokens.text] for record in records])
    return Baseline(records, first_layer_norms, float(image_norms.mean()), float(text_norms.mean()))


def record_with_states(
    model: PreTrainedModel, processor: Any, question: Question, layers: Sequence[int]
) -> tuple[Record, dict[str, torch.Tensor]]:
    """The record of one question, and the hidden states at each place that [`InterfaceHooks`] names."""
    states_by_place: dict[str, torch.Tensor] = {}

    def keep_states(place: str, states: torch.Tensor) -> None:
        states_by_place[place] = states

    with InterfaceHooks(model, keep_states):
        (record,) = record_questions(model, processor, [question], layers, title="")
    return record, states_by_place


def measure_first_layer(states_by_place: dict[str, torch.Tensor], is_image_token: torch.Tensor) -> dict[str, float]:
    """Mean norms over a sample's image tokens in the decoder's first layer, by the measure's name in `sweep.csv`.

    - `length`: norm of the image tokens that enter the layer
    - `attention_update`: norm of what attention adds to them
    - `mlp_update`: norm of what the MLP adds to them

    If no norm module stands before the MLP, the two updates can't be told apart and are left out.

    Args:
        states_by_place: Hidden states at each place that [`InterfaceHooks`] names.
        is_image_token: Mask of the image tokens, `(S,)`.
    """
    layer_input = states_by_place["decoder"][0, is_image_token].float()
    norms = {"length": mean_norm(layer_input)}
    if "before_mlp" in states_by_place:
        before_mlp = states_by_place["before_mlp"][0, is_image_token].float()
        after_mlp = states_by_place["after_mlp"][0, is_image_token].float()
        norms["attention_update"] = mean_norm(before_mlp - layer_input)
        norms["mlp_update"] = mean_norm(after_mlp - before_mlp)
    return norms


def mean_norm(states: torch.Tensor) -> float:
    """Mean L2 norm of hidden states `(num_tokens, hidden_size)`."""
    return token_norms(states).mean().item()


def first_layer_rows(model: PreTrainedModel, baseline: Baseline) -> pd.DataFrame:
    """Rows of the norms in the first layer and of the measure `eps`, as multiples of the norm of text tokens.

    `eps` is the norm of a token whose mean square is as large as the eps of the decoder's RMSNorm.
    """
    config = model.config.get_text_config()
    eps = getattr(config, "rms_norm_eps", 0)  # 0 for a decoder without RMSNorm
    eps_norm = (config.hidden_size * eps) ** 0.5
    num_pictures = len(baseline.first_layer_norms)

    tables = []
    measures = baseline.first_layer_norms[0].keys()  # the same for all pictures
    for measure in measures:
        norms = np.array([norms_of_picture[measure] for norms_of_picture in baseline.first_layer_norms])
        tables.append(make_rows(measure, norms / baseline.text_norm))
    eps_norms = np.full(num_pictures, eps_norm)
    tables.append(make_rows("eps", eps_norms / baseline.text_norm))
    return pd.concat(tables).assign(dose=UNCHANGED_DOSE, control=OWN_PICTURE)


def ask_questions(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], doses: Sequence[float], name: str
) -> pd.DataFrame:
    """Rows of the scores of the answers to all questions at all doses."""
    measured: list[MeasuredValue] = []
    for number in tqdm(range(len(questions)), desc=f"{name}: answers", unit="picture"):
        measured += ask_question(model, processor, questions, number, doses)
    return tabulate_measured(measured)


def tabulate_measured(measured: Sequence[MeasuredValue]) -> pd.DataFrame:
    """A table of measured values. Its columns for modality and layer are empty."""
    return pd.DataFrame(measured, columns=MeasuredValue._fields).assign(modality="", layer=pd.NA)


def ask_question(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], number: int, doses: Sequence[float]
) -> list[MeasuredValue]:
    """Scores of the answers to one question at each dose.

    If the right answer is known, the question is also asked about a white picture and about another question's
    picture. Each score comes with a second value, whose name ends in `_change`: the score minus the score for the
    question's own picture at dose 1.

    Args:
        model: The model.
        processor: The model's processor.
        questions: All questions.
        number: Index of the question to ask.
        doses: The doses, of which the first is 1.
    """
    question = questions[number]
    choices = find_choices(processor, questions, question)

    scores_by_control = {OWN_PICTURE: ask_own_picture(model, processor, question, choices, doses)}
    if choices.right:
        white = Image.new("RGB", question.image.size, "white")
        # The other picture is that of the question before. For the first question, index -1 is the last question.
        other_image = questions[number - 1].image
        for control, image in ((BLANK_PICTURE, white), (OTHER_PICTURE, other_image)):
            messages = question.prompt_about(image)
            scores_by_control[control] = ask_other_picture(model, processor, messages, choices, doses)

    scores_as_it_is = scores_by_control[OWN_PICTURE][0]  # the first dose is 1
    measured = []
    for control, scores_by_dose in scores_by_control.items():
        for dose, scores in zip(doses, scores_by_dose, strict=True):
            for measure, value in scores.items():
                change = value - scores_as_it_is[measure]
                measured.append(MeasuredValue(number, measure, value, dose, control))
                measured.append(MeasuredValue(number, f"{measure}_change", change, dose, control))
    return measured


class Choices(NamedTuple):
    """The answers that a model can choose from, each as a list of token ids.

    Attributes:
        answers: All different answers that the data gives to the same question about any picture, the right one too.
        right: The right answer, which is the question's own; empty if the question has no answer.
    """

    answers: list[list[int]]
    right: list[int]


def find_choices(processor: Any, questions: Sequence[Question], question: Question) -> Choices:
    """The right answer to a question, and all answers that the data gives to the same question about any picture."""
    texts = set()
    for other in questions:
        asks_the_same = other.roles_and_texts == question.roles_and_texts
        if asks_the_same and other.answer:
            texts.add(other.answer)

    ids_by_text = {text: answer_ids(processor, question.prompt, text) for text in sorted(texts)}
    right = ids_by_text.get(question.answer, [])  # an empty answer is not in the dictionary
    return Choices(answers=list(ids_by_text.values()), right=right)


def ask_own_picture(
    model: PreTrainedModel, processor: Any, question: Question, choices: Choices, doses: Sequence[float]
) -> list[Scores]:
    """Scores at each dose of the answers to a question about its own picture.

    - `kl`: KL divergence from the model as it is, mean over the tokens of its greedy answer
    - `changed`: 1 if the greedy answer differs from that of the model as it is, otherwise 0
    - `loss`: mean loss of the right answer's tokens; only if the right answer is known
    - `named`: 1 if the model finds the right answer likelier than all other choices, otherwise 0; only if there are
      other choices
    """
    inputs = prepare_inputs(model, processor, question.prompt)
    is_image_token = inputs["input_ids"][0] == image_token_id(model)

    prompt_length = len(is_image_token)
    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    greedy_answer = generated[0, prompt_length:].tolist()
    # The vocabulary's log-probabilities at the position of each token of the greedy answer, [num_tokens, vocab_size].
    (log_probs_as_it_is,) = distributions(model, read_prompt(model, inputs), [greedy_answer])

    scores_by_dose = []
    for dose in doses:
        with scaled(model, is_image_token, dose):
            prompt_state = read_prompt(model, inputs)

        # The greedy and the right answer are scored in one pass, which sees the multiplied tokens through the cache.
        answers = [greedy_answer]
        if choices.right:
            answers.append(choices.right)
        log_probs_by_answer = distributions(model, prompt_state, answers)

        # A dose changes the answer if another token becomes the likeliest at any position of the greedy answer.
        log_probs_at_dose = log_probs_by_answer[0]
        likeliest_tokens = log_probs_at_dose.argmax(dim=-1).tolist()
        scores = {
            "kl": mean_divergence(log_probs_as_it_is, log_probs_at_dose),
            "changed": float(likeliest_tokens != greedy_answer),
        }
        if choices.right:
            scores["loss"] = mean_loss(log_probs_by_answer[1], choices.right)
        if choices.right and len(choices.answers) > 1:
            (chosen_index,) = likeliest(model, prompt_state, choices.answers)
            scores["named"] = float(choices.answers[chosen_index] == choices.right)
        scores_by_dose.append(scores)
    return scores_by_dose


def ask_other_picture(
    model: PreTrainedModel, processor: Any, messages: list[Message], choices: Choices, doses: Sequence[float]
) -> list[Scores]:
    """Scores at each dose of the answers to a question about another picture: only the `loss` of the right answer.

    `messages` is the question's prompt with the other picture.
    """
    inputs = prepare_inputs(model, processor, messages)
    is_image_token = inputs["input_ids"][0] == image_token_id(model)

    scores_by_dose = []
    for dose in doses:
        with scaled(model, is_image_token, dose):
            prompt_state = read_prompt(model, inputs)
        (log_probabilities,) = distributions(model, prompt_state, [choices.right])
        scores_by_dose.append({"loss": mean_loss(log_probabilities, choices.right)})
    return scores_by_dose


def mean_divergence(log_p: torch.Tensor, log_q: torch.Tensor) -> float:
    """KL(p ‖ q) of two distributions p and q over the vocabulary, as mean over the tokens of an answer.

    Args:
        log_p: Logarithm of p at each token, `(num_tokens, vocab_size)`.
        log_q: Logarithm of q at each token, `(num_tokens, vocab_size)`.
    """
    divergences = (log_p.exp() * (log_p - log_q)).sum(dim=-1)  # [num_tokens]
    return divergences.mean().item()


def mean_loss(log_probabilities: torch.Tensor, tokens: Sequence[int]) -> float:
    """Mean loss of an answer's tokens.

    Args:
        log_probabilities: The vocabulary's log-probabilities at the position of each of the answer's tokens,
            `(num_tokens, vocab_size)`.
        tokens: Ids of the answer's tokens.
    """
    positions = range(len(tokens))
    log_probabilities_of_tokens = log_probabilities[positions, tokens]  # [num_tokens]
    return -log_probabilities_of_tokens.mean().item()


def measure_turning(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    baseline: Baseline,
    dose: float,
    name: str,
) -> pd.DataFrame:
    """Rows of one dose: how far hidden states, keys and values turn, and how much attention goes to the picture."""
    layers = spread_layers(len(find_decoder(model).layers))
    records: list[Record] = []
    drifts: list[MeasuredValue] = []
    for number, question in enumerate(tqdm(questions, desc=f"{name}: x {dose:.2g}", unit="picture")):
        record_as_it_is = baseline.records[number]
        is_image_token = record_as_it_is.input_ids == image_token_id(model)
        with scaled(model, is_image_token, dose):
            (record,) = record_questions(model, processor, [question], layers, title="")

        for measure, value in measure_drift(record, record_as_it_is).items():
            drifts.append(MeasuredValue(number, measure, value, dose, OWN_PICTURE))
        # Keys and values are the largest part of a record, and are not needed any more.
        record.keys.clear()
        record.values.clear()
        records.append(record)

    # If no attention was recorded, `measure_attention` returns `None`, which `pd.concat` passes over.
    tables = [measure_layers(records), measure_attention(records)]
    rows = pd.concat(tables).assign(dose=dose, control=OWN_PICTURE)
    return pd.concat([rows, tabulate_measured(drifts)])
