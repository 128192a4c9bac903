"""Greedy answers of a released folder by vLLM and by transformers, as JSON; run in vLLM's own environment.

python -I vllm_answers.py FOLDER ANSWERS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm import LLM, SamplingParams


TOKENS = 8


def read_prompts(processor: Any) -> list[dict[str, Any]]:
    """A prompt with a picture and one without, in vLLM's form."""
    prompts = []
    for picture, question in (Image.linear_gradient("L").convert("RGB"), "what is it?"), (None, "who are you?"):
        content = [{"type": "image"}] * (picture is not None) + [{"type": "text", "text": question}]
        text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
        prompts.append({"prompt": text, "multi_modal_data": {"image": picture} if picture else {}})
    return prompts


def ask_transformers(model: Any, processor: Any, prompt: dict[str, Any]) -> dict[str, list[Any]]:
    picture = prompt["multi_modal_data"].get("image")
    inputs = processor(text=prompt["prompt"], images=picture, return_tensors="pt")
    given = model.generate(
        **inputs, max_new_tokens=TOKENS, do_sample=False, output_scores=True, return_dict_in_generate=True
    )
    tokens = given.sequences[0, inputs["input_ids"].shape[1] :]
    log_probabilities = torch.cat(given.scores).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    return {"tokens": tokens.tolist(), "log_probabilities": log_probabilities.tolist()}


def ask_vllm(folder: str, prompts: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    engine = LLM(
        model=folder,
        model_impl="transformers",
        trust_remote_code=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2**26,  # 256 tokens of a model of 30 layers take 12 MB, in blocks of 128
    )
    answers = []
    for request in engine.generate(prompts, SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=0)):
        given = request.outputs[0]
        log_probabilities = [step[token].logprob for token, step in zip(given.token_ids, given.logprobs, strict=True)]
        answers.append({"tokens": list(given.token_ids), "log_probabilities": log_probabilities})
    return answers


def main() -> None:
    folder, output = sys.argv[1:]
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=True).eval()
    prompts = read_prompts(processor)
    expected = [ask_transformers(model, processor, prompt) for prompt in prompts]
    Path(output).write_text(json.dumps({"transformers": expected, "vllm": ask_vllm(folder, prompts)}))


if __name__ == "__main__":  # vLLM's workers import this file
    main()
