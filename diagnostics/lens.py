"""What hidden states between the layers read as in the model's own vocabulary: the logit lens.

The decoder's final norm and output embeddings are made for what leaves the last layer. What they make of a state
before is a hint of where it stands, no measure of what it holds.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diagnostics.embeddings import show_token
from diagnostics.parts import DiagnosticsError, find_decoder
from diagnostics.results import Lens, LensToken


# What families call the norm behind the decoder's last layer.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "norm_f", "ln_f")
# Tokens that are read at once: logits are as wide as the vocabulary.
CHUNK = 128
# Of the tokens that are read behind a layer, so many are shown.
TOP = 5
DEFINITIONS = {
    "share": "share of the visual tokens of the first pictures, sinks included, that the decoder's own final norm and "
    "head read as this token behind a layer",
    "probability": "mean probability of the token where it is the likeliest",
    "caveat": "the head is trained for what leaves the last layer: what it reads before is a hint, no measure "
    "(logit lens, nostalgebraist, 2020)",
}


def find_final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the decoder's last layer and the output embeddings.

    Raises:
        DiagnosticsError: if none has a known name.
    """
    parts = dict(find_decoder(model).named_children())
    for name in FINAL_NORMS:
        if name in parts:
            return parts[name]
    raise DiagnosticsError(f"no part of the decoder is called {', '.join(FINAL_NORMS)}")


@torch.no_grad()
def read_visual(model: PreTrainedModel, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest token by the decoder's final norm and output embeddings, and its probability.

    Args:
        model: The model.
        hidden_states: As they leave a layer, `(num_tokens, hidden_size)`.

    Returns:
        Ids and probabilities, `(num_tokens,)` each.

    Raises:
        DiagnosticsError: if the final norm can't be found.
    """
    norm, head = find_final_norm(model), model.get_output_embeddings()
    if head is None:
        raise DiagnosticsError("the model names no output embeddings")
    ids, probabilities = [], []
    for chunk in hidden_states.split(CHUNK):
        logits = _scaled_as_by(model, head(norm(chunk)).float())
        top = logits.softmax(-1).max(-1)
        ids.append(top.indices.cpu())
        probabilities.append(top.values.cpu())
    return torch.cat(ids), torch.cat(probabilities)


def _scaled_as_by(model: PreTrainedModel, logits: torch.Tensor) -> torch.Tensor:
    """What families do with the logits behind the output embeddings; it doesn't change which token is the likeliest.

    Granite divides, Muse multiplies and Gemma caps by its config; Cohere's models with pictures scale only where they
    hold the factor themselves.
    """
    config = model.config.get_text_config()
    factor = (getattr(model, "logit_scale", None) or 1.0) * getattr(config, "output_multiplier", 1.0)
    logits = logits * factor / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


def measure_lens(
    decoded: Sequence[dict[int, tuple[torch.Tensor, torch.Tensor]]], tokenizer: PreTrainedTokenizerBase
) -> Lens | None:
    """What `DEFINITIONS` says, of what [`read_visual`] returned for each sample by layer; `None` where nothing was
    read."""
    decoded = [layers for layers in decoded if layers]
    if not decoded:
        return None
    layers = sorted(decoded[0])
    tokens = []
    for layer in layers:
        ids, probabilities = (torch.cat([of[layer][part] for of in decoded]) for part in (0, 1))
        found, counts = ids.unique(return_counts=True)
        common = found[counts.argsort(descending=True, stable=True)][:TOP].tolist()
        tokens.append(
            [
                LensToken(
                    show_token(token, tokenizer),
                    (ids == token).double().mean().item(),
                    probabilities[ids == token].double().mean().item(),
                )
                for token in common
            ]
        )
    return Lens(layers, len(decoded), tokens)
