"""The model set by hand."""

import pytest
import torch
from hand_made import set_by_hand
from transformers import PreTrainedModel

from families import build, inputs


@pytest.fixture
def hand_made() -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    return set_by_hand(build("llava-siglip")), inputs("llava-siglip")
