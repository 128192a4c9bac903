"""All measures of one model, from one forward pass for each sample and one backward pass over a few."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm
from transformers import PreTrainedModel

from diagnostics.attention import attention_map, measure_attention
from diagnostics.attraction import measure_attractions
from diagnostics.capture import DiagnosticsError, Probe, Record, Tokens, classify
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.gradients import measure_gradients
from diagnostics.interface import measure_interface
from diagnostics.key_space import MAX_TOKENS, Basis, measure_key_space, project
from diagnostics.loading import Question, answer_inputs, find_tokenizer, prepare_inputs, seen_picture, special_ids
from diagnostics.projector_norm import measure_projector_norm
from diagnostics.update_rate import measure_layers


logger = logging.getLogger(__name__)

GRADIENT_SAMPLES = 4


@dataclass
class Pictures:
    """What is drawn and is no number.

    Attributes:
        seen: By sample, the picture as the vision encoder got it.
        maps: By sample, attention over it by layer.
        keys: Number of a layer, and t-SNE of its visual and text keys.
    """

    seen: list[Image.Image] = field(default_factory=list)
    maps: list[dict[int, torch.Tensor]] = field(default_factory=list)
    keys: tuple[int, np.ndarray, np.ndarray] | None = None


def spread_layers(count: int, chosen: int = 6) -> list[int]:
    """At most `chosen` layers of `count`, from the first to the last, evenly spread."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(chosen, count))})


def _key_positions(tokens: Tokens, count: int) -> torch.Tensor:
    """Positions of at most `count` visual and `count` text tokens, drawn at random, the same on every call."""
    generator = torch.Generator().manual_seed(0)
    chosen = []
    for mask in (tokens.visual, tokens.text):
        positions = mask.nonzero()[:, 0]
        chosen.append(positions[torch.randperm(len(positions), generator=generator)[:count]])
    return torch.cat(chosen).sort().values


@torch.no_grad()
def record_questions(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    layers: Sequence[int],
    title: str | None = None,
) -> list[Record]:
    """A record for each question, with attention and keys of `layers`.

    With a `title`, progress is shown. The head is not run: nothing is measured behind the decoder.

    Raises:
        DiagnosticsError: if a question can't be measured; the message names it.
    """
    special = special_ids(processor)
    per_sample = max(32, 2 * MAX_TOKENS // len(questions))
    records = []
    for question in tqdm(questions, desc=title, unit="sample", disable=title is None):
        inputs = prepare_inputs(model, processor, question)
        try:
            positions = _key_positions(classify(model, inputs, special), per_sample)
            with Probe(model, inputs, special, layers, positions, len(question.images)) as probe:
                model.base_model(**inputs)
            records.append(probe.record())
        except DiagnosticsError as error:
            raise type(error)(f"{question.source}: {error}") from error
    return records


def measure_dynamics(model: PreTrainedModel, records: Sequence[Record], vocabulary: torch.Tensor) -> dict[str, Any]:
    """What is followed through training: interface norms, norms and turning by layer, gain and bias."""
    return {
        "interface": measure_interface(records, vocabulary, model.config.get_text_config().hidden_size),
        "layers": measure_layers(records),
        "projector_norm": measure_projector_norm(model),
    }


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    bases: dict[tuple[int, int], Basis],
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    query: int = -1,
    num_maps: int = 3,
) -> tuple[dict[str, Any], Pictures]:
    """Every measure of one model.

    Args:
        model, processor: As [`load_model`] returns them.
        questions: The same for every model that is to be compared.
        name: What the report calls the model.
        bases: Principal components of the keys, shared by the models that are compared; the first fills them in.
        layers: Layers whose attention is drawn and whose keys are compared; six evenly spread ones by default.
        heads: Heads whose mean is drawn; all by default.
        query: Query whose attention is drawn: -1 is where the answer begins, -2 the last word before, and so on.
        num_maps: Samples whose attention is drawn.

    Raises:
        DiagnosticsError: if a layer, a head or a query is not there, or a question can't be measured.
    """
    count = len(model.get_decoder().layers)
    chosen = spread_layers(count) if layers is None else sorted(set(layers))
    if chosen[0] < 0 or chosen[-1] >= count:
        raise DiagnosticsError(f"{name} has layers 0 to {count - 1}, got --layers {' '.join(map(str, chosen))}.")
    num_heads = model.config.get_text_config().num_attention_heads
    if heads is not None and not all(0 <= head < num_heads for head in heads):
        raise DiagnosticsError(f"{name} has heads 0 to {num_heads - 1}, got --heads {' '.join(map(str, heads))}.")

    # First, since bitsandbytes packs 4-bit weights on CPU in the first pass without gradients, and can't go back.
    gradients = None
    notes = set()
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        notes.add("gradients: not recorded, a backward pass would hold all offloaded weights at once")
    else:
        logger.info("%s: gradients", name)
        batch = [answer_inputs(model, processor, question) for question in questions[:GRADIENT_SAMPLES]]
        gradients = measure_gradients(model, batch, special_ids(processor))
        if gradients is None:
            notes.add("gradients: not recorded, no text follows a picture or answers a question")
    records = record_questions(model, processor, questions, chosen, name)
    for record in records[:num_maps]:
        if not -len(record.queries) <= query < 0:
            raise DiagnosticsError(f"A sample has queries -1 to -{len(record.queries)}, got --query {query}.")
    vocabulary = vocabulary_norms(model)
    logger.info("%s: keys", name)
    keys = measure_key_space(records, bases)
    measured = {
        "name": name,
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "num_layers": count,
        "hidden_size": model.config.get_text_config().hidden_size,
        "num_samples": len(records),
        "num_tokens": {kind: sum(int(getattr(r.tokens, kind).sum()) for r in records) for kind in ("visual", "text")},
        "excluded": {
            reason: sum(int(record.tokens.excluded[reason].sum()) for record in records)
            for reason in records[0].tokens.excluded
        },
        "notes": sorted(notes.union(*(record.notes for record in records))),
        **measure_dynamics(model, records, vocabulary),
        "embeddings": measure_embeddings(vocabulary, find_tokenizer(processor)),
        "attention": measure_attention(records),
        "attraction": measure_attractions([record.attractions for record in records]),
        "key_space": keys,
        "gradients": gradients,
    }
    pictures = Pictures()
    for question, record in zip(questions[:num_maps], records, strict=False):
        pictures.seen.append(seen_picture(prepare_inputs(model, processor, question), question))
        maps = {layer: attention_map(record, layer, heads, query) for layer in sorted(record.attention)}
        pictures.maps.append({layer: values for layer, values in maps.items() if values is not None})
    if keys is not None:
        middle = keys["layers"][len(keys["layers"]) // 2]
        pictures.keys = (middle, *project(records, middle))
    return measured, pictures
