"""Records the attention of a decoder's layers: probabilities of chosen queries, keys before rotation, and values."""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# Names of the submodule that returns the keys before rotation. If an attention module has several of these, the first
# in this list is the last that the keys pass.
KEYS_MODULES = ("k_norm", "k_layernorm", "k_proj")


class AttentionCalls(ExitStack):
    """Records the attention of a decoder's layers until the context is left or closed.

    At every call, the layers of transformers look up their attention function by its name, `"sdpa"`. While the context
    is open, this name stands for a function that records its arguments and then calls transformers' own function.

    Attributes:
        attention: By layer, attention probabilities of the queries, `(num_heads, num_queries, S)`.
        visible: By layer, mask of the keys that each query sees, `(num_queries, S)`.
        keys: By layer, keys before rotation in float32, `(num_key_value_heads, num_kept, head_dim)`.
        values: By layer, values in float32, `(num_key_value_heads, num_kept, value_head_dim)`.

    Args:
        decoder: The module with the layers. If it does not run with `attn_implementation="sdpa"`, nothing is recorded.
        layers: The layers to record, by number.
        queries: Positions of the queries, `(num_queries,)`.
        key_positions: Positions of the keys and values that are kept, `(num_kept,)`.
        length: Number of tokens of the sample, `S`.
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
        # For each module inside a layer, the number of this layer.
        self._numbers: dict[nn.Module, int] = {}
        for number, layer in layers.items():
            for module in layer.modules():
                self._numbers[module] = number
        # For each attention module, what its keys module has returned in the current forward pass.
        self._projected: dict[nn.Module, torch.Tensor] = {}

        self._implementation = decoder.config._attn_implementation
        if self._implementation == "sdpa":
            self._watch_keys()
            self._replace_attention()

    def notes(self) -> list[str]:
        """What was not recorded, and why."""
        without_keys = [str(number) for number in self._layers if number not in self.keys]
        if not without_keys:
            return []
        if self._implementation != "sdpa":
            return [f"attention, keys: not recorded, the decoder runs with {self._implementation}, not with sdpa"]
        return [
            f"keys of layer {', '.join(without_keys)}: not recorded, there is no attention over the sample, or none "
            f"of its {', '.join(KEYS_MODULES)} returns the keys that are rotated"
        ]

    def _watch_keys(self) -> None:
        for module in self._numbers:
            keys_module = find_keys_module(module)
            if keys_module is not None:
                handle = keys_module.register_forward_hook(partial(self._see_keys, module))
                self.callback(handle.remove)

    def _see_keys(self, attention: nn.Module, keys_module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._projected[attention] = output.detach()[0]

    def _replace_attention(self) -> None:
        self._sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend
        self.callback(ALL_ATTENTION_FUNCTIONS.__setitem__, "sdpa", self._sdpa)

    def _attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' sdpa, and record the call if a watched layer attends from all tokens to all tokens."""
        is_watched = module in self._numbers
        num_queries = query.shape[2]
        num_keys = key.shape[2]
        if is_watched and num_queries == self._length and num_keys == self._length:
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
    """The submodule of an attention module that returns its keys before rotation; `None` if there is none."""
    for name in KEYS_MODULES:
        keys_module = getattr(attention, name, None)
        if keys_module is not None:
            return keys_module
    return None


def before_rotation(projected: torch.Tensor | None, key: torch.Tensor) -> torch.Tensor | None:
    """Keys before rotation, `(num_heads, S, head_dim)`; `None` if they are not known.

    Rotation keeps the norm of each key. So if the norms of `projected` and `key` differ, `projected` is not what was
    rotated to `key`.

    Args:
        projected: What the keys module returned, in the shape of `key`, or with tokens before heads; `None` if the
            module wasn't called.
        key: Keys after rotation, as the attention function gets them, `(num_heads, S, head_dim)`.
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
    # Rounding changes the norms a little, in low precision by a few eps. The mean norm keeps the tolerance above 0 for
    # keys whose own norm is near 0.
    relative_tolerance = max(8 * torch.finfo(key.dtype).eps, 1e-3)
    tolerance = relative_tolerance * (norms_after + norms_after.mean())
    is_rotation = ((norms_before - norms_after).abs() <= tolerance).all()  # False for keys that overflow
    return keys if is_rotation else None


def attention_rows(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, rows: torch.Tensor, scaling: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probabilities of chosen queries as transformers' sdpa computes them, and the keys that they see.

    Args:
        query: `(1, num_heads, S, head_dim)`.
        key: `(1, num_key_value_heads, S, head_dim)`.
        mask: A boolean or additive mask, `(1, 1 or num_heads, S, S)`; `None` for a causal mask.
        rows: Positions of the chosen queries, `(num_queries,)`.
        scaling: Factor of the dot products; 1/√head_dim by default.

    Returns:
        The probabilities in float32, `(num_heads, num_queries, S)`, and a mask of the keys that each query sees,
        `(num_queries, S)`.
    """
    rows = rows.to(query.device)
    queries = query[0][:, rows].float()  # [num_heads, num_queries, head_dim]
    keys = key[0].float()  # [num_key_value_heads, S, head_dim]
    queries_per_key = queries.shape[0] // keys.shape[0]
    keys = keys.repeat_interleave(queries_per_key, dim=0)  # [num_heads, S, head_dim]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = queries @ keys.transpose(1, 2) * scaling  # [num_heads, num_queries, S]

    if mask is None:
        positions = torch.arange(keys.shape[1], device=rows.device)
        visible = (positions <= rows[:, None])[None]  # [1, num_queries, S]
    elif mask.dtype == torch.bool:
        visible = mask[0][:, rows]
    else:
        addends = mask[0][:, rows]
        scores = scores + addends.float()
        # A hidden key gets the dtype's lowest number, or about that if several masks were added.
        visible = addends > torch.finfo(mask.dtype).min / 2

    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return probabilities, visible[0]
