"""`training/sft.py` with trained weights in bfloat16, which loses small updates, to see the effect.

    accelerate launch examples/digits/bf16_weights.py --config training/recipes/digits/stage1.yaml

It computes in bfloat16 throughout, so it needs `bf16: false`: that option keeps float32 weights.
"""

from typing import Any

import torch

from training import loading, sft
from training.stages import LearningRates, ModuleGroup, Stage, prepare_stage


def prepare_in_bfloat16(model: Any, stage: Stage, rates: LearningRates, **dtypes: torch.dtype) -> list[ModuleGroup]:
    """`training.stages.prepare_stage`, and then bfloat16 for every weight, the norm's among them.

    Raises:
        ValueError: if the recipe asks for mixed precision, since only the weights' dtype is to differ.
    """
    if dtypes["frozen_dtype"] != torch.float32:
        raise ValueError("With weights in bfloat16 set bf16: false; bf16 computes in bfloat16 from float32 weights.")
    groups = prepare_stage(model, stage, rates, frozen_dtype=torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return groups


if __name__ == "__main__":
    # Here instead of by an option: training itself has no use for weights that lose small updates.
    loading.prepare_stage = prepare_in_bfloat16  # type: ignore[assignment]
    sft.main()
