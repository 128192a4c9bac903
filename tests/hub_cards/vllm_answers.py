"""Ask vLLM and transformers the same questions about a released model, and write their greedy answers as JSON.

This script runs in vLLM's own environment:

python -I vllm_answers.py FOLDER ANSWERS IMPLEMENTATION

IMPLEMENTATION is vLLM's `model_impl`: "transformers" for its Transformers backend, which runs the folder's code, or
"vllm" for vLLM's own model class, which doesn't.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from vllm import LLM, SamplingParams


# Number of tokens in each answer.
NUM_TOKENS = 8


def main() -> None:
    """Ask vLLM and transformers, and write their answers."""
    folder, answers_file, implementation = sys.argv[1:]
    runs_code = implementation == "transformers"
    processor = AutoProcessor.from_pretrained(folder, trust_remote_code=runs_code)
    model = AutoModelForImageTextToText.from_pretrained(folder, trust_remote_code=runs_code).eval()
    prompts = make_prompts(processor)
    answers = {
        "transformers": [ask_transformers(model, processor, prompt) for prompt in prompts],
        "vllm": ask_vllm(folder, implementation, prompts),
    }
    Path(answers_file).write_text(json.dumps(answers))


def make_prompts(processor: Any) -> list[dict[str, Any]]:
    """A prompt with a picture, and a prompt without a picture, in vLLM's form."""
    # Twice as wide as high: a processor that cuts tiles makes two tiles of the picture, and the thumbnail.
    picture = Image.linear_gradient("L").convert("RGB").resize((56, 28))
    picture_chat = format_chat(processor, [{"type": "image"}, {"type": "text", "text": "what is it?"}])
    text_chat = format_chat(processor, [{"type": "text", "text": "who are you?"}])
    return [
        {"prompt": picture_chat, "multi_modal_data": {"image": picture}},
        {"prompt": text_chat, "multi_modal_data": {}},
    ]


def format_chat(processor: Any, content: list[dict[str, str]]) -> str:
    """The text of a chat with one user message of this content. The assistant is next."""
    messages = [{"role": "user", "content": content}]
    return processor.apply_chat_template(messages, add_generation_prompt=True)


def ask_transformers(model: Any, processor: Any, prompt: dict[str, Any]) -> dict[str, list[Any]]:
    """The tokens of transformers' answer, and their log-probabilities."""
    picture = prompt["multi_modal_data"].get("image")
    inputs = processor(text=prompt["prompt"], images=picture, return_tensors="pt")
    generated = model.generate(
        **inputs,
        max_new_tokens=NUM_TOKENS,
        do_sample=False,
        output_scores=True,
        return_dict_in_generate=True,
    )
    num_prompt_tokens = inputs["input_ids"].shape[1]
    tokens = generated.sequences[0, num_prompt_tokens:]  # [NUM_TOKENS]

    all_log_probabilities = torch.cat(generated.scores).log_softmax(-1)  # [NUM_TOKENS, vocab_size]
    positions = torch.arange(len(tokens))
    log_probabilities = all_log_probabilities[positions, tokens]  # [NUM_TOKENS]
    return {"tokens": tokens.tolist(), "log_probabilities": log_probabilities.tolist()}


def ask_vllm(folder: str, implementation: str, prompts: list[dict[str, Any]]) -> list[dict[str, list[Any]]]:
    """The tokens of vLLM's answers, and their log-probabilities."""
    engine = LLM(
        model=folder,
        model_impl=implementation,
        trust_remote_code=implementation == "transformers",
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2**26,  # 64 MiB, more than 256 tokens of a model with 30 layers take
    )
    # logprobs=0 asks for the log-probability of each generated token, and of no other token.
    options = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=0)

    answers = []
    for request in engine.generate(prompts, options):
        completion = request.outputs[0]
        log_probabilities = []
        for token, logprobs_by_token in zip(completion.token_ids, completion.logprobs, strict=True):
            log_probabilities.append(logprobs_by_token[token].logprob)
        answers.append({"tokens": list(completion.token_ids), "log_probabilities": log_probabilities})
    return answers


# vLLM's workers import this file, and must not run it.
if __name__ == "__main__":
    main()
