"""`release.json`: which repository and tag a release folder was built for, and from which weights."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from normllava.errors import UserError
from normllava.evaluation.json_records import read_record
from normllava.files import write_whole


RELEASE_FILE = "release.json"


@dataclass(frozen=True)
class Release:
    """The content of `release.json`.

    Attributes:
        repo_id: The repository on the Hub that the folder was built for, owner/name.
        revision: The tag that the folder was built for.
        weights: [`~normllava.files.fingerprint`] of the weights that the folder was built from.
    """

    repo_id: str
    revision: str
    weights: str

    def write(self, folder: Path) -> None:
        """Write `release.json` into a folder."""
        write_whole(folder / RELEASE_FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_release(folder: Path) -> Release:
    """Read `release.json` from a folder.

    Raises:
        UserError: if there is no such file, or if it can't be read.
    """
    path = folder / RELEASE_FILE
    if not path.exists():
        raise UserError(
            f"{folder} holds no {RELEASE_FILE}, so it is no release. Delete it, or give another --output_dir, and "
            "push the run again: python -m hub_cards push <run> --repo_id <owner/name>"
        )
    return read_record(Release, path)
