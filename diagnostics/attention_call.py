"""Records each layer's attention call: probabilities of chosen queries, keys and values."""

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask


# Attention that tells who is recording it, under a name of its own.
RECORDED = "recorded_sdpa"
NO_MODULE = "the layer has no module k_norm, k_layernorm or k_proj"
OTHER_KEYS = "what its k_norm or k_proj returns is not what its attention rotates"
NO_CALL = "the layer never calls attention over the sample"
# Who is told of the calls of an attention module.
_RECORDERS: "WeakKeyDictionary[nn.Module, AttentionCalls]" = WeakKeyDictionary()


class AttentionCalls:
    """Records the attention calls of a decoder's layers until it is removed.

    Attributes:
        attention: By layer, probabilities of the queries, `(num_heads, num_queries, S)`.
        visible: By layer, which keys the mask lets each query see, `(num_queries, S)`.
        keys: By layer, before rotation, in float32, `(num_key_value_heads, num_kept, head_dim)`.
        values: By layer, in float32, `(num_key_value_heads, num_kept, value_head_dim)`.

    Args:
        decoder: Holds the layers. Nothing is recorded unless it runs with `attn_implementation="sdpa"`.
        layers: Those to watch, by number.
        queries: Positions of the queries, `(num_queries,)`.
        key_positions: Positions of the keys and values that are kept, `(num_kept,)`.
        length: Of the sample, `S`.
    """

    def __init__(
        self,
        decoder: PreTrainedModel,
        layers: Mapping[int, nn.Module],
        queries: torch.Tensor,
        key_positions: torch.Tensor,
        length: int,
    ) -> None:
        self.attention: dict[int, torch.Tensor] = {}
        self.visible: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._decoder, self._layers, self._length = decoder, layers, length
        self._queries, self._key_positions = queries, key_positions
        self._without_keys: dict[str, list[int]] = {}  # reason: layer numbers
        self._numbers = {module: number for number, layer in layers.items() for module in layer.modules()}
        self._projected: dict[nn.Module, torch.Tensor] = {}  # keys of an attention module before its call
        self._handles: list[RemovableHandle] = []
        self._before = decoder.config._attn_implementation
        self._is_recorded = bool(layers) and self._before == "sdpa"
        if not self._is_recorded:
            return
        for module in self._numbers:
            source = find_keys_module(module)
            if source is not None:
                self._handles.append(source.register_forward_hook(self._see_keys(module)))
            _RECORDERS[module] = self
        decoder.set_attn_implementation(RECORDED)

    def remove(self) -> None:
        """Remove the hooks and restore the attention function."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._is_recorded:
            for module in self._numbers:
                _RECORDERS.pop(module, None)
            self._decoder.set_attn_implementation(self._before)

    def notes(self) -> list[str]:
        """What was not recorded, and why."""
        if not self._is_recorded:
            why = f"attention, keys: not recorded, the decoder runs with {self._before}, not with sdpa"
            return [why] if self._layers else []
        without = {f"keys of layer {{}}: not recorded, {why}": layers for why, layers in self._without_keys.items()}
        missed = [number for number in self._layers if number not in self.attention]
        if missed:
            without[f"attention, keys and values of layer {{}}: not recorded, {NO_CALL}"] = missed
        return [note.format(", ".join(map(str, layers))) for note, layers in without.items()]

    def _see_keys(self, attention: nn.Module) -> Any:
        def see(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            self._projected[attention] = output.detach()[0]

        return see

    @torch.no_grad()
    def see(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **kwargs: Any,
    ) -> None:
        """Record a call of the attention function, whose arguments these are."""
        projected = self._projected.pop(module, None)
        if not query.shape[2] == key.shape[2] == self._length:
            return
        number, positions = self._numbers[module], self._key_positions.to(key.device)
        rows, visible = attention_rows(query, key, mask, self._queries, module, **kwargs)
        self.attention[number], self.visible[number] = rows.cpu(), visible.cpu()
        self.values[number] = value[0][:, positions].float().cpu()
        keys = None if projected is None else in_heads(projected, key[0])
        if keys is None:
            reason = NO_MODULE if projected is None else OTHER_KEYS
            self._without_keys.setdefault(reason, []).append(number)
        else:
            self.keys[number] = keys[:, positions].float().cpu()


def recorded_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> Any:
    """transformers' sdpa, of which a module's recorder is told."""
    if module in _RECORDERS:
        _RECORDERS[module].see(module, query, key, value, attention_mask, **kwargs)
    return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register(RECORDED, recorded_attention)
AttentionMaskInterface.register(RECORDED, sdpa_mask)


def find_keys_module(attention: nn.Module) -> nn.Module | None:
    """The module of an attention module that returns keys before rotation; `None` if no name is known."""
    names = ("k_norm", "k_layernorm", "k_proj")
    return next((part for part in (getattr(attention, name, None) for name in names) if part is not None), None)


def in_heads(projected: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """Keys before rotation as `(num_key_value_heads, S, head_dim)`, times the scale that some rotary embeddings (YaRN)
    apply to all keys; `None` if these are not the ones that attention rotates, which keeps their norms.

    Args:
        projected: What a module returned, tokens or heads first.
        key: What attention gets, `(num_heads, S, head_dim)`.
    """
    heads, length, size = key.shape
    if projected.numel() != key.numel():
        return None
    is_heads_first = projected.ndim == 3 and projected.shape[:2] == (heads, length)
    keys = projected if is_heads_first else projected.reshape(length, heads, size).transpose(0, 1)
    before, after = (torch.linalg.vector_norm(of, dim=-1, dtype=torch.float32) for of in (keys, key))
    factor = after.norm() / before.norm().clamp(min=1e-30)
    tolerance = max(8 * torch.finfo(key.dtype).eps, 1e-3)
    if not ((before * factor - after).abs() <= tolerance * (after + after.mean())).all():
        return None
    return keys if abs(factor - 1) < tolerance else keys * factor


@torch.no_grad()
def attention_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    rows: torch.Tensor,
    module: nn.Module,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probabilities of some queries in float32, as transformers' sdpa computes them, and their visible keys.

    Args:
        query: `(1, num_heads, S, head_dim)`, `key` with `num_key_value_heads`.
        mask: `None`, or a boolean or additive mask `(1, 1 or num_heads, S, S)`.
        rows: Positions of the queries, `(num_queries,)`.

    Returns:
        Probabilities `(num_heads, num_queries, S)`, and which keys the mask allows, `(num_queries, S)`.
    """
    rows = rows.to(query.device)
    chosen, keys = query[0][:, rows].float(), key[0].float()
    keys = keys.repeat_interleave(chosen.shape[0] // keys.shape[0], dim=0)
    scores = chosen @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias[0][:, rows].float()
    visible = torch.ones(len(rows), keys.shape[1], dtype=torch.bool, device=rows.device)
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal:
            visible = torch.arange(keys.shape[1], device=rows.device)[None] <= rows[:, None]
            scores = scores.masked_fill(~visible, -torch.inf)
    elif mask.dtype == torch.bool:
        visible = mask[0, 0, rows]
        scores = scores.masked_fill(~mask[0][:, rows], -torch.inf)
    else:
        visible = mask[0, 0, rows] > torch.finfo(mask.dtype).min / 2
        scores = scores + mask[0][:, rows].float()
    return scores.softmax(-1), visible
