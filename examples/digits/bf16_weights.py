"""`training/sft.py` with trained weights in bfloat16, which loses small updates: to see what that does.

    accelerate launch examples/digits/bf16_weights.py --config training/recipes/digits/stage1.yaml

It computes in bfloat16 throughout, so it goes with `bf16: false`, which means bfloat16 beside float32 weights.
"""

from typing import Any

import torch

from training import loading, sft
from training.stages import LearningRates, ModuleGroup, Stage, prepare_stage


def prepare_in_bfloat16(model: Any, stage: Stage, rates: LearningRates, **dtypes: torch.dtype) -> list[ModuleGroup]:
    """`training.stages.prepare_stage`, and then bfloat16 for every weight, the norm's among them.

    Raises:
        ValueError: if the recipe asks for mixed precision, which the weights alone are to differ from.
    """
    if dtypes["frozen_dtype"] != torch.float32:
        raise ValueError("With weights in bfloat16 leave bf16, which computes in bfloat16 from float32 weights.")
    groups = prepare_stage(model, stage, rates, frozen_dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return groups


if __name__ == "__main__":
    # Here and not by an option: training itself has no use for weights that lose what they learn.
    loading.prepare_stage = prepare_in_bfloat16  # type: ignore[assignment]
    sft.main()
