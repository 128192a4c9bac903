"""Measures vision-language models: norms of image and text tokens, and what the decoder's layers do with them."""

from typing import TYPE_CHECKING, Any


# Type checkers and editors read these imports. When the program runs, `__getattr__` imports the same names.
if TYPE_CHECKING:
    from diagnostics.attention_maps import attention_map
    from diagnostics.comparison import Comparison, compare, measure, sweep

__all__ = ["Comparison", "attention_map", "compare", "measure", "sweep"]


def __getattr__(name: str) -> Any:
    """Import what `__all__` names when it is first used, not with the package.

    The two modules below import matplotlib and scikit-learn, which takes seconds. Training uses only other modules of
    this package, and shall not wait for these libraries.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from diagnostics import attention_maps, comparison

    if name == "attention_map":
        return attention_maps.attention_map
    # All other names of `__all__` are defined in `comparison`.
    return getattr(comparison, name)
