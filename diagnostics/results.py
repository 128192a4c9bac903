"""What is measured, as types, and the JSON that they are written to and read from.

A field that has a default is left out of the JSON where it is `None`; every other one is always there. What the
numbers mean is said in the `DEFINITIONS` beside each measure.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints


T = TypeVar("T")
# Metadata of a field that has another name in the JSON, because Python can't have that one.
KEY = "key"
# 95%, over pictures; `None` for a single picture.
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Estimate:
    """A mean over pictures of the mean within each, with its interval.

    Attributes:
        mean: The value.
        interval: See [`~diagnostics.statistics`].
        by_picture: What each picture says: its own value, or where the value is no mean over pictures, its jackknife
            pseudo-value. NaN where a picture says nothing. Two models' differences come from these, in pairs.
    """

    mean: float
    interval: Interval
    by_picture: list[float]


@dataclass(frozen=True)
class Curve:
    """Values with their intervals, by layer or by step."""

    mean: list[float]
    interval: list[Interval]

    @classmethod
    def through(cls, estimates: Sequence[Estimate]) -> "Curve":
        """The curve of estimates one after the other."""
        return Curve([estimate.mean for estimate in estimates], [estimate.interval for estimate in estimates])


@dataclass(frozen=True)
class ByLayer(Curve):
    """A value by layer, and its mean over the layers."""

    overall: Estimate


@dataclass(frozen=True)
class Summary(Estimate):
    """A norm per token, summed up.

    Attributes:
        std, median, p95: Over all tokens together.
        num_tokens, num_pictures: What these rest on.
        width: Number of the tokens' coordinates.
        rms: `mean` over the root of the width.
    """

    std: float
    median: float
    p95: float
    num_tokens: int
    num_pictures: int
    width: int
    rms: float


@dataclass(frozen=True, kw_only=True)
class Interface:
    """Norms at each place on the way into the decoder; of what a model doesn't name there are none."""

    encoder_output: Summary | None = None
    projector_input: Summary | None = None
    projector_output: Summary | None = None
    visual_at_decoder: Summary
    text_at_decoder: Summary
    text_in_prompt: Summary
    vocabulary: Summary
    ratio: Estimate
    ratio_to_vocabulary: Estimate

    def at_decoder(self, modality: str) -> Summary:
        """Of `"visual"` or `"text"` tokens."""
        return self.visual_at_decoder if modality == "visual" else self.text_at_decoder


@dataclass(frozen=True)
class Turning:
    """How long one modality's tokens are at each layer (and past the last), and how each layer turns them.

    Attributes:
        norm_quantiles: Quantiles of the norm over all tokens by layer, under `"5%"`, `"25%"`, and so on to `"95%"`.
    """

    norm: ByLayer
    norm_quantiles: dict[str, list[float]]
    cosine: ByLayer
    update_ratio: ByLayer
    update_cosine: ByLayer
    update_rate: Estimate


@dataclass(frozen=True)
class LayerGroup:
    """Means over some layers in a row.

    Attributes:
        name: `"first third"`, `"middle third"` or `"last third"`.
        first, last: Its layers, both included.
        gap: Of the cosines, visual less text.
        norm_ratio: Norm of visual tokens over that of text tokens.
    """

    name: str
    first: int
    last: int
    gap: Estimate
    norm_ratio: Estimate


@dataclass(frozen=True)
class LargestGap:
    """The layer whose cosines differ most, and its gap; the interval allows for the choice among all layers."""

    layer: int
    gap: Estimate


@dataclass(frozen=True)
class Layers:
    """Both modalities by layer, the gap of their cosines, and the ratio of their norms."""

    visual: Turning
    text: Turning
    gap: ByLayer
    norm_ratio: ByLayer
    groups: list[LayerGroup]
    largest_gap: LargestGap

    def of(self, modality: str) -> Turning:
        """Of `"visual"` or `"text"` tokens."""
        return self.visual if modality == "visual" else self.text


@dataclass(frozen=True)
class Prompted:
    """The gap of cosines when every picture is asked about with the same words.

    Attributes:
        question: The words; `None` for each picture's own question.
        num_pictures: How many pictures.
        gaps: By group of layers, as in [`Layers`].
    """

    question: str | None
    num_pictures: int
    gaps: list[Estimate]


@dataclass(frozen=True)
class ProjectorNorm:
    """Gain and bias of the norm behind the projector."""

    gain_l2: float
    gain_mean_abs: float
    bias_l2: float
    bias_mean_abs: float
    gain_start: float
    gain_drift: float
    gain_drift_relative: float
    yields: float


@dataclass(frozen=True)
class LongToken:
    """A token of the vocabulary, and the norm of its embedding."""

    id: int
    token: str
    norm: float


@dataclass(frozen=True)
class Embeddings:
    """Norms of the vocabulary."""

    mean: float
    std: float
    max: float
    num_embeddings: int
    num_zero: int
    top: list[LongToken]


@dataclass(frozen=True)
class Gaze:
    """Where text looks, by layer; the share of the bottom third only where every picture's layout is known.

    `entropy` and `bottom_third` are NaN at a layer whose window never reaches a picture.
    """

    mass: ByLayer
    entropy: ByLayer
    bottom_third: ByLayer | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedGaze(Gaze):
    """The same, beside what it would be if text looked everywhere alike."""

    evenly_spread: Gaze


@dataclass(frozen=True)
class Attention:
    """Where text looks, with sinks among the keys and without.

    Attributes:
        layers: Layers that were looked at.
        with_sinks, without_sinks: By layer.
        mass_by_head: By layer and head, with sinks, mean over pictures.
    """

    layers: list[int]
    with_sinks: ComparedGaze
    without_sinks: ComparedGaze
    mass_by_head: list[list[float]]

    @property
    def gazes(self) -> dict[str, Gaze]:
        """All four, by the title that the report and its plot give them."""
        return {
            "with sinks": self.with_sinks,
            "with sinks, evenly spread": self.with_sinks.evenly_spread,
            "without sinks": self.without_sinks,
            "without sinks, evenly spread": self.without_sinks.evenly_spread,
        }


@dataclass(frozen=True)
class Attractions:
    """Do updates correlate, and do they attract each other, by layer."""

    update_correlation: ByLayer
    attraction_visual_to_text: ByLayer
    attraction_text_to_visual: ByLayer


@dataclass(frozen=True)
class Modalities:
    """A value of visual and of text tokens, by layer."""

    visual: ByLayer
    text: ByLayer


@dataclass(frozen=True)
class Space:
    """How far apart visual and text tokens are in the space of keys, or of values: by layer of `layers`, medians over
    heads.

    Attributes:
        layers: Layers that were looked at.
        num_tokens: Of each modality.
        mmd, js, probe: How far apart. Only the MMD² has an interval: the
            jackknife's are too narrow for the others.
        mmd_baseline, js_baseline: What these stay below in 95% of halves of the pictures, within one modality; NaN
            below 4 pictures.
        p_value: Of the MMD², by exchanging the modalities of whole pictures; `None` where pictures share their words.
        smallest_p: The smallest p-value that so many exchanges can give.
        mmd_by_head: By layer and head.
        norm, spread: L2 norm of the tokens, and root mean square distance from their mean.
    """

    layers: list[int]
    num_tokens: int
    mmd: ByLayer
    mmd_baseline: list[float]
    p_value: list[float] | None
    smallest_p: float | None
    mmd_by_head: list[list[float]]
    js: Curve
    js_baseline: list[float]
    probe: Curve
    norm: Modalities
    spread: Modalities


@dataclass(frozen=True)
class LensToken:
    """A token that the decoder's head reads from visual tokens behind a layer.

    Attributes:
        token: As `repr` shows it.
        share: Of the visual tokens that are read as it.
        probability: Mean over these.
    """

    token: str
    share: float
    probability: float


@dataclass(frozen=True)
class Lens:
    """What the visual tokens of the first pictures are read as behind each layer of `layers`, the commonest first."""

    layers: list[int]
    num_pictures: int
    tokens: list[list[LensToken]]


@dataclass(frozen=True)
class GradientNorms:
    """The loss, and norms of its gradient where there is one."""

    loss: float
    projector_input: float | None = None
    visual_embeddings: float | None = None
    text_embeddings: float | None = None
    vision_encoder: float | None = None


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients over a few answers.

    Attributes:
        num_samples, num_targets: Answers, and tokens in them that count.
        norms: Under `"compensated"` and `"plain"`, or `"no norm"`; see [`~diagnostics.gradients.measure_gradients`].
    """

    num_samples: int
    num_targets: int
    norms: dict[str, GradientNorms]


@dataclass(frozen=True)
class DynamicsPoint:
    """What is followed through training, at one step.

    Attributes:
        questions: Fingerprint of what it was measured on.
        projector_norm: `None` where the projector ends in none.
    """

    step: int
    questions: str
    interface: Interface
    layers: Layers
    projector_norm: ProjectorNorm | None


@dataclass(frozen=True)
class ModelReport:
    """All measures of one model.

    Attributes:
        name: What the report calls it.
        class_, dtype, num_layers, hidden_size: What it is.
        num_samples, num_pictures: What was measured on; a picture may have several samples.
        num_tokens: By modality.
        excluded: Tokens that count for neither, by reason.
        notes: What could not be recorded, and why.
        prompts: The gap of cosines under other questions, each picture's own first.
        projector_norm: `None` where the projector ends in none; `attention`, `key_space`, `value_space`, `lens`,
            `gradients` where there is a note.
    """

    name: str
    class_: str = field(metadata={KEY: "class"})
    dtype: str
    num_layers: int
    hidden_size: int
    num_samples: int
    num_pictures: int
    num_tokens: dict[str, int]
    excluded: dict[str, int]
    notes: list[str]
    interface: Interface
    layers: Layers
    prompts: list[Prompted]
    projector_norm: ProjectorNorm | None
    embeddings: Embeddings
    attention: Attention | None
    attraction: Attractions
    key_space: Space | None
    value_space: Space | None
    lens: Lens | None
    gradients: Gradients | None


@dataclass(frozen=True)
class LanguageModel:
    """A language model whose embeddings are set beside."""

    name: str
    embeddings: Embeddings


@dataclass(frozen=True)
class Report:
    """What `report.json` holds: models side by side on the same questions.

    Attributes:
        command: What made it.
        versions: Of torch and transformers.
        data: Name of the file or folder.
        num_samples, num_pictures: Questions, and different pictures among them.
        passed_over: Rows without a picture.
        unreadable: Rows whose picture can't be read, and why.
        compare: `"models"`, or `"checkpoints"` of one model through training, whose keys have a common basis.
        models: One report each.
        base: A language model beside.
    """

    command: str
    versions: dict[str, str]
    data: str
    num_samples: int
    num_pictures: int
    passed_over: int
    unreadable: list[str]
    compare: str
    models: list[ModelReport]
    base: LanguageModel | None


def to_json(value: Any) -> Any:
    """A result as `json` writes it; numbers that are none, which JSON can't hold, become `None`."""
    if is_dataclass(value):
        return {
            _key(of): to_json(entry)
            for of in fields(value)
            if (entry := getattr(value, of.name)) is not None or of.default is MISSING
        }
    if isinstance(value, dict):
        return {key: to_json(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def from_json(kind: type[T], value: Any, source: object) -> T:
    """What [`to_json`] wrote. Fields that `kind` doesn't know are passed over.

    Args:
        kind: The type to read.
        value: What `json` read.
        source: File that it is from, for messages to people.

    Raises:
        ValueError: if something is missing or of another type; the message names it and the source.
    """
    try:
        return _read(kind, value, "")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source}: {error.args[0]}.") from error


def _read(kind: Any, value: Any, place: str) -> Any:
    """`place` says where in the file the value stands."""
    if get_origin(kind) in (Union, UnionType):
        (inner,) = set(get_args(kind)) - {NoneType}
        return None if value is None else _read(inner, value, place)
    if is_dataclass(kind):
        return _read_fields(kind, _expect(dict, value, place), place)
    if get_origin(kind) is dict:
        entries = _expect(dict, value, place)
        return {key: _read(get_args(kind)[1], entry, f"{place}{key}.") for key, entry in entries.items()}
    if get_origin(kind) in (list, tuple):
        entries = enumerate(_expect(list, value, place))
        return get_origin(kind)(_read(get_args(kind)[0], entry, f"{place}{number}.") for number, entry in entries)
    if kind is Any:
        return value
    if kind is float:
        return math.nan if value is None else float(_expect((int, float), value, place))
    return _expect(kind, value, place)


def _read_fields(kind: Any, entries: dict[str, object], place: str) -> Any:
    hints = get_type_hints(kind)
    missing = [_key(field) for field in fields(kind) if field.default is MISSING and _key(field) not in entries]
    if missing:
        raise KeyError(f"no {', '.join(place + key for key in missing)}")
    given = {field.name: _key(field) for field in fields(kind) if _key(field) in entries}
    return kind(**{name: _read(hints[name], entries[key], f"{place}{key}.") for name, key in given.items()})


def _expect(kind: Any, value: Any, place: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{place.removesuffix('.') or 'what it holds'} is {value!r:.40}")
    return value


def _key(field: Field) -> str:
    return field.metadata.get(KEY, field.name)
