"""Sweeps the norm of a model's image tokens, and scores the model's answers at each norm.

Image tokens are multiplied where they enter the decoder, by several factors in turn. These factors are called doses.
Nothing else changes, so any change of the answers comes from the norm of the image tokens. The rows are written to
`sweep.csv`.
"""

import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from normllava.diagnostics.answers import GREEDY, answer_ids, distributions, likeliest, read_prompt
from normllava.diagnostics.loading import Question
from normllava.diagnostics.recording import record_questions
from normllava.diagnostics.scaling import DOSES, UNCHANGED_DOSE, scaled
from normllava.diagnostics.table import COLUMNS, make_rows
from normllava.hooks import InterfaceHooks
from normllava.inputs import eval_mode, prepare_inputs
from normllava.norms import token_norms
from normllava.parts import image_token_id
from normllava.tokens import Tokens


logger = logging.getLogger(__name__)

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
    """

    picture: int
    measure: str
    value: float
    dose: float


class Entrance(NamedTuple):
    """Mean norms over a picture's tokens in the decoder's first layer, of the model as it is.

    Attributes:
        image: Norm of the image tokens that enter the layer.
        text: Norm of the text tokens that enter the layer.
        attention_update: Norm of what attention adds to image tokens; `None` if no norm module stands before the MLP,
            where it can't be told apart from what the MLP adds.
        mlp_update: Norm of what the MLP adds to image tokens; `None` as `attention_update` is.
    """

    image: float
    text: float
    attention_update: float | None
    mlp_update: float | None


@torch.no_grad()
def sweep_model(model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str) -> pd.DataFrame:
    """Rows of a model at each dose, with the columns of [`~.table`] and one more, `dose`.

    The rows of [`entrance_rows`] are of dose 1.

    Raises:
        DiagnosticsError: if the model's answers can't be scored.
    """
    with eval_mode(model):
        started = time.perf_counter()
        entrances = measure_entrances(model, processor, questions, name)
        seconds = time.perf_counter() - started

        doses = choose_doses(entrances)
        log_duration(name, len(questions), len(doses), seconds)
        measured: list[MeasuredValue] = []
        for number in tqdm(range(len(questions)), desc=f"{name}: answers", unit="picture"):
            measured += ask_question(model, processor, questions, number, doses)

    answers = pd.DataFrame(measured, columns=MeasuredValue._fields).assign(modality="", layer=pd.NA)
    rows = pd.concat([answers, entrance_rows(model, entrances)], ignore_index=True)[[*COLUMNS, "dose"]]
    return rows.astype({"layer": "Int64", "picture": "Int64"})


def choose_doses(entrances: Sequence[Entrance]) -> list[float]:
    """The doses of a sweep: `DOSES`, and last the dose that gives image tokens the norm of text tokens.

    The last is left out if it is within a tenth of another dose.
    """
    image_norm = np.mean([entrance.image for entrance in entrances])
    text_norm = np.mean([entrance.text for entrance in entrances])
    dose_of_text = float(text_norm / image_norm)
    if any(abs(dose_of_text / dose - 1) < 0.1 for dose in DOSES):
        return list(DOSES)
    return [*DOSES, dose_of_text]


def log_duration(name: str, num_pictures: int, num_doses: int, seconds: float) -> None:
    """Log about how long a sweep will take.

    Args:
        name: Name of the model.
        num_pictures: Number of pictures.
        num_doses: Number of doses.
        seconds: Duration of one pass over all pictures.
    """
    # The model reads the prompt once at each dose. The greedy answer takes about four more passes.
    passes = num_doses + 4
    # Scoring the answers adds about half of the time that these passes take.
    minutes = 1.5 * passes * seconds / 60
    logger.info("%s: %d passes for each of %d pictures: %.1f minutes", name, passes, num_pictures, minutes)


def measure_entrances(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str
) -> list[Entrance]:
    """What enters the decoder's first layer for each question, and what the layer adds to it."""
    entrances = []
    for question in tqdm(questions, desc=f"{name}: first layer", unit="picture"):
        states_by_place: dict[str, torch.Tensor] = {}
        # The record tells image tokens from sinks, which don't count.
        with InterfaceHooks(model, states_by_place.__setitem__):
            (record,) = record_questions(model, processor, [question], layers=[], title="")
        entrances.append(measure_entrance(states_by_place, record.tokens))
    return entrances


def measure_entrance(states_by_place: dict[str, torch.Tensor], tokens: Tokens) -> Entrance:
    """The norms of one sample. `states_by_place` are its hidden states at each place that [`InterfaceHooks`] names."""
    layer_input = states_by_place["decoder"][0].float()  # [num_tokens, hidden_size]
    image = mean_norm(layer_input[tokens.image])
    text = mean_norm(layer_input[tokens.text])
    if "before_mlp" not in states_by_place:
        return Entrance(image, text, None, None)

    before_mlp = states_by_place["before_mlp"][0].float()
    after_mlp = states_by_place["after_mlp"][0].float()
    attention_update = mean_norm((before_mlp - layer_input)[tokens.image])
    mlp_update = mean_norm((after_mlp - before_mlp)[tokens.image])
    return Entrance(image, text, attention_update, mlp_update)


def mean_norm(states: torch.Tensor) -> float:
    """Mean L2 norm of hidden states `(num_tokens, hidden_size)`."""
    return token_norms(states).mean().item()


def entrance_rows(model: PreTrainedModel, entrances: Sequence[Entrance]) -> pd.DataFrame:
    """Rows of what [`Entrance`] holds, and of the measure `eps`, as multiples of the mean norm of text tokens.

    - `length`: norm of the image tokens that enter the first layer
    - `attention_update`, `mlp_update`: norms of what attention and MLP add to them; without rows if they aren't known
    - `eps`: norm of a token whose mean square is as large as the eps of the decoder's RMSNorm
    """
    config = model.config.get_text_config()
    eps = getattr(config, "rms_norm_eps", 0)  # 0 for a decoder without RMSNorm
    table = pd.DataFrame(entrances).rename(columns={"image": "length"}).dropna(axis="columns", how="all")
    text_norm = table.pop("text").mean()
    table["eps"] = (config.hidden_size * eps) ** 0.5
    rows = [make_rows(measure, table[measure].to_numpy() / text_norm) for measure in table]
    return pd.concat(rows).assign(dose=UNCHANGED_DOSE)


def ask_question(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], number: int, doses: Sequence[float]
) -> list[MeasuredValue]:
    """Scores of the answers to one question at each dose.

    Each score comes with a second value, whose name ends in `_change`: the score minus the score at dose 1. `guessing`
    is what a model gets that always gives the question's commonest answer.

    Args:
        model: The model.
        processor: The model's processor.
        questions: All questions.
        number: Index of the question to ask.
        doses: The doses, of which the first is 1.
    """
    question = questions[number]
    choices = find_choices(processor, questions, question)
    scores_by_dose = score_answers(model, processor, question, choices, doses)

    measured = []
    if choices.can_be_ranked:
        measured.append(MeasuredValue(number, "guessing", choices.commonest, UNCHANGED_DOSE))
    scores_as_it_is = scores_by_dose[0]
    for dose, scores in zip(doses, scores_by_dose, strict=True):
        for measure, value in scores.items():
            measured.append(MeasuredValue(number, measure, value, dose))
            measured.append(MeasuredValue(number, f"{measure}_change", value - scores_as_it_is[measure], dose))
    return measured


class Choices(NamedTuple):
    """The answers that a model can choose from, each as a list of token ids.

    Attributes:
        answers: All different answers that the data gives to the same question about any picture, the right one too.
        right: The right answer, which is the question's own; empty if the question has no answer.
        commonest: The share that the commonest answer has in the rows that ask the same question; 0 without answers.
    """

    answers: list[list[int]]
    right: list[int]
    commonest: float

    @property
    def can_be_ranked(self) -> bool:
        """Whether the right answer is known, and there are others."""
        return bool(self.right) and len(self.answers) > 1


def find_choices(processor: Any, questions: Sequence[Question], question: Question) -> Choices:
    """The right answer to a question, and all answers that the data gives to the same question about any picture."""
    counts: Counter[str] = Counter()
    for other in questions:
        asks_the_same = other.roles_and_texts == question.roles_and_texts
        if asks_the_same and other.answer:
            counts[other.answer] += 1

    ids_by_text = {text: answer_ids(processor, question.prompt, text) for text in sorted(counts)}
    right = ids_by_text.get(question.answer, [])  # an empty answer is not in the dictionary
    commonest = max(counts.values()) / counts.total() if counts else 0.0
    return Choices(list(ids_by_text.values()), right, commonest)


def score_answers(
    model: PreTrainedModel, processor: Any, question: Question, choices: Choices, doses: Sequence[float]
) -> list[Scores]:
    """Scores of the answers to a question, at each dose.

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
        likeliest_tokens = log_probs_by_answer[0].argmax(dim=-1).tolist()
        scores = {"changed": float(likeliest_tokens != greedy_answer)}
        if choices.right:
            scores["loss"] = mean_loss(log_probs_by_answer[1], choices.right)
        if choices.can_be_ranked:
            (chosen_index,) = likeliest(model, prompt_state, choices.answers)
            scores["named"] = float(choices.answers[chosen_index] == choices.right)
        scores_by_dose.append(scores)
    return scores_by_dose


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
