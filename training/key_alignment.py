"""Losses that bring visual and text keys together while adapters are trained, MaLoRA-style (arXiv 2510.26721).

The paper's abstract names a multi-kernel MMD and a Gram reference; its full text was not available. The rest is our
choice: keys are taken before rotary embedding (after the key norm of families such as Qwen3), per head, of the tokens
that the diagnostics count as visual and text.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from diagnostics.parts import layer_groups
from diagnostics.tokens import Inputs, Tokens, classify, find_sinks, token_ids
from modeling_normllava import NormLlavaKeyAdapterForConditionalGeneration


# Per modality and forward pass.
MAX_TOKENS = 256


def mmd(visual: torch.Tensor, text: torch.Tensor, bandwidths: Sequence[float]) -> torch.Tensor:
    """MMD² between two sets of keys, mean over heads: the U-statistic of Gretton et al. (2012, eq. 3), which is about
    0 for equal distributions and can fall below.

    The kernel is `mean_j exp(-|x - y|² / (s_j σ²))`, where σ² is a head's mean squared distance over both sets,
    without a gradient.

    Args:
        visual, text: `(num_heads, num_tokens, head_dim)`, at least two tokens each.
        bandwidths: s.
    """
    keys, n, m = torch.cat([visual, text], dim=1), visual.shape[1], text.shape[1]
    centred = keys - keys.mean(dim=1, keepdim=True)  # same distances, less rounding error
    squares = centred.square().sum(-1)
    distances = (squares[:, :, None] + squares[:, None] - 2 * centred @ centred.transpose(1, 2)).clamp(min=0)
    scale = distances.detach().sum((1, 2), keepdim=True) / ((n + m) * (n + m - 1))  # σ² of each head, [heads, 1, 1]
    scale = scale.clamp(min=torch.finfo(keys.dtype).eps ** 2)  # in case all keys are equal
    kernel = torch.stack([torch.exp(-distances / (bandwidth * scale)) for bandwidth in bandwidths]).mean(0)
    kernel = kernel * (1 - torch.eye(n + m, dtype=kernel.dtype, device=kernel.device))
    of_visual, of_text = kernel[:, :n, :n].sum((1, 2)) / (n * (n - 1)), kernel[:, n:, n:].sum((1, 2)) / (m * (m - 1))
    return (of_visual + of_text - 2 * kernel[:, :n, n:].mean((1, 2))).mean()


def gram_distance(keys: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """`|G - G_ref|²_F / n²` of the Gram matrices of keys, centred and then normalized, mean over heads.

    Centring makes it invariant to a shift of all keys, which the MMD may require.

    Args:
        keys: Of one modality, `(num_heads, n, head_dim)`.
        reference: Reference keys of the same tokens, in the same shape.
    """

    def gram(of: torch.Tensor) -> torch.Tensor:
        rows = functional.normalize(of - of.mean(dim=1, keepdim=True), dim=-1)
        return rows @ rows.transpose(1, 2)

    return (gram(keys) - gram(reference)).square().mean()


class KeyAlignment:
    """Records the decoder's keys in training, and computes what is added to the loss.

    A pass with fewer than two tokens of a modality, such as one without pictures, adds nothing. Sinks are found among
    all drawn tokens together; the diagnostics find them per sample.

    Args:
        model: The model with key adapters, with LoRA adapters and without wrappers.
        processor: Its processor, for the special tokens.
        mmd_weight, gram_weight: Of [`mmd`], and of [`gram_distance`] to the keys that the frozen `k_proj` computes
            from the same hidden states, mean over the modalities. Both are means over `layers`.
        bandwidths: s of [`mmd`].
        layers: Layers of the decoder; `None` for all.

    Raises:
        ValueError: if there are no such layers.
    """

    @classmethod
    def from_arguments(
        cls, model: NormLlavaKeyAdapterForConditionalGeneration, processor: Any, run_args: Any
    ) -> Self | None:
        """As a run's arguments ask for it; `None` if they don't."""
        if not run_args.key_losses:
            return None
        weights = (run_args.key_mmd_weight, run_args.key_gram_weight)
        return cls(model, processor, *weights, (0.25, 0.5, 1.0, 2.0, 4.0))

    def __init__(
        self,
        model: NormLlavaKeyAdapterForConditionalGeneration,
        processor: Any,
        mmd_weight: float,
        gram_weight: float,
        bandwidths: Sequence[float],
        layers: Sequence[int] | None = None,
    ) -> None:
        decoder_layers: Any = model.model.language_model.layers
        count = len(decoder_layers)
        self._layers = sorted(set(range(count) if layers is None else layers))
        if not self._layers or not 0 <= self._layers[0] <= self._layers[-1] < count:
            raise ValueError(f"key_layers must be some of 0 to {count - 1}, the decoder's layers, got {layers}.")
        self._mmd_weight, self._gram_weight, self._bandwidths = mmd_weight, gram_weight, bandwidths
        self._ids = token_ids(model, processor)
        groups = {name.replace(" ", "_"): group for name, group in layer_groups(count).items()}
        self._groups = {number: name for name, group in groups.items() for number in group}
        self._tokens: Tokens | None = None  # of the pass, where it is watched
        # Of the tokens that are used, in the flattened batch, `(n,)`: the visual ones first.
        self._positions, self._num_visual = torch.empty(0), 0
        self._norms: list[torch.Tensor] = []
        self._keys: dict[int, torch.Tensor] = {}
        self._references: dict[int, torch.Tensor] = {}
        self._sums: defaultdict[str, torch.Tensor] = defaultdict(lambda: torch.zeros(3, dtype=torch.float64))
        model.model.register_forward_pre_hook(self._begin, with_kwargs=True)
        for layer in decoder_layers:
            layer.register_forward_hook(self._see_layer)
        self._head_dims: dict[int, int] = {}
        for number in self._layers:
            self._watch(number, decoder_layers[number].self_attn)

    def _begin(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        """Draw the tokens to use."""
        self._tokens, self._norms, self._keys, self._references = None, [], {}, {}
        if module.training:
            self._tokens = classify(kwargs, self._ids)
            visual, text = (_draw(mask.flatten()) for mask in (self._tokens.visual, self._tokens.text))
            self._positions, self._num_visual = torch.cat([visual, text]), len(visual)

    # After `penalty` the hooks do nothing: gradient checkpointing runs the layers again in the backward pass.

    @torch.no_grad()
    def _see_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._tokens is not None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            self._norms.append(states.flatten(0, 1)[self._positions].float().norm(dim=-1))

    def _watch(self, number: int, attention: Any) -> None:
        """Hook the modules that make a layer's keys, and, by the frozen `k_proj` alone, the reference."""
        norm, self._head_dims[number] = key_norm(attention), attention.head_dim

        @torch.no_grad()
        def see_projection(projection: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            if self._tokens is None or not self._gram_weight:
                return
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
        """What the last forward pass adds to the loss, a scalar.

        Raises:
            RuntimeError: if keys have no autograd graph, as under reentrant gradient checkpointing.
        """
        tokens, self._tokens = self._tokens, None
        if tokens is None:
            return torch.zeros(())
        if len(self._keys) < len(self._layers):
            raise RuntimeError("The keys have no graph: set use_reentrant in gradient_checkpointing_kwargs to false.")
        is_visual = torch.arange(len(self._positions)) < self._num_visual
        drawn = Tokens(is_visual, ~is_visual, {})
        norms = torch.stack([self._norms[0], *self._norms]).cpu()  # the first is the input, which doesn't count
        drawn = drawn.without("sink", find_sinks(norms, drawn))
        visual, text = (mask.nonzero()[:, 0].to(self._positions.device) for mask in (drawn.visual, drawn.text))
        if min(len(visual), len(text)) < 2:
            return torch.zeros(())
        with torch.autocast(self._positions.device.type, enabled=False):
            measured = []
            for number in self._layers:
                keys = self._keys.pop(number)
                keys = keys if keys.shape[:2] == tokens.visual.shape else keys.transpose(1, 2)  # heads came first
                keys = keys.flatten(0, 1)[self._positions]
                keys = keys.reshape(len(keys), -1, self._head_dims[number]).transpose(0, 1)  # [heads, n, head_dim]
                keys = keys.to(torch.promote_types(keys.dtype, torch.float32))
                # Recomputed in the backward pass, so that only one layer's matrices are held at a time.
                reference = self._references.pop(number, None)
                measured.append(checkpoint(self._measure, keys, reference, visual, text, use_reentrant=False))
            values = torch.stack(measured)
        for number, (distance, change) in zip(self._layers, values.detach().cpu().double(), strict=True):
            self._sums[self._groups[number]] += torch.stack([distance, change, torch.ones_like(change)])
        distance, change = values.mean(0)
        return distance * self._mmd_weight + change * self._gram_weight

    def _measure(
        self, keys: torch.Tensor, reference: torch.Tensor | None, visual: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """MMD² and the distance of Gram matrices of one layer, `(2,)`; 0 for a loss without weight."""
        distance = change = keys.new_zeros(())
        if self._mmd_weight:
            distance = mmd(keys[:, visual], keys[:, text], self._bandwidths)
        if reference is not None:
            reference = reference.to(keys.dtype)
            change = torch.stack([gram_distance(keys[:, of], reference[:, of]) for of in (visual, text)]).mean()
        return torch.stack([distance, change])

    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Means of both measures since the last call, by group of layers, over the passes that had them.

        Args:
            reduce: Sums a tensor over processes; all must call this.
        """
        groups = list(dict.fromkeys(self._groups[number] for number in self._layers))
        sums = reduce(torch.stack([self._sums[group] for group in groups]))  # [num_groups, (MMD², Gram, passes)]
        self._sums.clear()
        weights = {"key_mmd": self._mmd_weight, "key_gram": self._gram_weight}
        return {
            f"{name}/{group}": of_group[column].item() / of_group[2].item()
            for group, of_group in zip(groups, sums, strict=True)
            for column, (name, weight) in enumerate(weights.items())
            if weight and of_group[2] > 0
        }


def key_norm(attention: Any) -> Any:
    """The norm on keys, by transformers' names for it (Qwen3's, Phi's), or `None`."""
    return getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)


def _draw(mask: torch.Tensor) -> torch.Tensor:
    """At most `MAX_TOKENS` of the places where a mask `(n,)` is true, at random."""
    places = mask.nonzero()[:, 0]
    return places[torch.randperm(len(places), device=places.device)[:MAX_TOKENS]]
