"""All measures of one model: a backward pass over a few samples, a forward pass over each, some with other prompts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from diagnostics.attention import measure_attention
from diagnostics.attraction import measure_attractions
from diagnostics.embeddings import measure_embeddings, vocabulary_norms
from diagnostics.gradients import measure_gradients
from diagnostics.interface import measure_interface
from diagnostics.key_space import MAX_TOKENS, Bases, draw_positions, measure_space
from diagnostics.layers import measure_layers
from diagnostics.lens import measure_lens
from diagnostics.loading import QUESTION, Message, Part, Question
from diagnostics.parts import DiagnosticsError, decoder_layers
from diagnostics.pictures import NUM_MAPS, Pictures, take_pictures
from diagnostics.probe import Probe, Record, choose_queries
from diagnostics.projector_norm import measure_projector_norm
from diagnostics.results import Gradients, ModelReport, Prompted
from diagnostics.samples import Sample, naming_source, prepare_samples
from diagnostics.statistics import number_pictures
from diagnostics.tokens import find_tokenizer


GRADIENT_SAMPLES = 4
# Asked about the first pictures, to see whether the gap of cosines depends on the question.
OTHER_PROMPTS = (QUESTION, "What is in the middle of this picture?")
PROMPTED_PICTURES = 8


@dataclass(frozen=True)
class Closeup:
    """What to show of a model in detail.

    Attributes:
        layers: Layers whose attention is drawn and whose keys are compared; six evenly spread ones by default.
        heads: Heads whose mean attention is drawn; all by default.
        query: Query whose attention is drawn: -1 is where the answer begins, -2 the last word before, and so on.
    """

    layers: Sequence[int] | None = None
    heads: Sequence[int] | None = None
    query: int = -1

    def check(self, num_layers: int, num_heads: int) -> None:
        """Raises `DiagnosticsError` if a chosen layer or head is out of range."""
        for option, chosen, count in (("layers", self.layers, num_layers), ("heads", self.heads, num_heads)):
            if not all(0 <= number < count for number in chosen or ()):
                numbers = " ".join(map(str, chosen or ()))
                raise DiagnosticsError(f"It has {option} 0 to {count - 1}, got --{option} {numbers}.")


@dataclass
class SharedBases:
    """Principal components of keys and of values, which the first of several checkpoints fills in."""

    keys: Bases = field(default_factory=dict)
    values: Bases = field(default_factory=dict)


def measure_model(
    model: PreTrainedModel,
    processor: Any,
    questions: Sequence[Question],
    name: str,
    closeup: Closeup,
    bases: SharedBases,
) -> tuple[ModelReport, Pictures]:
    """Every measure of one model.

    Args:
        model, processor: As [`~diagnostics.loading.load_model`] returns them.
        questions: The same for every model that is to be compared.
        name: The model's name in the report.
        closeup: What to show in detail.
        bases: Filled in by the first of several checkpoints, used by the others; new ones for every other model.

    Raises:
        DiagnosticsError: if a layer, a head or a query does not exist, or a question can't be measured.
    """
    num_layers = len(decoder_layers(model))
    closeup.check(num_layers, model.config.get_text_config().num_attention_heads)
    layers = spread_layers(num_layers) if closeup.layers is None else sorted(set(closeup.layers))
    offloaded = any(parameter.device.type == "meta" for parameter in model.parameters())
    samples = prepare_samples(model, processor, questions, num_answered=0 if offloaded else GRADIENT_SAMPLES)
    check_query(samples[:NUM_MAPS], closeup.query)
    # First, since bitsandbytes packs 4-bit weights on CPU in the first pass without gradients, irreversibly.
    answered = [sample.answered for sample in samples if sample.answered is not None]
    gradients = measure_gradients(model, answered, f"{name}: gradients")
    records = record_samples(model, samples, layers, f"{name}: pictures", num_read=NUM_MAPS)
    pictures = number_pictures([sample.question.picture for sample in samples])
    prompts = ask_otherwise(model, processor, samples, records, pictures, name)
    notes = {note for record in records for note in record.notes}
    if offloaded:
        notes.add("gradients: not recorded, a backward pass would hold all offloaded weights at once")
    elif gradients is None:
        notes.add("gradients: not recorded, none of the first questions has an answer")
    report = summarize_records(model, processor, name, samples, records, pictures, prompts, gradients, notes, bases)
    return report, take_pictures(samples, records, pictures, report.key_space, closeup.heads, closeup.query)


def spread_layers(count: int, chosen: int = 6) -> list[int]:
    """At most `chosen` layers of `count`, from the first to the last, evenly spread."""
    return sorted({round(number) for number in np.linspace(0, count - 1, min(chosen, count))})


def check_query(samples: Sequence[Sample], query: int) -> None:
    """Raises `DiagnosticsError` if a sample has no such query."""
    for sample in samples:
        count = len(choose_queries(sample.prompt.tokens))
        if not -count <= query < 0:
            raise DiagnosticsError(f"A sample has queries -1 to -{count}, got --query {query}.")


@torch.no_grad()
def record_samples(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    layers: Sequence[int],
    title: str | None = None,
    num_read: int = 0,
) -> list[Record]:
    """A record for each sample, with attention, keys and values of `layers`; the visual tokens of the first `num_read`
    pictures are decoded once each with the decoder's head.

    With a `title`, progress is shown. For other samples the head is not run: nothing after the decoder is measured.

    Raises:
        DiagnosticsError: if a sample can't be measured; the message names its question.
    """
    pictures = [sample.question.picture for sample in samples]
    counts, seen = Counter(pictures), Counter[str]()
    per_picture = max(1, MAX_TOKENS // len(counts))
    records = []
    for number, sample in enumerate(tqdm(samples, desc=title, unit="picture", disable=title is None)):
        inputs, tokens, picture = sample.prompt.for_model(model), sample.prompt.tokens, pictures[number]
        kept = draw_positions(tokens, picture, seen[picture], -(-per_picture // counts[picture]))
        seen[picture] += 1
        with naming_source(sample.question):
            num_images, read = len(sample.question.images), seen[picture] == 1 and len(seen) <= num_read
            with Probe(model, inputs, tokens, layers, kept, num_images, lens=read) as probe:
                model.base_model(**inputs)
            records.append(probe.record())
    return records


def ask_otherwise(
    model: PreTrainedModel,
    processor: Any,
    samples: Sequence[Sample],
    records: Sequence[Record],
    pictures: np.ndarray,
    name: str,
) -> list[Prompted]:
    """The gap of cosines of the first pictures under their own questions and under `OTHER_PROMPTS`."""
    chosen = np.unique(pictures, return_index=True)[1][:PROMPTED_PICTURES]  # the first sample of each
    different = np.arange(len(chosen))
    gaps: dict[str | None, list[Record]] = {None: [records[number] for number in chosen]}
    for prompt in OTHER_PROMPTS:
        if all(_words(samples[number].question) == prompt for number in chosen):
            continue
        asked = prepare_samples(model, processor, [asking(samples[number].question, prompt) for number in chosen])
        gaps[prompt] = record_samples(model, asked, layers=(), title=f"{name}: {prompt}")
    return [
        Prompted(prompt, len(chosen), [group.gap for group in measure_layers(of, different).groups])
        for prompt, of in gaps.items()
    ]


def _words(question: Question) -> str:
    """The text of the prompt's last message."""
    return "\n".join(part["text"] for part in question.prompt[-1]["content"] if part["type"] == "text").strip()


def asking(question: Question, words: str) -> Question:
    """The same pictures and system message with another question."""
    system = [message for message in question.prompt if message["role"] == "system"]
    content: list[Part] = [{"type": "image", "image": image} for image in question.images]
    prompt = [*system, Message(role="user", content=[*content, {"type": "text", "text": words}])]
    return replace(question, prompt=prompt, conversation=prompt)


def summarize_records(
    model: PreTrainedModel,
    processor: Any,
    name: str,
    samples: Sequence[Sample],
    records: Sequence[Record],
    pictures: np.ndarray,
    prompts: list[Prompted],
    gradients: Gradients | None,
    notes: set[str],
    bases: SharedBases,
) -> ModelReport:
    """The report of a model from its records, gradients and notes."""
    vocabulary, tokenizer = vocabulary_norms(model), find_tokenizer(processor)
    hidden_size = model.config.get_text_config().hidden_size
    quantized = getattr(model.config, "quantization_config", None) is not None
    return ModelReport(
        name=name,
        class_=type(model).__name__,
        dtype=str(model.dtype).removeprefix("torch.") + (", quantized" if quantized else ""),
        num_layers=len(decoder_layers(model)),
        hidden_size=hidden_size,
        num_samples=len(records),
        num_pictures=int(pictures.max()) + 1,
        num_tokens={
            "visual": sum(int(record.tokens.visual.sum()) for record in records),
            "text": sum(int(record.tokens.text.sum()) for record in records),
        },
        excluded={
            reason: sum(int(record.tokens.excluded[reason].sum()) for record in records)
            for reason in records[0].tokens.excluded
        },
        notes=sorted(notes),
        interface=measure_interface(records, pictures, vocabulary, hidden_size),
        layers=measure_layers(records, pictures),
        prompts=prompts,
        projector_norm=measure_projector_norm(model),
        embeddings=measure_embeddings(vocabulary, tokenizer),
        attention=measure_attention(records, pictures),
        attraction=measure_attractions([record.attractions for record in records], pictures),
        key_space=measure_space([record.keys for record in records], records, pictures, bases.keys),
        value_space=measure_space([record.values for record in records], records, pictures, bases.values),
        lens=measure_lens([record.decoded for record in records], tokenizer),
        gradients=gradients,
    )
