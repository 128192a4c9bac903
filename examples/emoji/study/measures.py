"""What the study measures of a model: right names, norms, and what image tokens alone point at."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn
from transformers import LlavaProcessor

from diagnostics.norms import text_norm_target, token_norms, vocabulary_norms
from examples.emoji.evaluate import name_pictures, open_picture, perplexity
from examples.emoji.parts import RUN
from examples.emoji.study.cells import Record
from modeling_normllava import NormLlavaForConditionalGeneration
from training.align import embed_captions


# The two artists whose drawings decide, and one who is secondary. None is trained on.
PRIMARY = ("twemoji", "emojione")
SECONDARY = ("openmoji",)
BATCH_SIZE = 64
# Names whose drawings nearly agree, among those that are trained on: they count as one.
ONE_NAME = {
    "ram": "ewe",
    "two hump camel": "camel",
    "spouting whale": "whale",
    "nest with eggs": "empty nest",
    "front facing baby chick": "baby chick",
    "guide dog": "dog",
    "service dog": "dog",
}


def read_pictures() -> list[Record]:
    """All drawings of all artists, with their names."""
    return json.loads((RUN / "pictures" / "pictures.json").read_text(encoding="utf-8"))


def drawings_by(artist: str) -> list[Record]:
    """An artist's drawings, in the order of the list, which is the same in every run."""
    return [record for record in read_pictures() if record["set"] == artist]


def all_names() -> list[str]:
    """The names to choose from."""
    return sorted({record["name"] for record in read_pictures()})


def is_right(given: str, record: Record) -> bool:
    """Whether a name is a drawing's, or that of a near copy."""
    wanted = record["name"]
    return ONE_NAME.get(given, given) == ONE_NAME.get(wanted, wanted)


def as_digits(hits: list[bool]) -> str:
    """A digit a drawing, 1 where its name was right."""
    return "".join(str(int(hit)) for hit in hits)


@torch.no_grad()
def image_tokens(
    model: NormLlavaForConditionalGeneration, processor: LlavaProcessor, records: list[Record]
) -> torch.Tensor:
    """The image tokens that enter the decoder, in float32: `(num_drawings, num_patches, hidden_size)`."""
    tokens = []
    for start in range(0, len(records), BATCH_SIZE):
        images = [open_picture(record) for record in records[start : start + BATCH_SIZE]]
        inputs = processor.image_processor(images, return_tensors="pt").to(model.device, model.dtype)
        features = model.model.get_image_features(inputs["pixel_values"]).pooler_output
        tokens.append(torch.stack(list(features)).float())
    return torch.cat(tokens)


@torch.no_grad()
def measure_tokens(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> Record:
    """Of the drawings that decide, the image tokens' norm and the share whose tokens point at their name.

    `norm` is their mean L2 norm over T, the text embeddings' (eq. 11). `names_by_tokens` is in percent: a drawing's
    tokens point at the name whose embeddings they are nearest to in direction, as in the aligned start
    (training/align.py). The language model doesn't run.
    """
    records = [record for artist in PRIMARY for record in drawings_by(artist)]
    names = all_names()
    tokens = image_tokens(model, processor, records)
    target = text_norm_target(vocabulary_norms(model))

    directions, mean = embed_captions(model, processor, names)
    pointing = (nn.functional.normalize(tokens, dim=-1) - mean).mean(dim=1)  # [num_drawings, hidden_size]
    nearest = (nn.functional.normalize(pointing, dim=-1) @ directions.T).argmax(dim=-1)

    hits = [is_right(names[index], record) for index, record in zip(nearest.tolist(), records, strict=True)]
    return {"norm": token_norms(tokens).mean().item() / target, "names_by_tokens": 100 * sum(hits) / len(hits)}


@torch.no_grad()
def measure_model(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> Record:
    """The right names by artist, a digit a drawing, and the perplexity of text that nothing here trains on."""
    names = all_names()
    hits = {}
    for artist in (*PRIMARY, *SECONDARY):
        records = drawings_by(artist)
        given = name_pictures(model, processor, [open_picture(record) for record in records], names)
        hits[artist] = as_digits([is_right(name, record) for name, record in zip(given, records, strict=True)])
    return {"hits": hits, "perplexity": perplexity(model, processor.tokenizer)}


def measure_gain(model: Any) -> float | None:
    """The norm's mean gain over the gain that it started with; `None` where there is no norm."""
    config = model.config
    if config.projector_norm == "none":
        return None
    start = config.projector_norm_target / config.text_config.hidden_size**0.5
    return model.model.multi_modal_projector.norm.weight.mean().item() / start


def read_training(folder: Path, max_grad_norm: float = 1.0) -> Record:
    """The losses of the logged steps, and by module the share of them, in percent, whose gradient was clipped."""
    steps = pd.read_json(folder / "metrics.jsonl", lines=True).dropna(subset="loss")
    clipped = {}
    for column in steps.columns:
        if column.startswith("grad_norm/"):
            module = column.removeprefix("grad_norm/")
            clipped[module] = 100 * float((steps[column] > max_grad_norm).mean())
    return {"losses": steps["loss"].tolist(), "clipped": clipped}
