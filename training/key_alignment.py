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


# Of the MMD's kernels, as in the diagnostics' MMD²; and of each modality in a forward pass.
BANDWIDTHS, MAX_TOKENS = (0.25, 0.5, 1.0, 2.0, 4.0), 256


def mmd(visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """MMD² between two sets of keys, mean over heads: the U-statistic of Gretton et al. (2012, eq. 3), which is about
    0 for equal distributions and can fall below.

    The kernel is `mean_j exp(-|x - y|² / (s_j σ²))`, where s are `BANDWIDTHS` and σ² is a head's mean squared distance
    over both sets, without a gradient.

    Args:
        visual, text: `(num_heads, num_tokens, head_dim)`, at least two tokens each.
    """
    keys, n, m = torch.cat([visual, text], dim=1), visual.shape[1], text.shape[1]
    centred = keys - keys.mean(dim=1, keepdim=True)  # same distances, less rounding error
    squares = centred.square().sum(-1)
    distances = (squares[:, :, None] + squares[:, None] - 2 * centred @ centred.transpose(1, 2)).clamp(min=0)
    scale = distances.detach().sum((1, 2), keepdim=True) / ((n + m) * (n + m - 1))  # σ² of each head, [heads, 1, 1]
    scale = scale.clamp(min=torch.finfo(keys.dtype).eps ** 2)  # in case all keys are equal
    kernel = torch.stack([torch.exp(-distances / (bandwidth * scale)) for bandwidth in BANDWIDTHS]).mean(0)
    kernel = kernel * (1 - torch.eye(n + m, dtype=kernel.dtype, device=kernel.device))
    of_visual, of_text = kernel[:, :n, :n].sum((1, 2)) / (n * (n - 1)), kernel[:, n:, n:].sum((1, 2)) / (m * (m - 1))
    return (of_visual + of_text - 2 * kernel[:, :n, n:].mean((1, 2))).mean()


def gram_distance(keys: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """`|G - G_ref|²_F / n²` of the Gram matrices of keys, centred and then normalized, mean over heads.

    Centring makes it invariant to a shift of all keys, which the MMD may require. Both are `(num_heads, n, head_dim)`,
    of the same tokens of one modality.
    """
    now, then = (functional.normalize(of - of.mean(dim=1, keepdim=True), dim=-1) for of in (keys, reference))
    return (now @ now.mT - then @ then.mT).square().mean()


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
        self._weights, self._ids = (mmd_weight, gram_weight), token_ids(model, processor)
        self._tokens: Tokens | None = None  # of the pass, where it is watched
        # Of the tokens that are used, in the flattened batch, `(n,)`: the visual ones first.
        self._positions, self._num_visual = torch.empty(0), 0
        self._norms: list[torch.Tensor] = []
        self._keys: dict[int, torch.Tensor] = {}
        self._references: dict[int, torch.Tensor] = {}
        self._sums = torch.zeros(3, dtype=torch.float64)  # MMD², Gram distance, passes
        model.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder_layers: Any = model.model.language_model.layers
        self._attentions: list[Any] = [layer.self_attn for layer in decoder_layers]
        for number, layer in enumerate(decoder_layers):
            layer.register_forward_hook(self._see_layer)
            self._watch(number, layer.self_attn)

    def _begin(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        """Draw the tokens to use."""
        self._tokens, self._norms, self._keys, self._references = None, [], {}, {}
        if module.training:
            self._tokens = classify(kwargs, self._ids)
            found = (mask.flatten().nonzero()[:, 0] for mask in (self._tokens.visual, self._tokens.text))
            drawn = [places[torch.randperm(len(places), device=places.device)[:MAX_TOKENS]] for places in found]
            self._positions, self._num_visual = torch.cat(drawn), len(drawn[0])

    # After `penalty` the hooks do nothing: gradient checkpointing runs the layers again in the backward pass.

    @torch.no_grad()
    def _see_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._tokens is not None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            self._norms.append(states.flatten(0, 1)[self._positions].float().norm(dim=-1))

    def _watch(self, number: int, attention: Any) -> None:
        """Hook the modules that make a layer's keys, and, by the frozen `k_proj` alone, the reference."""
        norm = getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)  # Qwen3's, Phi's name

        @torch.no_grad()
        def see_projection(projection: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            if self._tokens is not None and self._weights[1]:
                keys = projection.base(args[0].flatten(0, 1)[self._positions])
                if norm is not None:  # `forward`, since a call would trigger the hook below
                    keys = norm.forward(keys.unflatten(-1, (-1, *norm.weight.shape)))
                self._references[number] = keys.reshape(len(keys), -1, attention.head_dim).transpose(0, 1)

        def see_keys(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            # All tokens: gradient checkpointing would have to rerun a selection made here.
            if self._tokens is not None and torch.is_grad_enabled():
                self._keys[number] = output

        attention.k_proj.register_forward_hook(see_projection)
        (norm or attention.k_proj).register_forward_hook(see_keys)

    def penalty(self) -> torch.Tensor:
        """What the last forward pass adds to the loss, a scalar."""
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return torch.zeros(())
        is_visual = torch.arange(len(self._positions)) < self._num_visual
        drawn = Tokens(is_visual, ~is_visual, {})
        norms = torch.stack([self._norms[0], *self._norms]).cpu()  # the first is the input, which doesn't count
        drawn = drawn.without("sink", find_sinks(norms, drawn))
        visual, text = (mask.nonzero()[:, 0].to(self._positions.device) for mask in (drawn.visual, drawn.text))
        if min(len(visual), len(text)) < 2:
            return torch.zeros(())
        with torch.autocast(self._positions.device.type, enabled=False):
            measured = []
            for number, attention in enumerate(self._attentions):
                keys = self._keys.pop(number)  # absent under reentrant gradient checkpointing, which leaves no graph
                keys = keys if keys.shape[:2] == tokens.visual.shape else keys.transpose(1, 2)  # heads came first
                keys = keys.flatten(0, 1)[self._positions]
                keys = keys.reshape(len(keys), -1, attention.head_dim).transpose(0, 1)  # [heads, n, head_dim]
                keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
                # Recomputed in the backward pass, so that only one layer's matrices are held at a time.
                reference = self._references.pop(number, None)
                measured.append(checkpoint(self._measure, keys, reference, visual, text, use_reentrant=False))
            values = torch.stack(measured).mean(0)
        self._sums += torch.cat([values.detach().cpu().double(), torch.ones(1)])
        return values[0] * self._weights[0] + values[1] * self._weights[1]

    def _measure(
        self, keys: torch.Tensor, reference: torch.Tensor | None, visual: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """MMD² and the distance of Gram matrices of one layer, `(2,)`; 0 for a loss without weight."""
        distance = change = keys.new_zeros(())
        if self._weights[0]:
            distance = mmd(keys[:, visual], keys[:, text])
        if reference is not None:
            reference = reference.to(keys.dtype)
            change = torch.stack([gram_distance(keys[:, of], reference[:, of]) for of in (visual, text)]).mean()
        return torch.stack([distance, change])

    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means over layers of both measures since the last call, over the passes that had them, without weights.
        `reduce` sums a tensor over processes; all must call this."""
        *sums, passes = reduce(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)
        names = zip(("key_mmd", "key_gram"), sums, self._weights, strict=True)
        return {name: of_name / passes for name, of_name, weight in names if weight and passes}
