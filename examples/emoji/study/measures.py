"""Measures a model of the study: the names that it gives, its image tokens, and what its layers do with them."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from tqdm import tqdm
from transformers import LlavaForConditionalGeneration, LlavaProcessor

from examples.emoji.evaluate import NAMING_BATCH, open_picture, perplexity
from examples.emoji.parts import RUN
from examples.emoji.pictures import ASK_NAME, Record
from examples.emoji.study.scores import PRIMARY, SECONDARY, is_right
from normllava.conversations.pictures import fingerprint
from normllava.diagnostics.answers import (
    PromptState,
    ScoredAnswer,
    best_answers,
    encode_prompts,
    make_prompt,
    read_prompt,
    score_answers,
)
from normllava.diagnostics.loading import Question
from normllava.diagnostics.measures import measure_attention, measure_layers
from normllava.diagnostics.recording import record_questions
from normllava.norms import text_norm_target, token_norms, vocabulary_norms
from normllava.parts import find_decoder, find_projector_norm
from training.composing.align import embed_captions


MAX_GRAD_NORM = 1.0  # the recipe's; above this norm, the trainer clips the gradient of a module
BATCH_SIZE = 64  # drawings that the vision encoder takes at once
# Of EmojiOne's drawings, the model's layers are measured on every so many.
EVERY_FOR_LAYERS = 6
# A drawing's right name, the name that a model gives it, and the margin (see `name_drawings`).
Answer = tuple[str, str, float]


def read_pictures() -> list[Record]:
    """The list of all drawings, each with its file, its artist (`set`) and its name."""
    return json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))


def drawings_by(artist: str) -> list[Record]:
    """An artist's drawings, in the order of pictures.json, which is the same in every run."""
    return [drawing for drawing in read_pictures() if drawing["set"] == artist]


def all_names() -> list[str]:
    """All names, from which a model chooses."""
    return sorted({drawing["name"] for drawing in read_pictures()})


@torch.no_grad()
def image_tokens(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, drawings: list[Record]
) -> torch.Tensor:
    """Drawings' image tokens where they enter the decoder, `(num_drawings, num_patches, hidden_size)` in float32."""
    tokens = []
    for start in range(0, len(drawings), BATCH_SIZE):
        images = [open_picture(drawing) for drawing in drawings[start : start + BATCH_SIZE]]
        inputs = processor.image_processor(images, return_tensors="pt").to(model.device, model.dtype)
        features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
        tokens.append(torch.stack(list(features)).float())  # `features` has a tensor for each picture
    return torch.cat(tokens)


@torch.no_grad()
def measure_tokens(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> dict[str, Any]:
    """Measure the image tokens of the primary artists' drawings, without running the language model.

    Returns:
        `norm`: the mean L2 norm of image tokens, divided by T, the mean norm of text embeddings.
        `names_by_tokens`: the percentage of drawings whose image tokens point at the right name. A drawing's image
        tokens point at the name whose text embeddings are nearest in direction.
    """
    drawings = []
    for artist in PRIMARY:
        drawings += drawings_by(artist)
    names = all_names()
    tokens = image_tokens(model, processor, drawings)

    # As in training/composing/align.py, the vocabulary's mean embedding is subtracted before directions are compared.
    # This mean is in units of the embeddings' mean norm, so image tokens are scaled to norm 1 first.
    name_directions, mean_embedding = embed_captions(model, processor, names)
    centered_tokens = nn.functional.normalize(tokens, dim=-1) - mean_embedding
    drawing_directions = nn.functional.normalize(centered_tokens.mean(dim=1), dim=-1)  # [num_drawings, hidden_size]
    cosines = drawing_directions @ name_directions.T  # [num_drawings, num_names]
    nearest_names = [names[index] for index in cosines.argmax(dim=-1).tolist()]

    hits = [is_right(name, drawing["name"]) for name, drawing in zip(nearest_names, drawings, strict=True)]
    text_norm = text_norm_target(vocabulary_norms(model))
    return {
        "norm": token_norms(tokens).mean().item() / text_norm,
        "names_by_tokens": 100 * sum(hits) / len(hits),
    }


def measure_model(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> dict[str, Any]:
    """Measure what a model makes of the held-out artists' drawings, and its perplexity.

    Returns:
        `answers`: for each artist, the answers of `name_drawings`.
        `perplexity`: the perplexity of text that no model here is trained on.
        `layers`: what `measure_decoder` returns.
    """
    answers = {}
    for artist in (*PRIMARY, *SECONDARY):
        answers[artist] = name_drawings(model, processor, drawings_by(artist))
    return {
        "answers": answers,
        "perplexity": perplexity(model, processor.tokenizer),
        "layers": measure_decoder(model, processor),
    }


def name_drawings(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, drawings: list[Record]
) -> list[Answer]:
    """Which name a model gives each drawing, and by what margin.

    The given name is the likeliest of all names. The margin is the log-probability of the right name less that of the
    likeliest other name, in nats. It is above 0 if the right name is given.
    """
    names = all_names()
    tokenizer = processor.tokenizer
    answer_ids = tokenizer([f"{name}{tokenizer.eos_token}" for name in names], add_special_tokens=False).input_ids

    answers: list[Answer] = []
    for start in tqdm(range(0, len(drawings), NAMING_BATCH), desc="Naming"):
        batch = drawings[start : start + NAMING_BATCH]
        prompts = [make_prompt(ASK_NAME, open_picture(drawing)) for drawing in batch]
        state = read_prompt(model, encode_prompts(processor, prompts).to(model.device))
        best = best_answers(model, state, answer_ids, num_best=2)

        right_indices = [names.index(drawing["name"]) for drawing in batch]
        margins = right_margins(model, state, answer_ids, right_indices, best)
        for drawing, (first, _), margin in zip(batch, best, margins, strict=True):
            answers.append((drawing["name"], names[first.index], round(margin, 3)))
    return answers


def right_margins(
    model: LlavaForConditionalGeneration,
    state: PromptState,
    answer_ids: list[list[int]],
    right_indices: list[int],
    best: list[list[ScoredAnswer]],
) -> list[float]:
    """For each prompt, the score of the right answer less that of the likeliest other answer.

    Args:
        model: The model.
        state: What the model has read of the prompts.
        answer_ids: Token ids of all answers.
        right_indices: For each prompt, the index of the right answer.
        best: For each prompt, the two answers with the highest scores.
    """
    prompts = list(range(len(right_indices)))
    right_scores = score_answers(model, state, prompts, [answer_ids[index] for index in right_indices])

    margins = []
    for right_index, right_score, (first, second) in zip(right_indices, right_scores, best, strict=True):
        other = second if first.index == right_index else first
        margins.append(right_score - other.score)
    return margins


def measure_decoder(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> dict[str, Any]:
    """What each layer of the decoder does with some of EmojiOne's drawings, as means over the drawings.

    Returns:
        `turning`: by modality, how far each layer turns its tokens: 1 less the cosine of its input and output.
        `attention`: for each layer, the share of the text's attention that goes to image tokens.
    """
    questions = []
    for drawing in drawings_by("emojione")[::EVERY_FOR_LAYERS]:
        image = open_picture(drawing)
        prompt = make_prompt(ASK_NAME, image)
        questions.append(Question(drawing["image"], fingerprint([image]), prompt))
    layers = range(len(find_decoder(model).layers))
    records = record_questions(model, processor, questions, layers, title="Layers")

    def by_layer(rows: pd.DataFrame) -> list[float]:
        """The means over pictures, in the order of the layers."""
        means = rows.groupby("layer")["value"].mean()
        return [round(float(mean), 4) for mean in means]

    turning = measure_layers(records).query("measure == 'turning'")
    attention = measure_attention(records)
    assert attention is not None  # attention is None only for decoders whose attention can't be recorded
    return {
        "turning": {modality: by_layer(rows) for modality, rows in turning.groupby("modality")},
        "attention": by_layer(attention.query("measure == 'attention'")),
    }


def measure_gain(model: Any) -> float | None:
    """How much the gain (the weight) of the LayerNorm behind the projector has grown in training.

    Returns:
        The mean gain divided by the gain at the start; `None` if the model has no such LayerNorm.
    """
    norm = find_projector_norm(model)
    if norm is None:
        return None
    # With this gain, the LayerNorm's outputs have the norm T.
    gain_at_start = model.config.projector_norm_target / model.config.text_config.hidden_size**0.5
    return norm.weight.mean().item() / gain_at_start


def read_training(folder: Path) -> dict[str, Any]:
    """Read what the trainer logged.

    Args:
        folder: Folder of the trained model.

    Returns:
        `losses`: the loss of each logged step.
        `clipped`: for each module, the percentage of logged steps in which its gradient was clipped.
    """
    lines = pd.read_json(folder / "metrics.jsonl", lines=True)
    if "loss" not in lines:  # the run failed before it logged a step
        return {"losses": [], "clipped": {}}
    steps = lines.dropna(subset="loss")  # the other lines are no training steps
    clipped = {}
    for column in steps.columns:
        if column.startswith("grad_norm/"):
            module = column.removeprefix("grad_norm/")
            is_clipped = steps[column] > MAX_GRAD_NORM
            clipped[module] = 100 * float(is_clipped.mean())
    return {"losses": steps["loss"].tolist(), "clipped": clipped}
