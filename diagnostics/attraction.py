"""What the theory leaves open, measured in a forward pass: do updates correlate, and do they attract each other?

Theorem 1 of "The Unseen Bias" (arXiv 2512.08374) takes the updates of a visual and of a text token as independent;
`diagnostics/THEORY.md` says why that matters and what κ is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from diagnostics.norms import SINK_FACTOR
from diagnostics.statistics import describe
from diagnostics.theory import measure_attraction


# Tokens of either modality that are compared in one sample.
MAX_TOKENS = 64
DEFINITIONS = {
    "tokens": f"at most {MAX_TOKENS} of each kind in a sample, evenly spaced; left out are those that enter the layer "
    f"over {SINK_FACTOR:g} times as long as the median of their modality",
    "update_correlation": "mean cosine between the updates of a visual and of a text token by one layer; independent "
    "updates give 0",
    "attraction_visual_to_text": "mean κ of visual tokens towards text tokens: cosine of a token's update and the "
    "other token, both taken across the token; independent updates give 0",
    "attraction_text_to_visual": "the same of text tokens towards visual ones",
}


NUMBERS = ("update_correlation", "attraction_visual_to_text", "attraction_text_to_visual")


@torch.no_grad()
def compare_updates(
    before: torch.Tensor, after: torch.Tensor, visual: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """The three `NUMBERS` of one layer and one sample, `(3,)`; see `DEFINITIONS`.

    Args:
        before, after: What enters the layer and what leaves it, `(S, hidden_size)`, float32.
        visual, text: Which position is what, `(S,)`.
    """
    chosen = []
    for mask in (visual, text):
        positions = mask.nonzero()[:, 0].to(before.device)
        norms = before[positions].norm(dim=-1)
        positions = positions[norms <= SINK_FACTOR * norms.median()]
        spaced = torch.linspace(0, len(positions) - 1, min(MAX_TOKENS, len(positions)), device=before.device)
        chosen.append(positions[spaced.round().long()])
    v, t = chosen
    updates = nn.functional.normalize(after - before, dim=-1)
    return torch.stack(
        [
            (updates[v] @ updates[t].T).mean(),
            measure_attraction(before[v], after[v], before[t]).mean(),
            measure_attraction(before[t], after[t], before[v]).mean(),
        ]
    )


def measure_attractions(samples: Sequence[torch.Tensor]) -> dict[str, Any]:
    """The `NUMBERS` by layer with intervals, from `(num_layers, 3)` of each sample."""
    values = np.stack([sample.double().numpy() for sample in samples])  # [num_samples, num_layers, 3]
    return {name: describe(values[:, :, number]) for number, name in enumerate(NUMBERS)}
