"""What a check reports."""

from dataclasses import dataclass


REBUILD = "Rebuild the stage folder from a complete run."


@dataclass(frozen=True, order=True)
class Finding:
    """One reason not to publish.

    Attributes:
        file: Path inside the folder.
        reason: What is wrong.
        fix: What to do about it.
    """

    file: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.file}: {self.reason}. {self.fix}"
