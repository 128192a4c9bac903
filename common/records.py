"""Records that one command writes and another reads back."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from common.errors import UserError


def read_record(kind: Any, path: Path) -> Any:
    """Read a JSON file as a dataclass or a list of them. Fields that the dataclass doesn't have are left out.

    Args:
        kind: The dataclass, or another type that pydantic reads.
        path: The file.

    Raises:
        UserError: if the file can't be read or doesn't fit; the message names the file and the field.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read ({error}).") from error
    except ValidationError as error:
        raise UserError(f"{path}: {describe_problems(error)}.") from error


def describe_problems(error: ValidationError) -> str:
    """What doesn't fit, each problem after the field's place."""
    described = []
    for problem in error.errors():
        field = ".".join(str(part) for part in problem["loc"])
        described.append(f"{field}: {problem['msg']}" if field else problem["msg"])
    return "; ".join(described)
