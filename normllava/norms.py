"""L2 norms of hidden states and of text embeddings, always computed in float32.

Source: "The Unseen Bias" (arXiv 2512.08374), Table 1 and eq. 11.
"""

import torch
from transformers import PreTrainedModel

from normllava.errors import UserError


# Number of token ids that are embedded at a time: few enough that their embeddings need little memory.
CHUNK_SIZE = 8192
# `input_scale` takes two factors as equal if they differ by no more than this share.
SCALE_TOLERANCE = 0.02


def token_norms(hidden_states: torch.Tensor) -> torch.Tensor:
    """L2 norm of each token: `(..., hidden_size)` in, `(...)` out, float32 whatever the input's dtype."""
    return torch.linalg.vector_norm(hidden_states, dim=-1, dtype=torch.float32)


@torch.no_grad()
def vocabulary_norms(model: PreTrainedModel) -> torch.Tensor:
    """L2 norm of what the embedding layer returns for each token id, `(num_embeddings,)`.

    The layer is called, because some layers, such as Gemma's, multiply the rows of their weight by a constant.
    """
    embedding_layer = model.get_input_embeddings()
    device = embedding_layer.weight.device
    # A weight that accelerate has offloaded is on the meta device. Accelerate then moves the ids to the right device.
    if device.type == "meta":
        device = torch.device("cpu")

    token_ids = torch.arange(embedding_layer.num_embeddings, device=device)
    norms = []
    for chunk in token_ids.split(CHUNK_SIZE):
        batch = chunk[None]  # [1, chunk_size], as if the ids were one sample
        embeddings = embedding_layer(batch)[0]  # [chunk_size, hidden_size]
        norms.append(token_norms(embeddings).cpu())
    return torch.cat(norms)


def text_norm_target(norms: torch.Tensor) -> float:
    """The mean norm of the text embeddings that are not all zero, which is T in the paper's eq. 11.

    A NormLlava's image tokens start at this norm, unless the user chooses another.

    Args:
        norms: L2 norms of all text embeddings, `(num_embeddings,)`.

    Raises:
        UserError: if every norm is 0.
    """
    nonzero = norms[norms > 0]
    if len(nonzero) == 0:
        raise UserError("All text embeddings are zero: the language model's `embed_tokens` has no trained weights.")
    return nonzero.double().mean().item()


def input_scale(norms_at_decoder: torch.Tensor, embedded_norms: torch.Tensor) -> float:
    """The factor by which a decoder, such as Granite's, multiplies its input before the first layer; 1 if it has none.

    Args:
        norms_at_decoder: Norms of text tokens at the decoder's first layer, `(num_tokens,)`.
        embedded_norms: Norms of the same tokens' embeddings, `(num_tokens,)`.
    """
    factors = (norms_at_decoder / embedded_norms)[embedded_norms > 0]
    if len(factors) < 2:  # a single factor can't show whether the factors of all tokens are equal
        return 1.0

    scale = factors.median().item()
    if abs(scale - 1) <= SCALE_TOLERANCE:
        return 1.0

    # A decoder that adds position embeddings changes the norm of each token by a different factor: it has no scale.
    all_are_equal = (factors - scale).abs().max() < SCALE_TOLERANCE * scale
    return scale if all_are_equal else 1.0
