"""Norms on the way from the vision encoder into the decoder (Tables 1 to 3 of "The Unseen Bias", arXiv 2512.08374)."""

from collections.abc import Sequence
from dataclasses import asdict
from math import sqrt
from typing import Any

import numpy as np
import torch

from diagnostics.capture import Record
from diagnostics.norms import text_norm_target
from diagnostics.statistics import ratio_and_interval, summarize


DEFINITIONS = {
    "encoder_output": "last hidden states of the vision encoder, class token included; what a merger inside of it "
    "makes of them comes under projector_output",
    "projector_input": "what enters the projector, as it enters: of the layer that is read, and where the model cuts "
    "tokens out or joins neighbours before, after that",
    "projector_output": "what the projector returns",
    "visual_at_decoder": "visual tokens that enter the decoder's first layer",
    "text_at_decoder": "ordinary text tokens that enter the decoder's first layer",
    "text_in_prompt": "what the embedding layer returns for the prompt's ordinary text tokens",
    "vocabulary": "what the embedding layer returns for every token of the vocabulary, all-zero rows left out; its "
    "mean is T (eq. 11)",
}


def measure_interface(records: Sequence[Record], vocabulary: torch.Tensor, hidden_size: int) -> dict[str, Any]:
    """Norms at each place of `DEFINITIONS`, and how much longer visual tokens are than text.

    Args:
        records: One for each sample.
        vocabulary: Norms of the embedding layer's output by token id, `(vocab_size,)`.
        hidden_size: Width of the decoder.

    Returns:
        By place a [`Summary`] as a dict with `width` and `rms`, the mean norm over the root of the width; `ratio`:
        mean norm of visual tokens over that of text tokens at the decoder, with its interval; `ratio_to_vocabulary`:
        the same over T.
    """
    norms: dict[str, tuple[list[torch.Tensor], int]] = {}
    for place, name in (
        ("encoder_output", "encoder"),
        ("projector_input", "projector_input"),
        ("projector_output", "projector_output"),
    ):
        if name in records[0].interface:
            norms[place] = ([record.interface[name][0] for record in records], records[0].interface[name][1])
    visual = [record.layer_norms[0, record.tokens.visual] for record in records]
    text = [record.layer_norms[0, record.tokens.text] for record in records]
    norms["visual_at_decoder"] = (visual, hidden_size)
    norms["text_at_decoder"] = (text, hidden_size)
    norms["text_in_prompt"] = ([vocabulary[record.input_ids[record.tokens.text]] for record in records], hidden_size)
    measured: dict[str, Any] = {}
    for place, (samples, width) in norms.items():
        measured[place] = _describe(samples, width)
    measured["vocabulary"] = _describe([vocabulary[vocabulary > 0]], hidden_size)
    means = [np.array([[sample.double().mean().item()] for sample in samples]) for samples in (visual, text)]
    target = text_norm_target(vocabulary)
    for name, denominator in (("ratio", means[1]), ("ratio_to_vocabulary", np.full_like(means[1], target))):
        (ratio,), (interval,) = ratio_and_interval(means[0], denominator)
        measured[name] = {"mean": ratio, "interval": interval}
    return measured


def _describe(samples: list[torch.Tensor], width: int) -> dict[str, Any]:
    summary = asdict(summarize(samples))
    return summary | {"width": width, "rms": summary["mean"] / sqrt(width)}
