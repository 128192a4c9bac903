"""How fast visual and text tokens turn from layer to layer of the decoder.

Source: "The Unseen Bias" (arXiv 2512.08374), Fig. 3 and 4: the cosine between a token's hidden states before and
after a layer stands for its angular velocity (eq. 8); the closer to 1, the slower it turns.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.norms import token_norms


@dataclass(frozen=True)
class TokenDynamics:
    """One modality's way through the decoder, means over its tokens.

    Attributes:
        norms: Mean L2 norm of the hidden states that enter each layer, and of what leaves the last one, before the
            decoder's final norm: `num_layers + 1` values.
        cosines: Mean cosine between a layer's input and output: `num_layers` values.
        num_tokens: Tokens averaged over.
    """

    norms: list[float]
    cosines: list[float]
    num_tokens: int

    @property
    def update_rate(self) -> float:
        """Mean of `1 - cosine` over the layers."""
        return 1 - sum(self.cosines) / len(self.cosines)


@torch.no_grad()
def measure_dynamics(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> dict[str, TokenDynamics]:
    """Dynamics of the `"visual"` and the `"text"` tokens of one batch. Padding is left out.

    Args:
        model: A vision-language model of transformers with `config.image_token_id` and `get_decoder().layers`.
        inputs: What its processor returns, with `input_ids` and `attention_mask` `(batch_size, sequence_length)`.

    Raises:
        ValueError: if the batch has no visual or no text tokens.
    """
    is_image = inputs["input_ids"] == model.config.image_token_id
    attended = inputs["attention_mask"].bool()
    masks = {"visual": is_image & attended, "text": ~is_image & attended}
    for name, mask in masks.items():
        if not mask.any():
            raise ValueError(f"The batch holds no {name} tokens (image_token_id {model.config.image_token_id}).")

    states: list[torch.Tensor] = []  # num_layers + 1 of [batch_size, sequence_length, hidden_size]
    layers = model.get_decoder().layers
    hooks = [layers[0].register_forward_pre_hook(lambda _, args: states.append(args[0]))]
    hooks += [
        layer.register_forward_hook(
            lambda _, args, output: states.append(output[0] if isinstance(output, tuple) else output)
        )
        for layer in layers
    ]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()

    norms = [token_norms(state) for state in states]
    cosines = [
        nn.functional.cosine_similarity(before.float(), after.float(), dim=-1) for before, after in pairwise(states)
    ]
    return {
        name: TokenDynamics(
            norms=[values[mask].mean().item() for values in norms],
            cosines=[values[mask].mean().item() for values in cosines],
            num_tokens=int(mask.sum()),
        )
        for name, mask in masks.items()
    }
