"""The logit lens: hidden states between the layers, decoded to the model's own vocabulary.

The decoder's final norm and output embeddings are trained for the last layer's output. Applied to earlier hidden
states they give a hint, not a measure of what these contain.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from diagnostics.embeddings import show_token
from diagnostics.parts import DiagnosticsError, find_decoder
from diagnostics.results import Lens, LensToken


# Names of the norm after the decoder's last layer.
FINAL_NORMS = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "norm_f", "ln_f")
# Tokens that are decoded at a time: logits are as wide as the vocabulary.
CHUNK = 128
# Number of decoded tokens that are shown for a layer.
TOP = 5
DEFINITIONS = {
    "share": "share of the visual tokens of the first pictures, sinks included, that the decoder's own final norm and "
    "head decode to this token after a layer",
    "probability": "mean probability of the token where it is the most probable one",
    "caveat": "the head is trained for the last layer's output: applied to earlier layers it gives a hint, not a "
    "measure (logit lens, nostalgebraist, 2020)",
}


def find_final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm between the decoder's last layer and the output embeddings.

    Raises:
        DiagnosticsError: if no known name is found.
    """
    parts = dict(find_decoder(model).named_children())
    for name in FINAL_NORMS:
        if name in parts:
            return parts[name]
    raise DiagnosticsError(f"no part of the decoder is called {', '.join(FINAL_NORMS)}")


@torch.no_grad()
def read_visual(model: PreTrainedModel, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most probable token by the decoder's final norm and output embeddings, and its probability.

    Args:
        model: The model.
        hidden_states: Output of a layer, `(num_tokens, hidden_size)`.

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
    """Scale or cap logits as the model family does; it doesn't change which token is the most probable.

    Granite divides, Muse multiplies and Gemma caps by its config; Cohere's vision models scale only if they have the
    factor themselves.
    """
    config = model.config.get_text_config()
    factor = (getattr(model, "logit_scale", None) or 1.0) * getattr(config, "output_multiplier", 1.0)
    logits = logits * factor / getattr(config, "logits_scaling", 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else cap * (logits / cap).tanh()


def measure_lens(
    decoded: Sequence[dict[int, tuple[torch.Tensor, torch.Tensor]]], tokenizer: PreTrainedTokenizerBase
) -> Lens | None:
    """The measures of `DEFINITIONS`, from the results of [`read_visual`] by layer, one sample of each picture; `None`
    if there are none."""
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
