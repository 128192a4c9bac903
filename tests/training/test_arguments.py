"""What a recipe may say: every field is checked before anything is loaded, and a mistake names its field."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from script_runs import FAST, INSTRUCT, PACKED, ROOT, run
from training import arguments, sft
from training.arguments import parse_arguments


ONE_ROW = {"per_device_train_batch_size": 1}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stage": "both"}, "stage must be one of align, instruct"),
    ({"stage": None}, "stage is missing"),
    ({"model_name_or_path": None}, "model_name_or_path is missing"),
    ({"stage": "instruct"}, "give vision_learning_rate"),
    ({"bad_rows": "drop"}, "bad_rows must be one of error, skip"),
    ({"global_batch_size": 5}, "global_batch_size 5 is not a multiple of per_device_train_batch_size 2 times 1"),
    ({"gradient_accumulation_steps": 2}, "either global_batch_size or gradient_accumulation_steps"),
    ({"warmup_ration": 0.1}, "warmup_ration"),
    ({"packing": True}, "give packed_length"),
    ({"packed_length": 200}, "set per_device_train_batch_size to 1"),
    ({"packed_length": 200, **ONE_ROW, "global_batch_size": None}, "give global_batch_size"),
    ({"packed_length": 9, **ONE_ROW}, "longest sample has .* tokens, a packed row 9"),
    ({"attn_implementation": "varlen"}, "is for packed rows"),
    ({"dataset_streaming": True}, "give max_steps"),
    ({"dataset_streaming": True, "max_steps": 2, **PACKED}, "global_batch_size can't be met"),
    ({"load_in_4bit": True}, "works only with stage 'adapt'"),
    ({"push_to_hub": True}, "holds your token"),
    ({"max_length": 9}, "more than max_length 9"),
    # Numbers that make no sense, and values of the wrong type, which YAML lets through.
    ({"global_batch_size": -16}, "global_batch_size must be at least 1, got -16"),
    ({"global_batch_size": 0}, "global_batch_size must be at least 1, got 0"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be at least 1, got 0"),
    ({"learning_rate": 0}, "learning_rate must be above 0, got 0"),
    ({"learning_rate": float("nan")}, "learning_rate must be a finite number, got nan"),
    ({"learning_rate": True}, "learning_rate must be a number, got True"),
    ({**INSTRUCT, "vision_learning_rate": 0}, "vision_learning_rate must be above 0"),
    ({"norm_learning_rate": -1e-3}, "norm_learning_rate must be above 0"),
    ({"max_grad_norm": -1}, "max_grad_norm must be at least 0, got -1"),
    ({"num_train_epochs": 0}, "num_train_epochs must be above 0"),
    ({"probe_steps": 0}, "probe_steps must be at least 1"),
    ({"packed_length": 0}, "packed_length must be at least 1"),
    ({"logging_steps": 0}, "logging_steps must be above 0"),
    ({"global_batch_size": 16.0}, "global_batch_size must be a whole number, got 16.0"),
    ({"learning_rate": None}, "recipe.yaml: learning_rate is empty"),
    ({"seed": None}, "recipe.yaml: seed is empty"),
    ({"max_steps": 0}, "max_steps must be at least 1, or -1"),
    ({"key_layers": [0.5]}, r"key_layers must be a list of whole numbers, got \[0.5\]"),
    ({"key_layers": []}, "key_layers is empty"),
    ({"key_bandwidths": ["x"]}, r"key_bandwidths must be a list of numbers, got \['x'\]"),
    ({"loss_type": "mse"}, "loss_type must be one of nll, dft, chunked_nll, got 'mse'"),
    # What would lose data, or do nothing, in silence.
    ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint must stay False"),
    ({"logging_strategy": "epoch"}, "logging_strategy 'epoch' would log the figures of other steps"),
    ({"neftune_noise_alpha": 5.0, **PACKED}, "neftune_noise_alpha scales its noise by the length"),
    ({"hub_model_id": "me/mine"}, "hub_model_id must stay None"),
    ({"hub_token": "hf_x"}, "hub_token must stay None"),
    ({"do_train": True}, "do_train must stay False"),
    ({"liger_kernel_config": {"rope": True}}, "liger_kernel_config must stay None"),
    ({"dataloader_persistent_workers": True}, "dataloader_persistent_workers does nothing without"),
    ({"optim": "schedule_free_adamw"}, "optim 'schedule_free_adamw' trains on other weights"),
    ({"use_cache": True}, "use_cache must stay False"),
    ({"optim_target_modules": "all-linear"}, "optim_target_modules must stay None"),
    ({"save_only_model": True}, "save_only_model must stay False, got True: such a checkpoint can't be resumed from"),
    ({"remove_unused_columns": True}, "remove_unused_columns must stay False"),
    ({"activation_offloading": True}, "activation_offloading must stay False"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor must stay 0.0"),
    ({"ignore_data_skip": True}, "ignore_data_skip must stay False"),
    ({"dataloader_drop_last": True}, "dataloader_drop_last must stay False"),
    ({"use_liger_kernel": True}, "use_liger_kernel must stay False"),
    ({"load_in_8bit": True}, "load_in_8bit must stay False"),
    ({"use_peft": True}, "use_peft must stay False"),
    ({"dtype": "bfloat16"}, "dtype must stay 'float32'"),
    ({"vision_learning_rate": 1e-5}, "vision_learning_rate does nothing in stage 'align'"),
    ({"lora_r": 4}, "lora_r does nothing in stage 'align'"),
    ({"train_sampling_strategy": "group_by_length", **PACKED}, "train_sampling_strategy 'group_by_length' does "),
    ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy must be one of random"),
    ({"probe_samples": 4}, "probe_samples does nothing without probe_steps"),
    ({"resume_changed": True}, "resume_changed does nothing without resume_from_checkpoint"),
    ({"clip_by_module": True, "max_grad_norm": 0}, "max_grad_norm 0 clips nothing"),
    ({"average_tokens_across_devices": False}, "average_tokens_across_devices must stay True"),
    ({"pad_to_multiple_of": 64}, "pad_to_multiple_of must stay 'auto'"),
    ({"accelerator_config": {"split_batches": True}}, "accelerator_config must stay None"),
    ({"save_on_each_node": True}, "save_on_each_node must stay False"),
    ({"fsdp": "full_shard auto_wrap"}, "fsdp must stay None"),
    ({"dataloader_in_order": False}, "dataloader_in_order must stay True"),
    ({"stage": "adapt", "bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type does nothing without load_in_4bit"),
    ({"adam_beta1": 2.0}, "adam_beta1 must be below 1, got 2.0"),
    ({"stage": "adapt", "lora_dropout": 1.0}, "lora_dropout must be below 1"),
    ({"key_mmd_weight": 0.1}, "key_mmd_weight works only with stage 'adapt'"),
    ({"key_gram_weight": -1.0}, "key_gram_weight must be at least 0"),
    ({"key_layers": [0]}, "key_layers does nothing without"),
    ({"key_bandwidths": [1.0, 0.0]}, "key_bandwidths must be numbers above 0"),
    ({"key_bandwidths": [1.0]}, "key_bandwidths does nothing without key_mmd_weight"),
    ({"stage": "adapt", "key_gram_weight": 0.1, "torch_compile": True}, "key_gram_weight reads keys"),
    (
        {
            "stage": "adapt",
            "key_mmd_weight": 0.1,
            "gradient_checkpointing": True,
            "gradient_checkpointing_kwargs": {"use_reentrant": True},
        },
        "key_mmd_weight needs gradient_checkpointing_kwargs use_reentrant false",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG, ids=[message for _, message in WRONG])
def test_a_wrong_recipe_stops_at_once(
    composed: Callable[..., Path],
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
    message: str,
) -> None:
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": str(data)}
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=message):
        run(monkeypatch, tmp_path, **{**fields, **wrong}, output_dir=str(tmp_path / "out"))


def test_sharding_of_version_1_is_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is accelerate's default, and wraps parameters under other names."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    for version in (None, "1"):
        if version is not None:
            monkeypatch.setenv("FSDP_VERSION", version)
        with pytest.raises(ValueError, match="Set fsdp_version to 2"):
            parse_arguments(["--config", str(recipe)])
    monkeypatch.setenv("FSDP_VERSION", "2")
    parse_arguments(["--config", str(recipe)])
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    with pytest.raises(ValueError, match="Set fsdp_state_dict_type to SHARDED_STATE_DICT"):
        parse_arguments(["--config", str(recipe)])


def test_the_launchers_precision_does_not_replace_the_recipes(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainer follows the launcher, while the record would say bf16: false."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ValueError, match="launcher has mixed_precision 'bf16', and bf16 is false"):
        parse_arguments(["--config", str(recipe), "--bf16", "false"])
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    parse_arguments(["--config", str(recipe), "--bf16", "false"])


def test_one_process_for_several_gpus_is_refused(recipe: Path) -> None:
    run_args, args = parse_arguments(["--config", str(recipe), "--use_cpu", "true"])
    args._n_gpu = 2
    with pytest.raises(ValueError, match="One process sees 2 GPUs"):
        arguments.check_arguments(run_args, args)


@pytest.mark.parametrize("section", ["optimizer", "scheduler"])
def test_deepspeeds_config_does_not_replace_the_learning_rates(recipe: Path, section: str) -> None:
    run_args, args = parse_arguments(["--config", str(recipe)])
    args.deepspeed_plugin = SimpleNamespace(deepspeed_config={})  # DeepSpeed is not among what the tests install
    arguments.check_arguments(run_args, args)
    args.deepspeed_plugin.deepspeed_config[section] = {"type": "AdamW"}
    with pytest.raises(ValueError, match=f"Remove the section '{section}' from DeepSpeed's config"):
        arguments.check_arguments(run_args, args)


def test_varlen_on_a_gpu_needs_a_torch_that_has_it(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--config", str(recipe), "--attn_implementation", "varlen", "--packed_length", "256"]
    given += ["--global_batch_size", "4", "--per_device_train_batch_size", "1", "--gradient_accumulation_steps", "1"]
    monkeypatch.setattr(arguments, "VARLEN_OPTIONS", {"is_causal"})
    parse_arguments([*given, "--use_cpu", "true"])
    monkeypatch.setattr(arguments.torch.cuda, "is_available", lambda: True)
    run_args, args = parse_arguments([*given, "--use_cpu", "true"])
    args.use_cpu = False
    with pytest.raises(ValueError, match=r"attn_implementation 'varlen' needs torch 2\.11 on a GPU"):
        arguments.check_arguments(run_args, args)


@pytest.fixture
def recipe(composed: Callable[..., Path], tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    fields = {"stage": "align", "model_name_or_path": str(composed()), "dataset_name": "rows.json"}
    path.write_text(yaml.safe_dump({**FAST, **fields, "output_dir": str(tmp_path / "out")}))
    return path


def test_the_recipe_is_recorded_however_it_is_given(recipe: Path) -> None:
    for given in (["--config", str(recipe)], [f"--config={recipe}"]):
        run_args, args = parse_arguments([*given, "--learning_rate", "5e-4"])
        assert run_args.recipe == str(recipe)
        assert args.learning_rate == 5e-4
    flags = [f"--{name}={value}" for name, value in yaml.safe_load(recipe.read_text()).items()]
    assert parse_arguments(flags)[0].recipe is None


@pytest.mark.parametrize(("name", "value"), [("bf16", "maybe"), ("seed", "42 or so")])
def test_text_that_is_no_value_of_a_field(
    recipe: Path, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    recipe.write_text(yaml.safe_dump({**yaml.safe_load(recipe.read_text()), name: value}))
    with pytest.raises(SystemExit):
        parse_arguments(["--config", str(recipe)])
    assert f"argument --{name}" in capsys.readouterr().err


def test_no_prefix_is_taken_for_an_option(recipe: Path) -> None:
    with pytest.raises(ValueError, match="--learning_rat"):
        parse_arguments(["--config", str(recipe), "--learning_rat", "5"])


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
