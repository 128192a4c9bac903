"""The memory that a training step takes on a device, from the model's config alone.

The step is run as in training - stage, dtypes, loss, gradient checkpointing, packed or padded rows, optimizer,
sharding - on tensors with shapes but no data, and every allocation and release of memory is recorded. Token ids and
masks are real, since the computation depends on them. Tensors are on the CPU, for autograd; where CUDA's kernels use
memory differently, the plan follows CUDA (`_like_cuda`).

By formula only: 4-bit weights, `adamw_bnb_8bit`, DDP's buckets and all of ZeRO-3's states. Not counted: memory inside
kernels, CUDA's context, communication libraries, and fragmentation.
"""

import contextlib
import dataclasses
import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._guards import active_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Trainer
from transformers.initialization import no_init_weights
from trl.kernels import chunked_logprob
from trl.trainer.utils import add_fused_lm_head

from conversations.tokens import IGNORED
from diagnostics.tokens import token_ids
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from training import attention
from training.arguments import RunArguments, TrainingConfig
from training.collator import sample_boundaries
from training.key_alignment import KeyAlignment
from training.loading import name_sharding_units, prepare_model
from training.stages import ModuleGroup, base_model
from training.trainer import gather_head, supervised_positions


GIB = 2**30
KINDS = ("weights", "gradients", "optimizer states", "gathered", "activations", "temporary")
"""Kinds of memory. "activations" are allocated by the forward pass, "temporary" by the backward pass, recomputed
layers included, and the optimizer; "gathered" are unsharded weights and gradients in communication, DDP's buckets
included."""


@dataclass(frozen=True)
class Sample:
    """What a sample holds: tokens (image tokens included), pictures and supervised tokens."""

    tokens: int
    pictures: int
    supervised: int


@dataclass(frozen=True)
class StepPlan:
    """Bytes on one device at the peak, by kind (`KINDS`); and what was planned: the prepared model, without data, and
    its parts."""

    peak: dict[str, int]
    model: NormLlavaForConditionalGeneration
    groups: list[ModuleGroup]

    @property
    def total(self) -> int:
        """Bytes of all kinds."""
        return sum(self.peak.values())


class _Block:
    """A piece of memory and its kind, which is given by where it was allocated or by a later `book`."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Ledger(TorchDispatchMode):
    """Records every tensor's memory when it is allocated, resized and released.

    Floating-point tensors that are made from no other tensor, such as buffers of zeros, have no data either.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self.fake, self.phase, self.sharded = fake, "activations", False
        self._events: list[tuple[_Block, int]] = []
        self._live: dict[int, tuple[_Block, int, Any]] = {}  # by storage

    def book(self, tensors: Iterable[Any], kind: str) -> None:
        """Set the kind of tensors."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
                self._block(local, kind).kind = kind

    def _block(self, tensor: torch.Tensor, kind: str) -> _Block:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            block = _Block(kind)
            self._live[key] = (block, storage.nbytes(), weakref.ref(storage, lambda _: self._forget(key)))
            self._events.append((block, storage.nbytes()))
        return self._live[key][0]

    def _forget(self, key: int) -> None:
        block, size, _ = self._live.pop(key)
        self._events.append((block, -size))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local tensors are dispatched here themselves
        kwargs = kwargs or {}
        if active_fake_mode() is not None:  # DTensor infers a shape
            return func(*args, **kwargs)
        if func is torch.ops.aten.index.Tensor:  # the size of a masked selection is known: masks are real
            places = [place.nonzero().unbind(1) if _is_mask(place) else (place,) for place in args[1]]
            args = (args[0], [place for group in places for place in group])
        from_nothing = not any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((args, kwargs)))
        dtype = kwargs.get("dtype") or (torch.int64 if "arange" in str(func) else torch.get_default_dtype())
        with self.fake if from_nothing and dtype.is_floating_point else contextlib.nullcontext():
            output = func(*args, **kwargs)
        # Sharded tensors are gathered into flat buffers.
        gathers = self.sharded and func is torch.ops.aten.empty.memory_format and output.dim() == 1
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._block(leaf, "gathered" if gathers else self.phase)
        return output

    def __enter__(self) -> "Ledger":
        resize = torch.UntypedStorage.resize_

        def resize_and_book(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            if storage._cdata in self._live:
                block, before, reference = self._live[storage._cdata]
                self._live[storage._cdata] = (block, storage.nbytes(), reference)
                self._events.append((block, storage.nbytes() - before))

        # FSDP2 releases gathered weights this way, which no operation shows.
        self._patch = mock.patch.object(torch.UntypedStorage, "resize_", resize_and_book)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patch.stop()

    def peak(self) -> dict[str, int]:
        """Bytes by kind at the peak."""
        totals = list(accumulate(change for _, change in self._events))
        until = totals.index(max(totals)) + 1
        sizes = dict.fromkeys(KINDS, 0)
        for block, change in self._events[:until]:
            sizes[block.kind] += change
        return sizes


def _is_mask(places: Any) -> bool:
    return isinstance(places, torch.Tensor) and places.dtype == torch.bool


@contextlib.contextmanager
def _like_cuda() -> Iterator[None]:
    """Memory as on CUDA: FlashAttention; autocast that computes layer norms in float32, which the CPU's does not;
    Triton's kernels and cuBLAS in the head, which need no memory besides tiles."""
    layer_norm = nn.functional.layer_norm

    def in_float32(states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return layer_norm(states.float() if torch.is_autocast_enabled("cpu") else states, *args, **kwargs)

    nothing: dict[str, Any] = dict.fromkeys(
        ("_forward_tile", "_backward_tile", "_addmm_fp32"), lambda *args, **kwargs: None
    )
    flash = mock.patch.object(attention, "runs_flash", lambda query: query.dtype in (torch.float16, torch.bfloat16))
    norms = mock.patch.object(nn.functional, "layer_norm", in_float32)
    with mock.patch.multiple(chunked_logprob, **nothing), flash, norms:
        yield


class _FourBitProduct(torch.autograd.Function):
    """As in bitsandbytes: weights are dequantized for the product, forward and backward, and not kept."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, packed: torch.Tensor, bias: Any, shape: tuple[int, int]) -> Any:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return nn.functional.linear(states, packed.new_empty(shape, dtype=states.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (packed,) = ctx.saved_tensors
        return gradients[0] @ packed.new_empty(ctx.shape, dtype=gradients[0].dtype), None, None, None


class _FourBitLinear(nn.Linear):
    """A linear layer in 4 bits with the memory that QLoRA states (arXiv 2305.14314, section 3): half a byte per weight
    and a scale per 64 weights, in float32, or in 8 bits with a second scale per 256 scales."""

    def __init__(self, base: nn.Linear, double_quant: bool, compute_dtype: torch.dtype) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, device="meta")
        count = base.weight.numel()
        self.weight = nn.Parameter(base.weight.new_empty(math.ceil(count / 2), 1, dtype=torch.uint8), False)
        self.bias = base.bias
        scales = math.ceil(count / 64)
        held = [(scales, torch.uint8), (math.ceil(scales / 256), torch.float32)] if double_quant else []
        for number, (size, dtype) in enumerate(held or [(scales, torch.float32)]):
            self.register_buffer(f"scales_{number}", base.weight.new_empty(size, dtype=dtype))
        self.compute_dtype = compute_dtype

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        states = hidden_states.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        output = _FourBitProduct.apply(states, self.weight, bias, (self.out_features, self.in_features))
        return output.to(hidden_states.dtype).clone()  # PEFT copies what 4-bit layers return


class _PlannedKeyAlignment(KeyAlignment):
    """Without data no token is a sink."""

    def _see_layer(self, layer: nn.Module, args: Any, output: Any) -> None:
        if self._watched is not None:
            self._norms.append(torch.ones_like(self._watched.positions))


def plan_step(
    config: NormLlavaConfig,
    run_args: RunArguments,
    args: TrainingConfig,
    rows: Sequence[Sequence[Sample]],
    num_processes: int = 1,
    sharding: str = "none",
    accumulation_steps: int = 2,
    cuda: bool = True,
) -> StepPlan:
    """Run an optimizer step without data.

    Args:
        config: The model's config.
        run_args, args: The run's arguments.
        rows: What a device gets in a forward pass: one packed row of samples, or padded rows of one sample.
        num_processes: Devices.
        sharding: `"none"`, `"ddp"` or `"fsdp2"`, as `training/accelerate/` has them.
        accumulation_steps: Forward passes of an optimizer step; more than two count as two.
        cuda: Whether to plan the memory of CUDA's kernels, or a CPU's.

    Raises:
        ValueError: if the optimizer's memory is not known, or 4-bit weights are to be sharded.
    """
    if sharding == "fsdp2" and run_args.load_in_4bit:
        raise ValueError("load_in_4bit is planned for DDP and single devices only, as in its recipes: no sharding.")
    with torch.device("meta"), no_init_weights():
        model = _build(config, run_args, args)
        trained, groups = prepare_model(model, run_args, args)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    _to_fake(trained, fake)
    arm(model, trained, args)
    key_alignment = _PlannedKeyAlignment.from_arguments(model, None, run_args)
    batch = make_batch(model, rows, packed=run_args.packed_length is not None)
    size, num_images = config.vision_config.image_size, sum(sample.pictures for row in rows for sample in row)
    with fake:
        batch["pixel_values"] = torch.empty(num_images, config.vision_config.num_channels, size, size)
    ledger = Ledger(fake)
    with contextlib.ExitStack() as stack:
        if sharding == "fsdp2" and num_processes > 1:
            stack.enter_context(fake_processes(num_processes))
            shard(trained, args)
            ledger.sharded = True
        if cuda:
            stack.enter_context(_like_cuda())
        stack.enter_context(ledger)
        ledger.book([*trained.parameters(), *trained.buffers()], "weights")
        ledger.book(batch.values(), "activations")
        parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
        optimizer = Optimizer(trained, parameters, args, cuda)
        for parameter in parameters:  # a first step, which creates the optimizer's states
            parameter.grad = torch.zeros_like(parameter)
        ledger.book((parameter.grad for parameter in parameters), "gradients")
        ledger.book(optimizer.step(), "optimizer states")
        for parameter in parameters:
            parameter.grad = None
        for _ in range(min(accumulation_steps, 2)):
            ledger.phase = "activations"
            loss = forward(trained, batch, args, key_alignment)
            ledger.phase = "temporary"
            loss.backward()
            del loss
            ledger.book((parameter.grad for parameter in parameters), "gradients")
        optimizer.step()
    peak = ledger.peak()
    if sharding == "ddp" and num_processes > 1:  # the reducer's copies of all gradients
        peak["gathered"] += sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return StepPlan(peak, model, groups)


def _build(config: NormLlavaConfig, run_args: RunArguments, args: TrainingConfig) -> NormLlavaForConditionalGeneration:
    """The model as `load_base` loads it."""
    attention = {"text_config": run_args.attn_implementation, "vision_config": "sdpa"}
    half = run_args.load_in_4bit and args.bf16
    model = NormLlavaForConditionalGeneration._from_config(
        config, attn_implementation=attention, dtype=torch.bfloat16 if half else torch.float32
    )
    if run_args.load_in_4bit:
        compute_dtype = torch.bfloat16 if args.bf16 else torch.float32
        linear = [n for n, module in model.model.language_model.named_modules() if isinstance(module, nn.Linear)]
        for name in linear:
            base = model.model.language_model.get_submodule(name)
            quantized = _FourBitLinear(base, run_args.use_bnb_nested_quant, compute_dtype)
            model.model.language_model.set_submodule(name, quantized)
    model.tie_weights()  # part of the initialization that was skipped
    name_sharding_units(model)
    return model


def _to_fake(model: nn.Module, fake: FakeTensorMode) -> None:
    """Replace tensors on the meta device, which can't be mixed with real ids, by fake ones on "the CPU"."""
    made: dict[torch.Tensor, Any] = {}
    for module in model.modules():
        tensors: Any
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in made:
                    with fake:
                        new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[tensor] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
                tensors[name] = made[tensor]


def arm(model: NormLlavaForConditionalGeneration, trained: Any, args: TrainingConfig) -> None:
    """Do what TRL and Trainer do to a model before they train it."""
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    if getattr(args, "activation_checkpointing", args.gradient_checkpointing):
        if trained is not model:
            model.enable_input_require_grads()
        enable: Any = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
        enable(args.gradient_checkpointing_kwargs or None)
    trained.train()


def shape_of(config: NormLlavaConfig) -> NormLlavaForConditionalGeneration:
    """The model on the meta device, where it takes no memory."""
    with torch.device("meta"), no_init_weights():
        model = NormLlavaForConditionalGeneration._from_config(config)
        model.tie_weights()
    return model


def picture_tokens(config: NormLlavaConfig) -> int:
    """Tokens of a picture."""
    vision = config.vision_config
    pixel_values = torch.empty(1, vision.num_channels, vision.image_size, vision.image_size, device="meta")
    return len(shape_of(config).model.get_image_features(pixel_values).pooler_output[0])


def make_batch(
    model: NormLlavaForConditionalGeneration, rows: Sequence[Sequence[Sample]], packed: bool
) -> dict[str, Any]:
    """A batch of these samples in the shapes that [`~training.collator.VisionLanguageCollator`] makes, without
    `pixel_values`: pictures first, then text, supervised at its end."""
    ids, config, per_picture = token_ids(model), model.config, picture_tokens(model.config)
    text = next(number for number in range(config.text_config.vocab_size) if number not in {ids.image, *ids.special})
    tokens, labels = [], []
    for row in rows:
        tokens.append(torch.cat([_sample_ids(sample, per_picture, ids.image, text) for sample in row]))
        labels.append(torch.cat([_sample_labels(sample, text) for sample in row]))
    if packed:
        boundaries = sample_boundaries([sample.tokens for sample in rows[0]])
        return {"input_ids": tokens[0][None], "labels": labels[0][None], **boundaries}
    pad = nn.utils.rnn.pad_sequence
    return {
        "input_ids": pad(tokens, batch_first=True, padding_value=text),
        "labels": pad(labels, batch_first=True, padding_value=IGNORED),
        "attention_mask": pad([torch.ones_like(row) for row in tokens], batch_first=True),
    }


def _sample_ids(sample: Sample, per_picture: int, image: int, text: int) -> torch.Tensor:
    ids = torch.full((sample.tokens,), text)
    ids[: sample.pictures * per_picture] = image
    return ids


def _sample_labels(sample: Sample, text: int) -> torch.Tensor:
    labels = torch.full((sample.tokens,), IGNORED)
    labels[sample.tokens - sample.supervised :] = text
    return labels


def forward(
    trained: Any, batch: dict[str, Any], args: TrainingConfig, key_alignment: KeyAlignment | None = None
) -> torch.Tensor:
    """The loss as [`~training.trainer.NormLlavaTrainer`] computes it: the head on supervised positions only."""
    scored, shift_labels = supervised_positions(batch["labels"])

    def keep_scored(module: nn.Module, args: Any, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state[scored][None]
        return output

    base = base_model(trained)
    hook = base.model.register_forward_hook(keep_scored)
    gather_head(base)
    inputs = {**batch, "shift_labels": shift_labels}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.bf16):
        output = trained(**inputs, fused_lm_head=True)
    hook.remove()
    loss = -output.log_probs.sum() / output.label_mask.sum().clamp(min=1)
    return loss if key_alignment is None else loss + key_alignment.penalty()


@contextlib.contextmanager
def fake_processes(count: int) -> Iterator[None]:
    """A process group in which only this process exists."""
    import torch.distributed._tools.fake_collectives
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def shard(trained: Any, args: TrainingConfig) -> None:
    """Shard a model over the CPU processes of this group, by accelerate's own code and the settings of
    `training/accelerate/fsdp2.yaml`; accelerate itself would use DDP on a CPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, reshard_after_forward=True, auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    precision = "bf16" if args.bf16 else "fp32"
    plugin.set_mixed_precision(precision)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin), torch_device_mesh={("shard",): mesh}, is_main_process=False,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("shard",)), device=torch.device("cpu"),
        mixed_precision="bf16" if args.bf16 else "no",
    )  # fmt: skip
    fsdp2_prepare_model(accelerator, trained)


def optimizer_name(args: TrainingConfig) -> str:
    """The optimizer's name, given as a string or as transformers' enumeration."""
    return str(getattr(args.optim, "value", args.optim))


class Optimizer:
    """The optimizer of the arguments. bitsandbytes' 8-bit AdamW is replaced by its states: two of one byte per weight,
    each with a scale of four bytes per 256. Those of embeddings and of fewer than 4096 weights stay in float32."""

    def __init__(self, model: Any, parameters: list[nn.Parameter], args: TrainingConfig, cuda: bool) -> None:
        self.parameters, self.optimizer = parameters, None
        self.states: list[torch.Tensor] = []
        name = optimizer_name(args)
        if name in ("adamw_bnb_8bit", "adamw_8bit"):
            modules = (module for module in model.modules() if isinstance(module, nn.Embedding))
            self.embeddings = {id(parameter) for module in modules for parameter in module.parameters()}
            return
        if name not in ("adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"):
            raise ValueError(
                f"optim {name!r}: its memory is not known. Plan with adamw_torch, adamw_torch_fused or adamw_bnb_8bit."
            )
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        if cuda and not options.get("fused"):
            options["foreach"] = True  # torch's choice on CUDA, whose temporary copies count
        self.optimizer = kind(parameters, **options)

    def step(self) -> list[torch.Tensor]:
        """Update the parameters; returns the states."""
        if self.optimizer is not None:
            self.optimizer.step()
            return [value for state in self.optimizer.state.values() for value in state.values()]
        if not self.states:
            for parameter in self.parameters:
                local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
                in_float32 = id(parameter) in self.embeddings or local.numel() < 4096
                for _ in range(2):
                    size = 4 * local.numel() if in_float32 else (local.numel() * (256 + 4) + 255) // 256
                    self.states.append(local.new_empty(size, dtype=torch.uint8))
        return self.states


def zero3_problem(args: TrainingConfig) -> str | None:
    """Why a run can't be planned under ZeRO-3; `None` if it can."""
    known = args.bf16 and optimizer_name(args) in ("adamw_torch", "adamw_torch_fused")
    return None if known else "its memory is known in bfloat16 with torch's AdamW alone"


def as_zero3(sharded: StepPlan, num_processes: int) -> StepPlan:
    """The plan under DeepSpeed's ZeRO-3 with bfloat16: activations as under FSDP2; the rest by DeepSpeed's defaults.
    Sharded are bfloat16 weights and, of trained parameters, float32 weights, gradients in both dtypes and Adam's
    states. At most 10⁹ weights are gathered and 5·10⁷ prefetched, with a bucket of 5·10⁸ gradients."""
    whole = trained = 0
    for group in sharded.groups:
        count = sum(parameter.numel() for parameter in group.parameters.values())
        whole, trained = whole + count, trained + count * (group.learning_rate is not None)
    states = {
        "weights": (2 * whole + 4 * trained) // num_processes,
        "gradients": (2 + 4) * trained // num_processes,
        "optimizer states": 8 * trained // num_processes,
        "gathered": 2 * min(whole, 10**9 + 5 * 10**7) + 2 * min(trained, 5 * 10**8),
    }
    return dataclasses.replace(sharded, peak=sharded.peak | states)
