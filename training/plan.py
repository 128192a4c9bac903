"""Plan a recipe: print the memory that a device needs at the peak of a step, and the FLOPs and hours of the run.

    python training/plan.py --config training/recipes/Qwen2.5-7B-Instruct/instruct.yaml --devices 8 --rows 780000

The model is built from its config, without weights. Steps run as in training, on tensors that have shapes and no data
(torch's `FakeTensorMode`), while torch's `MemTracker` counts their bytes. With several devices, weights, gradients and
optimizer states are divided by the number of devices, as FSDP2 shards them. The memory of masks, of the weights that
FSDP2 gathers, of CUDA's context and of fragmentation is not counted.
"""

import argparse
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normllava.command_line import command

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForImageTextToText, LlavaConfig, Trainer
from transformers.initialization import no_init_weights
from trl.trainer.utils import add_fused_lm_head

from normllava.errors import UserError
from normllava.parts import find_decoder
from training.folders.loading import load_config, prepare_model
from training.loop.positions import head_at_positions
from training.modules.stages import Stage, base_model
from training.modules.stand_ins import EightBitAdam, pack_layers
from training.options import command_line
from training.options.arguments import RunArguments, TrainingConfig
from training.options.refusals import check_sharded_optimizer


logger = logging.getLogger(__name__)

GIB = 2**30
OPTIMIZERS_8BIT = ("adamw_bnb_8bit", "adamw_8bit")
PLANNED_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd", *OPTIMIZERS_8BIT)
# The peak of memory comes in the second pass of the second step: the first step has made the optimizer's states, and
# the first pass has made the gradients.
NUM_STEPS = 2
NUM_PASSES = 2


@dataclass(frozen=True)
class Batch:
    """The size of a device's batch in one forward and backward pass. Each sample has one picture."""

    samples: int
    """The number of samples."""
    tokens: int
    """The number of tokens in a sample, image tokens included."""
    supervised: int
    """The number of supervised tokens in a sample."""
    is_packed: bool
    """Whether all samples are packed into one row."""
    tiles: int = 1
    """The number of tiles of a sample's picture, with its thumbnail; 1 if pictures aren't cut."""


@dataclass(frozen=True)
class StepPlan:
    """The memory of a step and the FLOPs of a pass. All fields but `flops` are bytes of one device at the peak."""

    weights: int
    gradients: int
    states: int
    """The optimizer's states."""
    activations: int
    """Activations and temporary tensors."""
    flops: int
    """Model FLOPs of one pass over a device's batch, forward and backward. As in the MFU of PaLM (arXiv 2204.02311,
    App. B), recomputation and padding don't count, and packed samples count as if each had a row of its own."""

    @property
    def peak(self) -> int:
        """All bytes of one device at the step's peak."""
        return self.weights + self.gradients + self.states + self.activations

    def sharded(self, devices: int) -> "StepPlan":
        """The plan of each of several devices, over which FSDP2 shards weights, gradients and states."""
        return replace(
            self,
            weights=self.weights // devices,
            gradients=self.gradients // devices,
            states=self.states // devices,
        )


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options, sft_options = build_parser().parse_known_args(argv)
    run_args, args = parse_for_gpu(sft_options)
    config = load_config(str(run_args.model_name_or_path), run_args.model_revision)

    is_sharded = options.devices > 1 and run_args.stage == Stage.INSTRUCT  # other stages train few weights, by DDP
    if is_sharded:
        check_sharded_optimizer(args)

    batch = make_batch(run_args, args, options.tokens, options.supervised, options.tiles)
    plan = plan_step(config, run_args, args, batch)
    if is_sharded:
        plan = plan.sharded(options.devices)

    num_rows = count_rows(run_args, args, batch, options.devices, options.rows)
    flops_per_sample = plan.flops / batch.samples
    flops = flops_per_sample * num_rows
    flops_per_second = options.devices * options.tflops * 1e12
    seconds = flops / flops_per_second

    logger.info(
        "assumed: %s rows of %d tokens, %d supervised, tiles of its picture: %d; %g TFLOP/s a device (an H100's peak "
        "is 989), training alone",
        f"{num_rows:,.0f}",
        options.tokens,
        options.supervised,
        options.tiles,
        options.tflops,
    )
    logger.info(
        "memory of a device, %s, bf16 %s: %.2f GiB (weights %.2f, gradients %.2f, states %.2f, activations and "
        "temporary %.2f)",
        "sharded by FSDP2" if is_sharded else "nothing sharded",
        bool(args.bf16),
        plan.peak / GIB,
        plan.weights / GIB,
        plan.gradients / GIB,
        plan.states / GIB,
        plan.activations / GIB,
    )
    logger.info("the run: %.3g FLOPs, %s, devices: %d", flops, describe_time(seconds), options.devices)


def build_parser() -> argparse.ArgumentParser:
    """The options of the command line, besides those of training/sft.py."""
    parser = argparse.ArgumentParser(
        description="Plan a recipe. Further options are those of training/sft.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample, image tokens included")
    parser.add_argument("--supervised", type=int, default=200, help="supervised tokens of a sample")
    parser.add_argument("--tiles", type=int, default=1, help="tiles of a sample's picture, with its thumbnail")
    parser.add_argument("--devices", type=int, default=1, help="devices; FSDP2 shards stage instruct over them")
    # LLaVA's stage 1 has 558,128 rows.
    parser.add_argument("--rows", type=int, default=558_128, help="rows of the data, unless the recipe has max_steps")
    parser.add_argument("--tflops", type=float, default=396.0, help="TFLOP/s of a device: 0.4 of an H100's 989")
    return parser


def parse_for_gpu(sft_options: Sequence[str]) -> tuple[RunArguments, TrainingConfig]:
    """The checked arguments of a run on a GPU, where bfloat16 is the default whatever the planning machine is."""
    parser = command_line.build_parser()
    fields = command_line.read_fields(parser, sft_options)
    if fields["bf16"] is None and not fields["fp16"]:
        fields["bf16"] = True
    return command_line.make_arguments(parser, fields)


def make_batch(run_args: RunArguments, args: TrainingConfig, tokens: int, supervised: int, tiles: int) -> Batch:
    """A device's batch by a recipe. The last three arguments are fields of [`Batch`]."""
    if run_args.packed_length is None:
        return Batch(args.per_device_train_batch_size, tokens, supervised, is_packed=False, tiles=tiles)
    samples = max(run_args.packed_length // tokens, 1)
    return Batch(samples, tokens, supervised, is_packed=True, tiles=tiles)


def count_rows(run_args: RunArguments, args: TrainingConfig, batch: Batch, devices: int, num_data_rows: int) -> float:
    """The number of rows that a run trains on, summed over epochs.

    `num_data_rows` is the number of rows in the data. It doesn't matter if the recipe gives `max_steps`.
    """
    if args.max_steps <= 0:
        return num_data_rows * args.num_train_epochs

    rows_per_step = run_args.global_batch_size
    if rows_per_step is None:
        rows_per_step = batch.samples * args.gradient_accumulation_steps * devices
    return args.max_steps * rows_per_step


def describe_time(seconds: float) -> str:
    """A time in words: hours, or minutes if it is shorter than an hour."""
    minutes = seconds / 60
    if minutes < 1:
        return "<1 minute"
    if minutes < 60:
        return f"{minutes:.0f} minutes"
    return f"{minutes / 60:.1f} hours"


def plan_step(config: LlavaConfig, run_args: RunArguments, args: TrainingConfig, batch: Batch) -> StepPlan:
    """The plan of a step on one device, measured in some steps without data.

    Frozen weights have the dtype that they have on a GPU.

    Raises:
        UserError: if the optimizer isn't one of `PLANNED_OPTIMIZERS`, or if a sample has too few tokens for its
            picture and its supervised tokens.
    """
    check_plan(config, run_args, args, batch)
    model, trained_model = build_model(config, run_args, args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        trained_model.to_empty(device="cpu")  # fake tensors of the weights' shapes, which take no memory
        model.tie_weights()  # to_empty has untied them
        trained_model.train()

        # FLOPs are counted before checkpointing is turned on, because recomputation isn't part of the model's FLOPs.
        with autocast(args):  # frozen weights may be bfloat16, and trained weights are float32
            flops = count_flops(trained_model, batch)
        trained_model.zero_grad()

        if args.gradient_checkpointing:
            has_adapters = trained_model is not model
            if has_adapters:  # then TRL calls this too
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})

        peak, optimizer = track_steps(trained_model, args, batch)

    weights = num_bytes(trained_model.parameters())
    gradients = num_bytes(trained_parameters(trained_model))  # a gradient has the size of its parameter
    states = 0
    for parameter_states in optimizer.state.values():
        states += num_bytes(parameter_states.values())

    return StepPlan(
        weights=weights,
        gradients=gradients,
        states=states,
        activations=peak - weights - gradients - states,
        flops=flops,
    )


def check_plan(config: LlavaConfig, run_args: RunArguments, args: TrainingConfig, batch: Batch) -> None:
    """Check that a step can be planned.

    Raises:
        UserError: in the cases that [`plan_step`] names.
    """
    image_tokens = config.image_seq_length * batch.tiles  # the config has the number for one tile
    if batch.tokens < image_tokens + batch.supervised:
        needed = f"{image_tokens} tokens of its picture and {batch.supervised} supervised ones"
        raise UserError(f"A sample of {batch.tokens} tokens can't hold the {needed}: set --tokens and --supervised.")
    if args.optim.value not in PLANNED_OPTIMIZERS:
        raise UserError(f"optim {args.optim.value} isn't planned, only {', '.join(PLANNED_OPTIMIZERS)}.")


def build_model(config: LlavaConfig, run_args: RunArguments, args: TrainingConfig) -> tuple[Any, Any]:
    """The model without data, and the model that is trained: the same model, or a `PeftModel` around it."""
    frozen_dtype = torch.bfloat16 if args.bf16 else torch.float32
    with torch.device("meta"), no_init_weights():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model.tie_weights()
        if run_args.load_in_4bit:
            pack_layers(find_decoder(model).layers, run_args.use_bnb_nested_quant)
        trained_model, _ = prepare_model(model, run_args, args, frozen_dtype)
    # As TRL does: the model's `forward` computes log probabilities without holding all logits.
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model, trained_model


def count_flops(trained_model: nn.Module, batch: Batch) -> int:
    """Model FLOPs of one pass, forward and backward, with each sample in a row of its own."""
    unpacked_batch = replace(batch, is_packed=False)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        compute_loss(trained_model, unpacked_batch).backward()
    return counter.get_total_flops()


def autocast(args: TrainingConfig) -> torch.autocast:
    """A block that computes in the arithmetic of training, and keeps no casts of weights, as the trainer does."""
    return torch.autocast("cpu", torch.bfloat16, enabled=bool(args.bf16), cache_enabled=False)


def track_steps(trained_model: nn.Module, args: TrainingConfig, batch: Batch) -> tuple[int, torch.optim.Optimizer]:
    """Run some steps, and track their memory.

    Returns:
        The bytes in use at the peak, and the optimizer with its states.
    """
    optimizer = make_optimizer(trained_model, args)
    with WholeModelTracker() as tracker:
        tracker.track_external(trained_model, optimizer)
        for _ in range(NUM_STEPS):
            for _ in range(NUM_PASSES):
                with autocast(args):
                    loss = compute_loss(trained_model, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    return peak, optimizer


def make_optimizer(trained_model: nn.Module, args: TrainingConfig) -> torch.optim.Optimizer:
    """The optimizer of the recipe, or for 8-bit Adam a stand-in whose states have the same size."""
    parameters = trained_parameters(trained_model)
    if args.optim.value in OPTIMIZERS_8BIT:
        embeddings = [module.weight for module in trained_model.modules() if isinstance(module, nn.Embedding)]
        return EightBitAdam(parameters, embeddings)

    optimizer_class, optimizer_options = Trainer.get_optimizer_cls_and_kwargs(args, trained_model)
    return optimizer_class(parameters, **optimizer_options)


def compute_loss(trained_model: Any, batch: Batch) -> torch.Tensor:
    """The loss of a pass over a made-up batch.

    All image tokens of the batch come first, then all text tokens, of which the last are supervised. The order doesn't
    matter, since only shapes are used. Image features and text embeddings are joined here, because the model would
    look for image tokens among the values of `input_ids`, which fake tensors don't have.
    """
    model = base_model(trained_model)
    num_tokens = batch.samples * batch.tokens
    num_supervised = batch.samples * batch.supervised
    num_rows = 1 if batch.is_packed else batch.samples

    vision = model.config.vision_config
    pixel_values = torch.empty(batch.samples * batch.tiles, vision.num_channels, vision.image_size, vision.image_size)
    features_by_tile = model.model.get_image_features(pixel_values).pooler_output
    features = torch.cat(list(features_by_tile))  # [num_image_tokens, hidden_size]
    text_ids = torch.zeros(num_tokens - len(features), dtype=torch.long)
    text = model.get_input_embeddings()(text_ids)  # [num_text_tokens, hidden_size]
    embeddings = torch.cat([features.to(text.dtype), text])  # [num_tokens, hidden_size]
    embeddings = embeddings.view(num_rows, num_tokens // num_rows, -1)  # [num_rows, row_length, hidden_size]

    options = {}
    if hasattr(model.config, "key_adapter_rank"):  # key adapters ask which tokens are the picture's
        options["visual_token_mask"] = torch.zeros(embeddings.shape[:2], dtype=torch.bool)
    labels = torch.zeros(1, num_supervised, dtype=torch.long)
    positions = torch.arange(num_tokens - num_supervised, num_tokens)
    with head_at_positions(model, positions):
        output = trained_model(
            inputs_embeds=embeddings, shift_labels=labels, fused_lm_head=True, use_cache=False, **options
        )
    return -output.log_probs.sum() / num_supervised


def trained_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a module that get a gradient."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def num_bytes(values: Iterable[Any]) -> int:
    """The bytes of all tensors among `values`. Other values, such as numbers in an optimizer's states, don't count."""
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def attention_flops(query: Any, key: Any, value: Any, *_: Any, attn_mask: Any = None, **options: Any) -> int:
    """FLOPs of attention from the shapes of its tensors, which `FlopCounterMode` passes instead of the tensors.

    Only the decoder's attention gets a mask. The mask is causal, so half of the products count.
    """
    flops = sdpa_flop_count(query, key, value)
    if attn_mask is None:
        return flops
    return flops // 2


def attention_backward_flops(gradient: Any, *forward_shapes: Any, **options: Any) -> int:
    """FLOPs of attention's backward pass: twice those of the forward pass, since recomputation doesn't count."""
    return 2 * attention_flops(*forward_shapes, **options)


# FLOP counts of the operations for attention on a CPU, which torch's own counter doesn't know.
ATTENTION_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


class WholeModelTracker(MemTracker):
    """`MemTracker` without its hooks on single modules, which fail for parameters that aren't trained."""

    def _pre_fw_hook(self, *args: Any) -> None: ...
    def _post_fw_hook(self, *args: Any) -> None: ...
    def _pre_bw_hook(self, *args: Any) -> None: ...
    def _post_bw_hook(self, *args: Any) -> None: ...


if __name__ == "__main__":
    main()
