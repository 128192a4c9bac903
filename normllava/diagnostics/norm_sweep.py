"""Sweeps the norm of a model's image tokens, and scores the model's answers at each norm.

Image tokens are multiplied where they enter the decoder, by several factors in turn. These factors are called doses.
Nothing else changes, so any change of the answers comes from the norm of the image tokens. The rows are written to
`sweep.csv`.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from normllava.diagnostics.answers import GREEDY, answer_ids, distributions, likeliest, read_prompt
from normllava.diagnostics.loading import Question
from normllava.diagnostics.scaling import DOSES, UNCHANGED_DOSE, scaled
from normllava.diagnostics.table import COLUMNS, make_rows
from normllava.inputs import eval_mode, prepare_inputs
from normllava.parts import image_token_id


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


def require_scored_answers(model: PreTrainedModel, processor: Any, question: Question) -> None:
    """Ask one question, to find out before a long measurement whether the model's answers can be scored.

    Raises:
        DiagnosticsError: if they can't.
    """
    with eval_mode(model), torch.no_grad():
        prompt_state = read_prompt(model, prepare_inputs(model, processor, question.prompt))
        any_token = 0
        distributions(model, prompt_state, [[any_token]])


@torch.no_grad()
def sweep_model(
    model: PreTrainedModel, processor: Any, questions: Sequence[Question], name: str, measured_rows: pd.DataFrame
) -> pd.DataFrame:
    """Rows of a model at each dose, with the columns of [`~.table`] and one more, `dose`.

    The rows of dose 1 also have the measure `length`: the norm of the image tokens that enter the decoder, over the
    mean norm of text tokens.

    Args:
        model: The model.
        processor: The model's processor.
        questions: What the model is asked.
        name: Name of the model.
        measured_rows: The rows of all measures, of the model as it is and the same questions.
    """
    norms = measured_rows.query("measure == 'at_decoder'").pivot(index="picture", columns="modality", values="value")
    image_norms = norms["image"] / norms["text"].mean()
    doses = choose_doses(float(image_norms.mean()))

    measured: list[MeasuredValue] = []
    with eval_mode(model):
        for number in tqdm(range(len(questions)), desc=f"{name}: answers", unit="picture"):
            measured += ask_question(model, processor, questions, number, doses)

    answers = pd.DataFrame(measured, columns=MeasuredValue._fields).assign(modality="", layer=pd.NA)
    lengths = make_rows("length", image_norms.to_numpy()).assign(dose=UNCHANGED_DOSE)
    rows = pd.concat([answers, lengths], ignore_index=True)[[*COLUMNS, "dose"]]
    return rows.astype({"layer": "Int64", "picture": "Int64"})


def choose_doses(image_norm: float) -> list[float]:
    """The doses of a sweep: `DOSES`, and last the dose that gives image tokens the norm of text tokens.

    The last is left out if it is within a tenth of another dose.

    Args:
        image_norm: Mean norm of image tokens, over that of text tokens.
    """
    dose_of_text = 1 / image_norm
    if any(abs(dose_of_text / dose - 1) < 0.1 for dose in DOSES):
        return list(DOSES)
    return [*DOSES, dose_of_text]


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

    - `changed`: 1 if the greedy answer differs from that of the model as it is, otherwise 0. The first dose, which is
      1, tells what the model as it is says: in bfloat16 its greedy tokens, which were generated one by one, can differ
    - `loss`: mean loss of the right answer's tokens; only if the right answer is known
    - `named`: 1 if the model finds the right answer likelier than all other choices, otherwise 0; only if there are
      other choices
    """
    inputs = prepare_inputs(model, processor, question.prompt)
    is_image_token = inputs["input_ids"][0] == image_token_id(model)

    prompt_length = len(is_image_token)
    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    greedy_answer = generated[0, prompt_length:].tolist()

    scores_by_dose: list[Scores] = []
    tokens_as_it_is: list[int] = []
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
        if not scores_by_dose:
            tokens_as_it_is = likeliest_tokens
        scores = {"changed": float(likeliest_tokens != tokens_as_it_is)}
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
