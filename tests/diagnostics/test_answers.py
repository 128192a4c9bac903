"""The likeliest of a list of answers, beside scoring each of them in full."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from diagnostics.answers import CHUNK_SIZE, answer_ids, encode_prompts, likeliest, make_prompt, read_prompt
from modeling_normllava import NormLlavaForConditionalGeneration


@pytest.mark.parametrize("sharpness", [1.0, 40.0])
def test_likeliest_is_exact(composed: Callable[..., Path], picture: Image.Image, sharpness: float) -> None:
    """A flat model has to score every answer, and a sharp one stops early."""
    model = NormLlavaForConditionalGeneration.from_pretrained(composed()).eval()
    processor = AutoProcessor.from_pretrained(composed())
    with torch.no_grad():
        model.lm_head.weight *= sharpness
    words = ["a", "ab", "abc", "b", "bbbb", "cat", "car", "cart", "dog", "do", "zebra", "zoo", "x", "xy", "no", "nod"]
    assert len(words) > CHUNK_SIZE
    answers = [processor.tokenizer(f"{word}<|im_end|>", add_special_tokens=False).input_ids for word in words]
    found = []
    for question in ("What is this?", "Why?", "Name it.", "b", "zzz"):
        inputs = encode_prompts(processor, [make_prompt(question, picture)])
        found.append(likeliest(model, read_prompt(model, inputs), answers))
        scores = []
        for tokens in answers:
            ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], dim=1)
            with torch.no_grad():
                logits = model(input_ids=ids, pixel_values=inputs["pixel_values"]).logits[0].double()
            following = logits.log_softmax(-1)[-len(tokens) - 1 : -1]
            scores.append(sum(row[token].item() for row, token in zip(following, tokens, strict=True)))
        best = max(range(len(words)), key=scores.__getitem__)
        assert scores[found[-1]] == pytest.approx(scores[best], abs=1e-4)


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content[-1].text }}END{% endfor %}"
PROMPTED = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("template", "written"),
    [
        (TURNS.replace("END", "<|im_start|>\n"), "cat<|im_start|>"),  # Gemma's turns end otherwise than its texts
        (TURNS.replace(">{{ m.c", "> {{ m.c").replace("END", "<|im_end|>"), " cat<|im_end|>"),  # SmolVLM
        (TURNS.replace("END", "<|im_start|>\n<|im_end|>"), "cat<|im_start|>"),  # Phi-3
        (TURNS.replace("END", "<\\s> "), "cat<|im_end|>"),  # LLaVA-1.6 with Mistral: no token
        (TURNS.replace(">{{ m.c", "> And {{ m.c").replace("END", "<|im_start|>"), "cat<|im_end|>"),
        (TURNS.replace("m.content[-1].text", "(m.content if m.role == 'user' else m.content + '') | string"),
         "cat<|im_end|>"),  # takes no list
    ],
)  # fmt: skip
def test_answers_as_templates_write_them(
    template: str, written: str, composed: Callable[..., Path], picture: Image.Image
) -> None:
    processor = AutoProcessor.from_pretrained(composed())
    processor.chat_template = template + PROMPTED
    assert processor.tokenizer.decode(answer_ids(processor, make_prompt("What?", picture), "cat")) == written
