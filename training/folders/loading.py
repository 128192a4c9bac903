"""Loads the model of a run, a NormLlava or transformers' own Llava, and prepares it for its stage."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    AutoProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

import training.modules.attention  # noqa: F401 - registers "varlen"
from modeling_normllava.modeling_normllava import describe_misfit
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.conversations.rows import BadRowError
from normllava.errors import UserError, errors_named_after
from normllava.files import folder_or_id
from training.modules.adapters import add_adapters, quantization_config
from training.modules.stages import LearningRates, ModuleGroup, Stage, prepare_stage
from training.options.arguments import RunArguments, TrainingConfig


def load_config(name: str, revision: str | None = None) -> LlavaConfig:
    """The config of a NormLlava or a Llava. `name` is its folder or Hub id.

    Raises:
        UserError: if `name` is another kind of model, or an adapter.
    """
    if Path(name, "adapter_config.json").exists():
        raise UserError(
            f"{name} is an adapter, not a whole model. Merge it into its base first: python training/merge.py "
            f"--adapter {name} --output_dir <folder>"
        )
    with errors_named_after(name):
        config = AutoConfig.from_pretrained(folder_or_id(name), revision=revision)
    if not isinstance(config, LlavaConfig):
        raise UserError(
            f"{name} has model_type {config.model_type!r}, and only a Llava or a NormLlava can be trained: "
            "python training/compose.py makes one of a vision encoder and a language model."
        )
    return config


def load_processor(name: str, revision: str | None = None) -> LlavaProcessor:
    """The processor of a NormLlava or a Llava. `name` is its folder or Hub id.

    Raises:
        UserError: if the processor's files are missing or wrong.
    """
    with errors_named_after(name):
        return AutoProcessor.from_pretrained(name, revision=revision)


def require_complete(name: str, processor: LlavaProcessor) -> None:
    """Refuse the processor of the model `name` if it lacks what `training/compose.py` would have added.

    Raises:
        UserError: if the image processor doesn't name the size of its pictures, or there is no padding token.
    """
    if getattr(processor.image_processor, "crop_size", None) is None:
        raise incomplete_error(name, "its image processor names no crop_size")
    if processor.tokenizer.pad_token is None:
        raise incomplete_error(name, "its tokenizer has no padding token")


def require_trained_end(name: str, row_tokenizer: RowTokenizer) -> None:
    """Refuse a chat template that marks no answer, or marks answers without the token that ends them.

    Args:
        name: The model's folder or Hub id.
        row_tokenizer: The tokenizer of rows by the chat template.

    Raises:
        UserError: if no token of an answer is supervised, or no special token is: the model wouldn't learn to stop.
    """
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    try:
        row = row_tokenizer({"source": name, "conversations": turns}, image_sizes=[])
    except BadRowError as error:  # here, and not for every row, since checking the rows takes long
        problem = "its chat template marks no answer, or its tokenizer has `trim_offsets`"
        raise incomplete_error(name, problem) from error
    added_tokens = row_tokenizer.processor.tokenizer.added_tokens_decoder
    special_ids = {token_id for token_id, token in added_tokens.items() if token.special}
    if special_ids.isdisjoint(row["labels"]):
        raise incomplete_error(name, "its chat template marks no token that ends an answer")


def incomplete_error(name: str, problem: str) -> UserError:
    """The error for a model that has to be composed before it can be trained."""
    return UserError(
        f"{name} can't be trained as it is: {problem}. Make a copy that can: python training/compose.py --llava_model "
        f"{name} --projector_norm none --output_dir <folder>"
    )


def load_base(run_args: RunArguments, args: TrainingConfig) -> LlavaForConditionalGeneration:
    """The model that a run starts from.

    Its weights are float32. If the language model is quantized to 4 bits, the other weights have `frozen_dtype`.

    Raises:
        UserError: if the model's weights don't fit its config.
    """
    name = str(run_args.model_name_or_path)
    config = load_config(name, run_args.model_revision)
    # The recipe's attention is only for the language model. The vision encoder never gets packed rows.
    attention = {"text_config": run_args.attn_implementation, "vision_config": "sdpa"}
    options: dict[str, Any] = {"dtype": torch.float32, "attn_implementation": attention}
    if run_args.load_in_4bit:
        options["quantization_config"] = quantization_config(
            compute_dtype=torch.bfloat16 if args.bf16 else torch.float32,
            quant_type=run_args.bnb_4bit_quant_type,
            double_quant=run_args.use_bnb_nested_quant,
        )
        options["dtype"] = args.frozen_dtype
        options["device_map"] = {"": args.device}  # the whole model on one device

    with errors_named_after(name):
        model, report = AutoModelForImageTextToText.from_pretrained(
            name, config=config, revision=run_args.model_revision, output_loading_info=True, **options
        )
    # A NormLlava refuses such weights itself. A Llava would go on with random ones.
    misfit = describe_misfit(report)
    # `describe_misfit` lets a norm's weights stay unused, since they may be left out on purpose. Here that would train
    # a model without the norm that it has.
    dropped = [key for key in report["unexpected_keys"] if "multi_modal_projector" in key]
    if misfit is None and dropped:
        misfit = f"Weights unexpected: {min(dropped)}"
    if misfit is not None:
        raise UserError(f"{name} doesn't fit its config. {misfit}.")

    # torch doesn't train the embedding of `padding_idx`. But the padding token may also be the token that ends turns,
    # whose embedding has to be trained.
    model.get_input_embeddings().padding_idx = None
    # On a CPU bitsandbytes would rewrite 4-bit weights at the first pass in eval mode, and round their scales.
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    # FSDP2 shards each module whose class is in `_no_split_modules`. Vision encoders list classes of their whole model
    # family there. accelerate refuses classes that no module of the model has, so these are left out.
    class_names = {type(module).__name__ for module in model.modules()}
    model._no_split_modules = sorted(class_names & set(model._no_split_modules or ()))
    return model


def prepare_model(
    model: LlavaForConditionalGeneration, run_args: RunArguments, args: TrainingConfig, frozen_dtype: torch.dtype
) -> tuple[Any, list[ModuleGroup]]:
    """Prepare a loaded model, in place, for the stage of the run.

    Frozen weights get `frozen_dtype`. In training this is `args.frozen_dtype`. `training/plan.py` plans for a GPU on a
    CPU, and gives the dtype that frozen weights have on a GPU.

    Returns:
        The model that Trainer trains, which in stage 'adapt' is a `PeftModel` around the loaded model, and the model's
        modules with their learning rates.
    """
    stage = Stage(str(run_args.stage))
    trained_model: Any = model
    if stage is Stage.ADAPT:
        torch.manual_seed(args.seed)  # for the adapters' weights
        trained_model = add_adapters(
            model,
            rank=run_args.lora_r,
            alpha=run_args.lora_alpha,
            dropout=run_args.lora_dropout,
            revision=run_args.model_revision,
            use_rslora=run_args.use_rslora,
            use_dora=run_args.use_dora,
        )

    norm_rate = run_args.norm_learning_rate
    if norm_rate is None:
        norm_rate = args.learning_rate
    vision_rate = run_args.vision_learning_rate
    if vision_rate is None:  # only stage 'instruct' reads the rate, and check_arguments requires it there
        vision_rate = 0.0
    rates = LearningRates(
        common=args.learning_rate,
        vision=vision_rate,
        norm=norm_rate,
        projector=run_args.projector_learning_rate,
    )
    return trained_model, prepare_stage(model, stage, rates, frozen_dtype)
