"""Measures what the theory leaves open, in a forward pass: do updates correlate, and do they attract each other?

Theorem 1 of "The Unseen Bias" (arXiv 2512.08374) takes the updates of a visual and of a text token as independent;
`examples/theory/THEORY.md` says why that matters and what κ is.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from diagnostics.results import Attractions
from diagnostics.statistics import by_layer, by_picture
from diagnostics.tokens import SINK_FACTOR, far_longer


# Tokens of either modality that are compared in one sample.
MAX_COMPARED = 64
DEFINITIONS = {
    "tokens": f"at most {MAX_COMPARED} of each kind in a sample, evenly spaced; those that enter the layer with a "
    f"norm over {SINK_FACTOR:g} times the median of their modality are left out",
    "update_correlation": "mean cosine between the updates of a visual and of a text token by one layer; independent "
    "updates give 0",
    "attraction_visual_to_text": "mean κ of visual tokens towards text tokens: cosine of a token's update and the "
    "other token, both projected orthogonally to the token; independent updates give 0",
    "attraction_text_to_visual": "the same for text tokens towards visual ones",
}


def attraction_towards(hidden_states: torch.Tensor, updated: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """κ of each token's update towards each other token: their cosine, both projected orthogonally to the token.

    Args:
        hidden_states: Tokens before a layer, `(num_tokens, hidden_size)`.
        updated: The same after it.
        others: Tokens of the other modality before the layer, `(num_others, hidden_size)`.

    Returns:
        `(num_tokens, num_others)`, from -1 to 1, float32.
    """
    unit = nn.functional.normalize(hidden_states.float(), dim=-1)
    update = updated.float() - hidden_states.float()
    across = update - (update * unit).sum(-1, keepdim=True) * unit  # [num_tokens, hidden_size]
    across = nn.functional.normalize(across, dim=-1)
    others = nn.functional.normalize(others.float(), dim=-1)
    cosine = unit @ others.T
    # `across` is orthogonal to the token, so the other's part along the token drops out of the product.
    return (across @ others.T) / (1 - cosine.square()).clamp(min=1e-12).sqrt()


@torch.no_grad()
def compare_updates(
    before: torch.Tensor, after: torch.Tensor, visual: torch.Tensor, text: torch.Tensor
) -> torch.Tensor:
    """The values of [`Attractions`], in that order, for one layer and one sample, `(3,)`; see `DEFINITIONS`.

    Args:
        before, after: The layer's input and output, `(S, hidden_size)`, float32.
        visual, text: Type of each position, `(S,)`.
    """
    chosen = []
    for mask in (visual, text):
        positions = mask.nonzero()[:, 0].to(before.device)
        positions = positions[~far_longer(before[positions].norm(dim=-1))]
        spaced = torch.linspace(0, len(positions) - 1, min(MAX_COMPARED, len(positions)), device=before.device)
        chosen.append(positions[spaced.round().long()])
    v, t = chosen
    updates = nn.functional.normalize(after - before, dim=-1)
    return torch.stack(
        [
            (updates[v] @ updates[t].T).mean(),
            attraction_towards(before[v], after[v], before[t]).mean(),
            attraction_towards(before[t], after[t], before[v]).mean(),
        ]
    )


def measure_attractions(samples: Sequence[torch.Tensor], pictures: np.ndarray) -> Attractions:
    """The numbers of `DEFINITIONS` by layer with intervals.

    Args:
        samples: Results of [`compare_updates`] by layer, `(L, 3)`, one for each sample.
        pictures: Number of each sample's picture.
    """
    values = by_picture(np.stack([sample.double().numpy() for sample in samples]), pictures)  # [num_pictures, L, 3]
    return Attractions(*(by_layer(values[:, :, number]) for number in range(values.shape[2])))
