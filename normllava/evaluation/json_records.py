"""Reading records: JSON files that one command writes and another reads back."""

from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from normllava.errors import UserError


def read_record(kind: Any, path: Path) -> Any:
    """Read a JSON file as a dataclass, or as a list of dataclasses.

    Fields of the file that the dataclass doesn't have are left out.

    Args:
        kind: The dataclass, `list[...]` of it, or another type that pydantic reads.
        path: The JSON file.

    Raises:
        UserError: if the file can't be read, or doesn't fit `kind`. The message names the file and the field.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} can't be read ({error}).") from error
    except ValidationError as error:
        raise UserError(f"{path}: {describe_problems(error)}.") from error


def describe_problems(error: ValidationError) -> str:
    """Describe all problems of a record in one line, each with the field that it is about."""
    descriptions = []
    for problem in error.errors():
        description = problem["msg"]
        field = ".".join(str(part) for part in problem["loc"])  # such as rows.0.name
        if field:  # a problem of the whole file has no field
            description = f"{field}: {description}"
        descriptions.append(description)
    return "; ".join(descriptions)
