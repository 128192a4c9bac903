"""The plan of a step against what the same step allocates on a CPU."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode
from trl.trainer.utils import add_fused_lm_head

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from script_runs import FAST, INSTRUCT
from training.command_line import parse_arguments
from training.loading import prepare_model
from training.loss import head_on_supervised, supervised
from training.plan import main, plan_step
from training.stages import base_model


ROWS, TOKENS, SUPERVISED = 8, 150, 20
STAGES = {"align": {"stage": "align"}, "instruct": INSTRUCT, "adapt": {"stage": "adapt", "lora_r": 4}}


def allocated(config: NormLlavaConfig, run_args: Any, args: Any, folder: Path) -> int:
    """Bytes at the peak of two steps of two passes, by torch's profiler."""
    image, per_picture = config.image_token_id, 4
    input_ids = torch.full((ROWS, TOKENS), 5)
    input_ids[:, :per_picture] = image
    labels = torch.full((ROWS, TOKENS), -100)
    labels[:, -SUPERVISED:] = 5
    inputs = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
    places, tokens = supervised(labels)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        model: Any = NormLlavaForConditionalGeneration._from_config(config, dtype=torch.float32)
        trained, _ = prepare_model(model, run_args, args, torch.float32)
        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if args.gradient_checkpointing:
            if trained is not model:
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        trained.train()
        learned = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learned, fused=True)
        for _ in range(2):
            for _ in range(2):
                with head_on_supervised(base_model(trained), places):
                    output = trained(
                        **inputs, pixel_values=torch.rand(ROWS, 3, 28, 28), shift_labels=tokens[None],
                        fused_lm_head=True, use_cache=False,
                    )  # fmt: skip
                (-output.log_probs.mean()).backward()
                del output
            optimizer.step()
            optimizer.zero_grad()
    record.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    return max(event["args"]["Total Allocated"] for event in events if event["name"] == "[memory]")


@pytest.mark.parametrize("stage", STAGES)
def test_flops_are_those_of_eager_attention_over_half_of_a_causal_matrix(
    composed: Callable[..., Path], tmp_path: Path, stage: str
) -> None:
    given = {**FAST, **STAGES[stage], "model_name_or_path": str(composed()), "dataset_name": "none"}
    run_args, args = parse_arguments(
        [f"--{name}={value}" for name, value in (given | {"output_dir": tmp_path}).items()]
    )
    config = NormLlavaConfig.from_pretrained(composed())
    _, flops = plan_step(config, run_args, args, 1, TOKENS, SUPERVISED)
    whole = NormLlavaForConditionalGeneration._from_config(config, dtype=torch.float32, attn_implementation="eager")
    model = base_model(prepare_model(whole, run_args, args, torch.float32)[0].train())
    input_ids = torch.tensor([[config.image_token_id] * 4 + [5] * (TOKENS - 4)])
    with FlopCounterMode(display=False) as counter:
        states = model.model(input_ids=input_ids, pixel_values=torch.rand(1, 3, 28, 28)).last_hidden_state
        model.lm_head(states[:, -SUPERVISED:]).sum().backward()
    text = config.text_config
    halved = 6 * text.num_attention_heads * text.head_dim * text.num_hidden_layers * TOKENS**2
    assert flops == pytest.approx(counter.get_total_flops() - halved, rel=0.03)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_plan_is_within_a_tenth_of_the_peak(
    composed: Callable[..., Path], tmp_path: Path, stage: str, checkpointed: bool
) -> None:
    given = {**FAST, **STAGES[stage], "model_name_or_path": str(composed()), "dataset_name": "none"}
    given |= {"gradient_checkpointing": checkpointed, "output_dir": str(tmp_path)}
    run_args, args = parse_arguments([f"--{name}={value}" for name, value in given.items()])
    config = NormLlavaConfig.from_pretrained(composed())
    sizes = (ROWS, TOKENS, SUPERVISED)
    memory, flops = plan_step(config, run_args, args, *sizes)
    assert sum(memory.values()) == pytest.approx(allocated(config, run_args, args, tmp_path), rel=0.1)
    halves, same_flops = plan_step(config, run_args, args, *sizes, devices=2)
    assert halves["weights"] == memory["weights"] // 2
    of_rows = "activations and temporary"
    assert halves[of_rows] == pytest.approx(memory[of_rows], rel=0.01)  # when Python frees a tensor may differ
    assert same_flops == flops > 0
    args.bf16 = True
    weights = plan_step(config, run_args, args, *sizes)[0]["weights"]
    assert weights == memory["weights"] if stage == "instruct" else weights < 0.7 * memory["weights"]


def test_a_plan_goes_by_max_steps_and_refuses_what_no_sample_holds(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    given = {**FAST, "stage": "align", "model_name_or_path": composed(), "dataset_name": "none"}
    given |= {"output_dir": tmp_path}

    def report(*options: str) -> str:
        monkeypatch.setattr("sys.argv", ["plan.py", *options, *(f"--{name}={value}" for name, value in given.items())])
        caplog.clear()
        with caplog.at_level(logging.INFO):
            main()
        return "\n".join(caplog.messages[-3:])

    assert report("--rows", "40", "--num_train_epochs", "1") == report("--rows", "7", "--max_steps", "10")
    told = r"assumed: 40 rows of 1024 tokens, 200 supervised, [\s\S]*: (.*) FLOPs, (.*) hours, devices: 2"
    flops, hours = map(float, re.fullmatch(told, report("--rows=40", "--tflops=1e-07", "--devices=2")).groups())
    assert hours == pytest.approx(flops / (2 * 1e5 * 3600), rel=0.01)
    with pytest.raises(SystemExit, match=r"^error: A sample of 10 tokens can't hold .* supervised ones: set --tokens"):
        report("--tokens", "10")
