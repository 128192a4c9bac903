"""A method that is meant to replace one of transformers or TRL must find it there: a rename would switch it off."""

from collections.abc import Callable
from typing import TypeVar


Class = TypeVar("Class", bound=type)


def checks_overrides(cls: Class) -> Class:
    """Check, when a class is made, that every method marked with `typing_extensions.override` is one of its bases'.

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
