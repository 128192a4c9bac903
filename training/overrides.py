"""Checks that overridden methods still exist in transformers and TRL: after a rename ours would never be called."""

from collections.abc import Callable
from typing import TypeVar


Class = TypeVar("Class", bound=type)


def checks_overrides(cls: Class) -> Class:
    """Check, when a class is created, that every method marked with `typing_extensions.override` exists in its bases.

    Raises:
        ImportError: if the installed version of the library has no such method.
    """
    for name, member in vars(cls).items():
        marked = isinstance(member, Callable) and getattr(member, "__override__", False)  # type: ignore[arg-type]
        if marked and not any(hasattr(base, name) for base in cls.__bases__):
            bases = ", ".join(f"{base.__module__}.{base.__name__}" for base in cls.__bases__)
            raise ImportError(
                f"{cls.__name__}.{name} replaces a method that {bases} no longer has. Install the versions of "
                "constraints.txt."
            )
    return cls
