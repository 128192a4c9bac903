"""Measurements of a vision-language model: norms at the modality interface, and what the decoder does with tokens."""

from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from diagnostics.attention_maps import attention_map
    from diagnostics.comparison import Comparison, compare, measure, sweep

__all__ = ["Comparison", "attention_map", "compare", "measure", "sweep"]


def __getattr__(name: str) -> Any:
    """Import the names of `__all__` only when one of them is first used.

    They need matplotlib and scikit-learn, which take seconds to import. Training imports only other modules of this
    package, and so does not wait for them.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diagnostics import attention_maps, comparison

    if name == "attention_map":
        return attention_maps.attention_map
    return getattr(comparison, name)
