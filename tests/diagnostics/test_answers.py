"""The likeliest of a list of answers, compared with scoring each answer in full; and the token ids of an answer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor, PreTrainedModel

from diagnostics.answers import CHUNK_SIZE, answer_ids, encode_prompts, likeliest, make_prompt, read_prompt
from modeling_normllava import NormLlavaForConditionalGeneration


@torch.no_grad()
def score_in_one_pass(model: PreTrainedModel, inputs: Any, answer: list[int]) -> float:
    """Log-probability of an answer after a prompt, from one pass over both."""
    ids = torch.cat([inputs["input_ids"], torch.tensor([answer])], dim=1)
    logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0].double()
    # A token's probability is computed at the position before it.
    at_answer = logits.log_softmax(dim=-1)[-len(answer) - 1 : -1]
    return at_answer[range(len(answer)), answer].sum().item()


@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_likeliest_is_exact(composed: Callable[..., Path], picture: Image.Image, sharpness: float) -> None:
    """With a flat distribution every answer has to be scored; with a sharp one the search ends early."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    with torch.no_grad():
        model.lm_head.weight *= sharpness

    words = ["a", "ab", "abc", "b", "bbbb", "cat", "car", "cart", "dog", "do", "zebra", "zoo", "x", "xy", "no", "nod"]
    assert len(words) > CHUNK_SIZE
    answers = [processor.tokenizer(f"{word}<|im_end|>", add_special_tokens=False).input_ids for word in words]
    for question in ("What is this?", "Why?", "Name it.", "b", "zzz"):
        inputs = encode_prompts(processor, [make_prompt(question, picture)])
        best = likeliest(model, read_prompt(model, inputs), answers)
        scores = [score_in_one_pass(model, inputs, answer) for answer in answers]
        assert scores[best] == pytest.approx(max(scores), abs=1e-4)


def chat_template(before_text: str = "", text: str = "message.content[-1].text", end: str = "") -> str:
    """A chat template whose turns are like "<user>What?", with more before the text and at the end of the turn."""
    turn = "<{{ message.role }}>" + before_text + "{{ " + text + " }}" + end
    turns = "{% for message in messages %}" + turn + "{% endfor %}"
    return turns + "{% if add_generation_prompt %}<assistant>{% endif %}"


# The tokenizer has two special tokens, <|im_start|> and its end token <|im_end|>.
@pytest.mark.parametrize(
    ("template", "answer_text"),
    [
        # The first special token after the answer ends the turn, as in Gemma and Phi-3.
        (chat_template(end="<|im_start|>\n"), "cat<|im_start|>"),
        (chat_template(end="<|im_start|>\n<|im_end|>"), "cat<|im_start|>"),
        # Space that the template puts before the answer belongs to it, as in SmolVLM.
        (chat_template(before_text=" ", end="<|im_end|>"), " cat<|im_end|>"),
        # Without a special token at the end, as in LLaVA-1.6 with Mistral, the tokenizer's own ends the answer.
        (chat_template(end="<\\s> "), "cat<|im_end|>"),
        # The same if the template changes the answer, or fails because it takes no lists of parts.
        (chat_template(before_text=" And ", end="<|im_start|>"), "cat<|im_end|>"),
        (
            chat_template(text="(message.content if message.role == 'user' else message.content + '') | string"),
            "cat<|im_end|>",
        ),
    ],
)
def test_answers_as_templates_write_them(
    template: str, answer_text: str, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    processor.chat_template = template
    ids = answer_ids(processor, make_prompt("What?", picture), "cat")
    assert processor.tokenizer.decode(ids) == answer_text
