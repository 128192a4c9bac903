"""Types of the results, and how they are written to and read from JSON.

A field with a default is left out of the JSON if it is `None`; every other one is always there. The `DEFINITIONS` of
each measure say what the numbers mean.
"""

import math
from collections.abc import Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints


T = TypeVar("T")
# Metadata of a field whose name in the JSON is not allowed in Python.
KEY = "key"
# 95%, over pictures; `None` for a single picture.
Interval = tuple[float, float] | None


@dataclass(frozen=True)
class Estimate:
    """A mean over pictures of the mean within each, with its interval.

    Attributes:
        mean: The value.
        interval: See [`~diagnostics.statistics`].
        by_picture: Each picture's value, or if the estimate is not a mean over pictures, its jackknife pseudo-value.
            NaN for a picture without a value. Paired differences of two models come from these.
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
    """Summary of tokens' norms.

    Attributes:
        std, median, p95: Over all tokens together.
        num_tokens, num_pictures: Sample sizes.
        width: Number of the tokens' coordinates.
        rms: `mean` over the square root of the width.
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
    """Norms at each place up to the decoder; `None` for places that were not found in the model."""

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
    """Norms of one modality's tokens at each layer (and after the last), and how each layer turns them.

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
        gap: Of the cosines, visual minus text.
        norm_ratio: Norm of visual tokens over that of text tokens.
    """

    name: str
    first: int
    last: int
    gap: Estimate
    norm_ratio: Estimate


@dataclass(frozen=True)
class LargestGap:
    """The layer whose cosines differ most, and its gap; the interval is corrected for the choice among all layers."""

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
    """The gap of cosines with the same question for every picture.

    Attributes:
        question: The question; `None` for each picture's own.
        num_pictures: How many pictures.
        gaps: By group of layers, as in [`Layers`].
    """

    question: str | None
    num_pictures: int
    gaps: list[Estimate]


@dataclass(frozen=True)
class ProjectorNorm:
    """Gain and bias of the norm after the projector."""

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
    """Attention of text to the picture by layer; `bottom_third` only if every picture's layout is known.

    `entropy` and `bottom_third` are NaN at a layer whose attention window never reaches a picture.
    """

    mass: ByLayer
    entropy: ByLayer
    bottom_third: ByLayer | None = None


@dataclass(frozen=True, kw_only=True)
class ComparedGaze(Gaze):
    """The same, and its values for uniform attention."""

    evenly_spread: Gaze


@dataclass(frozen=True)
class Attention:
    """Attention of text to the picture, with and without sinks among the keys.

    Attributes:
        layers: Measured layers.
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
    """Distances between visual and text tokens in key or value space: by layer of `layers`, medians over heads.

    Attributes:
        layers: Measured layers.
        num_tokens: Of each modality.
        mmd, js, probe: The distances. Only the MMD² has an interval: the jackknife's are too narrow for the others.
        mmd_baseline, js_baseline: 95% quantile of these over halves of the pictures, within one modality; NaN below 4
            pictures.
        p_value: Of the MMD², by swapping the modalities of whole pictures; `None` if pictures share a question.
        smallest_p: The smallest p-value that this number of swaps can give.
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
    """A token that visual tokens decode to after a layer.

    Attributes:
        token: As `repr` shows it.
        share: Of the visual tokens that decode to it.
        probability: Mean over these.
    """

    token: str
    share: float
    probability: float


@dataclass(frozen=True)
class Lens:
    """The tokens that visual tokens of the first pictures decode to after each layer, most common first."""

    layers: list[int]
    num_pictures: int
    tokens: list[list[LensToken]]


@dataclass(frozen=True)
class GradientNorms:
    """The loss, and norms of its gradient if there is one."""

    loss: float
    projector_input: float | None = None
    visual_embeddings: float | None = None
    text_embeddings: float | None = None
    vision_encoder: float | None = None


@dataclass(frozen=True)
class Gradients:
    """Loss and gradients over a few answers.

    Attributes:
        num_samples, num_targets: Number of answers, and of target tokens in them.
        norms: Under `"compensated"` and `"plain"`, or `"no norm"`; see [`~diagnostics.gradients.measure_gradients`].
    """

    num_samples: int
    num_targets: int
    norms: dict[str, GradientNorms]


@dataclass(frozen=True)
class DynamicsPoint:
    """The measures tracked during training, at one step.

    Attributes:
        questions: Fingerprint of the questions.
        dtype: Of the model; during training with bf16, `"bfloat16 autocast"`.
        projector_norm: `None` if the projector does not end in a norm.
    """

    step: int
    questions: str
    dtype: str
    interface: Interface
    layers: Layers
    projector_norm: ProjectorNorm | None


@dataclass(frozen=True)
class ModelReport:
    """All measures of one model.

    Attributes:
        name: Name in the report.
        class_, dtype, num_layers, hidden_size: Of the model; a quantized one's dtype says so.
        num_samples, num_pictures: Of the data; a picture may have several samples.
        num_tokens: By modality.
        excluded: Number of excluded tokens by reason.
        notes: What could not be recorded, and why.
        prompts: The gap of cosines under other questions, each picture's own first.
        projector_norm: `None` if the projector does not end in a norm; `attention`, `key_space`, `value_space`,
            `lens`, `gradients` if there is a note.
        weights: [`~conversations.files.fingerprint`] of the weights; `None` if they are not in a local folder.
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
    weights: str | None = None


@dataclass(frozen=True)
class LanguageModel:
    """A language model whose embeddings are compared."""

    name: str
    embeddings: Embeddings


@dataclass(frozen=True)
class Report:
    """What `report.json` holds: models side by side on the same questions.

    Attributes:
        command: Command that made it.
        versions: Of torch and transformers.
        data: Name of the file or folder.
        num_samples, num_pictures: Questions, and different pictures among them.
        passed_over: Number of skipped rows without a picture.
        unreadable: Skipped rows whose picture can't be read, and why.
        compare: `"models"`, or `"checkpoints"` of one model through training, whose keys have a common basis.
        models: One report each.
        base: A language model to compare with.
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
    """A result as `json` writes it; NaN and infinities, which JSON doesn't have, become `None`."""
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
    """Read what [`to_json`] wrote. Fields that `kind` doesn't have are ignored.

    Args:
        kind: The type to read.
        value: What `json` read.
        source: File that it is from, for messages.

    Raises:
        ValueError: if something is missing or of another type; the message names it and the source.
    """
    try:
        return _read(kind, value, "")
    except (KeyError, TypeError) as error:
        raise ValueError(f"{source}: {error.args[0]}.") from error


def _read(kind: Any, value: Any, place: str) -> Any:
    """`place` is the value's path in the file."""
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
        raise TypeError(f"{place.removesuffix('.') or 'its content'} is {value!r:.40}")
    return value


def _key(field: Field) -> str:
    return field.metadata.get(KEY, field.name)
