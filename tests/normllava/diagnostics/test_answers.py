"""Tests of finding the likeliest of a list of answers, and of an answer's token ids."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel

from families import build, inputs
from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.diagnostics.answers import (
    CHUNK_SIZE,
    answer_ids,
    cache_argument,
    distributions,
    encode_prompts,
    likeliest,
    make_prompt,
    read_prompt,
)
from normllava.parts import DiagnosticsError


# Each letter is a token, so many of these answers begin with the same tokens.
ANSWERS = ["a", "ab", "abc", "b", "bbbb", "cat", "car", "cart", "dog", "do", "zebra", "zoo", "x", "xy", "no", "nod"]


@torch.no_grad()
def score_in_one_pass(model: PreTrainedModel, inputs: Any, answer: list[int]) -> float:
    """Log-probability of an answer after a prompt, from one pass over both."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
    logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0].double()  # [length, vocab_size]
    log_probabilities = logits.log_softmax(dim=-1)

    # The model predicts each token at the position before it.
    answer_start = len(ids[0]) - len(answer)
    score = 0.0
    for position, token in enumerate(answer, start=answer_start):
        score += log_probabilities[position - 1, token].item()
    return score


@pytest.mark.parametrize(
    "logit_factor",
    [
        pytest.param(1.0, id="flat distribution, every answer has to be scored"),
        pytest.param(40.0, id="sharp distribution, not every answer has to be scored"),
    ],
)
def test_no_answer_is_likelier_than_the_likeliest(
    make_model_folder: Callable[..., Path], picture: Image.Image, logit_factor: float
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    with torch.no_grad():
        model.lm_head.weight *= logit_factor

    assert len(ANSWERS) > CHUNK_SIZE  # otherwise all answers are scored at once
    answers = []
    for answer in ANSWERS:
        answers.append(processor.tokenizer(f"{answer}<|im_end|>", add_special_tokens=False).input_ids)

    for question in ("What is this?", "Why?", "Name it.", "b", "zzz"):
        inputs = encode_prompts(processor, [make_prompt(question, picture)])
        (best,) = likeliest(model, read_prompt(model, inputs), answers)
        scores = [score_in_one_pass(model, inputs, answer) for answer in answers]
        assert scores[best] == pytest.approx(max(scores), abs=1e-4)


def test_prompts_of_one_length_each_get_their_own_likeliest_answer(
    make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    # With larger outputs of attention, what follows a token depends on the prompt.
    with torch.no_grad():
        model.lm_head.weight *= 80.0
        for layer in model.model.language_model.layers:
            layer.self_attn.o_proj.weight *= 100.0
    questions = ("Why?", "How?", "Who?", "Say.", "Tell", "zzzz")
    prompts = [make_prompt(question, picture) for question in questions]

    # Many answers begin with the same token, so that the tokens after it decide. With such sharp distributions, the
    # search ends sooner for some prompts than for others.
    answers = [[number % 3, number, number + 1] for number in range(60)]
    answers += [[30 + number % 20, number] for number in range(60)]
    together = likeliest(model, read_prompt(model, encode_prompts(processor, prompts)), answers)
    alone = []
    for prompt in prompts:
        state = read_prompt(model, encode_prompts(processor, [prompt]))
        scores = []
        for answer, log_probabilities in zip(answers, distributions(model, state, answers), strict=True):
            scores.append(log_probabilities[range(len(answer)), answer].sum().item())
        alone.append(scores.index(max(scores)))
    assert together == alone
    assert len(set(alone)) > 1  # otherwise one prompt could be taken for another


def test_answers_of_a_model_that_overflows_are_not_scored(
    make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    """Every comparison with NaN is false, so the first answer of the list would be the likeliest."""
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    with torch.no_grad():
        model.lm_head.weight *= torch.inf
    with pytest.raises(DiagnosticsError, match=r"overflows in torch.float32, so answers can't be scored"):
        read_prompt(model, encode_prompts(processor, [make_prompt("Why?", picture)]))


def test_prompts_of_different_lengths_are_not_read_together(
    make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()
    processor = AutoProcessor.from_pretrained(make_model_folder())
    prompts = [make_prompt("Why?", picture), make_prompt("What is this?", picture)]
    with pytest.raises(DiagnosticsError, match="Prompts of different lengths can't be read together"):
        read_prompt(model, encode_prompts(processor, prompts))


def test_prompts_of_a_decoder_with_offsets_of_positions_are_not_read_together() -> None:
    prompt = inputs("qwen2_vl")
    prompts = {name: torch.cat([value, value]) for name, value in prompt.items()}
    with pytest.raises(DiagnosticsError, match="positions have three axes"):
        read_prompt(build("qwen2_vl"), prompts)


def make_template(before_text: str = "", get_text: str = "message.content[-1].text", end_of_turn: str = "") -> str:
    """A chat template that writes a turn as its role, `before_text`, its text and `end_of_turn`.

    With the defaults, a question is written as "<user>What?". `get_text` is the Jinja expression for a turn's text.
    """
    turn = "<{{ message.role }}>" + before_text + "{{ " + get_text + " }}" + end_of_turn
    turns = "{% for message in messages %}" + turn + "{% endfor %}"
    return turns + "{% if add_generation_prompt %}<assistant>{% endif %}"


class NewModel(torch.nn.Module):
    """A model whose argument for the cache has the new name, as in transformers' own models."""

    def forward(self, input_ids: Any = None, cache: Any = None) -> None:
        """Does nothing."""


class OldModel(torch.nn.Module):
    """A model whose argument for the cache has the old name, as in models of older versions of transformers."""

    def forward(self, input_ids: Any = None, past_key_values: Any = None) -> None:
        """Does nothing."""


@pytest.mark.parametrize(("model", "name"), [(NewModel(), "cache"), (OldModel(), "past_key_values")])
def test_the_name_of_a_models_cache_argument_is_found(model: Any, name: str) -> None:
    assert cache_argument(model) == name


def test_no_deprecated_argument_is_used(
    model: NormLlavaForConditionalGeneration, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    inputs = encode_prompts(AutoProcessor.from_pretrained(make_model_folder()), [make_prompt("What?", picture)])
    answer = [1, 2, 3]  # any token ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distributions(model, read_prompt(model, inputs), [answer])


# Both <|im_end|> and <|im_start|> are special tokens of the tokenizer. <|im_end|> is its end token.
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        pytest.param(
            make_template(end_of_turn="<|im_start|>\n"),
            "cat<|im_start|>",
            id="another special token ends the turn, as in Gemma and Phi-3",
        ),
        pytest.param(
            make_template(end_of_turn="<|im_start|>\n<|im_end|>"),
            "cat<|im_start|>",
            id="the first of two special tokens ends the turn",
        ),
        pytest.param(
            make_template(before_text=" ", end_of_turn="<|im_end|>"),
            " cat<|im_end|>",
            id="a space before the answer belongs to it, as in SmolVLM",
        ),
        pytest.param(
            make_template(end_of_turn="<\\s> "),  # plain text for this tokenizer
            "cat<|im_end|>",
            id="no special token ends the turn, as in LLaVA-1.6 with Mistral",
        ),
        pytest.param(
            make_template(before_text=" And ", end_of_turn="<|im_start|>"),
            "cat<|im_end|>",
            id="the template changes the answer",
        ),
        pytest.param(
            # For an answer, this adds a string to a list, which fails in Jinja as in Python.
            make_template(get_text="(message.content if message.role == 'user' else message.content + '') | string"),
            "cat<|im_end|>",
            id="the template fails, because the answer's content is a list",
        ),
    ],
)
def test_an_answer_has_the_token_ids_that_the_template_writes(
    template: str, expected: str, make_model_folder: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder())
    processor.chat_template = template
    ids = answer_ids(processor, make_prompt("What?", picture), "cat")
    assert processor.tokenizer.decode(ids) == expected
