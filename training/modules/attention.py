"""Attention for packed rows, which computes each sample of a row by itself. Its name in transformers is "varlen".

With "sdpa" or "eager", attention computes all sequence_length x sequence_length products of a packed row, and a mask
then hides those between tokens of different samples. "varlen" computes attention only within each sample. On a GPU it
uses torch's kernel for samples of different lengths. Elsewhere it calls sdpa for one sample after the other.
Padded rows get sdpa's attention, with a mask that is made without waiting for the GPU.
"""

import logging
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from normllava.errors import UserError


logger = logging.getLogger(__name__)

# The compute capabilities of GPUs with less shared memory: RTX 3090, 4090 and 5090, A10, L40S.
SMALL_SHARED_MEMORY = ((8, 6), (8, 9), (12, 0), (12, 1))


def unread_mask(device: torch.device) -> torch.Tensor:
    """The mask that the decoder gets with a packed row, empty, `(1, 1, 0, 0)`.

    transformers makes no mask where it gets one of four dimensions, and "varlen" doesn't read that of a packed row.
    Other attention fails on an empty one.
    """
    return torch.empty(1, 1, 0, 0, dtype=torch.bool, device=device)


def mask_without_reading(
    attention_mask: torch.Tensor | None = None, allow_is_causal_skip: bool = True, **kwargs: Any
) -> torch.Tensor | None:
    """The mask of rows that are not packed. Arguments are those of transformers' mask functions.

    `sdpa_mask` would read from an `attention_mask` whether anything is padded, and Python would wait for the GPU.
    """
    can_skip = allow_is_causal_skip and attention_mask is None
    return sdpa_mask(attention_mask=attention_mask, allow_is_causal_skip=can_skip, **kwargs)


def varlen_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each sample of a packed row. Rows that are not packed get sdpa's attention.

    Shapes below are those of a packed row, which is a batch of its own.

    Args:
        module: The attention layer.
        query: `(1, num_heads, sequence_length, head_dim)`.
        key, value: `(1, num_key_value_heads, sequence_length, head_dim)`.
        attention_mask: The mask of rows that are not packed; `None` if nothing is padded. With a packed row, this is
            [`unread_mask`], or any mask that transformers has made, and isn't used.
        dropout: The probability with which an attention weight is dropped.
        scaling: The factor of the products of queries and keys; 1/√head_dim by default.
        cu_seq_lens_q: The position at which each sample begins, and then the row's length, int32,
            `(num_samples + 1,)`, from the collator; `None` if rows are not packed.
        max_length_q: Number of tokens of the longest sample, from the collator. Computing it from `cu_seq_lens_q`
            would have to wait for the GPU.
        softcap, s_aux: Soft caps and attention sinks, which are refused.
        kwargs: Further arguments of the layer. A layer with a sliding window gives `sliding_window`, the number of
            tokens that a token sees, including itself.

    Returns:
        The output, `(1, sequence_length, num_heads, head_dim)`, and `None` in place of the attention weights.

    Raises:
        UserError: if the layer has soft caps or attention sinks, gets [`unread_mask`] without `cu_seq_lens_q` and
            `max_length_q`, or has a sliding window and doesn't give `sliding_window` for a packed row.
    """
    if softcap is not None or s_aux is not None:
        raise UserError(
            f'{type(module).__name__} has soft caps or attention sinks, which neither "varlen" nor "sdpa" computes: '
            "set attn_implementation: eager."
        )

    # Rows that are not packed come without the lengths of samples.
    if cu_seq_lens_q is None or max_length_q is None:
        is_packed = attention_mask is not None and attention_mask.numel() == 0
        if is_packed:  # but the decoder hasn't passed the lengths of its samples on
            raise UserError(
                f"{type(module).__name__} isn't told where the samples of a packed row begin (cu_seq_lens_q, "
                'max_length_q), and so can\'t run with "varlen": set attn_implementation: sdpa.'
            )
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **kwargs)

    # The layers of some decoders don't pass their window on, since the window is part of the mask that sdpa gets.
    has_window = getattr(module.config, "sliding_window", None) is not None
    if has_window and "sliding_window" not in kwargs:
        raise UserError(
            f"{type(module).__name__} doesn't tell its sliding window, and so can't run with \"varlen\" on packed "
            "rows: set attn_implementation: sdpa."
        )
    sliding_window = kwargs.get("sliding_window")

    if query.is_cuda and kernel_supports(query, value, dropout):
        output = attend_by_kernel(
            query,
            key,
            value,
            scaling=scaling,
            sliding_window=sliding_window,
            cu_seq_lens=cu_seq_lens_q,
            max_length=max_length_q,
        )
    else:
        output = attend_by_sample(
            module,
            query,
            key,
            value,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            cu_seq_lens=cu_seq_lens_q,
        )
    return output, None


def kernel_supports(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Whether torch's kernel can compute this attention on a GPU. Shapes are as in [`varlen_attention_forward`]."""
    head_dim = query.shape[-1]
    same_head_dim = value.shape[-1] == head_dim
    supports_head_dim = head_dim <= 256 and head_dim % 8 == 0
    # With less shared memory, torch's own sdpa doesn't train heads of these sizes by FlashAttention.
    if 192 < head_dim <= 224 and torch.cuda.get_device_capability(query.device) in SMALL_SHARED_MEMORY:
        supports_head_dim = False
    supports_dtype = value.dtype in (torch.float16, torch.bfloat16)
    return same_head_dim and supports_head_dim and supports_dtype and dropout == 0.0


def attend_by_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scaling: float | None,
    sliding_window: int | None,
    cu_seq_lens: torch.Tensor,
    max_length: int,
) -> torch.Tensor:
    """The output of [`varlen_attention_forward`], computed by torch's FlashAttention for samples of different lengths.

    `torch.nn.attention.varlen` calls the same operator. It isn't used here, since torch 2.8 and 2.9 lack it, and its
    arguments changed later. The operator has a backward pass, takes fewer heads of keys than of queries, and can be
    compiled.
    """
    # Under autocast the rotary embedding returns float32 queries and keys, which the kernel doesn't take.
    query = query[0].transpose(0, 1).to(value.dtype).contiguous()  # [sequence_length, num_heads, head_dim]
    key = key[0].transpose(0, 1).to(value.dtype).contiguous()  # [sequence_length, num_key_value_heads, head_dim]
    value = value[0].transpose(0, 1).contiguous()  # like key

    # The number of earlier tokens that a token sees. -1 means all earlier tokens of its sample. `window_size_right` is
    # the number of later tokens. It is 0, which makes attention with a window causal too.
    window_size_left = -1 if sliding_window is None else sliding_window - 1
    output, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        cum_seq_q=cu_seq_lens,
        cum_seq_k=cu_seq_lens,
        max_q=max_length,
        max_k=max_length,
        dropout_p=0.0,
        is_causal=sliding_window is None,
        return_debug_mask=False,
        scale=scaling,
        window_size_left=window_size_left,
        window_size_right=0,
    )
    return output[None]  # [1, sequence_length, num_heads, head_dim]


# This function isn't compiled, since it loops over samples: each number of samples would need a graph of its own.
@torch.compiler.disable
def attend_by_sample(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    dropout: float,
    scaling: float | None,
    sliding_window: int | None,
    cu_seq_lens: torch.Tensor,
) -> torch.Tensor:
    """The output of [`varlen_attention_forward`], computed by sdpa for one sample after the other.

    Adjacent samples of the same length are computed in one call. Otherwise a batch without pictures would take
    hundreds of calls: the collator adds a blank picture, and each of the blank picture's tokens is a sample by itself.
    """
    if query.is_cuda:
        warn_of_sdpa(value.dtype, query.shape[-1], dropout)

    outputs = []
    start = 0
    lengths = cu_seq_lens.diff().tolist()
    for length, equal_lengths in groupby(lengths):
        num_samples = len(list(equal_lengths))
        end = start + num_samples * length

        # [1, heads, sequence_length, head_dim] -> [num_samples, heads, length, head_dim]
        queries, keys, values = (
            states[0, :, start:end].unflatten(1, (num_samples, length)).transpose(0, 1)
            for states in (query, key, value)
        )
        mask = None
        if sliding_window is not None and length > sliding_window:
            mask = sliding_window_mask(length, sliding_window, query.device)

        # `is_causal` counts only without a mask.
        output, _ = sdpa_attention_forward(module, queries, keys, values, mask, dropout, scaling, is_causal=True)
        outputs.append(output.flatten(0, 1))  # [num_samples * length, num_heads, head_dim]
        start = end

    return torch.cat(outputs)[None]  # [1, sequence_length, num_heads, head_dim]


def sliding_window_mask(length: int, sliding_window: int, device: torch.device) -> torch.Tensor:
    """The mask of a sample, boolean, `(1, 1, length, length)`: true where a query (row) sees a key (column)."""
    positions = torch.arange(length, device=device)
    distance = positions[:, None] - positions[None]  # [length, length], positive for keys before the query
    is_seen = (distance >= 0) & (distance < sliding_window)
    return is_seen[None, None]


@cache
def warn_of_sdpa(dtype: torch.dtype, head_dim: int, dropout: float) -> None:
    """Warn that sdpa computes attention because the kernel can't. Through `cache`, each warning comes only once."""
    logger.warning(
        'Attention "varlen": the GPU\'s kernel takes bfloat16 and float16, head dimensions of up to 256 that are '
        "multiples of 8 (on some GPUs not those above 192), and no dropout. With %s, head dimension %d and dropout "
        "%g, sdpa computes one sample after the other, which is slower.",
        dtype,
        head_dim,
        dropout,
    )


def default_attention(config: PreTrainedConfig, device: torch.device) -> str:
    """The attention of a run if its recipe names none: "varlen" if it can run, otherwise "sdpa".

    Args:
        config: The language model's config.
        device: The device that the run trains on.
    """
    # Some decoders compute attention in their own code, and don't call functions registered with transformers.
    is_pluggable = MODEL_MAPPING[type(config)]._supports_attention_backend
    if not is_pluggable:
        return "sdpa"

    if device.type == "cpu":
        return "varlen"
    # The kernel needs compute capability 8.0 (Ampere) or later. AMD's GPUs have another, which was never run.
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    if is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0):
        return "varlen"
    return "sdpa"


AttentionInterface.register("varlen", varlen_attention_forward)
AttentionMaskInterface.register("varlen", mask_without_reading)
