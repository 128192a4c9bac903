"""What the theory leaves open, measured in a forward pass: do updates correlate, and do they attract each other?

Theorem 1 of "The Unseen Bias" (arXiv 2512.08374) takes the updates of a visual and of a text token as independent;
`diagnostics/THEORY.md` says why that matters and what κ is.
"""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.capture import SINK_FACTOR, Tokens
from diagnostics.statistics import mean_and_interval
from diagnostics.theory import measure_attraction


# Tokens of either modality that are compared in one sample.
MAX_TOKENS = 64
DEFINITIONS = {
    "update_correlation": "mean cosine between the updates of a visual and of a text token by one layer; independent "
    "updates give 0",
    "attraction_visual_to_text": "mean κ of visual tokens towards text tokens: cosine of a token's update and the "
    "other token, both taken across the token; independent updates give 0",
    "attraction_text_to_visual": "the same of text tokens towards visual ones",
}


class AttractionProbe:
    """Watches the decoder's layers over one sample; `values` then holds the numbers of `DEFINITIONS` by layer.

    Args:
        model: The model.
        tokens: Which position of the sample is what.
    """

    def __init__(self, model: PreTrainedModel, tokens: Tokens) -> None:
        self._layers: nn.ModuleList = model.get_decoder().layers
        self._tokens = tokens
        self._hooks: list[Any] = []
        self.values: list[list[float]] = []
        """By layer, in the order of `DEFINITIONS`."""

    def __enter__(self) -> Self:
        self._hooks = [layer.register_forward_hook(self._see, with_kwargs=True) for layer in self._layers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _see(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        after = (output if isinstance(output, torch.Tensor) else output[0])[0].float()
        before = (args[0] if args else kwargs["hidden_states"])[0].to(after.device, torch.float32)
        (visual, visual_after), (text, text_after) = (
            self._choose(before, after, mask) for mask in (self._tokens.visual, self._tokens.text)
        )
        updates = [nn.functional.normalize(a - b, dim=-1) for a, b in ((visual_after, visual), (text_after, text))]
        self.values.append(
            [
                (updates[0] @ updates[1].T).mean().item(),
                measure_attraction(visual, visual_after, text).mean().item(),
                measure_attraction(text, text_after, visual).mean().item(),
            ]
        )

    @staticmethod
    def _choose(before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        positions = mask.nonzero()[:, 0].to(before.device)
        norms = before[positions].norm(dim=-1)
        positions = positions[norms <= SINK_FACTOR * norms.median()]
        spaced = torch.linspace(0, len(positions) - 1, min(MAX_TOKENS, len(positions)), device=before.device)
        positions = positions[spaced.round().long()]
        return before[positions], after[positions]


def measure_attractions(samples: Sequence[list[list[float]]]) -> dict[str, Any]:
    """The numbers of `DEFINITIONS` by layer with intervals, from the `values` of a probe for each sample."""
    values = np.array(samples)  # [num_samples, num_layers, 3]
    measured = {}
    for number, name in enumerate(DEFINITIONS):
        mean, interval = mean_and_interval(values[:, :, number])
        measured[name] = {"mean": mean, "interval": interval}
    return measured
