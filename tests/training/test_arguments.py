"""What a recipe may say: a mistake names its field, and what would change the result in silence is refused."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from script_runs import FAST, PACKED, ROOT
from training import arguments
from training.arguments import parse_arguments


@pytest.fixture
def recipe(composed: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": "rows.json"}
    path.write_text(yaml.safe_dump({**FAST, **fields, "output_dir": str(tmp_path / "out")}))
    return path


NO_NAME = {"dataset_name": None}
STREAM = {"dataset_streaming": True, "max_steps": 2}
# What a recipe adds to the fixture's, and what is said of it.
REFUSED: list[tuple[dict[str, Any], str]] = [
    # Missing or misspelt.
    ({"output_dir": None}, "output_dir is missing"),
    ({"model_name_or_path": None}, "model_name_or_path is missing"),
    ({"dataset_name": None}, "dataset_name is missing"),
    ({"stage": None}, "stage is missing"),
    ({"learning_rat": 1.0}, "not used by the HfArgumentParser: .*learning_rat"),
    ({"warmup": {"steps": 1}}, "not used by the HfArgumentParser: .*warmup"),
    ({"seed": ...}, "recipe.yaml: seed is empty"),
    # Sources.
    ({"datasets": [{"path": "a.json"}]}, "Give either dataset_name or datasets"),
    ({**NO_NAME, "datasets": [{"path": "a"}], "image_folder": "b"}, "Give either image_folder or datasets"),
    ({**NO_NAME, "datasets": []}, "dataset_name is missing"),
    ({**NO_NAME, "datasets": ["rows.json"]}, "datasets, entry 1 must be a mapping of path, name, split"),
    ({**NO_NAME, "datasets": [{"path": "a"}, {"split": "b"}]}, "datasets, entry 2 must be a mapping of path, name"),
    ({**NO_NAME, "datasets": [{"path": "a", "weight": 0}]}, "entry 1: weight must be a finite number above 0, got 0"),
    ({**NO_NAME, "datasets": [{"path": "a"}] * 2, **STREAM}, "dataset_streaming reads a single source"),
    # What would train something else, or be passed over.
    ({"use_peft": True}, "use_peft must stay False"),
    ({"lora_target_modules": ["q_proj"]}, "lora_target_modules must stay None"),
    ({"packing": True}, "packing must stay False"),
    ({"completion_only_loss": False}, "completion_only_loss must stay None"),
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices must stay True"),
    ({"auto_find_batch_size": True}, "auto_find_batch_size must stay False"),
    ({"ignore_data_skip": True}, "ignore_data_skip must stay False"),
    ({"torch_compile": True}, "torch_compile must stay False"),
    ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint must stay False"),
    ({"load_best_model_at_end": True, "save_strategy": "no"}, "load_best_model_at_end must stay"),
    ({"chat_template_path": "x"}, "chat_template_path must stay None"),
    ({"push_to_hub": True}, "push_to_hub must stay False, got True: .* holds your token"),
    ({"stage": "instruct"}, "give vision_learning_rate"),
    ({"load_in_4bit": True}, "load_in_4bit works only with stage 'adapt'"),
    ({"key_mmd_weight": 0.1}, "key_mmd_weight works only with stage 'adapt'"),
    ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy must be one of random, group_by_length"),
    ({"train_sampling_strategy": "sequential", **PACKED}, "and random with packed_length"),
    ({"neftune_noise_alpha": 5.0, **PACKED}, "neftune_noise_alpha scales its noise by a row's length"),
    ({"gradient_accumulation_steps": 2}, "either global_batch_size or gradient_accumulation_steps"),
    ({**PACKED, "global_batch_size": None}, "give global_batch_size"),
    ({**PACKED, **STREAM}, "the latter for packed streams"),
    ({"dataset_streaming": True}, "give max_steps"),
    ({"optim": "schedule_free_adamw"}, "optim 'schedule_free_adamw' trains on other weights than it saves"),
    ({"fp16": True, "bf16": True}, "At most one of fp16 and bf16"),
]


def write(recipe: Path, **changes: Any) -> list[str]:
    """Change a recipe, without the fields that are `None` and with nothing after those that are `...`."""
    fields = {**yaml.safe_load(recipe.read_text()), **changes}
    given = {name: None if value is ... else value for name, value in fields.items() if value is not None}
    recipe.write_text(yaml.safe_dump(given))
    return ["--config", str(recipe)]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_a_wrong_recipe_is_refused(recipe: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_arguments(write(recipe, **wrong))


@pytest.mark.parametrize(
    ("name", "value"),
    [("stage", "both"), ("bad_rows", "drop"), ("bf16", "maybe"), ("seed", "42 or so"), ("global_batch_size", 16.0),
     ("learning_rate", True), ("save_strategy", False), ("train_sampling_strategy", "longest")],
)  # fmt: skip
def test_a_recipes_values_are_checked_as_the_command_lines_are(
    recipe: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(write(recipe, **{name: value}))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: argument --{name}" in line


def test_the_launcher_does_not_replace_the_recipe(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--config", str(recipe), "--bf16", "false"]
    run_args, args = parse_arguments(given)
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config={})  # DeepSpeed is not among what the tests install
    arguments.check_arguments(run_args, args)
    args.deepspeed_plugin.deepspeed_config["optimizer"] = {"type": "AdamW"}
    with pytest.raises(ValueError, match="Remove optimizer and scheduler from DeepSpeed's config"):
        arguments.check_arguments(run_args, args)
    run_args.clip_by_module, args.deepspeed_plugin.deepspeed_config = True, {}
    with pytest.raises(ValueError, match="DeepSpeed can only clip all gradients together"):
        arguments.check_arguments(run_args, args)
    for name, value, message in (
        ("ACCELERATE_MIXED_PRECISION", "bf16", "launcher has mixed_precision 'bf16'"),  # the record would say false
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", "Launch without --dynamo_backend"),
        ("ACCELERATE_USE_FSDP", "true", "Set fsdp_version to 2"),  # accelerate's default is version 1
    ):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            with pytest.raises(ValueError, match=message):
                parse_arguments(given)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    parse_arguments(given)


@pytest.mark.parametrize("has_amx", [True, False])
def test_a_cpu_computes_in_what_it_is_fast_at(recipe: Path, monkeypatch: pytest.MonkeyPatch, has_amx: bool) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": has_amx}, raising=False)
    given = write(recipe, bf16=None)
    _, args = parse_arguments(given)
    assert (args.bf16, args.chose_bf16, args.frozen_dtype) == (has_amx, True, torch.float32)
    assert args.to_dict()["bf16"] == has_amx
    for asked in (True, False):
        _, args = parse_arguments([*given, "--bf16", str(asked)])
        assert (args.bf16, args.chose_bf16, args.frozen_dtype) == (asked, False, torch.float32)


def test_a_resumed_run_computes_as_it_did(recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": False}, raising=False)
    given = write(recipe, bf16=None)
    for step, bf16 in ((5, False), (10, True)):
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"arguments": {"bf16": bf16}}))
    (tmp_path / "out" / "checkpoint-15").mkdir()  # not complete
    resumed = {"true": True, str(tmp_path / "out" / "checkpoint-5"): False, "false": False}
    for resume, expected in resumed.items():
        _, args = parse_arguments([*given, "--resume_from_checkpoint", resume])
        assert args.bf16 == expected, resume


def test_what_a_user_did_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    failed = subprocess.run(
        [sys.executable, "training/sft.py", "--use_cpu", "true", "--output_dir", str(tmp_path / "out"),
         "--dataset_name", "rows.json", "--stage", "align", "--model_name_or_path", "gone"],
        cwd=ROOT, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert failed.returncode == 1
    assert "error: " in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_recipe_is_recorded_however_it_is_given(recipe: Path) -> None:
    for given in (["--config", str(recipe)], [f"--config={recipe}"]):
        run_args, args = parse_arguments([*given, "--learning_rate", "5e-4"])
        assert run_args.recipe == str(recipe)
        assert args.learning_rate == 5e-4
    flags = [f"--{name}={value}" for name, value in yaml.safe_load(recipe.read_text()).items()]
    assert parse_arguments(flags)[0].recipe is None


@pytest.mark.parametrize("content", [None, "- a list", "learning_rate: [", b"\xff\xfe"])
def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path, content: str | bytes | None) -> None:
    path = tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"--config .*recipe.yaml (can't be read|is not a mapping)"):
        parse_arguments(["--config", str(path)])


def test_resuming_may_be_switched_off(recipe: Path) -> None:
    given = {"false": None, "False": None, "true": True, "True": True, "out/checkpoint-3": "out/checkpoint-3"}
    for value, meant in given.items():
        _, args = parse_arguments(["--config", str(recipe), "--resume_from_checkpoint", value])
        assert args.resume_from_checkpoint == meant
    assert parse_arguments(["--config", str(recipe)])[1].resume_from_checkpoint is None


def test_recipes_warn_of_nothing(recipe: Path, recwarn: pytest.WarningsRecorder) -> None:
    for checkpointing in ("true", "false"):
        _, args = parse_arguments(["--config", str(recipe), "--gradient_checkpointing", checkpointing])
        assert args.gradient_checkpointing == (checkpointing == "true")
    assert [str(warning.message) for warning in recwarn if "deprecated" in str(warning.message)] == []


STAGES = [path for path in sorted((ROOT / "training" / "recipes").glob("*/*.yaml")) if path.name != "card.yaml"]


@pytest.mark.parametrize("path", STAGES, ids=lambda path: "/".join(path.parts[-2:]))
def test_recipes_parse(path: Path) -> None:
    # bfloat16 is refused where no device has it, which says nothing about the recipe.
    run_args, args = parse_arguments(["--config", str(path), "--bf16", "false", "--use_cpu", "true"])
    assert args.max_length is None
    assert args.seed == 42
    assert args.weight_decay == 0
    assert args.lr_scheduler_type == "cosine"
    assert args.warmup_steps == 0.03
    if path.parts[-2] in ("digits", "SmolLM2-135M-Instruct"):
        return
    assert run_args.packed_length is not None
    if path.stem in ("stage1", "stage2"):
        stage1 = run_args.stage == "align"
        assert run_args.global_batch_size == (256 if stage1 else 128)
        assert args.learning_rate == (1e-3 if stage1 else 1e-5)
        assert run_args.vision_learning_rate == (None if stage1 else 2e-6)
        assert args.num_train_epochs == 1
        assert yaml.safe_load(path.read_text())["bf16"] is True
