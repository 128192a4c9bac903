"""Trains a NormLlava: its learning rates and clipping by module, measures, checkpoints that are whole."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import TorchDynamoPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import rotate_checkpoints
from typing_extensions import override

from common.errors import UserError
from conversations.measured import row_lengths
from conversations.tokens import IGNORED
from diagnostics.parts import find_decoder
from diagnostics.tokens import attended_tokens
from training.checkpoints import (
    SAVING_FOLDER,
    STATE_FILE,
    publish_checkpoint,
    publish_result,
    write_aside,
    write_unsharded,
)
from training.compiling import compile_layers
from training.loss import SupervisedTrainer
from training.monitor import ConsoleTable, InterfaceMonitor, MetricsFile
from training.rehearsal import largest_batch, rehearsal
from training.run import Run
from training.stages import ModuleGroup
from training.streams import PLACE, StreamBatches


# What wrappers put into parameter names: PEFT, and FSDP's activation checkpointing.
WRAPPERS = ("base_model.model.", "_checkpoint_wrapped_module.")


def total_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradient of all `parameters` together, a scalar; over all shards if they are sharded."""
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


class NormLlavaTrainer(SupervisedTrainer):
    """Trains a model that [`~training.stages.prepare_stage`] has prepared.

    Args:
        model: The model, or the `PeftModel` around it.
        groups: What `prepare_stage` returned: learning rates and names of the modules.
        run: The run's record, written into each checkpoint and with the result.
        sampler: Deals batches of padded or packed rows to the processes; `None` for a stream.
        stream: The batches of a stream; a resumed run continues where it was.
        clip_by_module: Clip the gradient of each module to `max_grad_norm` instead of the whole gradient.
        eval_sampler: The sampler of held-out rows.
        kwargs: As for [`SupervisedTrainer`].
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ModuleGroup],
        run: Run,
        sampler: BatchRebalanceSampler | None = None,
        stream: StreamBatches | None = None,
        clip_by_module: bool = False,
        eval_sampler: BatchRebalanceSampler | None = None,
        **kwargs: Any,
    ) -> None:
        # Only names: sharding replaces parameters, and unsharded ones referenced here would stay on the device.
        self._modules = {name: group.name for group in groups for name in group.parameters}
        self._rates = {group.name: group.learning_rate for group in groups if group.learning_rate is not None}
        self._run, self._clip_by_module = run, clip_by_module
        self._sampler, self._stream, self._eval_sampler = sampler, stream, eval_sampler
        self._grad_norms: dict[str, torch.Tensor] = {}  # by module, before clipping
        # TRL casts a quantized model's trained parameters to bfloat16, which loses small steps and most of the gain.
        masters = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
        super().__init__(model=model, **kwargs)
        for parameter, master in masters.items():
            if parameter.dtype != master.dtype:
                parameter.data = master.to(parameter.device)
        self._monitor = InterfaceMonitor(self._unwrapped(), self.processing_class)
        # In a notebook the default is another class than in a terminal.
        for printer in (transformers.trainer.DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            self.remove_callback(printer)
        for callback in (self._monitor, ConsoleTable(), MetricsFile(Path(self.args.output_dir) / "metrics.jsonl")):
            self.add_callback(callback)
        if stream is not None:
            self.args.ignore_data_skip = True  # the stream itself resumes where it was

    @override
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Without compiling, which accelerate would do to the whole model; `_prepare_for_training` compiles layers."""
        return super()._build_accelerator_args(**kwargs) | {"dynamo_plugin": TorchDynamoPlugin(backend="no")}

    @override
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._sampler

    @override
    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._eval_sampler

    @override
    def get_train_dataloader(self) -> DataLoader:
        """The training data loader; for a stream that of `StreamBatches`, which deals rows to processes itself."""
        return super().get_train_dataloader() if self._stream is None else self._stream.loader()

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, its parameter groups split by module, each with its learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        modules, groups = self._by_module(model or self.model), []
        # The common rate first, or else the highest: it is the one that Trainer logs as `learning_rate`.
        rates, common = self._rates, self.args.learning_rate
        for name in sorted(modules, key=lambda name: (rates[name] != common, -rates[name])):
            members = set(modules[name])
            for group in optimizer.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter in members]
                if parameters:
                    groups.append({**group, "params": parameters, "lr": self._rates[name], "module": name})
        optimizer.param_groups = groups
        return optimizer

    def _by_module(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """The trained parameters of each module. By name, as sharding replaces parameters."""
        modules: dict[str, list[nn.Parameter]] = {name: [] for name in self._rates}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for wrapper in WRAPPERS:
                    name = name.replace(wrapper, "")
                modules[self._modules[name]].append(parameter)
        return modules

    @override
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        """As Trainer does it; then compile layers where asked, and rehearse, with the weights and states of a resumed
        run in their places."""
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if plugin is not None and plugin.mixed_precision_policy is not None:  # it rounds losses to bfloat16
            plugin.mixed_precision_policy = dataclasses.replace(plugin.mixed_precision_policy, output_dtype=None)
        layers = list(find_decoder(self._unwrapped()).layers)  # before FSDP puts a wrapper around each
        model, dataloader = super()._prepare_for_training(*args, **kwargs)
        if self.args.torch_compile:
            compile_layers(layers, self.args.torch_compile_backend)
        if self._sampler is not None:
            self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
            with rehearsal(model, self.optimizer.optimizer, self.args.device):
                for column, padded in (("length", not self.data_collator.packed), ("num_images", False)):
                    rows = largest_batch(self._sampler, row_lengths(self.train_dataset, column), padded)
                    if self.args.gradient_accumulation_steps == 1:  # with more, a pass does find older gradients
                        model.zero_grad()
                    super().training_step(model, self.data_collator([self.train_dataset[row] for row in rows]))
            self._metrics["train"].clear()
            if self._key_alignment is not None:
                self._key_alignment.collect(self._sum_over_processes)
        return model, dataloader

    @override
    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """An epoch, with what Trainer leaves out where a run is resumed: the intervals of this start (a checkpoint
        brings those of before), the sampler's epoch, and an end: a run that has all its steps takes none."""
        self.state.compute_steps(self.args, self.state.max_steps)
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)
        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(epoch=epoch, **kwargs)

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A forward and backward pass; the loss without what [`KeyAlignment`] adds, so that runs with and without it
        are comparable. `FloatingPointError` is raised if it is not finite."""
        if self._stream is not None:
            self._stream.trained_on(inputs.pop(PLACE))
        # Tokens of all processes, without padding and blank pictures; a batch without labels is one without rows.
        num_tokens = attended_tokens(inputs).sum() * (inputs["labels"] != IGNORED).any()
        self.state.num_input_tokens_seen += int(self._sum_over_processes(num_tokens))  # checkpoints keep this state
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._check_finite("loss", loss.item())
        return loss if self._key_alignment is None else loss - self._penalty

    @override
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Measure the gradient, whole and by module, then clip the one or the others; the whole norm before that."""
        self.accelerator.unscale_gradients()
        modules = self._by_module(self.accelerator.unwrap_model(model))
        norms = {name: total_norm(parameters) for name, parameters in modules.items()}
        norm = torch.stack(list(norms.values())).norm()
        for name, parameters in modules.items():
            limited = norms[name] if self._clip_by_module else norm
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, limited)
        self._grad_norms = norms
        if self.accelerator.scaler is None:  # float16's scaler skips a step that is not finite
            self._check_finite("gradient's norm", float(norm))
        return norm

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise UserError(
                f"The {name} is {value} in step {self.state.global_step + 1}; lower the learning rate, or look at "
                "the rows of this step."
            )

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss with the step's measurements. Gradient norms that are not finite are left out."""
        if "loss" in logs:
            # The scheduler has stepped already; these are the rates of the step that is logged, as `learning_rate` is.
            scale = logs["learning_rate"] / (self._rates[self.optimizer.param_groups[0]["module"]] or 1.0)
            logs |= {f"learning_rate/{name}": rate * scale for name, rate in self._rates.items()}
            logs |= {f"grad_norm/{name}": norm.item() for name, norm in self._grad_norms.items()}
            logs |= self._monitor.collect(self._sum_over_processes)
            if self._key_alignment is not None:
                logs |= self._key_alignment.collect(self._sum_over_processes)
        # What TRL counts and, for a stream, Trainer, begins at 0 again where a run is resumed.
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        if self._stream is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps
        for name in ("total_flos", "train_samples_per_second"):  # count padding, and packed rows as samples
            logs.pop(name, None)
        # A step that float16's scaler skipped has no gradient norm, and JSON no infinity.
        known = {name: value for name, value in logs.items() if "grad_norm" not in name or math.isfinite(value)}
        super().log(known, start_time)

    @override
    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes a checkpoint, before it is moved to its place."""
        return str(Path(self.args.output_dir) / SAVING_FOLDER)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let Trainer save a checkpoint aside, then move it to its place in one step."""
        output_dir, name = Path(self.args.output_dir), f"checkpoint-{self.state.global_step}"
        self._unwrapped()._weight_conversions = []  # Trainer reads a model's own names, which the Hub's DINOv2 hasn't
        with write_aside(output_dir, self.accelerator) as aside:
            super()._save_checkpoint(model, trial)
            if self._stream is not None:
                self._stream.write_place(aside / name, self.is_world_process_zero())
        if self.state.best_model_checkpoint is not None:  # the path that Trainer gave it is aside
            self.state.best_model_checkpoint = str(output_dir / Path(self.state.best_model_checkpoint).name)
        if self.is_world_process_zero():
            self._run.write(aside / name)
            self.state.save_to_json(str(aside / name / STATE_FILE))
            publish_checkpoint(aside / name, output_dir / name)
            rotate_checkpoints(str(output_dir), self.args.save_total_limit, self.state.best_model_checkpoint)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and processor. The run's result, for which no folder is given, appears only once all is written.
        Every process must call this."""
        if output_dir is not None:
            super().save_model(output_dir, _internal_call=True)
            return
        self._unwrapped().__dict__.pop("_weight_conversions", None)  # the result gets the Hub's names
        with write_aside(Path(self.args.output_dir), self.accelerator) as aside:
            if self.is_fsdp_enabled:
                weights = self.accelerator.get_state_dict(self.model)  # gathered in the main process's memory
                if self.is_world_process_zero() and self._unwrapped() is self.accelerator.unwrap_model(self.model):
                    write_unsharded(self._unwrapped(), weights, self.processing_class, aside)
                elif self.is_world_process_zero():
                    self._save(str(aside), state_dict=weights)  # adapters
            else:
                super().save_model(str(aside), _internal_call=True)
        if self.is_world_process_zero():
            self._run.write(aside)
            self.state.save_to_json(str(aside / STATE_FILE))
            publish_result(aside, Path(self.args.output_dir))

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: TRL's card would overwrite the checkpoint's own, which says more."""

    @override
    def _send_telemetry(self) -> None:
        """Do nothing: training runs are private."""
