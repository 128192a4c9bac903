"""What a recipe takes: memory of a device at the peak of a step, FLOPs and hours.

    python training/plan.py --config training/recipes/Qwen2.5-7B-Instruct/stage2.yaml --devices 8 --rows 780000

A step runs as in training, on tensors with shapes and no data (torch's `MemTracker` under `FakeTensorMode`), from the
model's config alone. With several devices weights, gradients and optimizer states are divided by their number, as
FSDP2 shards them. Not counted: attention masks, what FSDP2 gathers, CUDA's context, and fragmentation.
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
from transformers import AutoModelForImageTextToText, Trainer
from transformers.initialization import no_init_weights
from trl.trainer.utils import add_fused_lm_head

from modeling_normllava import NormLlavaConfig
from training.arguments import RunArguments, TrainingConfig, parse_arguments
from training.flops import step_flops
from training.loading import load_config, prepare_model
from training.loss import head_on_supervised
from training.stages import Stage, base_model


logger = logging.getLogger(__name__)
GIB = 2**30


@dataclass(frozen=True)
class Batch:
    """What a device gets in a forward pass.

    Attributes:
        lengths: Tokens of each sample, image tokens included.
        pictures, supervised: Pictures and supervised tokens of all samples.
        packed: Whether the samples share one row; otherwise each has its own, padded to the longest.
    """

    lengths: Sequence[int]
    pictures: int
    supervised: int
    packed: bool


@dataclass(frozen=True)
class Plan:
    """Bytes on a device by kind, at the peak of a step, and the model FLOPs of a forward and backward pass."""

    memory: dict[str, int]
    flops: float

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.memory.values())


class _Tracker(MemTracker):
    """Without what it does for each module, which assumes that every parameter is trained."""

    def _pre_fw_hook(self, *args: Any) -> None: ...
    def _post_fw_hook(self, *args: Any) -> None: ...
    def _pre_bw_hook(self, *args: Any) -> None: ...
    def _post_bw_hook(self, *args: Any) -> None: ...


def plan_step(
    config: NormLlavaConfig, run_args: RunArguments, args: TrainingConfig, batch: Batch, devices: int = 1
) -> Plan:
    """Take two steps of two passes without data.

    Raises:
        ValueError: for 4-bit weights and optimizers other than torch's, whose memory is not known here.
    """
    if run_args.load_in_4bit or not args.optim.value.startswith(("adamw_torch", "sgd")):
        raise ValueError("Not planned: 4-bit weights, and other optimizers than adamw_torch, adamw_torch_fused, sgd.")
    with torch.device("meta"), no_init_weights():
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        model.tie_weights()
        trained, _ = prepare_model(model, run_args, args)
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if args.gradient_checkpointing:
        if trained is not model:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with FakeTensorMode(allow_non_fake_inputs=True):
        _allocate(trained)
        trained.train()
        learned = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, trained)
        optimizer = kind(learned, **options)
        with _Tracker() as tracker:
            tracker.track_external(trained, optimizer)
            for _ in range(2):
                for _ in range(2):
                    _loss(trained, batch, bool(args.bf16)).backward()
                optimizer.step()
                optimizer.zero_grad()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
        states = [state for of_one in optimizer.state.values() for state in of_one.values()]
        sizes = {"weights": _size(trained.parameters()), "gradients": _size(learned), "states": _size(states)}
        flops = step_flops(model, Stage(str(run_args.stage)), batch.lengths, batch.pictures, batch.supervised)
    memory = {name: size // devices for name, size in sizes.items()}
    return Plan(memory | {"activations and temporary": peak - sum(sizes.values())}, sum(flops.values()))


def _allocate(model: nn.Module) -> None:
    """Replace tensors on the meta device by fake ones on "the CPU", in a `FakeTensorMode`; tied ones stay tied."""
    made: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        held: Any
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor not in made:
                    new = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                held[name] = None if tensor is None else made[tensor]


def _size(tensors: Iterable[Any]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if isinstance(tensor, torch.Tensor))


def _loss(trained: Any, batch: Batch, bf16: bool) -> torch.Tensor:
    """The loss of a batch: pictures come first, text after them, and the last tokens are supervised. The pictures'
    features are put in their places here, as the model's own way depends on the tokens' values."""
    model = base_model(trained)
    vision, num_rows = model.config.vision_config, 1 if batch.packed else len(batch.lengths)
    size = sum(batch.lengths) if batch.packed else num_rows * max(batch.lengths)
    pixel_values = torch.empty(batch.pictures, vision.num_channels, vision.image_size, vision.image_size)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        features = torch.cat(list(model.model.get_image_features(pixel_values).pooler_output))
        text = model.get_input_embeddings()(torch.zeros(size - len(features), dtype=torch.long))
        states = torch.cat([features.to(text.dtype), text]).view(num_rows, size // num_rows, -1)
        places = torch.arange(size - batch.supervised, size)
        labels = torch.zeros(1, batch.supervised, dtype=torch.long)
        with head_on_supervised(model, places):
            output = trained(inputs_embeds=states, shift_labels=labels, fused_lm_head=True, use_cache=False)
    return -output.log_probs.sum() / batch.supervised


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description="Plan a recipe. Further options are those of training/sft.py.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a sample, image tokens included")
    parser.add_argument("--supervised", type=int, default=200, help="supervised tokens of a sample")
    parser.add_argument("--devices", type=int, default=1, help="devices that FSDP2 shards the model over")
    parser.add_argument("--rows", type=int, default=558_128, help="rows of the data")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of a device; by default an H100's")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that training reaches")
    options, given = parser.parse_known_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run_args, args = parse_arguments(given)
    config = load_config(str(run_args.model_name_or_path), run_args.model_revision)
    packed = run_args.packed_length
    samples = max(packed // options.tokens, 1) if packed is not None else args.per_device_train_batch_size
    batch = Batch([options.tokens] * samples, samples, samples * options.supervised, packed is not None)
    plan = plan_step(config, run_args, args, batch, options.devices)
    parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in plan.memory.items())
    flops = plan.flops / samples * options.rows * args.num_train_epochs
    hours = flops / (options.devices * options.tflops * 1e12 * options.mfu) / 3600
    logger.info("memory of a device: %.1f GiB (%s)", plan.total / GIB, parts)
    logger.info("the run: %.3g FLOPs, %.1f hours on %d devices", flops, hours, options.devices)


if __name__ == "__main__":
    main()
