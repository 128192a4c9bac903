"""The command `normllava` tells its version, starts its commands, and names what isn't installed."""

import subprocess
import sys
from importlib.metadata import version

import pytest

from normllava.__main__ import SUBCOMMANDS, main


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"{version('normllava')}\n"


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_each_command_lists_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: normllava {name} ")


# A program in which matplotlib isn't installed.
PROGRAM = """
import sys
sys.modules["matplotlib"] = None
from normllava.__main__ import main
main(["diagnose", "--help"])
"""


def test_a_missing_extra_is_named() -> None:
    completed = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert completed.returncode == 1
    assert completed.stderr.splitlines()[-1].startswith(
        'error: normllava diagnose needs matplotlib, which is not installed. Install the extra "diagnose", such as '
    )
