"""Reading a run's arguments: wrong recipes are refused with a message that names the field, right recipes are read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from normllava.errors import UserError
from script_runs import FAST, INSTRUCT, PACKED, ROOT
from training import sft
from training.folders.run import COMPARED_ARGUMENTS, describe_environment, describe_run
from training.options.arguments import RunArguments, SourceArguments, TrainingConfig, default_num_workers
from training.options.command_line import parse_arguments
from training.options.refusals import FIXED_FIELDS, check_arguments


@pytest.fixture
def recipe(make_model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """The path of a recipe of stage 'align' that is accepted."""
    path = tmp_path / "recipe.yaml"
    fields = {"stage": "align", "model_name_or_path": str(make_model_folder()), "dataset_name": "rows.json"}
    path.write_text(yaml.safe_dump({**FAST, **fields, "output_dir": str(tmp_path / "out")}))
    return path


# Stands in a recipe for a field without a value.
LEFT_EMPTY = object()


def change_recipe(recipe: Path, **changes: Any) -> list[str]:
    """Write a recipe with other fields beside a recipe.

    A field that is `None` is taken out of the recipe. A field that is `LEFT_EMPTY` has nothing after its colon.

    Returns:
        The command line's options that name the new file.
    """
    fields = yaml.safe_load(recipe.read_text())
    for name, value in changes.items():
        if value is None:
            fields.pop(name, None)
        elif value is LEFT_EMPTY:
            fields[name] = None
        else:
            fields[name] = value
    changed_recipe = recipe.with_name("changed") / recipe.name
    changed_recipe.parent.mkdir(exist_ok=True)
    changed_recipe.write_text(yaml.safe_dump(fields))
    return ["--config", str(changed_recipe)]


NO_DATASET_NAME = {"dataset_name": None}
EVALUATION = {"eval_dataset_name": "held_out.json", "eval_strategy": "epoch"}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
# Changes, as for `change_recipe`, that make the fixture's recipe wrong, and a pattern of the message.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"output_dir": None}, "output_dir is missing"),
    ({**NO_DATASET_NAME, "datasets": []}, "dataset_name is missing"),
    ({"learning_rat": 1.0}, "recipe.yaml: --learning_rat is unknown, did you mean --learning_rate?"),
    ({"datsets": [{"path": "a.json"}]}, "recipe.yaml: --datsets is unknown, did you mean --datasets?"),
    ({"seed": LEFT_EMPTY}, "recipe.yaml must be a mapping of fields to values"),
    ({"learning_rate": [1e-3]}, r"recipe.yaml: learning_rate can't be a list, got \[0.001\]"),
    ({"output_dir": ["out"]}, "output_dir can't be a list"),
    ({"seed": {"a": 1}}, "seed can't be a mapping"),
    ({"datasets": {"path": "a.json"}}, "datasets can't be a mapping"),
    # Sources of rows.
    ({"datasets": [{"path": "a.json"}]}, "Give either dataset_name or datasets"),
    (
        {**NO_DATASET_NAME, "datasets": [{"path": "a", "wieght": 2}]},
        "datasets: wieght is unknown in .*; an entry has path, name",
    ),
    ({**NO_DATASET_NAME, "datasets": [{"weight": 2}]}, "datasets: path is missing"),
    (
        {**NO_DATASET_NAME, "datasets": [{"path": "a", "weight": 0}]},
        "datasets, a: weight must be a number above 0, got 0",
    ),
    ({**NO_DATASET_NAME, "datasets": [{"path": "a", "weight": "2"}]}, "weight must be a number above 0, got '2'"),
    ({**NO_DATASET_NAME, "datasets": ["a.json"]}, "datasets: 'a.json' is no mapping; an entry has path, name"),
    ({**PACKED, "dataset_streaming": True, "max_steps": 2}, "neither datasets nor packed_length"),
    # Fields that would be ignored, or with which the run would train something else.
    ({"optim": "schedule_free_adamw"}, "trains other weights than it saves"),
    ({"stage": "align", "load_in_4bit": True}, "load_in_4bit works only with stage 'adapt'"),
    ({"key_mmd_weight": 0.1}, "key_mmd_weight and key_gram_weight work only with stage 'adapt'"),
    # This recipe is refused by transformers.
    ({"eval_strategy": "steps", "logging_steps": 0}, "requires either non-zero --eval_steps"),
    ({"dtype": "bfloat16"}, "dtype must stay 'float32'"),
    ({"assistant_only_loss": True}, "assistant_only_loss must stay False"),
    ({"logging_strategy": "epoch"}, "logging_strategy must stay 'steps'"),
    ({"eval_dataset_name": "held_out.json"}, "eval_dataset_name needs an eval_strategy"),
    ({"eval_strategy": "steps"}, "need held-out rows: give eval_dataset_name"),
    ({"eval_on_start": True}, "need held-out rows: give eval_dataset_name"),
    ({"save_strategy": "best", **EVALUATION}, "'best' needs an eval_strategy, and metric_for_best_model"),
    ({"save_strategy": "best", "metric_for_best_model": "loss"}, "'best' needs an eval_strategy"),
    (
        {"metric_for_best_model": "accuracy", **EVALUATION},
        "metric_for_best_model must be loss, got accuracy",
    ),
    ({"fsdp": "full_shard auto_wrap"}, "Take fsdp out of the recipe"),
    ({"torch_compile_mode": "reduce-overhead"}, "torch_compile_mode must stay None"),
    ({"torch_compile_backend": "eager"}, "torch_compile_backend must be inductor, .* or aot_eager"),
    ({"stage": "adapt", "torch_compile": True, "key_gram_weight": 0.1}, "set torch_compile to false"),
    ({"stage": "instruct"}, "give vision_learning_rate"),
    ({**INSTRUCT, "stage": "adapt"}, "vision_learning_rate is read in stage 'instruct' alone, got stage 'adapt'"),
    ({"fp16": True}, "fp16 needs a GPU"),
    ({"logging_nan_inf_filter": True}, "logging_nan_inf_filter must stay False"),
    ({"report_to": "dvclive"}, "report_to: dvclive is not installed: install it, or give report_to: none"),
    ({"num_train_epochs": 0}, "num_train_epochs 0 trains nothing"),
    ({"warmup_ratio": 0.03}, "warmup_ratio is gone: give warmup_steps, where a number below 1"),
    ({"neftune_noise_alpha": 5.0, **PACKED}, "neftune_noise_alpha depends on rows' lengths"),
    ({"gradient_accumulation_steps": 2}, "either global_batch_size or gradient_accumulation_steps"),
    (
        {"global_batch_size": 5, "per_device_train_batch_size": 2},
        "global_batch_size 5 is not a multiple of per_device_train_batch_size 2 times 1 processes",
    ),
    ({"optim": "schedule_free_adamw"}, "trains other weights than it saves"),
    ({"optim": "galore_adamw_layerwise"}, "optim galore_adamw_layerwise changes weights in every backward pass"),
    ({"optim": "adalomo"}, "optim adalomo changes weights in every backward pass"),
    ({**PACKED, "global_batch_size": None}, "give global_batch_size"),
    ({"stage": "align", "lora_r": 64}, "lora_r is read in stage 'adapt' alone, got stage 'align'"),
    ({**INSTRUCT, "lora_alpha": 8}, "lora_alpha is read in stage 'adapt' alone, got stage 'instruct'"),
    ({"lora_dropout": 0.1}, "lora_dropout is read in stage 'adapt' alone"),
    ({"use_rslora": True}, "use_rslora is read in stage 'adapt' alone"),
    ({"use_dora": True}, "use_dora is read in stage 'adapt' alone"),
    ({"loss_type": "dft", "eval_dataset_name": "held_out.json", "eval_on_start": True}, "leave out loss_type"),
    ({"loss_type": "dft", **EVALUATION}, "leave out loss_type"),
    ({"stage": "adapt", "key_mmd_weight": 0.1, **REENTRANT}, "set use_reentrant to false"),
    ({"clip_by_module": True, "max_grad_norm": 0}, "clip_by_module clips to max_grad_norm, and 0 clips nothing"),
    # Values that are out of range.
    ({"global_batch_size": 0}, "global_batch_size must be 1 or more, got 0"),
    ({"per_device_train_batch_size": 0}, "per_device_train_batch_size must be 1 or more, got 0"),
    ({"per_device_eval_batch_size": 0}, "per_device_eval_batch_size must be 1 or more, got 0"),
    ({"global_batch_size": None, "gradient_accumulation_steps": 0}, "gradient_accumulation_steps must be 1 or more"),
    ({**PACKED, "packed_length": 0}, "packed_length must be 1 or more, got 0"),
    ({"max_length": -1}, "max_length must be 1 or more, got -1"),
    ({"stage": "adapt", "lora_r": 0}, "lora_r must be 1 or more, got 0"),
    ({"learning_rate": -1e-3}, "learning_rate must be 0 or more, got -0.001"),
    ({"learning_rate": float("nan")}, "learning_rate must be 0 or more, got nan"),
    ({**INSTRUCT, "vision_learning_rate": -1.0}, "vision_learning_rate must be 0 or more, got -1.0"),
    ({"projector_learning_rate": -1.0}, "projector_learning_rate must be 0 or more, got -1.0"),
    ({"norm_learning_rate": -1.0}, "norm_learning_rate must be 0 or more, got -1.0"),
    ({"stage": "adapt", "key_gram_weight": -1.0}, "key_gram_weight must be 0 or more, got -1.0"),
]


def test_a_wrong_recipe_is_refused(recipe: Path) -> None:
    for changes, message in REFUSED:
        with pytest.raises(UserError, match=message):
            parse_arguments(change_recipe(recipe, **changes))


# The fields of TRL and transformers that a resumed run may change, or that name data, or that have their own check.
FREE_FIELDS = frozenset(
    """
    accelerator_config activation_checkpointing activation_checkpointing_kwargs activation_offloading
    dataloader_pin_memory dataloader_prefetch_factor dataset_config dataset_name dataset_num_proc dataset_test_split
    dataset_train_split ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb ddp_static_graph debug deepspeed
    disable_tqdm do_eval eval_delay eval_on_start eval_steps eval_strategy fsdp fsdp_config full_determinism
    gradient_checkpointing_kwargs greater_is_better ignore_data_skip local_rank log_level log_level_replica
    log_on_each_node logging_first_step logging_steps metric_for_best_model output_dir per_device_eval_batch_size
    project report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name save_only_model
    save_steps save_strategy save_total_limit skip_memory_metrics torch_empty_cache_steps trackio_bucket_id
    trackio_space_id trackio_static_space_id
    """.split()  # noqa: SIM905 - as a list, each name would take a line
)


def test_every_inherited_field_is_refused_compared_or_free() -> None:
    """A new version of TRL or transformers may bring fields, which nothing here reads until somebody looks.

    A resumed run is compared in the fields on which the weights depend.
    """
    names = {field.name for arguments in (RunArguments, TrainingConfig) for field in dataclasses.fields(arguments)}
    # What the classes declare themselves is this project's own, or has another default or help here.
    own_names = {*RunArguments.__annotations__, *TrainingConfig.__annotations__}
    compared_names = set(COMPARED_ARGUMENTS)
    assert names - own_names - set(FIXED_FIELDS) - compared_names - FREE_FIELDS == set()
    assert FREE_FIELDS & (compared_names | set(FIXED_FIELDS)) == set()
    assert compared_names & set(FIXED_FIELDS) == set()


# Some of the fields that nothing reads, with a value that would be ignored.
IGNORED_FIELDS: dict[str, Any] = {
    "dataloader_drop_last": True,
    "pad_to_multiple_of": 8,
    "lora_target_parameters": ["experts"],
    "lora_task_type": "SEQ_CLS",
    "ignore_bias_buffers": True,
    "eos_token": "<|im_end|>",
    "bf16_full_eval": True,
    "include_for_metrics": ["inputs"],
    "hub_strategy": "end",
    "trust_remote_code": True,
}


def test_the_help_lists_this_projects_fields(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        sft.main(["--help"])
    assert not end.value.code
    printed = capsys.readouterr().out
    declared = RunArguments.__annotations__ | TrainingConfig.__annotations__
    for name in {*declared, "config", "max_steps"} - {"recipe"}:
        assert f"--{name}" in printed
    assert "Held-out rows to evaluate the model on" in printed


def test_a_field_that_nothing_reads_is_refused(recipe: Path) -> None:
    for field, value in IGNORED_FIELDS.items():
        with pytest.raises(UserError, match=f"^{field} must stay .*, got .*{FIXED_FIELDS[field]}"):
            sft.main(change_recipe(recipe, **{field: value}))


@pytest.mark.parametrize(("name", "value"), [("stage", "both"), ("bf16", "maybe"), ("learning_rate", True)])
def test_argparse_checks_the_values_of_a_recipe_too(
    recipe: Path, capsys: pytest.CaptureFixture[str], name: str, value: Any
) -> None:
    """argparse refuses a value that is no choice of an option, or has another type."""
    with pytest.raises(SystemExit):
        parse_arguments(change_recipe(recipe, **{name: value}))
    (line,) = capsys.readouterr().err.splitlines()
    assert f"error: argument --{name}" in line


def test_a_bare_no_means_the_choice_no(recipe: Path) -> None:
    """YAML reads a bare `no` as false."""
    recipe.write_text(recipe.read_text() + "save_strategy: no\neval_strategy: no\n")
    _, args = parse_arguments(["--config", str(recipe)])
    assert args.save_strategy == "no"
    assert args.eval_strategy == "no"


def test_a_tilde_is_the_home_folder(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    options = ["--model_name_or_path=~/model", "--dataset_name=~/rows.json", "--output_dir=~/out"]
    run_args, args = parse_arguments(["--config", str(recipe), *options])
    assert run_args.model_name_or_path == "/home/me/model"
    assert run_args.dataset_name == "/home/me/rows.json"
    assert args.output_dir == "/home/me/out"


def test_an_option_that_is_gone_is_refused_on_the_command_line(recipe: Path) -> None:
    with pytest.raises(ValueError, match="warmup_ratio is gone: give warmup_steps"):
        parse_arguments(["--config", str(recipe), "--warmup_ratio", "0.03"])


def test_deepspeed_is_refused(recipe: Path) -> None:
    run_args, args = parse_arguments(["--config", str(recipe)])
    args.deepspeed_plugin = object()  # stands for the plugin of DeepSpeed, which is not installed for tests
    with pytest.raises(ValueError, match="DeepSpeed is not supported"):
        check_arguments(run_args, args)


def test_the_best_checkpoint_is_not_kept_as_shards(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = change_recipe(
        recipe,
        save_strategy="best",
        metric_for_best_model="loss",
        eval_strategy="steps",
        eval_dataset_name="rows.json",
    )
    run_args, args = parse_arguments(options)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match="under FSDP2 holds shards that no model loads"):
        check_arguments(run_args, args)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "adamw_8bit", "paged_adamw_32bit", "lion_32bit"])
def test_optimizers_of_bitsandbytes_are_refused_for_shards(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, optim: str
) -> None:
    """Their kernels raise a RuntimeError for weights that FSDP2 shards, at the first step."""
    run_args, args = parse_arguments(change_recipe(recipe, optim=optim))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UserError, match=f"optim {optim} is bitsandbytes', which can't train weights that"):
        check_arguments(run_args, args)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("ACCELERATE_MIXED_PRECISION", "bf16", "launcher has mixed_precision 'bf16'"),
        ("ACCELERATE_DYNAMO_BACKEND", "inductor", "launch with --dynamo_backend no, and give torch_compile: true"),
        ("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT", "Set fsdp_version: 2 and SHARDED_STATE_DICT"),
    ],
)
def test_settings_of_the_launcher_that_contradict_the_recipe_are_refused(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    """`accelerate launch` hands its settings to the script as environment variables."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        parse_arguments(["--config", str(recipe), "--bf16", "false"])


def test_several_gpus_in_one_process_are_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingConfig, "n_gpu", 2)  # as on a machine with two GPUs, without a launcher
    with pytest.raises(ValueError, match=r"over 2 GPUs by DataParallel, .* accelerate launch, one process a GPU"):
        sft.main(["--config", str(recipe)])


def test_compiling_leaves_float32_as_precise_as_it_was(recipe: Path) -> None:
    _, args = parse_arguments(["--config", str(recipe), "--torch_compile", "true"])
    assert args.tf32 is False  # with torch.compile, transformers would turn on TF32, which is less precise


def set_capabilities(monkeypatch: pytest.MonkeyPatch, **capabilities: bool) -> None:
    """Let torch report that the CPU has these capabilities, whatever CPU the test runs on."""
    # An older torch has no `get_capabilities`, so it need not exist (`raising=False`).
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)


def assert_arithmetic(args: TrainingConfig, bf16: bool) -> None:
    """Check that all fields of these arguments agree on whether the run computes in bfloat16."""
    assert args.bf16 is bf16
    assert args.to_dict()["bf16"] is bf16
    precision_of_accelerate = "bf16" if bf16 else "no"
    assert args.mixed_precision == precision_of_accelerate


@pytest.mark.parametrize(
    ("capabilities", "is_fast"),
    [
        pytest.param(["avx512_f"], False, id="no bfloat16"),
        pytest.param(["avx512_f", "avx512_bf16"], True, id="AMD Zen 5"),
        pytest.param(["avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16"], True, id="Intel Xeon"),
        pytest.param(["avx512_f", "avx512_bf16", "avx512_fp16"], False, id="Intel Xeon whose AMX is hidden"),
    ],
)
def test_a_cpu_that_is_fast_at_bfloat16_computes_in_bfloat16_unless_told_otherwise(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, capabilities: list[str], is_fast: bool
) -> None:
    set_capabilities(monkeypatch, **dict.fromkeys(capabilities, True))
    without_bf16 = change_recipe(recipe, bf16=None)
    _, args = parse_arguments(without_bf16)
    assert_arithmetic(args, bf16=is_fast)
    assert args.frozen_dtype == torch.float32  # on a CPU, also with bf16

    _, args = parse_arguments([*without_bf16, "--bf16", "true"])
    assert_arithmetic(args, bf16=True)
    _, args = parse_arguments([*without_bf16, "--bf16", "false"])
    assert_arithmetic(args, bf16=False)


@pytest.fixture
def start_script(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RunArguments, TrainingConfig]]:
    """A function that starts the script without training, and returns the arguments with which it would train."""
    recorded: list[tuple[RunArguments, TrainingConfig]] = []
    monkeypatch.setattr(sft, "train", lambda run_args, args: recorded.append((run_args, args)))

    def start(*argv: str) -> tuple[RunArguments, TrainingConfig]:
        sft.main(list(argv))
        return recorded[-1]

    return start


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_resumed_run_keeps_the_arithmetic_and_attention_of_its_record(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start_script: Callable[..., Any], is_fast: bool
) -> None:
    # A new run on this machine would have bf16=is_fast. In the output folder, checkpoint 5 records the same value, and
    # checkpoint 10 the opposite.
    set_capabilities(monkeypatch, amx_bf16=is_fast)
    environment = describe_environment("cpu", num_processes=1, resumed=False)
    recorded_arguments = {5: {"bf16": is_fast, "attn_implementation": "sdpa"}, 10: {"bf16": not is_fast}}
    for step, arguments in recorded_arguments.items():
        folder = tmp_path / "out" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        describe_run(arguments, "data", environment).write(folder)
    without_bf16 = change_recipe(recipe, bf16=None)

    # Resume from the newest checkpoint.
    _, args = start_script(*without_bf16, "--resume_from_checkpoint", "True")
    assert_arithmetic(args, bf16=not is_fast)

    # Resume from the newest checkpoint of an output folder that is given with a `~`.
    monkeypatch.setenv("HOME", str(tmp_path))
    _, args = start_script(*without_bf16, "--resume_from_checkpoint", "True", "--output_dir", "~/out")
    assert_arithmetic(args, bf16=not is_fast)

    # Resume from a checkpoint that is given by path.
    run_args, args = start_script(*without_bf16, "--resume_from_checkpoint", str(tmp_path / "out" / "checkpoint-5"))
    assert_arithmetic(args, bf16=is_fast)
    assert run_args.attn_implementation == "sdpa"

    # Fields that the user gives win over the record.
    options = ("--bf16", str(is_fast), "--attn_implementation", "eager", "--resume_from_checkpoint", "true")
    run_args, args = start_script(*without_bf16, *options)
    assert_arithmetic(args, bf16=is_fast)
    assert run_args.attn_implementation == "eager"

    # A run that is not resumed reads no record.
    run_args, args = start_script(*without_bf16, "--resume_from_checkpoint", "false")
    assert args.resume_from_checkpoint is None
    assert_arithmetic(args, bf16=is_fast)
    assert run_args.attn_implementation is None


def test_sources_on_the_command_line_are_paths(recipe: Path) -> None:
    without_dataset_name = change_recipe(recipe, dataset_name=None)
    run_args, _ = parse_arguments([*without_dataset_name, "--datasets", "a.json", "b.json"])
    assert run_args.datasets == [SourceArguments("a.json"), SourceArguments("b.json")]


def test_a_recipe_that_is_no_yaml_is_refused_in_one_line(recipe: Path) -> None:
    recipe.write_text("stage: align\n  learning_rate: 1: 2")
    with pytest.raises(UserError, match=r"recipe.yaml is not YAML: .* line 2") as error:
        parse_arguments(["--config", str(recipe)])
    assert "\n" not in str(error.value)

    recipe.write_bytes("stage: align # für".encode("latin-1"))  # YAML is UTF-8
    with pytest.raises(UserError, match=r"recipe.yaml is not YAML: 'utf-8' codec"):
        parse_arguments(["--config", str(recipe)])


def test_a_bug_of_ours_keeps_its_traceback(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ValueError from a bug must not become a UserError, of which a command prints only the message."""

    def fail(*args: Any) -> None:
        int("a bug")

    for function in ("training.options.command_line.check_arguments", "training.options.arguments.read_resume"):
        with monkeypatch.context() as patched:
            patched.setattr(function, fail)
            with pytest.raises(ValueError, match="invalid literal for int") as error:
                parse_arguments(["--config", str(recipe)])
            assert not isinstance(error.value, UserError)


def test_the_command_line_wins_over_the_recipe_without_deprecation_warnings(
    recipe: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for config in (["--config", str(recipe)], [f"--config={recipe}"]):
        run_args, args = parse_arguments([*config, "--learning_rate", "5e-4", "--gradient_checkpointing", "true"])
        assert run_args.recipe == str(recipe)
        assert args.learning_rate == 5e-4
        assert args.gradient_checkpointing

    warnings = [str(warning.message) for warning in recwarn]
    assert not any("deprecated" in warning for warning in warnings)


def test_a_run_without_a_recipe_records_none(recipe: Path) -> None:
    fields = yaml.safe_load(recipe.read_text())
    run_args, _ = parse_arguments([f"--{name}={value}" for name, value in fields.items()])
    assert run_args.recipe is None


def test_an_unknown_option_is_refused(recipe: Path) -> None:
    with pytest.raises(ValueError, match=r"^--learning_rte is unknown, did you mean --learning_rate\?$"):
        parse_arguments(["--config", str(recipe), "--learning_rte", "1"])


# The paths of all recipes. Their folders also have files card.yaml, which are no recipes: they describe model cards.
RECIPES = [path for path in sorted((ROOT / "training" / "recipes").glob("*/*.yaml")) if path.name != "card.yaml"]
# The folders of recipes for small models. The recipes in all other folders have the settings of the paper, arXiv
# 2512.08374.
SMALL_MODELS = ("digits", "SmolLM2-135M-Instruct", "Qwen3-0.6B")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_all_recipes_are_accepted_and_those_of_large_models_have_the_papers_settings(path: Path) -> None:
    # The recipe is read for float32 on the CPU, because a recipe with bf16 is refused without a device for bfloat16.
    run_args, args = parse_arguments(["--config", str(path), "--bf16", "false", "--use_cpu", "true"])
    assert args.seed == 42
    assert args.weight_decay == 0
    assert args.lr_scheduler_type == "cosine"
    assert args.warmup_steps == 0.03
    if path.parent.name in SMALL_MODELS:
        return

    # The recipe is of a large model.
    assert run_args.packed_length is not None
    if path.stem == "align":
        assert run_args.global_batch_size == 256
        assert args.learning_rate == 1e-3
        assert run_args.vision_learning_rate is None
    if path.stem == "instruct":
        assert run_args.global_batch_size == 128
        assert args.learning_rate == 1e-5
        assert run_args.vision_learning_rate == 2e-6


def test_pictures_are_opened_by_workers_where_there_is_a_gpu(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # `default_num_workers` is for processes that train on a GPU.
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(12))  # a machine with 12 CPU cores
    assert default_num_workers() == 8  # the most that a process gets
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_num_workers() == 3  # 12 cores for 4 processes

    _, args = parse_arguments(change_recipe(recipe))
    assert args.dataloader_num_workers == 0  # the recipe trains on the CPU


def test_workers_of_a_stream_do_not_depend_on_the_machine(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingConfig, "__post_init__", lambda args: None)  # the real method would read the device
    monkeypatch.setattr("training.options.command_line.check_arguments", lambda run_args, args: None)

    stream = {"dataset_streaming": True, "max_steps": 2}
    _, args = parse_arguments(change_recipe(recipe, **stream))
    assert args.dataloader_num_workers == 0
    _, args = parse_arguments(change_recipe(recipe, **stream, dataloader_num_workers=3))
    assert args.dataloader_num_workers == 3
    _, args = parse_arguments(change_recipe(recipe, dataloader_num_workers=None))
    assert args.dataloader_num_workers is None  # the device decides
