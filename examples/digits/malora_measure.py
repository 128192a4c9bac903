"""Measures of the MaLoRA-style arms: distances of keys and of values, cost of adaptation, and its effect on tokens."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from ablation import Arm, arm_folder, score
from ablation_report import Accuracy, read_metrics
from malora import ADAPTATIONS
from safetensors import safe_open

from diagnostics.attention import measure_attention
from diagnostics.key_space import measure_space
from diagnostics.loading import Question, load_model
from diagnostics.model_report import SharedBases, record_samples
from diagnostics.parts import decoder_layers
from diagnostics.probe import Record
from diagnostics.results import Space, from_json
from diagnostics.samples import prepare_samples
from training.compose import measure_target


# Name of the model before adaptation: its folder.
START = "stage1"


@dataclass(frozen=True)
class Apart:
    """How far apart visual and text tokens are by layer; see `DEFINITIONS` of `diagnostics.key_space`."""

    mmd: list[float]
    mmd_baseline: list[float]
    js: list[float]
    js_baseline: list[float]
    probe: list[float]


@dataclass(frozen=True)
class Cosines:
    """Cosine of a token's keys, or values, before and after adaptation by layer, mean over heads and tokens."""

    visual: list[float]
    text: list[float]


@dataclass(frozen=True)
class Change:
    """Cost and effect of adaptation.

    Attributes:
        loss: The last logged one, without the losses on keys.
        mmd, gram: The losses on keys, unweighted, mean over groups of layers; `None` if the arm has none.
        keys, values: Their cosines before and after.
    """

    trained_parameters: int
    seconds: float
    loss: float
    keys: Cosines
    values: Cosines
    mmd: float | None = None
    gram: float | None = None


@dataclass(frozen=True)
class Measured:
    """A model.

    Attributes:
        evaluation: Exact match.
        num_tokens: Compared tokens of each modality.
        keys, values: Distances between visual and text tokens.
        attention: Share of text queries' attention that falls on the picture, by layer.
        even_attention: The same for uniform attention.
        change: `None` for the model before adaptation.
    """

    evaluation: Accuracy
    num_tokens: int
    keys: Apart
    values: Apart
    attention: list[float]
    even_attention: list[float]
    change: Change | None = None


@dataclass(frozen=True)
class Rescaled:
    """Cosines of a model's keys and values before and after rescaling visual tokens to the norm of text, untrained."""

    keys: Cosines
    values: Cosines


@dataclass(frozen=True)
class Case:
    """The models of a norm and seed: the start, and the adapted ones by arm; without a norm, the start rescaled."""

    norm: str
    seed: int
    models: dict[str, Measured]
    rescaled: Rescaled | None = None


def measure_case(norm: Arm, seed: int, root: Path, questions: Sequence[Question]) -> Case | None:
    """The finished models of a norm and seed; `None` if no arm is finished.

    Keys and values of all are projected on the principal components of the model before adaptation.
    """
    base = arm_folder(root, norm, seed)
    done = [arm.name for arm in ADAPTATIONS if (base / arm.name / "evaluation.json").exists()]
    if not done:
        return None
    bases, start = SharedBases(), record(base / START, questions)
    models = {START: measure(start, score(base / START), bases)}
    for name in done:
        records = record(base / name / "merged", questions)
        evaluation = json.loads((base / name / "evaluation.json").read_text(encoding="utf-8"))
        models[name] = measure(records, evaluation, bases, read_change(base / name / "adapter", start, records))
    rescaled = None
    if norm.name == "none":
        rescaled = Rescaled(*compare(start, record(base / START, questions, rescale=True)))
    return Case(norm.name, seed, models, rescaled)


def record(folder: Path, questions: Sequence[Question], rescale: bool = False) -> list[Record]:
    """A model's record for each question; each question is about a different picture.

    With `rescale` each visual token enters the decoder with the mean norm of text tokens (T).
    """
    model, processor = load_model(str(folder))
    if rescale:
        target = measure_target(model.model.language_model)
        model.model.multi_modal_projector.register_forward_hook(
            lambda module, args, features: target * torch.nn.functional.normalize(features, dim=-1)
        )
    return record_samples(model, prepare_samples(model, processor, questions), range(len(decoder_layers(model))))


def measure(
    records: Sequence[Record], evaluation: dict[str, Any], bases: SharedBases, change: Change | None = None
) -> Measured:
    """Everything reported about a model."""
    pictures = np.arange(len(records))
    keys = measure_space([one.keys for one in records], records, pictures, bases.keys)
    values = measure_space([one.values for one in records], records, pictures, bases.values)
    looks = measure_attention(records, pictures)
    assert keys is not None
    assert values is not None
    assert looks is not None
    return Measured(
        evaluation=from_json(Accuracy, evaluation, "evaluation.json"),
        num_tokens=keys.num_tokens,
        keys=in_numbers(keys),
        values=in_numbers(values),
        attention=looks.with_sinks.mass.mean,
        even_attention=looks.with_sinks.evenly_spread.mass.mean,
        change=change,
    )


def in_numbers(space: Space) -> Apart:
    """The reported numbers of a space."""
    return Apart(space.mmd.mean, space.mmd_baseline, space.js.mean, space.js_baseline, space.probe.mean)


def read_change(adapter: Path, before: Sequence[Record], after: Sequence[Record]) -> Change:
    """What an adapter's run logged, and its effect on the same tokens of the same samples."""
    lines = read_metrics(adapter)
    last = [line for line in lines if "loss" in line][-1]
    penalties = {
        kind: [value for name, value in last.items() if name.startswith(f"key_{kind}/")] for kind in ("mmd", "gram")
    }
    keys, values = compare(before, after)
    with safe_open(adapter / "adapter_model.safetensors", "pt") as weights:
        count = sum(weights.get_tensor(name).numel() for name in weights.keys())  # noqa: SIM118 - not a dict
    return Change(
        trained_parameters=count,
        seconds=next(line["train_runtime"] for line in lines if "train_runtime" in line),
        loss=last["loss"],
        keys=keys,
        values=values,
        **{kind: mean(values) for kind, values in penalties.items() if values},
    )


def compare(before: Sequence[Record], after: Sequence[Record]) -> tuple[Cosines, Cosines]:
    """Cosines of keys, and of values."""
    keys, values = (
        Cosines(*(mean_cosine(before, after, kind, modality) for modality in ("visual", "text")))
        for kind in ("keys", "values")
    )
    return keys, values


def mean_cosine(before: Sequence[Record], after: Sequence[Record], kind: str, modality: str) -> list[float]:
    """Cosine of each token's keys, or values, of two models by layer, mean over heads and over tokens.

    Tokens that are a sink in either model are left out.
    """
    cosines = []
    for first, second in zip(before, after, strict=True):
        chosen = (getattr(first.tokens, modality) & getattr(second.tokens, modality))[first.key_positions]
        pairs = [(layer[:, chosen], getattr(second, kind)[n][:, chosen]) for n, layer in getattr(first, kind).items()]
        cosines.append(torch.stack([torch.cosine_similarity(*pair, dim=-1).mean(0) for pair in pairs]))
    return torch.cat(cosines, dim=1).mean(dim=1).tolist()
