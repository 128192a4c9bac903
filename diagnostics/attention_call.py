"""Records each layer's attention call: probabilities of chosen queries, keys and values.

Keys are recorded before rotary embedding, but the call gets them after it. Rotation keeps the inner products between a
token's heads, so the unrotated keys are found by these products among the outputs of the layer's modules.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


NO_MODULE = "no module of the layer returns the keys that its attention gets, before rotation"
ROTATED_BEFORE = "they are normed after their rotation, so they don't exist before it"
NO_CALL = "the layer never calls attention over the sample"


class KeysNotFoundError(Exception):
    """The keys before rotation are not among the outputs of a layer's modules; the message says why."""


class AttentionCalls:
    """Records the attention calls of a decoder's layers until it is removed.

    Attributes:
        attention: By layer, probabilities of the queries, `(num_heads, num_queries, S)`.
        visible: By layer, which keys the mask lets each query see, `(num_queries, S)`.
        keys: By layer, before rotation, in float32, `(num_key_value_heads, num_kept, head_dim)`; for multi-head latent
            attention, the part that is never rotated.
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
        self._queries, self._key_positions, self._length, self._layers = queries, key_positions, length, layers
        self._without_keys: dict[str, list[int]] = {}  # reason: layer numbers
        # Inputs and outputs of a layer's modules so far, until its attention is called.
        self._seen: dict[int, list[tuple[Any, torch.Tensor]]] = {}
        self._handles: list[RemovableHandle] = []
        self._before: Any = ALL_ATTENTION_FUNCTIONS._local_mapping.get("sdpa")
        self._implementation = decoder.config._attn_implementation
        if self._implementation == "sdpa":
            for number, layer in layers.items():
                self._watch_modules(number, layer)
            # Under the same name, by which transformers chooses masks and torch kernels.
            ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attend(ALL_ATTENTION_FUNCTIONS["sdpa"])

    def remove(self) -> None:
        """Remove the hooks and restore the attention function."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
        if self._before is not None:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = self._before

    def notes(self) -> list[str]:
        """What was not recorded, and why."""
        if self._implementation != "sdpa":
            return [f"attention, keys: not recorded, the decoder runs with {self._implementation}, not with sdpa"]
        notes = [
            f"keys of layer {_numbers(layers)}: not recorded, {reason}"
            for reason, layers in self._without_keys.items()
        ]
        without = [number for number in self._layers if number not in self.attention]
        if without:
            notes.append(f"attention, keys and values of layer {_numbers(without)}: not recorded, {NO_CALL}")
        return notes

    def _watch_modules(self, number: int, layer: nn.Module) -> None:
        def begin(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            self._seen[number] = [(None, args[0] if args else kwargs["hidden_states"])]

        def see(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if number in self._seen and isinstance(output, torch.Tensor):
                self._seen[number].append((next(iter((*args, *kwargs.values())), None), output))

        def end(module: nn.Module, args: Any, output: Any) -> None:
            self._seen.pop(number, None)

        self._handles.append(layer.register_forward_pre_hook(begin, with_kwargs=True))
        self._handles.append(layer.register_forward_hook(end))
        for module in layer.modules():
            if module is not layer:
                self._handles.append(module.register_forward_hook(see, with_kwargs=True))

    def _attend(self, sdpa: Callable[..., Any]) -> Callable[..., Any]:
        numbers = {id(module): number for number, layer in self._layers.items() for module in layer.modules()}

        def attend(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> Any:
            number = numbers.get(id(module))
            if number is not None and query.shape[2] == key.shape[2] == self._length:
                rows, visible = attention_rows(query, key, attention_mask, self._queries, module, **kwargs)
                self.attention[number], self.visible[number] = rows.cpu(), visible.cpu()
                self._keep(number, module, key.detach()[0], value.detach()[0])
            return sdpa(module, query, key, value, attention_mask, **kwargs)

        return attend

    @torch.no_grad()
    def _keep(self, number: int, module: nn.Module, key: torch.Tensor, value: torch.Tensor) -> None:
        seen = self._seen.pop(number, [])
        repeats = count_repeats(key)
        key, value = key[::repeats], value[::repeats]
        positions = self._key_positions.to(key.device)
        self.values[number] = value[:, positions].float().cpu()
        latent = getattr(module, "qk_nope_head_dim", None)
        try:
            keys = find_keys(key, value, seen) if latent is None else find_latent_keys(key, latent, seen)
        except KeysNotFoundError as error:
            self._without_keys.setdefault(str(error), []).append(number)
        else:
            self.keys[number] = keys[:, positions].float().cpu()


def _numbers(layers: list[int]) -> str:
    return ", ".join(map(str, layers))


def count_repeats(key: torch.Tensor) -> int:
    """How often each key head is repeated in a call's keys `(num_heads, S, head_dim)`, as some families do."""
    count = len(key)
    sizes = (size for size in range(count, 1, -1) if count % size == 0)
    return next((size for size in sizes if torch.equal(key, key[::size].repeat_interleave(size, dim=0))), 1)


def find_keys(key: torch.Tensor, value: torch.Tensor, seen: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """The keys before rotation: the last module output that has, token by token, the same inner products between heads
    as the keys that attention gets, times the scale that some rotary embeddings (YaRN) apply to all keys.

    Args:
        key, value: What attention gets, `(num_key_value_heads, S, head_dim)`.
        seen: First input and output of the layer's modules, in order.

    Returns:
        `(num_key_value_heads, S, head_dim)`.

    Raises:
        KeysNotFoundError: if there is none, or only one that is already rotated.
    """
    products = _head_products(key)
    scale = products.diagonal(dim1=1, dim2=2).sqrt()  # norms, [S, num_heads]
    tolerance = max(4 * torch.finfo(key.dtype).eps, 1e-4)
    limit = tolerance * scale[:, :, None] * scale[:, None] + 1e-12 * products.max()  # for zero keys
    reason = NO_MODULE
    for number in range(len(seen) - 1, 0, -1):
        given, returned = seen[number]
        for states in _in_heads(returned, key.shape):
            factor = (scale.square().sum() / states.float().square().sum()).sqrt()
            difference = (_head_products(states) * factor.square() - products).abs()
            if torch.equal(states, value) or not (difference <= limit).all():
                continue
            if torch.equal(states, key) and not _comes_from(given, [output for _, output in seen[:number]], key.shape):
                reason = ROTATED_BEFORE
                continue
            return states if abs(factor - 1) < tolerance else states * factor
    raise KeysNotFoundError(reason)


def find_latent_keys(key: torch.Tensor, size: int, seen: list[tuple[Any, torch.Tensor]]) -> torch.Tensor:
    """The part of the keys that multi-head latent attention never rotates.

    Args:
        key: What attention gets, `(num_heads, S, head_dim)`.
        size: Width of the part, which comes first or last in the key.
        seen: As for [`find_keys`]; a module returns the part before the values of each head.

    Returns:
        `(num_heads, S, size)`.

    Raises:
        KeysNotFoundError: if no module returns it.
    """
    num_heads, length, _ = key.shape
    for _, returned in reversed(seen):
        width, rest = divmod(returned.numel(), num_heads * length)
        if rest or width < size:
            continue
        for states in _in_heads(returned, torch.Size((num_heads, length, width))):
            part = states[..., :size]
            if torch.equal(part, key[..., :size]) or torch.equal(part, key[..., -size:]):
                return part
    raise KeysNotFoundError(NO_MODULE)


def _comes_from(given: Any, outputs: list[torch.Tensor], shape: torch.Size) -> bool:
    """Whether a module's input is an earlier module's output; if not, it was changed in between: rotated."""
    taken = _in_heads(given, shape) if isinstance(given, torch.Tensor) else []
    found = [states for output in outputs for states in _in_heads(output, shape)]
    return not taken or any(torch.equal(states, other) for states in taken for other in found)


def _in_heads(states: torch.Tensor, shape: torch.Size) -> list[torch.Tensor]:
    """A tensor as `(num_heads, S, size)`, for each layout (tokens or heads first) that its shape allows."""
    num_heads, length, size = shape
    if states.numel() != shape.numel():
        return []
    layouts = []
    if states.shape[-3:] == shape:
        layouts.append(states.reshape(shape))
    if states.shape[-2:] == (length, num_heads * size) or states.shape[-3:] == (length, num_heads, size):
        layouts.append(states.reshape(length, num_heads, size).transpose(0, 1))
    return layouts


def _head_products(states: torch.Tensor) -> torch.Tensor:
    """Inner products between each token's heads, `(S, num_heads, num_heads)`, of `(num_heads, S, head_dim)`."""
    states = states.float().transpose(0, 1)
    return states @ states.transpose(1, 2)


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
        module: The attention module; its `is_causal` is the default for the argument.

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
