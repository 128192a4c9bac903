"""L2 norms of tokens and of the text embeddings, always in float32.

Source: "The Unseen Bias" (arXiv 2512.08374), Table 1 and eq. 11.
"""

import torch
from torch import nn
from transformers import PreTrainedModel


def token_norms(hidden_states: torch.Tensor) -> torch.Tensor:
    """L2 norm of each token: `(..., hidden_size)` in, `(...)` out, float32 whatever the input's dtype."""
    return torch.linalg.vector_norm(hidden_states, dim=-1, dtype=torch.float32)


@torch.no_grad()
def embedding_norms(embeddings: nn.Module, num_embeddings: int, chunk_size: int = 8192) -> torch.Tensor:
    """L2 norms `(num_embeddings,)` of what the embedding layer returns for each token id, `chunk_size` at a time.

    The layer is called instead of reading its weight, because some decoders (Gemma) scale the embeddings.
    """
    device = next(embeddings.parameters()).device
    if device.type == "meta":  # offloaded: accelerate takes ids from anywhere
        device = torch.device("cpu")
    chunks = torch.arange(num_embeddings, device=device).split(chunk_size)
    return torch.cat([token_norms(embeddings(ids[None])[0]).cpu() for ids in chunks])


def vocabulary_norms(model: PreTrainedModel) -> torch.Tensor:
    """[`embedding_norms`] of a model, `(num_embeddings,)`."""
    embeddings = model.get_input_embeddings()
    return embedding_norms(embeddings, embeddings.num_embeddings)


def text_norm_target(norms: torch.Tensor) -> float:
    """T: the mean of `norms`, the `(num_embeddings,)` L2 norms of the text embeddings, over those above 0 (eq. 11).

    Raises:
        ValueError: if every norm is 0, so that there is nothing to align to.
    """
    nonzero = norms[norms > 0]
    if len(nonzero) == 0:
        raise ValueError("All text embeddings are zero: the language model's `embed_tokens` has no trained weights.")
    return nonzero.double().mean().item()
