"""What a recipe takes: memory of a device at the peak of a step, FLOPs and hours.

    python training/plan.py --config training/recipes/Qwen2.5-7B-Instruct/stage2.yaml --devices 8 --rows 780000

A step runs as in training, on tensors with shapes and no data (torch's `MemTracker` under `FakeTensorMode`), from the
model's config alone. With several devices weights, gradients and optimizer states are divided by their number, as
FSDP2 shards them, and casts aren't kept. Not counted: masks, what FSDP2 gathers, CUDA's context, fragmentation.
"""

import argparse
import logging
from collections.abc import Iterable
from typing import Any

import torch
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
from training.loss import head_on_supervised
from training.stages import base_model


logger = logging.getLogger(__name__)
GIB = 2**30


def _attention(query: Any, key: Any, value: Any, *_: Any, attn_mask: Any = None, **options: Any) -> int:
    """FLOPs of attention by shapes; half where there is a mask: the decoder's is causal, the encoder has none."""
    return sdpa_flop_count(query, key, value) // (1 if attn_mask is None else 2)


# torch's own count leaves these out. In the backward pass attention recomputes a product, which doesn't count.
ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda gradient, *shapes, **options: 2 * _attention(*shapes, **options)
    ),
}


class _Tracker(MemTracker):
    """Without what it does for each module, which assumes that every parameter is trained."""

    def _pre_fw_hook(self, *args: Any) -> None: ...
    def _post_fw_hook(self, *args: Any) -> None: ...
    def _pre_bw_hook(self, *args: Any) -> None: ...
    def _post_bw_hook(self, *args: Any) -> None: ...


def plan_step(
    config: NormLlavaConfig,
    run_args: RunArguments,
    args: TrainingConfig,
    samples: int,
    tokens: int,
    supervised: int,
    devices: int = 1,
) -> tuple[dict[str, int], int]:
    """Take two steps of two passes without data, with weights held as on a GPU. Model FLOPs are of samples by
    themselves: padding and recomputation don't count, as in the MFU of PaLM (arXiv 2204.02311, App. B).

    Args:
        samples: Samples of a pass, with a picture each; they share one row if the recipe packs.
        tokens, supervised: Tokens of a sample, image tokens included, and how many of them are supervised.

    Returns:
        Bytes of a device by kind, at the peak of a step, and the model FLOPs of a forward and backward pass.

    Raises:
        UserError: for 4-bit weights and optimizers other than torch's, whose memory is not known here, and if a
            sample is shorter than its picture and what is supervised.
    """
    if tokens < config.image_seq_length + supervised:
        needed = f"{config.image_seq_length} tokens of its picture and {supervised} supervised ones"
        raise UserError(f"A sample of {tokens} tokens can't hold the {needed}: set --tokens and --supervised.")
    if run_args.load_in_4bit or not args.optim.value.startswith(("adamw_torch", "sgd")):
        raise UserError("Not planned: 4-bit weights, and other optimizers than adamw_torch, adamw_torch_fused, sgd.")
    with torch.device("meta"), no_init_weights():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model.tie_weights()
        trained, _ = prepare_model(model, run_args, args, torch.bfloat16 if args.bf16 else torch.float32)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    num_rows = 1 if run_args.packed_length is not None else samples
    with FakeTensorMode(allow_non_fake_inputs=True):
        trained.to_empty(device="cpu")
        model.tie_weights()
        trained.train()
        with FlopCounterMode(display=False, custom_mapping=ATTENTION) as counter:
            _loss(trained, samples, samples, tokens, supervised).backward()
        trained.zero_grad()
        if args.gradient_checkpointing:
            if trained is not model:
                model.enable_input_require_grads()
            model.gradient_checkpointing_enable({"use_reentrant": False})
        learned = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, trained)
        optimizer = kind(learned, **options)
        with _Tracker() as tracker:
            tracker.track_external(trained, optimizer)
            for _ in range(2):
                for _ in range(2):
                    with torch.autocast("cpu", torch.bfloat16, bool(args.bf16), cache_enabled=devices == 1):
                        loss = _loss(trained, num_rows, samples, tokens, supervised)
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        states = [state for of_one in optimizer.state.values() for state in of_one.values()]
        sizes = {"weights": _size(trained.parameters()), "gradients": _size(learned), "states": _size(states)}
    memory = {name: size // devices for name, size in sizes.items()}
    return memory | {"activations and temporary": peak - sum(sizes.values())}, counter.get_total_flops()


def _size(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def _loss(trained: Any, num_rows: int, samples: int, tokens: int, supervised: int) -> torch.Tensor:
    """The loss of a pass: pictures come first, text after them, and the last tokens are supervised. The pictures'
    features are put in their places here, as the model's own way depends on the tokens' values."""
    model = base_model(trained)
    vision, size, num_labels = model.config.vision_config, samples * tokens, samples * supervised
    pixel_values = torch.empty(samples, vision.num_channels, vision.image_size, vision.image_size)
    features = torch.cat(list(model.model.get_image_features(pixel_values).pooler_output))
    text = model.get_input_embeddings()(torch.zeros(size - len(features), dtype=torch.long))
    states = torch.cat([features.to(text.dtype), text]).view(num_rows, size // num_rows, -1)
    labels = torch.zeros(1, num_labels, dtype=torch.long)
    with head_on_supervised(model, torch.arange(size - num_labels, size)):
        output = trained(inputs_embeds=states, shift_labels=labels, fused_lm_head=True, use_cache=False)
    return -output.log_probs.sum() / num_labels


def build_parser() -> argparse.ArgumentParser:
    """The command's options."""
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


@command()
def main() -> None:
    """Run the command line."""
    options, given = build_parser().parse_known_args()
    run_args, args = parse_arguments(given)
    config, packed = load_config(str(run_args.model_name_or_path), run_args.model_revision), run_args.packed_length
    samples = args.per_device_train_batch_size if packed is None else max(packed // options.tokens, 1)
    memory, flops = plan_step(config, run_args, args, samples, options.tokens, options.supervised, options.devices)
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in memory.items())
    rows_of_step = run_args.global_batch_size or samples * args.gradient_accumulation_steps * options.devices
    rows = args.max_steps * rows_of_step if args.max_steps > 0 else options.rows * args.num_train_epochs
    total = flops * rows / samples
    minutes = total / (options.devices * options.tflops * 1e12) / 60
    time = f"{minutes / 60:.1f} hours" if minutes >= 60 else f"{minutes:.0f} minutes" if minutes >= 1 else "<1 minute"
    of_rows = f"{rows:,.0f} rows of {options.tokens} tokens, {options.supervised} supervised, a picture in each"
    logger.info("assumed: %s; %g TFLOP/s a device (an H100's peak is 989), training alone", of_rows, options.tflops)
    logger.info("memory of a device, bf16 %s: %.2f GiB (%s)", bool(args.bf16), sum(memory.values()) / GIB, parts)
    logger.info("the run: %.3g FLOPs, %s, devices: %d", total, time, options.devices)


if __name__ == "__main__":
    main()
