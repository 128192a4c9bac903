"""TRL's trainer with our batches, loss, learning rates by module, measurements and checkpoints."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import TorchDynamoPlugin
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import TrainerControl
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import SFTTrainer
from typing_extensions import override

from common.errors import UserError
from conversations.measured import row_lengths
from conversations.tokens import IGNORED
from diagnostics.parts import find_decoder
from diagnostics.tokens import attended_tokens
from training.batches import Batches
from training.checkpoints import (
    SAVING_FOLDER,
    STATE_FILE,
    publish_checkpoint,
    publish_result,
    write_aside,
    write_unsharded,
)
from training.compiling import compile_layers
from training.key_alignment import KeyAlignment
from training.loss import gradient_alone, head_on_supervised, supervised
from training.monitor import ConsoleTable, InterfaceMonitor, MetricsFile
from training.rehearsal import largest_batch, rehearsal
from training.run import Run
from training.stages import ModuleGroup, base_model
from training.streams import PLACE, StreamBatches


# What wrappers put into parameter names: PEFT, and FSDP's activation checkpointing.
WRAPPERS = ("base_model.model.", "_checkpoint_wrapped_module.")


class NormLlavaTrainer(SFTTrainer):
    """Trains a model that [`~training.stages.prepare_stage`] has prepared.

    Methods stand in the order in which training calls them, each with its helpers behind it. Where one overrides TRL's
    or Trainer's, its docstring says what would happen without.

    Args:
        model: The model, or the `PeftModel` around it.
        groups: What `prepare_stage` returned: learning rates and names of the modules.
        run: The run's record, written into each checkpoint and with the result.
        sampler: Deals batches of padded or packed rows to the processes; `None` for a stream.
        stream: The batches of a stream; a resumed run continues where it was.
        clip_by_module: Clip the gradient of each module to `max_grad_norm` instead of the whole gradient.
        eval_sampler: Deals the batches of held-out rows.
        key_alignment: The losses on the decoder's keys, if there are any.
        kwargs: As for [`SFTTrainer`].
    """

    control: TrainerControl

    def __init__(
        self,
        model: nn.Module,
        groups: list[ModuleGroup],
        run: Run,
        sampler: Batches | None = None,
        stream: StreamBatches | None = None,
        clip_by_module: bool = False,
        eval_sampler: Batches | None = None,
        key_alignment: KeyAlignment | None = None,
        **kwargs: Any,
    ) -> None:
        # Only names: sharding replaces parameters, and unsharded ones referenced here would stay on the device.
        self._module_of = {name: group.name for group in groups for name in group.parameters}
        self._rates = {group.name: group.learning_rate for group in groups if group.learning_rate is not None}
        self._run = run
        self._sampler = sampler
        self._stream = stream
        self._clip_by_module = clip_by_module
        self._eval_sampler = eval_sampler
        self._key_alignment = key_alignment
        # Of this process, since they were last added to the state.
        self._num_new_tokens = 0
        # By module, before clipping.
        self._grad_norms: dict[str, torch.Tensor] = {}

        with kept_dtypes(model):
            super().__init__(model=model, **kwargs)

        if stream is not None:
            self.args.ignore_data_skip = True  # the stream itself resumes where it was

        fsdp_plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if fsdp_plugin is not None and fsdp_plugin.mixed_precision_policy is not None:
            # Otherwise FSDP2 rounds each loss to bfloat16.
            policy = dataclasses.replace(fsdp_plugin.mixed_precision_policy, output_dtype=None)
            fsdp_plugin.mixed_precision_policy = policy

        # In a notebook Trainer's default is another class than in a terminal.
        self.remove_callback(transformers.trainer.DEFAULT_PROGRESS_CALLBACK)
        self.remove_callback(PrinterCallback)
        self._monitor = InterfaceMonitor(self._unwrapped(), self.processing_class)
        self.add_callback(self._monitor)
        self.add_callback(ConsoleTable())
        self.add_callback(MetricsFile(Path(self.args.output_dir) / "metrics.jsonl"))

    @override
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Tell accelerate not to compile: it would compile the whole model, which breaks into dozens of graphs."""
        return super()._build_accelerator_args(**kwargs) | {"dynamo_plugin": TorchDynamoPlugin(backend="no")}

    @override
    def get_train_dataloader(self) -> DataLoader:
        """The batches as `sampler` or `stream` deal them: accelerate would deal them among the processes again."""
        if self._stream is not None:
            return self._stream.loader()
        assert self._sampler is not None
        return self._data_loader(self.train_dataset, self._sampler)

    def _data_loader(self, rows: Dataset, batches: Batches) -> DataLoader:
        return DataLoader(
            rows,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=self.args.dataloader_persistent_workers,
        )

    @override
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        """Compile the layers where asked, and rehearse, once a resumed run has its weights and states.

        Trainer has no callback between loading a checkpoint and the first step.
        """
        # A resumed run logs and saves at the intervals of this start, not at those that its checkpoint brings.
        self.state.compute_steps(self.args, max_steps)

        layers = list(find_decoder(self._unwrapped()).layers)  # before FSDP puts a wrapper around each
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.args.torch_compile:
            compile_layers(layers, self.args.torch_compile_backend)

        if self._sampler is not None:
            self._rehearse(model, self._sampler)
        return model, loader

    def _rehearse(self, model: nn.Module, sampler: Batches) -> None:
        """Take passes of the batch with most tokens and of the one with most pictures; see training/rehearsal.py."""
        is_padded = not self.data_collator.packed
        most_tokens = largest_batch(sampler, row_lengths(self.train_dataset), is_padded)
        most_images = largest_batch(sampler, row_lengths(self.train_dataset, "num_images"), is_padded=False)

        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        with rehearsal(model, self.optimizer.optimizer, self.args.device):
            for rows in (most_tokens, most_images):
                # With more passes a step, a pass does find older gradients.
                if self.args.gradient_accumulation_steps == 1:
                    model.zero_grad()
                batch = self.data_collator([self.train_dataset[row] for row in rows])
                super().training_step(model, batch)

        # Nothing of it is logged.
        self._metrics["train"].clear()
        if self._key_alignment is not None:
            self._key_alignment.collect(self._sum_over_processes)

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Split the optimizer's parameter groups by module: Trainer has one learning rate for all of them."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)

        # The common rate first, or else the highest: it is the one that Trainer logs as `learning_rate`.
        common = self.args.learning_rate
        names = sorted(self._rates, key=lambda name: (self._rates[name] != common, -self._rates[name]))
        parameters_of = self._trained_parameters(model or self.model)

        groups = []
        for name in names:
            members = set(parameters_of[name])
            for group in optimizer.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter in members]
                if parameters:
                    groups.append({**group, "params": parameters, "lr": self._rates[name], "module": name})
        optimizer.param_groups = groups
        return optimizer

    def _trained_parameters(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """The trained parameters by module. Found by name, as sharding replaces parameters."""
        modules: dict[str, list[nn.Parameter]] = {name: [] for name in self._rates}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for wrapper in WRAPPERS:
                    name = name.replace(wrapper, "")
                modules[self._module_of[name]].append(parameter)
        return modules

    @override
    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """Start the sampler's epoch, unless all steps are done: Trainer would take one more of a finished run."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(epoch=epoch, **kwargs)

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A forward and backward pass, whose tokens are counted and whose loss is checked.

        Trainer would count padding, and train on with a loss that is not finite.

        Raises:
            UserError: if the loss is not finite.
        """
        if self._stream is not None:
            self._stream.trained_on(inputs.pop(PLACE))

        # Without padding and blank pictures; a batch without labels is one without rows.
        if (inputs["labels"] != IGNORED).any():
            self._num_new_tokens += int(attended_tokens(inputs).sum())

        loss = super().training_step(model, inputs, *args, **kwargs)
        self._check_finite("loss", loss.item())
        return loss

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise UserError(
                f"The {name} is {value} in step {self.state.global_step + 1}; lower the learning rate, or look at "
                "the rows of this step."
            )

    @override
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """TRL's loss at the supervised tokens alone, and in training the gradient of the losses on keys.

        TRL's `compute_loss` calls the model, whose `forward` it has replaced: the head is applied in tiles without
        ever holding all logits, the sum of the tokens' losses is divided by the step's number of tokens, and
        multiplied by that of processes, which DDP and FSDP2 average over. Without Triton it would score every
        position, image tokens included.
        """
        base = self._unwrapped()
        head = base.get_output_embeddings()
        if model.training and isinstance(head, FSDPModule):
            # TRL would gather a sharded head past FSDP2, so that each process keeps its own gradient.
            head.unshard()

        places, tokens = supervised(inputs["labels"])
        with head_on_supervised(base, places):
            loss = super().compute_loss(model, {**inputs, "shift_labels": tokens[None]}, *args, **kwargs)

        if self._key_alignment is None or not model.training:
            return loss
        # The mean over the passes of a step, and over processes, whose gradients are averaged.
        penalty = self._key_alignment.penalty().to(loss.device) / self.current_gradient_accumulation_steps
        # Its gradient alone, so that the losses of runs with and without it can be compared.
        return loss + gradient_alone(penalty)

    @override
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Measure the gradient by module, then clip: Trainer measures and clips the whole gradient alone.

        Returns:
            The norm of the whole gradient before clipping.

        Raises:
            UserError: if it is not finite. In float16 the scaler skips such a step.
        """
        self.accelerator.unscale_gradients()
        parameters_of = self._trained_parameters(self.accelerator.unwrap_model(model))
        self._grad_norms = {name: gradient_norm(parameters) for name, parameters in parameters_of.items()}
        whole_norm = torch.stack(list(self._grad_norms.values())).norm()

        for name, parameters in parameters_of.items():
            norm = self._grad_norms[name] if self._clip_by_module else whole_norm
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)

        if self.accelerator.scaler is None:
            self._check_finite("gradient's norm", float(whole_norm))
        return whole_norm

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step with its measurements, and without what Trainer counts with padding or from 0 after a resume."""
        self._add_up_tokens()
        if "loss" in logs:
            logs |= self._measurements(logs["learning_rate"])

        # TRL's own count, and of a stream Trainer's, begins at 0 again where a run is resumed.
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        if self._stream is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps

        # They count padding, and packed rows as samples.
        logs.pop("total_flos", None)
        logs.pop("train_samples_per_second", None)
        # A step that float16's scaler skipped has no gradient norm, and JSON no infinity.
        finite = {name: value for name, value in logs.items() if "grad_norm" not in name or math.isfinite(value)}
        super().log(finite, start_time)

    def _add_up_tokens(self) -> None:
        """Add the tokens that all processes have trained on to the state, which checkpoints keep."""
        new_tokens = self._sum_over_processes(torch.tensor(self._num_new_tokens))
        self.state.num_input_tokens_seen += int(new_tokens)
        self._num_new_tokens = 0

    def _measurements(self, logged_rate: float) -> dict[str, float]:
        """Rates and gradient norms by module, and what the monitor and the losses on keys have measured."""
        # The scheduler has stepped already; these are the rates of the step that is logged, as `logged_rate` is.
        first_rate = self._rates[self.optimizer.param_groups[0]["module"]]
        scale = logged_rate / (first_rate or 1.0)

        measurements = {f"learning_rate/{name}": rate * scale for name, rate in self._rates.items()}
        measurements |= {f"grad_norm/{name}": norm.item() for name, norm in self._grad_norms.items()}
        measurements |= self._monitor.collect(self._sum_over_processes)
        if self._key_alignment is not None:
            measurements |= self._key_alignment.collect(self._sum_over_processes)
        return measurements

    @override
    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The mean loss of the held-out rows' supervised tokens, also with a blank picture in place of every one.

        Logged as `eval_loss` and `eval_loss_blank`. Trainer's would be the mean over batches. The random state is
        restored, so that training doesn't notice.
        """
        device = self.args.device
        blank = self.data_collator.pixels([]).to(device)
        sums = torch.zeros(3, dtype=torch.float64)  # loss, loss with blank pictures, supervised tokens
        assert self._eval_sampler is not None

        self.model.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            for batch in self._data_loader(self.eval_dataset, self._eval_sampler):
                batch = self._prepare_inputs(batch)
                blanked = {**batch, "pixel_values": blank.expand_as(batch["pixel_values"])}
                sums[0] += self._summed_loss(batch)
                sums[1] += self._summed_loss(blanked)
                sums[2] += (batch["labels"] != IGNORED).sum().item()

        loss, loss_blank, num_tokens = self._sum_over_processes(sums).tolist()
        metrics = {"eval_loss": loss / num_tokens, "eval_loss_blank": loss_blank / num_tokens}
        self._metrics["eval"].clear()  # TRL's own, averaged over batches
        self.log(metrics)  # in eval mode still, or TRL would add what it has measured in training
        self.model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _summed_loss(self, batch: dict[str, Any]) -> float:
        """The sum of the losses of a batch's supervised tokens."""
        # TRL divides by this number, and multiplies by the number of processes, since DDP averages over them.
        num_items = self.accelerator.num_processes
        loss: Any = self.compute_loss(self.model, batch, num_items_in_batch=num_items)
        return loss.item()

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let Trainer save a checkpoint aside, then move it to its place in one step: a killed run leaves no half."""
        self._add_up_tokens()
        output_dir = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"

        self._unwrapped()._weight_conversions = []  # Trainer reads a model's own names, which the Hub's DINOv2 hasn't
        with write_aside(output_dir, self.accelerator) as aside:
            super()._save_checkpoint(model, trial)
            if self._stream is not None:
                self._stream.write_place(aside / name, self.is_world_process_zero())

        if self.state.best_model_checkpoint is not None:
            # The path that Trainer gave it is aside.
            self.state.best_model_checkpoint = str(output_dir / Path(self.state.best_model_checkpoint).name)
        if self.is_world_process_zero():
            self._run.write(aside / name)
            self.state.save_to_json(str(aside / name / STATE_FILE))
            publish_checkpoint(aside / name, output_dir / name)
            rotate_checkpoints(str(output_dir), self.args.save_total_limit, self.state.best_model_checkpoint)

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: TRL's card would overwrite the checkpoint's own, which says more."""

    @override
    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes a checkpoint before it is moved to its place."""
        return str(Path(self.args.output_dir) / SAVING_FOLDER)

    @override
    def _send_telemetry(self) -> None:
        """Do nothing: TRL would tell of each checkpoint, and training runs are private."""

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and processor. Every process must call this.

        The run's result, for which no folder is given, appears only once all is written, and whole under FSDP2 too:
        Trainer would write neither.
        """
        if output_dir is not None:
            super().save_model(output_dir, _internal_call=True)
            return

        self._unwrapped().__dict__.pop("_weight_conversions", None)  # the result gets the Hub's names
        with write_aside(Path(self.args.output_dir), self.accelerator) as aside:
            if self.is_fsdp_enabled:
                self._save_gathered(aside)
            else:
                super().save_model(str(aside), _internal_call=True)

        if self.is_world_process_zero():
            self._run.write(aside)
            self.state.save_to_json(str(aside / STATE_FILE))
            publish_result(aside, Path(self.args.output_dir))

    def _save_gathered(self, folder: Path) -> None:
        """Save what FSDP2 shards, gathered in the main process's memory."""
        weights = self.accelerator.get_state_dict(self.model)
        if not self.is_world_process_zero():
            return

        has_adapters = self._unwrapped() is not self.accelerator.unwrap_model(self.model)
        if has_adapters:
            self._save(str(folder), state_dict=weights)
        else:
            write_unsharded(self._unwrapped(), weights, self.processing_class, folder)

    def _unwrapped(self) -> Any:
        """The model without the wrappers of accelerate and PEFT."""
        return base_model(self.accelerator.unwrap_model(self.model))

    def _sum_over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        if self.accelerator.num_processes == 1:
            return sums
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum")


@contextmanager
def kept_dtypes(model: nn.Module) -> Iterator[None]:
    """Give trained parameters back the dtypes that they have before the block.

    TRL's constructor casts those of a quantized model to bfloat16, which loses small steps and most of the gain.
    """
    trained = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
    yield
    for parameter, data in trained.items():
        if parameter.dtype != data.dtype:
            parameter.data = data.to(parameter.device)


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradient of all `parameters` together, a scalar; over all shards if they are sharded."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        return norm.full_tensor()
    return norm
