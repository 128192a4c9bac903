"""Measures vision-language models: norms of image and text tokens, and what the decoder's layers do with them."""

from normllava.diagnostics.attention_maps import attention_map
from normllava.diagnostics.comparison import Comparison, compare, measure, sweep


__all__ = ["Comparison", "attention_map", "compare", "measure", "sweep"]
