"""Norms of the text embeddings, and the tokens with the largest (Tables 6 to 8 of "The Unseen Bias")."""

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diagnostics.norms import embedding_norms
from diagnostics.results import Embeddings, LongToken


DEFINITIONS = {
    "mean": "mean L2 norm of what the embedding layer returns for each token id, all-zero rows left out (T, eq. 11)",
    "num_zero": "rows that are all zero",
    "top": "the tokens with the largest norms",
}


def vocabulary_norms(model: PreTrainedModel) -> torch.Tensor:
    """Norms of the embedding layer's output by token id, `(num_embeddings,)`."""
    embeddings = model.get_input_embeddings()
    return embedding_norms(embeddings, embeddings.num_embeddings)


def measure_embeddings(norms: torch.Tensor, tokenizer: PreTrainedTokenizerBase, top_k: int = 10) -> Embeddings:
    """The measures of `DEFINITIONS`, and `std`, `max` and `num_embeddings`, of norms by token id.

    Tokens are shown by `repr`; ids beyond the tokenizer's vocabulary, which pad the table, by number.
    """
    nonzero = norms[norms > 0].double()
    longest = norms.topk(min(top_k, len(norms)))
    return Embeddings(
        mean=nonzero.mean().item(),
        std=nonzero.std(correction=0).item(),
        max=nonzero.max().item(),
        num_embeddings=len(norms),
        num_zero=int((norms == 0).sum()),
        top=[
            LongToken(token, show_token(token, tokenizer), norm)
            for token, norm in zip(longest.indices.tolist(), longest.values.tolist(), strict=True)
        ],
    )


def show_token(token: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A token as `repr` shows it, or its id if the tokenizer doesn't know it."""
    return repr(tokenizer.decode([token])) if token < len(tokenizer) else f"id {token}, not in the tokenizer"
