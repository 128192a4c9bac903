"""Losses that bring visual and text keys together while adapters are trained, MaLoRA-style (arXiv 2510.26721).

The paper's abstract names a multi-kernel MMD and a Gram reference; its full text was not available. The rest is our
choice: keys are taken before rotary embedding (after the key norm of families such as Qwen3), per head, of the tokens
that the diagnostics count as visual and text.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from common.errors import UserError
from diagnostics.tokens import Inputs, Tokens, classify, find_sinks, token_ids
from modeling_normllava import NormLlavaForConditionalGeneration, NormLlavaKeyAdapterForConditionalGeneration


# Of the MMD's kernels, as in the diagnostics' MMD².
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
# Of each modality in a forward pass.
MAX_TOKENS = 256


def mmd(visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """MMD² between two sets of keys, mean over heads: the U-statistic of Gretton et al. (2012, eq. 3).

    It is about 0 for equal distributions, and can fall below.

    Args:
        visual, text: `(num_heads, num_tokens, head_dim)`, at least two tokens each.
    """
    num_visual = visual.shape[1]
    kernel = gaussian_kernels(torch.cat([visual, text], dim=1))
    within_visual = mean_within(kernel[:, :num_visual, :num_visual])
    within_text = mean_within(kernel[:, num_visual:, num_visual:])
    across = kernel[:, :num_visual, num_visual:].mean((1, 2))
    return (within_visual + within_text - 2 * across).mean()


def gaussian_kernels(keys: torch.Tensor) -> torch.Tensor:
    """`mean_j exp(-|x - y|² / (s_j σ²))` of each two keys of a head.

    s are `BANDWIDTHS`, and σ² is the head's mean squared distance over all of its keys, without a gradient.

    Args:
        keys: `(num_heads, num_tokens, head_dim)`.

    Returns:
        `(num_heads, num_tokens, num_tokens)`.
    """
    num_tokens = keys.shape[1]
    centred = keys - keys.mean(dim=1, keepdim=True)  # same distances, less rounding error
    squares = centred.square().sum(-1)
    distances = squares[:, :, None] + squares[:, None] - 2 * centred @ centred.transpose(1, 2)
    distances = distances.clamp(min=0)

    num_pairs = num_tokens * (num_tokens - 1)
    scale = distances.detach().sum((1, 2), keepdim=True) / num_pairs  # [num_heads, 1, 1]
    scale = scale.clamp(min=torch.finfo(keys.dtype).eps ** 2)  # in case all keys are equal
    return torch.stack([torch.exp(-distances / (bandwidth * scale)) for bandwidth in BANDWIDTHS]).mean(0)


def mean_within(kernel: torch.Tensor) -> torch.Tensor:
    """Mean over the pairs of different tokens, a sum of eq. 3: `(num_heads, n, n)` in, `(num_heads,)` out."""
    num_tokens = kernel.shape[1]
    is_other = 1 - torch.eye(num_tokens, dtype=kernel.dtype, device=kernel.device)
    return (kernel * is_other).sum((1, 2)) / (num_tokens * (num_tokens - 1))


def gram_distance(keys: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """`|G - G_ref|²_F / n²` of the Gram matrices of keys, centred and then normalized, mean over heads.

    Centring makes it invariant to a shift of all keys, which the MMD may require. Both are `(num_heads, n, head_dim)`,
    of the same tokens of one modality.
    """
    return (gram_matrix(keys) - gram_matrix(reference)).square().mean()


def gram_matrix(keys: torch.Tensor) -> torch.Tensor:
    """Cosines of centred keys: `(num_heads, n, head_dim)` in, `(num_heads, n, n)` out."""
    centred = keys - keys.mean(dim=1, keepdim=True)
    directions = functional.normalize(centred, dim=-1)
    return directions @ directions.mT


class KeyAlignment:
    """Records the decoder's keys in training, and computes what is added to the loss.

    A pass with fewer than two tokens of a modality, such as one without pictures, adds nothing. Sinks are found among
    all drawn tokens together; the diagnostics find them per sample.

    Args:
        model: The model with key adapters, with LoRA adapters and without wrappers.
        processor: Its processor, for the special tokens.
        mmd_weight, gram_weight: Of [`mmd`], and of [`gram_distance`] to the keys that the frozen `k_proj` computes
            from the same hidden states, mean over the modalities. Both are means over the decoder's layers.

    Raises:
        UserError: if the model has no key adapters.
    """

    def __init__(
        self, model: NormLlavaForConditionalGeneration, processor: Any, mmd_weight: float, gram_weight: float
    ) -> None:
        if not isinstance(model, NormLlavaKeyAdapterForConditionalGeneration):
            raise UserError(
                "key_mmd_weight and key_gram_weight need key adapters, and the model has none. Add them: "
                "python training/add_key_adapters.py --model <folder> --output_dir <folder>"
            )
        self._mmd_weight = mmd_weight
        self._gram_weight = gram_weight
        self._ids = token_ids(model, processor)
        self._sums = torch.zeros(3, dtype=torch.float64)  # MMD², Gram distance, passes

        # Of the pass that is watched; `None` where none is.
        self._tokens: Tokens | None = None
        # The drawn tokens in the flattened batch, `(n,)`: the visual ones first.
        self._positions = torch.empty(0)
        self._num_visual = 0
        # By layer, of the drawn tokens: norms of its output; reference keys `(num_heads, n, head_dim)`. And of all
        # tokens the keys, as the model has them.
        self._norms: list[torch.Tensor] = []
        self._references: dict[int, torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}

        model.model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        decoder_layers: Any = model.model.language_model.layers
        self._attentions: list[Any] = [layer.self_attn for layer in decoder_layers]
        for number, layer in enumerate(decoder_layers):
            layer.register_forward_hook(self._see_layer)
            self._watch_keys(number, layer.self_attn)

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        """Draw the tokens to use."""
        self._tokens = None
        self._norms = []
        self._references = {}
        self._keys = {}
        if not module.training:
            return

        self._tokens = classify(kwargs, self._ids)
        visual = draw(self._tokens.visual)
        text = draw(self._tokens.text)
        self._positions = torch.cat([visual, text])
        self._num_visual = len(visual)

    # After `penalty` the hooks do nothing: gradient checkpointing runs the layers again in the backward pass.

    @torch.no_grad()
    def _see_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._tokens is None:
            return
        hidden_states = output if isinstance(output, torch.Tensor) else output[0]
        self._norms.append(hidden_states.flatten(0, 1)[self._positions].float().norm(dim=-1))

    def _watch_keys(self, number: int, attention: Any) -> None:
        """Hook the modules that make a layer's keys, and, by the frozen `k_proj` alone, the reference."""
        norm = getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)  # Qwen3's, Phi's name

        @torch.no_grad()
        def see_projection(projection: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            if self._tokens is None or not self._gram_weight:
                return
            hidden_states = args[0].flatten(0, 1)[self._positions]
            keys = projection.base(hidden_states)
            if norm is not None:  # `forward`, since a call would trigger the hook below
                keys = norm.forward(keys.unflatten(-1, (-1, *norm.weight.shape)))
            self._references[number] = split_heads(keys, attention.head_dim)

        def see_keys(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            # All tokens: gradient checkpointing would have to rerun a selection made here.
            if self._tokens is not None and torch.is_grad_enabled():
                self._keys[number] = output

        attention.k_proj.register_forward_hook(see_projection)
        (norm or attention.k_proj).register_forward_hook(see_keys)

    def penalty(self) -> torch.Tensor:
        """What the last forward pass adds to the loss, a scalar."""
        tokens = self._tokens
        self._tokens = None
        if tokens is None:
            return torch.zeros(())
        visual, text = self._without_sinks()
        if min(len(visual), len(text)) < 2:
            return torch.zeros(())

        with torch.autocast(self._positions.device.type, enabled=False):
            measured = []
            for number, attention in enumerate(self._attentions):
                keys = self._keys.pop(number)
                if keys.shape[:2] != tokens.visual.shape:
                    keys = keys.transpose(1, 2)  # heads came first
                keys = split_heads(keys.flatten(0, 1)[self._positions], attention.head_dim)
                keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
                # Recomputed in the backward pass, so that only one layer's matrices are held at a time.
                reference = self._references.pop(number, None)
                measured.append(checkpoint(self._measure, keys, reference, visual, text, use_reentrant=False))
            means = torch.stack(measured).mean(0)

        one_pass = torch.ones(1, dtype=torch.float64)
        self._sums += torch.cat([means.detach().cpu().double(), one_pass])
        distance, change = means
        return distance * self._mmd_weight + change * self._gram_weight

    def _without_sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of the drawn tokens are visual, and which text, by their numbers; sinks are neither."""
        is_visual = torch.arange(len(self._positions)) < self._num_visual
        drawn = Tokens(is_visual, ~is_visual, {})
        norms = torch.stack([self._norms[0], *self._norms]).cpu()  # the first is the input, which doesn't count
        kept = drawn.without("sink", find_sinks(norms, drawn))

        device = self._positions.device
        return kept.visual.nonzero()[:, 0].to(device), kept.text.nonzero()[:, 0].to(device)

    def _measure(
        self, keys: torch.Tensor, reference: torch.Tensor | None, visual: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """MMD² and the distance of Gram matrices of one layer, `(2,)`; 0 for a loss without weight."""
        distance = keys.new_zeros(())
        if self._mmd_weight:
            distance = mmd(keys[:, visual], keys[:, text])

        change = keys.new_zeros(())
        if reference is not None:
            reference = reference.to(keys.dtype)
            change_of_visual = gram_distance(keys[:, visual], reference[:, visual])
            change_of_text = gram_distance(keys[:, text], reference[:, text])
            change = torch.stack([change_of_visual, change_of_text]).mean()
        return torch.stack([distance, change])

    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Both measures since the last call, without weights: means over layers and over the passes that had them.

        `reduce` sums a tensor over processes; all must call this.
        """
        distance, change, num_passes = reduce(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)

        means = {}
        if num_passes and self._mmd_weight:
            means["key_mmd"] = distance / num_passes
        if num_passes and self._gram_weight:
            means["key_gram"] = change / num_passes
        return means


def draw(mask: torch.Tensor) -> torch.Tensor:
    """At most `MAX_TOKENS` random positions where a mask is true, in the flattened mask."""
    positions = mask.flatten().nonzero()[:, 0]
    order = torch.randperm(len(positions), device=positions.device)
    return positions[order[:MAX_TOKENS]]


def split_heads(keys: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Keys by head: `(n, ...)` with all heads behind in, `(num_heads, n, head_dim)` out."""
    return keys.reshape(len(keys), -1, head_dim).transpose(0, 1)
