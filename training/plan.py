"""What a recipe takes: memory of a device at the peak of a step, FLOPs and hours.

    python training/plan.py --config training/recipes/Qwen2.5-7B-Instruct/stage2.yaml --devices 8 --rows 780000

A step runs as in training, on tensors with shapes and no data (torch's `MemTracker` under `FakeTensorMode`), from the
model's config alone. With several devices weights, gradients and optimizer states are divided by their number, as
FSDP2 shards them, and casts aren't kept. Not counted: masks, what FSDP2 gathers, CUDA's context, fragmentation.
"""

import argparse
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import AutoModelForImageTextToText, Trainer
from transformers.initialization import no_init_weights
from trl.trainer.utils import add_fused_lm_head

from common.console import command
from common.errors import UserError
from modeling_normllava import NormLlavaConfig
from training.arguments import RunArguments, TrainingConfig
from training.command_line import parse_arguments
from training.loading import load_config, prepare_model
from training.loss import head_at_positions
from training.stages import base_model


logger = logging.getLogger(__name__)

GIB = 2**30
# Steps that are taken, and passes of each: the second pass has the first one's gradients beside it, and the second
# step the optimizer's states.
NUM_STEPS = 2
NUM_PASSES = 2


@dataclass(frozen=True)
class Batch:
    """What a device sees in a pass. Each sample has one picture."""

    samples: int
    tokens: int
    """Of a sample, image tokens included."""
    supervised: int
    """Tokens of a sample that are supervised."""
    is_packed: bool
    """Whether the samples share one row."""


@dataclass(frozen=True)
class StepPlan:
    """What a step takes: bytes of a device at its peak, and FLOPs."""

    weights: int
    gradients: int
    states: int
    """Of the optimizer."""
    activations: int
    """And what is temporary."""
    flops: int
    """Model FLOPs of a pass, forward and backward, of all samples by themselves: padding and recomputation don't
    count, as in the MFU of PaLM (arXiv 2204.02311, App. B)."""

    @property
    def peak(self) -> int:
        """All bytes at the peak."""
        return self.weights + self.gradients + self.states + self.activations


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options, recipe_options = build_parser().parse_known_args(argv)
    run_args, args = parse_arguments(recipe_options)
    config = load_config(str(run_args.model_name_or_path), run_args.model_revision)

    batch = make_batch(run_args, args, options.tokens, options.supervised)
    plan = plan_step(config, run_args, args, batch, options.devices)

    num_rows = count_rows(run_args, args, batch, options.devices, options.rows)
    flops = plan.flops * num_rows / batch.samples
    seconds = flops / (options.devices * options.tflops * 1e12)

    logger.info(
        "assumed: %s rows of %d tokens, %d supervised, a picture in each; %g TFLOP/s a device (an H100's peak is "
        "989), training alone",
        f"{num_rows:,.0f}",
        options.tokens,
        options.supervised,
        options.tflops,
    )
    logger.info(
        "memory of a device, bf16 %s: %.2f GiB (weights %.2f, gradients %.2f, states %.2f, activations and temporary "
        "%.2f)",
        bool(args.bf16),
        plan.peak / GIB,
        plan.weights / GIB,
        plan.gradients / GIB,
        plan.states / GIB,
        plan.activations / GIB,
    )
    logger.info("the run: %.3g FLOPs, %s, devices: %d", flops, describe_time(seconds), options.devices)


def build_parser() -> argparse.ArgumentParser:
    """The options of the command line, beside those of training/sft.py."""
    parser = argparse.ArgumentParser(
        description="Plan a recipe. Further options are those of training/sft.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample, image tokens included")
    parser.add_argument("--supervised", type=int, default=200, help="supervised tokens of a sample")
    parser.add_argument("--devices", type=int, default=1, help="devices that FSDP2 shards the model over")
    parser.add_argument("--rows", type=int, default=558_128, help="rows of the data, unless the recipe has max_steps")
    parser.add_argument("--tflops", type=float, default=396.0, help="TFLOP/s of a device: 0.4 of an H100's 989")
    return parser


def make_batch(run_args: RunArguments, args: TrainingConfig, tokens: int, supervised: int) -> Batch:
    """The batch of a recipe, of samples with so many tokens and supervised tokens."""
    samples = args.per_device_train_batch_size
    if run_args.packed_length is not None:
        samples = max(run_args.packed_length // tokens, 1)
    return Batch(samples, tokens, supervised, is_packed=run_args.packed_length is not None)


def count_rows(run_args: RunArguments, args: TrainingConfig, batch: Batch, devices: int, rows_of_data: int) -> float:
    """Rows that a run sees: those of its steps where they are given, else those of its epochs."""
    if args.max_steps <= 0:
        return rows_of_data * args.num_train_epochs
    rows_of_step = run_args.global_batch_size
    if rows_of_step is None:
        rows_of_step = batch.samples * args.gradient_accumulation_steps * devices
    return args.max_steps * rows_of_step


def describe_time(seconds: float) -> str:
    """Hours or minutes."""
    minutes = seconds / 60
    if minutes < 1:
        return "<1 minute"
    if minutes < 60:
        return f"{minutes:.0f} minutes"
    return f"{minutes / 60:.1f} hours"


def plan_step(
    config: NormLlavaConfig, run_args: RunArguments, args: TrainingConfig, batch: Batch, devices: int = 1
) -> StepPlan:
    """Take some steps without data, with weights held as on a GPU.

    Raises:
        UserError: for 4-bit weights and optimizers other than torch's, whose memory is not known here, and if a
            sample is shorter than its picture and what is supervised.
    """
    check_plan(config, run_args, args, batch)
    model, trained = build_model(config, run_args, args)
    with FakeTensorMode(allow_non_fake_inputs=True):
        trained.to_empty(device="cpu")
        model.tie_weights()
        trained.train()

        flops = count_flops(trained, batch)
        trained.zero_grad()
        if args.gradient_checkpointing:
            if trained is not model:
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})

        # Sharded weights are gathered anew in each pass, so that autocast's casts of them aren't kept.
        keeps_casts = devices == 1
        peak, optimizer = track_steps(trained, args, batch, keeps_casts)

    learned = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    weights = num_bytes(trained.parameters())
    gradients = num_bytes(learned)
    states = num_bytes(state for states in optimizer.state.values() for state in states.values())
    return StepPlan(
        weights=weights // devices,
        gradients=gradients // devices,
        states=states // devices,
        activations=peak - weights - gradients - states,
        flops=flops,
    )


def check_plan(config: NormLlavaConfig, run_args: RunArguments, args: TrainingConfig, batch: Batch) -> None:
    """Refuse what can't be planned, as [`plan_step`] says."""
    if batch.tokens < config.image_seq_length + batch.supervised:
        needed = f"{config.image_seq_length} tokens of its picture and {batch.supervised} supervised ones"
        raise UserError(f"A sample of {batch.tokens} tokens can't hold the {needed}: set --tokens and --supervised.")
    if run_args.load_in_4bit or not args.optim.value.startswith(("adamw_torch", "sgd")):
        raise UserError("Not planned: 4-bit weights, and other optimizers than adamw_torch, adamw_torch_fused, sgd.")


def build_model(config: NormLlavaConfig, run_args: RunArguments, args: TrainingConfig) -> tuple[Any, Any]:
    """The model without data, and what is trained, which may be the adapters around it."""
    frozen_dtype = torch.bfloat16 if args.bf16 else torch.float32
    with torch.device("meta"), no_init_weights():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model.tie_weights()
        trained, _ = prepare_model(model, run_args, args, frozen_dtype)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    return model, trained


def count_flops(trained: nn.Module, batch: Batch) -> int:
    """Model FLOPs of a pass, forward and backward."""
    unpacked = Batch(batch.samples, batch.tokens, batch.supervised, is_packed=False)
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        compute_loss(trained, unpacked).backward()
    return counter.get_total_flops()


def track_steps(
    trained: nn.Module, args: TrainingConfig, batch: Batch, keeps_casts: bool
) -> tuple[int, torch.optim.Optimizer]:
    """Bytes at the peak of some steps, and the optimizer that took them."""
    learned = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    optimizer_class, optimizer_options = Trainer.get_optimizer_cls_and_kwargs(args, trained)
    optimizer = optimizer_class(learned, **optimizer_options)
    with WholeModelTracker() as tracker:
        tracker.track_external(trained, optimizer)
        for _ in range(NUM_STEPS):
            for _ in range(NUM_PASSES):
                with torch.autocast("cpu", torch.bfloat16, enabled=bool(args.bf16), cache_enabled=keeps_casts):
                    loss = compute_loss(trained, batch)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"], optimizer


def compute_loss(trained: Any, batch: Batch) -> torch.Tensor:
    """The loss of a pass: pictures come first, text after them, and the last tokens are supervised.

    The pictures' features are put in their places here, as the model's own way depends on the tokens' values.
    """
    model = base_model(trained)
    num_tokens = batch.samples * batch.tokens
    num_labels = batch.samples * batch.supervised
    num_rows = 1 if batch.is_packed else batch.samples

    vision = model.config.vision_config
    pixel_values = torch.empty(batch.samples, vision.num_channels, vision.image_size, vision.image_size)
    features = torch.cat(list(model.model.get_image_features(pixel_values).pooler_output))
    num_text_tokens = num_tokens - len(features)
    text = model.get_input_embeddings()(torch.zeros(num_text_tokens, dtype=torch.long))
    hidden_states = torch.cat([features.to(text.dtype), text])  # [num_tokens, hidden_size]
    hidden_states = hidden_states.view(num_rows, num_tokens // num_rows, -1)

    labels = torch.zeros(1, num_labels, dtype=torch.long)
    places = torch.arange(num_tokens - num_labels, num_tokens)
    with head_at_positions(model, places):
        output = trained(inputs_embeds=hidden_states, shift_labels=labels, fused_lm_head=True, use_cache=False)
    return -output.log_probs.sum() / num_labels


def num_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of those that are tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def attention_flops(query: Any, key: Any, value: Any, *_: Any, attn_mask: Any = None, **options: Any) -> int:
    """FLOPs of attention by shapes; half where there is a mask: the decoder's is causal, the encoder has none."""
    flops = sdpa_flop_count(query, key, value)
    return flops if attn_mask is None else flops // 2


def attention_backward_flops(gradient: Any, *shapes: Any, **options: Any) -> int:
    """FLOPs of attention's backward pass, without the product that it recomputes."""
    return 2 * attention_flops(*shapes, **options)


# torch's own count leaves these out.
ATTENTION_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


class WholeModelTracker(MemTracker):
    """`MemTracker` without what it does for each module, which assumes that every parameter is trained."""

    def _pre_fw_hook(self, *args: Any) -> None: ...
    def _post_fw_hook(self, *args: Any) -> None: ...
    def _pre_bw_hook(self, *args: Any) -> None: ...
    def _post_bw_hook(self, *args: Any) -> None: ...


if __name__ == "__main__":
    main()
