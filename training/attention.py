"""Attention over packed rows that computes each sample on its own, registered with transformers as "varlen".

sdpa and eager mask a packed row with a length x length matrix and compute all of it. Here the cost is the sum of the
samples' squared lengths: by torch's variable-length FlashAttention on CUDA, sample by sample elsewhere.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask


try:
    from torch.nn.attention.varlen import varlen_attn

    VARLEN_OPTIONS = frozenset(inspect.signature(varlen_attn).parameters)
except ImportError:  # torch before 2.10
    VARLEN_OPTIONS = frozenset()


def runs_flash(query: torch.Tensor) -> bool:
    """Whether FlashAttention supports the tensor's device and dtype."""
    return query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)


def varlen_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within the samples of a packed row.

    Args:
        module: The attention layer.
        query: `(1, num_heads, sequence_length, head_dim)`.
        key, value: `(1, num_key_value_heads, sequence_length, head_dim)`.
        attention_mask: Must be `None`.
        cu_seq_lens_q: Where samples begin, `(num_samples + 1,)`, int32, as the collator gives it.
        max_length_q: Length of the longest sample.

    Returns:
        `(1, sequence_length, num_heads, head_dim)`, and `None` for the weights, which are never built.

    Raises:
        ValueError: for a padded batch, torch before 2.11 on CUDA, or a decoder that doesn't say where samples begin
            (StableLM, Nemotron) or has attention sinks or soft caps.
    """
    if attention_mask is not None:
        raise ValueError('Attention "varlen" is for packed rows; use "sdpa" for padded batches.')
    if cu_seq_lens_q is None:
        raise ValueError(
            f'{type(module).__name__} is not told where samples begin, which attention "varlen" needs; use "sdpa".'
        )
    if kwargs.get("s_aux") is not None or kwargs.get("softcap") is not None:
        raise ValueError('Attention "varlen" has no attention sinks and no soft caps; use "eager".')
    # Under autocast the rotary embedding returns float32 queries and keys, which FlashAttention does not support.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if runs_flash(query):
        if dropout:
            raise ValueError(
                'Attention "varlen" has no dropout; use "sdpa" or set the model\'s attention_dropout to 0.'
            )
        if "window_size" not in VARLEN_OPTIONS:
            raise ValueError(f'Attention "varlen" needs torch 2.11 on CUDA, not {torch.__version__}; use "sdpa".')
        # Since torch 2.12 fewer heads of keys must be announced; before, the kernel simply took them.
        options: dict[str, Any] = (
            {"enable_gqa": query.shape[1] != key.shape[1]} if "enable_gqa" in VARLEN_OPTIONS else {}
        )
        window = (-1, 0) if sliding_window is None else (sliding_window - 1, 0)
        q, k, v = (states[0].transpose(0, 1).contiguous() for states in (query, key, value))
        longest = int(max_length_q or query.shape[2])
        output: Any = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            longest,
            longest,
            scale=scaling,
            window_size=window,
            **options,
        )  # [sequence_length, num_heads, head_dim]
        return output[None], None
    if sliding_window is not None and max_length_q is not None and max_length_q > sliding_window:
        raise ValueError('Attention "varlen" supports sliding windows on CUDA only; use "sdpa".')
    return attend_by_sample(module, query, key, value, cu_seq_lens_q, dropout, scaling), None


@torch.compiler.disable  # it reads the lengths, and a graph would be of one number of samples
def attend_by_sample(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_lens_q: torch.Tensor,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """What `varlen_attention_forward` returns, by torch's own attention of one sample after the other."""
    lengths = cu_seq_lens_q.diff().tolist()
    outputs = [
        sdpa_attention_forward(module, q, k, v, None, dropout, scaling, is_causal=True)[0]
        for q, k, v in zip(*(states.split(lengths, dim=2) for states in (query, key, value)), strict=True)
    ]
    return torch.cat(outputs, dim=1)


@contextmanager
def unpacked(model: PreTrainedModel) -> Iterator[None]:
    """For the time of the block the model's decoder takes samples that are not packed: "sdpa" stands for "varlen"."""
    attention = model.config.text_config._attn_implementation
    if attention == "varlen":
        model.set_attn_implementation({"text_config": "sdpa"})
    try:
        yield
    finally:
        if attention == "varlen":
            model.set_attn_implementation({"text_config": attention})


AttentionInterface.register("varlen", varlen_attention_forward)
AttentionMaskInterface.register("varlen", flash_attention_mask)
