"""Measurements of a vision-language model: norms at the modality interface, and what the decoder makes of them."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diagnostics.comparison import Comparison, compare, measure

__all__ = ["Comparison", "compare", "measure"]


def __getattr__(name: str) -> Any:
    """Loaded when asked for: training uses this package without the extra "diagnostics"."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diagnostics import comparison

    return getattr(comparison, name)
