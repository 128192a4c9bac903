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
from conversations.measured import integer_column, row_lengths
from conversations.tokens import IGNORED
from diagnostics.parts import find_decoder
from diagnostics.tokens import attended_tokens
from training.batches import Batches
from training.checkpoints import (
    SAVING_FOLDER,
    STATE_FILE,
    open_saving_folder,
    publish_checkpoint,
    publish_result,
    write_unsharded,
)
from training.compiling import compile_layers
from training.key_alignment import KeyAlignment
from training.loss import gradient_alone, head_at_positions, supervised_tokens
from training.monitor import ConsoleTable, InterfaceMonitor, MetricsFile
from training.rehearsal import largest_batch, rehearsal
from training.run import Run
from training.stages import ModuleGroup, base_model
from training.streams import PLACE, StreamBatches


# PEFT and FSDP's activation checkpointing put these parts into the names of the parameters that they wrap.
WRAPPER_NAME_PARTS = ("base_model.model.", "_checkpoint_wrapped_module.")


class NormLlavaTrainer(SFTTrainer):
    """Trains a model that [`~training.stages.prepare_stage`] has prepared.

    Methods stand in the order in which training calls them, each followed by its helpers. The docstring of a method
    that overrides TRL's or Trainer's says what the overridden method would do.

    Args:
        model: The model, or the `PeftModel` around it.
        groups: The modules of the model with their learning rates, as `prepare_stage` returns them.
        run: The run's record, which is written into each checkpoint and beside the final model.
        sampler: This process's batches of padded or packed rows; `None` if the rows are a stream.
        stream: The batches of a stream; `None` if the rows are not a stream.
        clip_by_module: Whether to clip the gradient of each module to `max_grad_norm`, instead of clipping the whole
            gradient to it.
        eval_sampler: This process's batches of held-out rows.
        key_alignment: The losses on the decoder's keys; `None` if the run has none.
        kwargs: Arguments of [`SFTTrainer`].
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
        # The module of each parameter, both by name. The parameters themselves are not kept: FSDP2 replaces them by
        # shards, and a reference to a whole parameter would keep it on the device.
        self._module_names: dict[str, str] = {}
        # The learning rate that the run gives to each module that is trained.
        self._rates: dict[str, float] = {}
        # The learning rate of each module in the last step. The scheduler changes it from step to step.
        self._step_rates: dict[str, float] = {}
        for group in groups:
            for parameter_name in group.parameters:
                self._module_names[parameter_name] = group.name
            if group.learning_rate is not None:
                self._rates[group.name] = group.learning_rate

        self._run = run
        self._sampler = sampler
        self._stream = stream
        self._clip_by_module = clip_by_module
        self._eval_sampler = eval_sampler
        self._key_alignment = key_alignment
        # The number of tokens that this process has trained on since it last added them to the trainer's state.
        self._num_new_tokens = 0
        # The last step's gradient norm of each module, before clipping.
        self._grad_norms: dict[str, torch.Tensor] = {}

        with keep_dtypes(model):
            super().__init__(model=model, **kwargs)

        if stream is not None:
            self.args.ignore_data_skip = True  # a resumed stream itself goes on at the row where it stopped

        fsdp_plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if fsdp_plugin is not None and fsdp_plugin.mixed_precision_policy is not None:
            # With an output_dtype, FSDP2 would round each loss to bfloat16.
            policy = dataclasses.replace(fsdp_plugin.mixed_precision_policy, output_dtype=None)
            fsdp_plugin.mixed_precision_policy = policy

        # Our callbacks replace Trainer's progress bar, whose class differs between notebooks and terminals.
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
        """A loader of this process's batches.

        Trainer would hand the loader to accelerate, which would split the batches among the processes once more.
        """
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
        """Compile the layers if the run asks for it, and rehearse the largest batches.

        Both must come after a resumed run has loaded its checkpoint and before the first step, where Trainer calls no
        callback.
        """
        # A resumed run logs and saves at the intervals that it is given now, not at those of its checkpoint.
        self.state.compute_steps(self.args, max_steps)

        # The layers are listed before FSDP's activation checkpointing wraps them, since they are compiled inside it.
        layers = list(find_decoder(self._unwrapped()).layers)
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if self.args.torch_compile:
            compile_layers(layers, self.args.torch_compile_backend)

        if self._sampler is not None:
            self._rehearse(model, self._sampler)
        return model, loader

    def _rehearse(self, model: nn.Module, sampler: Batches) -> None:
        """Run the batches with the most tokens and with the most tiles once, so that lack of memory shows now."""
        is_padded = not self.data_collator.packed
        most_tokens = largest_batch(sampler, row_lengths(self.train_dataset), is_padded)
        most_tiles = largest_batch(sampler, integer_column(self.train_dataset, "num_tiles"), is_padded=False)

        # A training step reads this number, which Trainer sets only in its loop.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        optimizer = self.optimizer.optimizer  # without accelerate's wrapper
        with rehearsal(model, optimizer, self.args.device):
            for row_numbers in (most_tokens, most_tiles):
                # If training accumulates gradients over several passes, a pass needs memory for the gradients of
                # earlier passes too. So gradients are freed here only if a step has a single pass.
                if self.args.gradient_accumulation_steps == 1:
                    model.zero_grad()
                batch = self.data_collator([self.train_dataset[number] for number in row_numbers])
                super().training_step(model, batch)  # our own would count tokens, and stop if the loss isn't finite

        # The log must not contain what TRL and the losses on keys have measured here.
        self._metrics["train"].clear()
        if self._key_alignment is not None:
            self._key_alignment.collect(self._sum_over_processes)

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """An optimizer with parameter groups by module: Trainer would give all parameters the same learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)

        # Trainer logs the rate of the first group as `learning_rate`. So modules with the common rate come first, and
        # then those with the highest rates.
        common_rate = self.args.learning_rate
        highest_first = sorted(self._rates, key=lambda module: self._rates[module], reverse=True)
        with_common_rate = [module for module in highest_first if self._rates[module] == common_rate]
        with_own_rate = [module for module in highest_first if self._rates[module] != common_rate]

        if model is None:
            model = self.model
        trained_parameters = self._trained_parameters(model)

        # Trainer has made two groups, one with weight decay and one without. Each module gets its part of both.
        groups = []
        for module in with_common_rate + with_own_rate:
            members = set(trained_parameters[module])
            for group in optimizer.param_groups:
                parameters = [parameter for parameter in group["params"] if parameter in members]
                if parameters:
                    groups.append({**group, "params": parameters, "lr": self._rates[module], "module": module})
        optimizer.param_groups = groups
        return optimizer

    def _trained_parameters(self, model: nn.Module) -> dict[str, list[nn.Parameter]]:
        """The trained parameters of each module, or this process's shards of them."""
        parameters: dict[str, list[nn.Parameter]] = {module: [] for module in self._rates}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for part in WRAPPER_NAME_PARTS:
                    name = name.replace(part, "")
                module = self._module_names[name]
                parameters[module].append(parameter)
        return parameters

    @override
    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """Run an epoch, unless all steps are done: Trainer would add a step to a finished run that is resumed."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(epoch=epoch, **kwargs)

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a forward and backward pass.

        Trainer would count padding as tokens, and would go on training with a loss that is not finite.

        Returns:
            The loss of the pass.

        Raises:
            UserError: if the loss is not finite.
        """
        if self._stream is not None:
            self._stream.record_trained(inputs.pop(PLACE))

        # The scheduler sets the optimizer's rates of the next step before the current step is logged.
        self._step_rates = {group["module"]: group["lr"] for group in self.optimizer.param_groups}

        # Every row has supervised tokens, so a batch without supervised tokens has no rows. The collator has given
        # such a batch a token of padding, which isn't counted.
        has_rows = (inputs["labels"] != IGNORED).any()
        if has_rows:
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
        """TRL's loss of the supervised tokens; in training with the gradient of the losses on keys.

        TRL's loss is the sum over the tokens of the batch, divided by the number of supervised tokens in the step, and
        multiplied by the number of processes, since DDP and FSDP2 average over processes.

        TRL has replaced the model's `forward` by one that applies the head to one tile of tokens after the other, so
        that all logits never exist at once. Without Triton, TRL would compute logits at every position, those of image
        tokens included; here the head gets only the positions before supervised tokens.
        """
        unwrapped = self._unwrapped()
        head = unwrapped.get_output_embeddings()
        if model.training and isinstance(head, FSDPModule):
            # TRL would gather a sharded head by other means than FSDP2's own, after which FSDP2 would not add up the
            # gradients of the processes.
            head.unshard()

        positions, next_tokens = supervised_tokens(inputs["labels"])
        inputs = {**inputs, "shift_labels": next_tokens[None]}  # [1, num_supervised]
        with head_at_positions(unwrapped, positions):
            loss = super().compute_loss(model, inputs, *args, **kwargs)

        if self._key_alignment is None or not model.training:
            return loss
        # A step adds up the gradients of its passes. The division makes the step's penalty the mean over its passes.
        penalty = self._key_alignment.penalty().to(loss.device) / self.current_gradient_accumulation_steps
        # Only the penalty's gradient is added, so that logged losses of runs with and without key losses can be
        # compared.
        return loss + gradient_alone(penalty)

    @override
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients of a step, after their norms have been measured by module.

        Trainer measures and clips only the whole gradient.

        Returns:
            The norm of the whole gradient before clipping.

        Raises:
            UserError: if that norm is not finite, except in float16, where the scaler skips such a step.
        """
        self.accelerator.unscale_gradients()  # float16's scaler has scaled them
        trained_parameters = self._trained_parameters(self.accelerator.unwrap_model(model))
        for module, parameters in trained_parameters.items():
            self._grad_norms[module] = gradient_norm(parameters)
        whole_norm = torch.stack(list(self._grad_norms.values())).norm()

        for module, parameters in trained_parameters.items():
            norm = self._grad_norms[module] if self._clip_by_module else whole_norm
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)

        uses_scaler = self.accelerator.scaler is not None
        if not uses_scaler:
            self._check_finite("gradient's norm", float(whole_norm))
        return whole_norm

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step with our measurements, and without Trainer's figures that are wrong here.

        Trainer and TRL would log figures that count padding, or that begin at 0 again when a run is resumed.
        """
        self._add_up_tokens()
        if "loss" in logs:  # not in the logs of an evaluation or of the whole run
            logs |= self._measurements()

        # In a resumed run TRL's count of tokens begins at 0, and so does Trainer's epoch if the rows are a stream.
        self._metrics["train"]["num_tokens"] = [self.state.num_input_tokens_seen]
        if self._stream is not None:
            self.state.epoch = self.state.global_step / self.state.max_steps

        # `total_flos` counts padding, and `train_samples_per_second` takes a packed row for a single sample.
        logs.pop("total_flos", None)
        logs.pop("train_samples_per_second", None)
        # In a step that float16's scaler skipped, gradient norms are infinite, which JSON can't express.
        for name in list(logs):
            if "grad_norm" in name and not math.isfinite(logs[name]):
                del logs[name]
        super().log(logs, start_time)

    def _add_up_tokens(self) -> None:
        """Add the number of tokens since the last call to the trainer's state, summed over processes.

        Checkpoints keep the state, so that a resumed run goes on counting.
        """
        new_tokens = self._sum_over_processes(torch.tensor(self._num_new_tokens))
        self.state.num_input_tokens_seen += int(new_tokens)
        self._num_new_tokens = 0

    def _measurements(self) -> dict[str, float]:
        """Learning rates and gradient norms by module, norms at the decoder's input, and the losses on keys."""
        measurements = {f"learning_rate/{name}": rate for name, rate in self._step_rates.items()}
        measurements |= {f"grad_norm/{name}": norm.item() for name, norm in self._grad_norms.items()}
        measurements |= self._monitor.collect(self._sum_over_processes)
        if self._key_alignment is not None:
            measurements |= self._key_alignment.collect(self._sum_over_processes)
        return measurements

    @override
    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean loss of the held-out rows' supervised tokens, with their pictures and with blank pictures.

        The two losses are returned and logged as `eval_loss` and `eval_loss_blank`. Trainer would log a mean over
        batches. The random state is restored, so that training goes on as it would without an evaluation.
        """
        device = self.args.device
        cuda_devices = [device] if device.type == "cuda" else []
        blank = self.data_collator.process_images([]).to(device)  # [1, 3, height, width]
        sums = torch.zeros(3, dtype=torch.float64)  # loss, loss with blank pictures, number of supervised tokens
        assert self._eval_sampler is not None

        self.model.eval()
        with torch.random.fork_rng(cuda_devices):
            for batch in self._data_loader(self.eval_dataset, self._eval_sampler):
                batch = self._prepare_inputs(batch)
                blanked = {**batch, "pixel_values": blank.expand_as(batch["pixel_values"])}
                sums[0] += self._summed_loss(batch)
                sums[1] += self._summed_loss(blanked)
                sums[2] += (batch["labels"] != IGNORED).sum().item()

        loss, loss_blank, num_tokens = self._sum_over_processes(sums).tolist()
        metrics = {"eval_loss": loss / num_tokens, "eval_loss_blank": loss_blank / num_tokens}
        self._metrics["eval"].clear()  # TRL's own metrics are means over batches
        self.log(metrics)  # before model.train(): in training mode TRL would add its metrics of training
        self.model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _summed_loss(self, batch: dict[str, Any]) -> float:
        """The sum of the losses of a batch's supervised tokens."""
        # TRL divides the sum by `num_items_in_batch`, and multiplies it by the number of processes. With this number
        # for both, the sum stays as it is.
        num_processes = self.accelerator.num_processes
        loss: Any = self.compute_loss(self.model, batch, num_items_in_batch=num_processes)
        return loss.item()

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint in a separate folder, and rename it when it is complete.

        Trainer writes a checkpoint in its place, where a killed run leaves it half-written.
        """
        self._add_up_tokens()
        output_dir = Path(self.args.output_dir)
        name = f"checkpoint-{self.state.global_step}"

        # transformers converts the names of saved weights to the Hub's names, which for DINOv2 differ from the names
        # in the model. Trainer loads a checkpoint by the names in the model, so conversions are turned off.
        self._unwrapped()._weight_conversions = []
        with open_saving_folder(output_dir, self.accelerator) as saving_folder:
            super()._save_checkpoint(model, trial)
            if self._stream is not None:
                self._stream.write_place(saving_folder / name, self.is_world_process_zero())

        if self.state.best_model_checkpoint is not None:
            # Trainer has set this to a path in the saving folder, which the checkpoint is about to leave.
            self.state.best_model_checkpoint = str(output_dir / Path(self.state.best_model_checkpoint).name)
        if self.is_world_process_zero():
            self._run.write(saving_folder / name)
            self.state.save_to_json(str(saving_folder / name / STATE_FILE))
            publish_checkpoint(saving_folder / name, output_dir / name)
            rotate_checkpoints(str(output_dir), self.args.save_total_limit, self.state.best_model_checkpoint)

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: TRL's model card would overwrite the one that is written with the checkpoint."""

    @override
    def _get_output_dir(self, trial: Any) -> str:
        """The folder in which Trainer writes a checkpoint, before we move it to its place."""
        return str(Path(self.args.output_dir) / SAVING_FOLDER)

    @override
    def _send_telemetry(self) -> None:
        """Do nothing: TRL would send telemetry at each checkpoint, and training runs are private."""

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and processor. Every process must call this.

        With `output_dir`, which Trainer gives for a checkpoint, this is Trainer's own method. Without it, this saves
        the final model of the run: FSDP2's shards are gathered, and the model is written into a separate folder and
        published only when it is complete. Trainer would write it in its place, and sharded.
        """
        if output_dir is not None:
            super().save_model(output_dir, _internal_call=True)
            return

        # The final model gets the Hub's names again, which `_save_checkpoint` has turned off.
        self._unwrapped().__dict__.pop("_weight_conversions", None)
        with open_saving_folder(Path(self.args.output_dir), self.accelerator) as saving_folder:
            if self.is_fsdp_enabled:
                self._save_gathered(saving_folder)
            else:
                super().save_model(str(saving_folder), _internal_call=True)

        if self.is_world_process_zero():
            self._run.write(saving_folder)
            self.state.save_to_json(str(saving_folder / STATE_FILE))
            publish_result(saving_folder, Path(self.args.output_dir))

    def _save_gathered(self, folder: Path) -> None:
        """Gather the weights that FSDP2 has sharded, in the memory of the main process, which saves them."""
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
        """The elementwise sum of the tensors that the processes give. Every process must call this."""
        if self.accelerator.num_processes == 1:
            return sums
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum")


@contextmanager
def keep_dtypes(model: nn.Module) -> Iterator[None]:
    """A block after which the trained parameters have the dtypes and values that they had before the block.

    TRL's constructor casts the trained parameters of a quantized model to bfloat16, whose rounding loses small steps,
    and most of what the norm's gain learns.
    """
    data_before = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
    yield
    for parameter, data in data_before.items():
        if parameter.dtype != data.dtype:
            parameter.data = data.to(parameter.device)


def gradient_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """L2 norm of the gradient of all `parameters` together, a scalar. It includes the shards of other processes."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):
        return norm.full_tensor()
    return norm
