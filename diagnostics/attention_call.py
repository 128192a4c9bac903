"""Records each layer's attention call: probabilities of chosen queries, keys before rotation, and values."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# The first of these that an attention module has returns its keys before rotation.
KEYS_MODULES = ("k_norm", "k_layernorm", "k_proj")


class AttentionCalls(ExitStack):
    """Records the attention calls of a decoder's layers until it is left or closed.

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
        super().__init__()
        self.attention: dict[int, torch.Tensor] = {}
        self.visible: dict[int, torch.Tensor] = {}
        self.keys: dict[int, torch.Tensor] = {}
        self.values: dict[int, torch.Tensor] = {}
        self._layers, self._queries, self._key_positions, self._length = layers, queries, key_positions, length
        self._numbers = {module: number for number, layer in layers.items() for module in layer.modules()}
        self._projected: dict[nn.Module, torch.Tensor] = {}  # what the keys module of an attention module returned
        self._implementation = decoder.config._attn_implementation
        if self._implementation != "sdpa":
            return
        for module in self._numbers:
            found = (getattr(module, name, None) for name in KEYS_MODULES)
            source = next((part for part in found if part is not None), None)
            if source is not None:
                self.callback(source.register_forward_hook(partial(self._see_keys, module)).remove)
        self._sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend
        self.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, "sdpa", self._sdpa)

    def notes(self) -> list[str]:
        """What was not recorded, and why."""
        missed = ", ".join(str(number) for number in self._layers if number not in self.keys)
        if not missed:
            return []
        if self._implementation != "sdpa":
            return [f"attention, keys: not recorded, the decoder runs with {self._implementation}, not with sdpa"]
        return [
            f"keys of layer {missed}: not recorded, there is no attention over the sample, or none of its "
            f"{', '.join(KEYS_MODULES)} returns the keys that are rotated"
        ]

    def _see_keys(self, attention: nn.Module, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._projected[attention] = output.detach()[0]

    def _attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' sdpa, which is told to the recorder first."""
        if module in self._numbers and query.shape[2] == key.shape[2] == self._length:
            self._record(module, query, key, *args, **kwargs)
        return self._sdpa(module, query, key, *args, **kwargs)

    @torch.no_grad()
    def _record(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> None:
        number, positions = self._numbers[module], self._key_positions.to(key.device)
        rows, visible = attention_rows(query, key, attention_mask, self._queries, scaling)
        self.attention[number], self.visible[number] = rows.cpu(), visible.cpu()
        self.values[number] = value[0][:, positions].float().cpu()
        keys = before_rotation(self._projected.pop(module, None), key[0])
        if keys is not None:
            self.keys[number] = keys[:, positions].float().cpu()


def before_rotation(projected: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """Keys before rotation, of what a module returned, tokens or heads first; `None` if they are not those that
    attention rotates, which keeps their norms: `key`, which attention gets, is `(num_heads, S, head_dim)` too."""
    heads, length, size = key.shape
    if projected is None or projected.numel() != key.numel():
        return None
    is_heads_first = projected.shape == key.shape
    keys = projected if is_heads_first else projected.reshape(length, heads, size).transpose(0, 1)
    before, after = (torch.linalg.vector_norm(of, dim=-1, dtype=torch.float32) for of in (keys, key))
    tolerance = max(8 * torch.finfo(key.dtype).eps, 1e-3)
    is_rotation = ((before - after).abs() <= tolerance * (after + after.mean())).all()  # not where they overflow
    return keys if is_rotation else None


def attention_rows(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor, scaling: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probabilities of some queries in float32, as transformers' sdpa computes them, and their visible keys.

    Args:
        query: `(1, num_heads, S, head_dim)`, `key` with `num_key_value_heads`.
        mask: `None` for a causal one, or boolean or additive, `(1, 1 or num_heads, S, S)`.
        rows: Positions of the queries, `(num_queries,)`.
        scaling: Of the products; 1/√head_dim by default.

    Returns:
        Probabilities `(num_heads, num_queries, S)`, and which keys the mask allows, `(num_queries, S)`.
    """
    rows = rows.to(query.device)
    chosen, keys = query[0][:, rows].float(), key[0].float()
    keys = keys.repeat_interleave(chosen.shape[0] // keys.shape[0], dim=0)
    scores = chosen @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is None:
        allowed = (torch.arange(keys.shape[1], device=rows.device) <= rows[:, None])[None]
    else:
        allowed = mask[0][:, rows]
        if mask.dtype != torch.bool:
            scores = scores + allowed.float()
            allowed = allowed > torch.finfo(mask.dtype).min / 2
    return scores.masked_fill(~allowed, -torch.inf).softmax(-1), allowed[0]
