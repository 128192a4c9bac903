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

    transformers' layers look their attention up by name, `"sdpa"`, at every call: while this is open, they find a
    function that records what it is given, and then calls the usual one.

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
        self._layers = layers
        self._queries = queries
        self._key_positions = key_positions
        self._length = length
        # The layer's number of each module in it, and what the keys module of an attention module returned.
        self._numbers = {module: number for number, layer in layers.items() for module in layer.modules()}
        self._projected: dict[nn.Module, torch.Tensor] = {}

        self._implementation = decoder.config._attn_implementation
        if self._implementation == "sdpa":
            self._watch_keys()
            self._replace_attention()

    def notes(self) -> list[str]:
        """What was not recorded, and why."""
        missed = [str(number) for number in self._layers if number not in self.keys]
        if not missed:
            return []
        if self._implementation != "sdpa":
            return [f"attention, keys: not recorded, the decoder runs with {self._implementation}, not with sdpa"]
        return [
            f"keys of layer {', '.join(missed)}: not recorded, there is no attention over the sample, or none of its "
            f"{', '.join(KEYS_MODULES)} returns the keys that are rotated"
        ]

    def _watch_keys(self) -> None:
        for module in self._numbers:
            keys_module = find_keys_module(module)
            if keys_module is not None:
                handle = keys_module.register_forward_hook(partial(self._see_keys, module))
                self.callback(handle.remove)

    def _see_keys(self, attention: nn.Module, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._projected[attention] = output.detach()[0]

    def _replace_attention(self) -> None:
        self._sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend
        self.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, "sdpa", self._sdpa)

    def _attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """transformers' sdpa, recorded where it attends from the whole sample to the whole sample."""
        is_watched = module in self._numbers
        if is_watched and query.shape[2] == self._length and key.shape[2] == self._length:
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
        number = self._numbers[module]
        positions = self._key_positions.to(key.device)

        probabilities, visible = attention_rows(query, key, attention_mask, self._queries, scaling)
        self.attention[number] = probabilities.cpu()
        self.visible[number] = visible.cpu()
        self.values[number] = value[0][:, positions].float().cpu()

        keys = before_rotation(self._projected.pop(module, None), key[0])
        if keys is not None:
            self.keys[number] = keys[:, positions].float().cpu()


def find_keys_module(attention: nn.Module) -> nn.Module | None:
    """The part of an attention module that returns its keys before rotation; `None` of a module without one."""
    for name in KEYS_MODULES:
        part = getattr(attention, name, None)
        if part is not None:
            return part
    return None


def before_rotation(projected: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """Keys before rotation, `(num_heads, S, head_dim)`.

    Args:
        projected: What the keys module returned, with tokens or heads first; `None` if it wasn't called.
        key: What attention gets, after rotation, `(num_heads, S, head_dim)`.

    Returns:
        `None` if `projected` isn't what was rotated: rotation keeps norms.
    """
    if projected is None or projected.numel() != key.numel():
        return None

    num_heads, length, head_dim = key.shape
    if projected.shape == key.shape:
        keys = projected
    else:
        keys = projected.reshape(length, num_heads, head_dim).transpose(0, 1)

    norms_before = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    norms_after = torch.linalg.vector_norm(key, dim=-1, dtype=torch.float32)
    relative_tolerance = max(8 * torch.finfo(key.dtype).eps, 1e-3)
    tolerance = relative_tolerance * (norms_after + norms_after.mean())
    is_rotation = ((norms_before - norms_after).abs() <= tolerance).all()  # False where they overflow
    return keys if is_rotation else None


def attention_rows(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor, scaling: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probabilities of some queries in float32, as transformers' sdpa computes them, and their visible keys.

    Args:
        query: `(1, num_heads, S, head_dim)`.
        key: `(1, num_key_value_heads, S, head_dim)`.
        mask: `None` for a causal one, or boolean or additive, `(1, 1 or num_heads, S, S)`.
        rows: Positions of the queries, `(num_queries,)`.
        scaling: Of the products; 1/√head_dim by default.

    Returns:
        Probabilities `(num_heads, num_queries, S)`, and which keys the mask allows, `(num_queries, S)`.
    """
    rows = rows.to(query.device)
    queries = query[0][:, rows].float()  # [num_heads, num_queries, head_dim]
    keys = key[0].float()
    keys = keys.repeat_interleave(queries.shape[0] // keys.shape[0], dim=0)  # [num_heads, S, head_dim]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = queries @ keys.transpose(1, 2) * scaling  # [num_heads, num_queries, S]

    if mask is None:
        positions = torch.arange(keys.shape[1], device=rows.device)
        allowed = (positions <= rows[:, None])[None]  # [1, num_queries, S]
    elif mask.dtype == torch.bool:
        allowed = mask[0][:, rows]
    else:
        added = mask[0][:, rows]
        scores = scores + added.float()
        allowed = added > torch.finfo(mask.dtype).min / 2

    probabilities = scores.masked_fill(~allowed, -torch.inf).softmax(dim=-1)
    return probabilities, allowed[0]
