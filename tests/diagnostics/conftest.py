"""The model set by hand, and the table of the families that were measured."""

from typing import Any

import pytest
import torch
from hand_made import set_by_hand
from transformers import PreTrainedModel

from families import FAMILIES, build, inputs


@pytest.fixture
def hand_made() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    return set_by_hand(build("llava-siglip")), inputs("llava-siglip")


FAMILY_ROWS: dict[str, str] = {}


@pytest.fixture
def family_table() -> dict[str, str]:
    """Rows of the table that is printed once the families were measured."""
    return FAMILY_ROWS


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if FAMILY_ROWS:
        terminalreporter.section(f"{len(FAMILY_ROWS)} of {len(FAMILIES)} families, small and random")
        header = (
            f"{'family':17}{'visual':>8}{'text':>6}{'ratio':>9}{'1-cos v':>9}{'1-cos t':>9}{'mass':>7}{'keys':>12}"
        )
        terminalreporter.write_line(header + "  left out, notes")
        for row in FAMILY_ROWS.values():
            terminalreporter.write_line(row)
