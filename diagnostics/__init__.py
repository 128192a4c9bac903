"""Measurements of a vision-language model: norms at the modality interface, and how the decoder treats them."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diagnostics.comparison import Comparison, attention_map, compare, measure, sweep

__all__ = ["Comparison", "attention_map", "compare", "measure", "sweep"]


def __getattr__(name: str) -> Any:
    """Lazy imports: training uses this package without the extra "diagnostics"."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diagnostics import comparison

    return getattr(comparison, name)
