"""Records the attention of a decoder's layers: probabilities of chosen queries, keys before rotation, and values.

"Rotation" is rotary position embedding, which attention modules apply to queries and keys after they are projected.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


# Names that an attention module may give the submodule that returns the keys before rotation. The names of norms come
# first: if there is a norm of the keys, it is applied after `k_proj`, and its output is what is rotated.
KEYS_MODULES = ("k_norm", "k_layernorm", "k_proj")


class AttentionCalls(ExitStack):
    """Records the attention of a decoder's layers over one sample of `S` tokens, as long as the context is open.

    At every call, an attention module of transformers looks up its attention function by name, `"sdpa"`. While the
    context is open, this name stands for a function that records its arguments and then calls transformers' own.

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
        length: The number `S` of tokens of the sample.
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
        # For each module inside the layers, the number of its layer.
        self._layer_numbers: dict[nn.Module, int] = {}
        for number, layer in layers.items():
            for module in layer.modules():
                self._layer_numbers[module] = number
        # For each attention module, the keys before rotation of the call that is under way.
        self._projected_keys: dict[nn.Module, torch.Tensor] = {}

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
            f"keys of layer {', '.join(without_keys)}: not recorded. Either the layer doesn't attend to all tokens at "
            f"once, or none of its modules {', '.join(KEYS_MODULES)} returns the keys that are rotated"
        ]

    def _watch_keys(self) -> None:
        """Keep what the keys module of each attention module returns."""
        for module in self._layer_numbers:  # all modules of the chosen layers; only attention has a keys module
            keys_module = find_keys_module(module)
            if keys_module is not None:
                handle = keys_module.register_forward_hook(partial(self._keep_keys, module))
                self.callback(handle.remove)

    def _keep_keys(self, attention: nn.Module, keys_module: nn.Module, args: Any, output: torch.Tensor) -> None:
        """Forward hook of the keys module of `attention`: keeps the keys until `_record` takes them."""
        self._projected_keys[attention] = output.detach()[0]  # the batch has one sample

    def _replace_attention(self) -> None:
        """Let the name `"sdpa"` stand for `_attend` until the context is left."""
        self._transformers_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend
        self.callback(self._restore_attention)

    def _restore_attention(self) -> None:
        """Let the name `"sdpa"` stand for transformers' own function again."""
        ALL_ATTENTION_FUNCTIONS["sdpa"] = self._transformers_sdpa

    def _attend(self, module: nn.Module, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call transformers' sdpa, and record the call if a watched layer attends from all tokens to all tokens."""
        is_watched = module in self._layer_numbers
        num_queries = query.shape[2]
        num_keys = key.shape[2]
        if is_watched and num_queries == self._length and num_keys == self._length:
            self._record(module, query, key, *args, **kwargs)
        return self._transformers_sdpa(module, query, key, *args, **kwargs)

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
        """Record a call of sdpa, whose arguments these are. The batch has one sample."""
        number = self._layer_numbers[module]

        probabilities, visible = attention_of_queries(query, key, attention_mask, self._queries, scaling)
        self.attention[number] = probabilities.cpu()
        self.visible[number] = visible.cpu()

        key_positions = self._key_positions.to(key.device)
        self.values[number] = value[0][:, key_positions].float().cpu()

        keys = before_rotation(self._projected_keys.pop(module, None), key[0])
        if keys is not None:
            self.keys[number] = keys[:, key_positions].float().cpu()


def find_keys_module(attention: nn.Module) -> nn.Module | None:
    """The submodule that returns an attention module's keys before rotation; `None` if there is none."""
    for name in KEYS_MODULES:
        keys_module = getattr(attention, name, None)
        if keys_module is not None:
            return keys_module
    return None


def before_rotation(projected: torch.Tensor | None, rotated: torch.Tensor) -> torch.Tensor | None:
    """Keys before rotation, `(num_key_value_heads, S, head_dim)`; `None` if they are not known.

    Rotation keeps the norm of each key, or multiplies all keys by the same factor, as YaRN does: by 1.14 for a context
    four times as long (arXiv 2309.00071). So if the norms of `projected` and `rotated` differ by more than such
    a factor, `projected` is not what was rotated.

    Args:
        projected: What the keys module returned, `(num_key_value_heads, S, head_dim)`, `(S, num_key_value_heads,
            head_dim)` or `(S, num_key_value_heads * head_dim)`; `None` if the keys module wasn't called.
        rotated: Keys after rotation, as the attention function gets them, `(num_key_value_heads, S, head_dim)`.
    """
    if projected is None or projected.numel() != rotated.numel():
        return None

    if projected.shape == rotated.shape:
        keys = projected
    else:
        num_key_value_heads, length, head_dim = rotated.shape
        keys = projected.reshape(length, num_key_value_heads, head_dim).transpose(0, 1)

    # Both norms are [num_key_value_heads, S].
    norms_before = torch.linalg.vector_norm(keys, dim=-1, dtype=torch.float32)
    norms_after = torch.linalg.vector_norm(rotated, dim=-1, dtype=torch.float32)

    # YaRN's factor is at least 1, and below 2 up to a context 20,000 times as long. 0.9 leaves room for rounding.
    common_factor = norms_after.mean() / norms_before.mean()
    if not 0.9 < common_factor < 2:  # also true for NaN
        return None
    norms_before = common_factor * norms_before

    # Rounding changes a norm by a few eps of the keys' dtype. The tolerance is at least 1e-3, because in
    # float32 a few eps are next to nothing. The mean norm is added so that the tolerance isn't 0 for a key near 0.
    relative_tolerance = max(8 * torch.finfo(rotated.dtype).eps, 1e-3)
    tolerance = relative_tolerance * (norms_after + norms_after.mean())
    has_same_norm = (norms_before - norms_after).abs() <= tolerance  # False where a norm is infinite or NaN
    return keys if has_same_norm.all() else None


def attention_of_queries(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    query_positions: torch.Tensor,
    scaling: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probabilities of chosen queries as transformers' sdpa computes them, and the keys each query sees.

    Args:
        query: `(1, num_heads, S, head_dim)`.
        key: `(1, num_key_value_heads, S, head_dim)`.
        mask: A boolean or additive mask, `(1, 1 or num_heads, S, S)`; `None` for a causal mask.
        query_positions: Positions of the chosen queries, `(num_queries,)`.
        scaling: Factor of the dot products; 1/√head_dim by default.

    Returns:
        The probabilities in float32, `(num_heads, num_queries, S)`, and a mask of the keys that each query sees,
        `(num_queries, S)`.
    """
    query_positions = query_positions.to(query.device)
    queries = query[0][:, query_positions].float()  # [num_heads, num_queries, head_dim]
    keys = key[0].float()  # [num_key_value_heads, S, head_dim]
    # With grouped queries, several heads share a key.
    heads_per_key = queries.shape[0] // keys.shape[0]
    keys = keys.repeat_interleave(heads_per_key, dim=0)  # [num_heads, S, head_dim]
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = scaling * (queries @ keys.transpose(1, 2))  # [num_heads, num_queries, S]

    # In each case, `visible` is [1 or num_heads, num_queries, S].
    if mask is None:
        key_positions = torch.arange(keys.shape[1], device=query.device)
        is_earlier_or_same = key_positions <= query_positions[:, None]  # [num_queries, S]
        visible = is_earlier_or_same[None]
    elif mask.dtype == torch.bool:
        visible = mask[0][:, query_positions]
    else:
        addends = mask[0][:, query_positions]
        scores = scores + addends.float()
        # To hide a key, about the dtype's lowest number is added. Half of it tells hidden keys from visible ones.
        visible = addends > torch.finfo(mask.dtype).min / 2

    probabilities = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
    return probabilities, visible[0]  # every head sees the same keys
