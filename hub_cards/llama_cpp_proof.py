"""Ask llama.cpp and transformers the same about the same pictures, and compare every token of their answers.

llama.cpp is asked as a user would ask it: by a chat request to its server, which runs in this process (xllamacpp).
"""

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoProcessor, LlavaForConditionalGeneration

from normllava.diagnostics.answers import GREEDY, make_prompt
from normllava.errors import UserError


MAX_NEW_TOKENS = 16
# How far the log-probabilities of a token may be apart in float32. Another token is a difference only where the first
# is likelier than the second by more than this.
TOLERANCE = 0.02
QUESTIONS = ("What is in the picture?", "Describe it.")
# The shapes of the made-up pictures, in multiples of the encoder's size.
SHAPES = ((1, 1), (1, 1), (1, 1), (1, 1), (2, 1), (1, 2), (3, 1), (1, 3))


@dataclass(frozen=True)
class Question:
    """A picture with a question."""

    name: str
    """Names the picture in the table."""
    picture: Image.Image
    text: str


@dataclass(frozen=True)
class Answer:
    """A greedy answer."""

    num_prompt_tokens: int
    token_ids: list[int]
    """Without the token that ends it."""
    log_probabilities: list[float]
    """Of each of these tokens."""
    margins: list[float]
    """By how much the log-probability of each token, and of what follows the last, is above that of the second
    likeliest; empty if not known."""

    def up_to(self, length: int) -> "Answer":
        """The beginning of the answer, of this many tokens."""
        return Answer(
            num_prompt_tokens=self.num_prompt_tokens,
            token_ids=self.token_ids[:length],
            log_probabilities=self.log_probabilities[:length],
            margins=self.margins[: length + 1],
        )


@dataclass(frozen=True)
class Comparison:
    """The answers of both to one question."""

    question: Question
    here: Answer
    """transformers' answer."""
    there: Answer
    """llama.cpp's answer."""
    largest_difference: float
    """The largest difference of the log-probabilities of a token, before the first that only one answer has."""
    has_same_tokens: bool
    """Whether both answers have the same tokens, up to the first tie."""
    problem: str | None
    """Why the two are not equal; `None` if they are."""

    @property
    def has_same_prompt(self) -> bool:
        """Whether both prompts have the same number of tokens."""
        return self.here.num_prompt_tokens == self.there.num_prompt_tokens


def make_questions(size: int, examples: Sequence[tuple[Path, str]] = ()) -> list[Question]:
    """The questions to ask: made-up pictures of square, wide and high shapes, and a release's examples.

    Args:
        size: The side of the pictures that the encoder takes, in pixels.
        examples: A picture's file and a question each.
    """
    rng = np.random.default_rng(0)
    questions = []
    for number, (width, height) in enumerate(SHAPES):
        # Coarse noise, so that there is something to see at any size.
        coarse = rng.integers(0, 256, (4 * height, 4 * width, 3), dtype=np.uint8)
        picture = Image.fromarray(coarse).resize((width * size, height * size), Image.Resampling.NEAREST)
        questions.append(Question(f"noise {width} x {height}", picture, QUESTIONS[number % len(QUESTIONS)]))
    for path, text in examples:
        questions.append(Question(path.name, Image.open(path).convert("RGB"), text))
    return questions


def compare(
    folder: Path, language_model: Path, vision: Path, examples: Sequence[tuple[Path, str]]
) -> list[Comparison]:
    """Compare the answers of two files in llama.cpp with those of the folder they were written from.

    Args:
        folder: The plain Llava's folder.
        language_model: The file with the language model.
        vision: The file with the encoder and the projector.
        examples: Examples of the release, as for [`make_questions`].
    """
    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(folder)
    size = model.config.vision_config.image_size
    questions = []
    for question in make_questions(size, examples):
        # The model was trained on squashed pictures, and llama.cpp would pad them. So they are squashed here.
        squashed = question.picture.resize((size, size), processor.image_processor.resample)
        questions.append(Question(question.name, squashed, question.text))

    answers_there = ask_llama_cpp(language_model, vision, questions)
    comparisons = []
    for question, there in zip(questions, answers_there, strict=True):
        here = ask_transformers(model, processor, question)
        # llama.cpp tells the token that ends an answer too.
        if there.token_ids and there.token_ids[-1] in end_ids(model):
            there = there.up_to(len(there.token_ids) - 1)
        # It leaves tokens that are parts of a character out, and so the answers are compared up to the first of these.
        length = count_whole_characters(here.token_ids, processor.tokenizer)
        if length < len(here.token_ids):
            here = here.up_to(length)
            there = there.up_to(length)
        comparisons.append(compare_answers(question, here, there))
    return comparisons


def end_ids(model: Any) -> list[int]:
    """The ids of the tokens that end an answer."""
    ids = model.generation_config.eos_token_id
    return ids if isinstance(ids, list) else [ids]


def count_whole_characters(token_ids: Sequence[int], tokenizer: Any) -> int:
    """The number of tokens before the first that is only a part of a character."""
    for position, token in enumerate(token_ids):
        if "\ufffd" in tokenizer.decode([token]):
            return position
    return len(token_ids)


@torch.no_grad()
def ask_transformers(model: Any, processor: Any, question: Question) -> Answer:
    """transformers' greedy answer."""
    inputs = processor.apply_chat_template(
        make_prompt(question.text, question.picture),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    num_prompt_tokens = inputs["input_ids"].shape[1]
    generated = model.generate(**inputs, **GREEDY, max_new_tokens=MAX_NEW_TOKENS)
    token_ids = generated[0, num_prompt_tokens:].tolist()
    if token_ids and token_ids[-1] in end_ids(model):
        token_ids.pop()

    whole = torch.cat([inputs["input_ids"], torch.tensor([token_ids], dtype=torch.long)], dim=1)
    logits = model(input_ids=whole, pixel_values=inputs["pixel_values"]).logits[0, num_prompt_tokens - 1 :]
    log_probabilities = logits.float().log_softmax(dim=-1)  # [num_tokens + 1, vocab_size]
    two_likeliest = log_probabilities.topk(2, dim=-1).values
    margins = (two_likeliest[:, 0] - two_likeliest[:, 1]).tolist()
    of_tokens = [log_probabilities[position, token].item() for position, token in enumerate(token_ids)]
    return Answer(num_prompt_tokens, token_ids, of_tokens, margins)


def ask_llama_cpp(language_model: Path, vision: Path, questions: Sequence[Question]) -> list[Answer]:
    """llama.cpp's greedy answers.

    Raises:
        UserError: if llama.cpp can't load the files, or refuses a request.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(language_model)
    params.mmproj.path = str(vision)
    params.n_ctx = 4096
    params.n_parallel = 1
    params.use_jinja = True
    params.warmup = False
    params.verbosity = 0
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as error:
        raise UserError(f"llama.cpp can't load {language_model} with {vision}: {error}") from error
    return [ask_server(server, question) for question in questions]


def ask_server(server: Any, question: Question) -> Answer:
    """The answer of a running server to a question."""
    buffer = io.BytesIO()
    question.picture.save(buffer, "PNG")
    url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": question.text}]
    request = {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": MAX_NEW_TOKENS,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
        "cache_prompt": False,
    }
    response = server.handle_chat_completions(request)
    if not isinstance(response, dict):
        response = json.loads(response)
    if "choices" not in response:
        raise UserError(f"llama.cpp refuses the request about {question.name}: {response}")
    (choice,) = response["choices"]
    tokens = choice["logprobs"]["content"] if choice["logprobs"] else []
    return Answer(
        num_prompt_tokens=response["usage"]["prompt_tokens"],
        token_ids=[token["id"] for token in tokens],
        log_probabilities=[token["logprob"] for token in tokens],
        margins=[],
    )


def compare_answers(question: Question, here: Answer, there: Answer) -> Comparison:
    """Compare the answers of transformers (`here`) and llama.cpp (`there`), token by token."""
    if here.num_prompt_tokens != there.num_prompt_tokens:
        problem = f"the prompt has {here.num_prompt_tokens} tokens, and {there.num_prompt_tokens} in llama.cpp"
        return Comparison(question, here, there, float("nan"), has_same_tokens=False, problem=problem)

    largest = 0.0
    # After the last token both answers must end.
    tokens_here = [*here.token_ids, None]
    tokens_there = [*there.token_ids, None]
    for position, (token_here, token_there) in enumerate(zip(tokens_here, tokens_there, strict=False)):
        if token_here != token_there and here.margins[position] > TOLERANCE:
            problem = f"token {position + 1} is {token_there} and not {token_here}"
            return Comparison(question, here, there, largest, has_same_tokens=False, problem=problem)
        if token_here != token_there or token_here is None:
            break  # after a tie, the answers may go on differently
        difference = abs(here.log_probabilities[position] - there.log_probabilities[position])
        largest = max(largest, difference)

    if largest > TOLERANCE:
        problem = f"log-probabilities are up to {largest:.3f} apart"
        return Comparison(question, here, there, largest, has_same_tokens=True, problem=problem)
    return Comparison(question, here, there, largest, has_same_tokens=True, problem=None)


def describe(comparisons: Sequence[Comparison]) -> str:
    """The table that the command prints, with a line for each question."""
    lines = [f"{'picture':20}{'prompt':>8}{'tokens':>8}{'equal':>7}{'largest difference':>20}"]
    for comparison in comparisons:
        here, there = comparison.here.token_ids, comparison.there.token_ids
        num_equal = sum(a == b for a, b in zip(here, there, strict=False))
        lines.append(
            f"{comparison.question.name:20}{comparison.here.num_prompt_tokens:8}{len(here):8}{num_equal:7}"
            f"{comparison.largest_difference:20.5f}"
        )
    return "\n".join(lines)
