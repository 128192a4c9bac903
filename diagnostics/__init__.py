"""Measurements of a vision-language model: norms at the modality interface, and how the decoder treats them."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diagnostics.attention_maps import attention_map
    from diagnostics.comparison import Comparison, compare, measure, sweep

__all__ = ["Comparison", "attention_map", "compare", "measure", "sweep"]


def __getattr__(name: str) -> Any:
    """Import the names above when they are first used: training needs parts of this package, and none of what a report
    needs (matplotlib, scikit-learn), which takes seconds to import."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diagnostics import attention_maps, comparison

    if name == "attention_map":
        return attention_maps.attention_map
    return getattr(comparison, name)
