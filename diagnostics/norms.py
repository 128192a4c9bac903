"""L2 norms of tokens and of the text embeddings, always in float32.

Source: "The Unseen Bias" (arXiv 2512.08374), Table 1 and eq. 11.
"""

import torch
from transformers import PreTrainedModel

from common.errors import UserError


# Ids that are embedded at a time, which bounds the memory.
CHUNK = 8192


def token_norms(hidden_states: torch.Tensor) -> torch.Tensor:
    """L2 norm of each token: `(..., hidden_size)` in, `(...)` out, float32 whatever the input's dtype."""
    return torch.linalg.vector_norm(hidden_states, dim=-1, dtype=torch.float32)


@torch.no_grad()
def vocabulary_norms(model: PreTrainedModel) -> torch.Tensor:
    """L2 norms `(num_embeddings,)` of what the embedding layer returns for each token id.

    The layer is called instead of reading its weight, because some decoders (Gemma) scale the embeddings.
    """
    embeddings = model.get_input_embeddings()
    device = next(embeddings.parameters()).device
    if device.type == "meta":  # Offloaded: accelerate takes ids from any device.
        device = torch.device("cpu")

    ids = torch.arange(embeddings.num_embeddings, device=device)
    norms = [token_norms(embeddings(chunk[None])[0]).cpu() for chunk in ids.split(CHUNK)]
    return torch.cat(norms)


def text_norm_target(norms: torch.Tensor) -> float:
    """T: the mean of `norms`, the `(num_embeddings,)` L2 norms of the text embeddings, over those above 0 (eq. 11).

    Raises:
        UserError: if every norm is 0, so that there is nothing to align to.
    """
    nonzero = norms[norms > 0]
    if len(nonzero) == 0:
        raise UserError("All text embeddings are zero: the language model's `embed_tokens` has no trained weights.")
    return nonzero.double().mean().item()
