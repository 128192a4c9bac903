"""Trains a NormLlava: learning rates and clipping by module, measures, checkpoints that are whole."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import rotate_checkpoints
from typing_extensions import override

from conversations.measured import row_lengths
from conversations.tokens import IGNORED
from diagnostics.tokens import attended_tokens
from training.checkpoints import STATE_FILE, check_weights, publish, save, write_aside, write_unsharded
from training.flops import MfuMeter
from training.held_out import Answer
from training.loss import SupervisedTrainer
from training.monitor import (
    ConsoleTable,
    EpochSetter,
    InterfaceMonitor,
    MetricsFile,
    StepsFile,
    StreamEpoch,
    total_norm,
)
from training.rehearsal import largest_batch, rehearsal
from training.run import Progress, Run
from training.stages import ModuleGroup
from training.streams import PLACE, StreamBatches


# What wrappers put into parameter names: PEFT, and FSDP's activation checkpointing.
WRAPPERS = ("base_model.model.", "_checkpoint_wrapped_module.")


class NormLlavaTrainer(SupervisedTrainer):
    """Trains a model that [`~training.stages.prepare_stage`] has prepared.

    Args:
        model: The model, or the `PeftModel` around it.
        groups: What `prepare_stage` returned: learning rates and names of the modules.
        run: The run's record, written into each checkpoint and with the result.
        sampler: Deals batches of padded or packed rows to the processes; `None` for a stream.
        stream: The batches of a stream; a resumed run continues where it was.
        mfu: Measures how much of the devices' peak is reached.
        clip_by_module: Clip the gradient of each module to `max_grad_norm` instead of the whole gradient.
        kwargs: As for [`SupervisedTrainer`].
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ModuleGroup],
        run: Run,
        sampler: BatchRebalanceSampler | None = None,
        stream: StreamBatches | None = None,
        mfu: MfuMeter | None = None,
        clip_by_module: bool = False,
        **kwargs: Any,
    ) -> None:
        # Only names: sharding replaces parameters, and unsharded ones referenced here would stay on the device.
        self._modules = {name: group.name for group in groups for name in group.parameters}
        self._rates = {group.name: group.learning_rate for group in groups if group.learning_rate is not None}
        self._run = run
        self._sampler, self._stream = sampler, stream
        self._clip_by_module, self._mfu = clip_by_module, mfu
        # Sum of the losses of all steps, and tokens trained on: of this process, and of all before this start.
        self._seen, self._seen_before = torch.zeros(2, dtype=torch.float64), Progress(num_tokens=0, loss_sum=0.0)
        # TRL casts a quantized model's trained parameters to bfloat16, which loses small steps and most of the gain.
        masters = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
        super().__init__(model=model, **kwargs)
        for parameter, master in masters.items():
            if parameter.dtype != master.dtype:
                parameter.data = master.to(parameter.device)
        if self.args.max_grad_norm == 0 and not self.is_deepspeed_enabled:
            self.args.max_grad_norm = math.inf  # with 0 Trainer does not check gradients at all
        self._monitor = InterfaceMonitor(self._unwrapped(), self.processing_class)
        self.add_callback(self._monitor)
        self.add_callback(MetricsFile(Path(self.args.output_dir) / "metrics.jsonl"))
        self._answers = StepsFile(Path(self.args.output_dir) / "answers.jsonl")
        if self._questions is not None:
            self.add_callback(self._answers)
        # In a notebook the default is another class than in a terminal.
        for printer in (transformers.trainer.DEFAULT_PROGRESS_CALLBACK, PrinterCallback):
            self.remove_callback(printer)
        self._console = ConsoleTable(shows_mfu=mfu is not None)
        self.add_callback(self._console)
        if sampler is not None:
            self.add_callback(EpochSetter(sampler))
        if stream is not None:
            self.add_callback(StreamEpoch())
            self.args.ignore_data_skip = True  # the stream itself resumes where it was

    @override
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._sampler

    @override
    def get_train_dataloader(self) -> DataLoader:
        """The training data loader; for a stream that of `StreamBatches`, which deals rows to processes itself."""
        return super().get_train_dataloader() if self._stream is None else self._stream.loader(self.args)

    @override
    def train(self, resume_from_checkpoint: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from a checkpoint if one is named.

        Raises:
            ValueError: if the checkpoint's weights are not those of the model.
        """
        if resume_from_checkpoint is not None:
            check_weights(Path(resume_from_checkpoint), self.accelerator.unwrap_model(self.model))
            self._seen_before = Run.read(Path(resume_from_checkpoint)).progress or self._seen_before
            self._console.tokens_before = self._seen_before.num_tokens
            self.args.eval_on_start = False  # done at the first start
        return super().train(resume_from_checkpoint, *args, **kwargs)

    @override
    def _init_training_state(self, max_steps: int, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """With this run's intervals of logging, evaluation and saving: a checkpoint's state brings those of before."""
        done = super()._init_training_state(max_steps, *args, **kwargs)
        self.state.compute_steps(self.args, max_steps)
        return done

    @override
    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> tuple[nn.Module, DataLoader]:
        """As Trainer does it; then rehearse, with the weights and states of a resumed run in their places."""
        model, dataloader = super()._prepare_for_training(*args, **kwargs)
        if self._sampler is not None and not self.is_deepspeed_enabled:
            lengths = row_lengths(self.train_dataset)
            self._rehearse(model, largest_batch(self._sampler, lengths, self.data_collator.packed))
        return model, dataloader

    def _rehearse(self, model: nn.Module, rows: list[int]) -> None:
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        with rehearsal(model, self.optimizer.optimizer, self.args.device):
            batch = self.data_collator([self.train_dataset[row] for row in rows])
            model.train()
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._prepare_inputs(batch))
            self.accelerator.backward(loss)
            del loss
        self._metrics["train"].clear()
        if self._key_alignment is not None:
            self._key_alignment.collect(self._sum_over_processes)

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, its parameter groups split by module, each with its learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        modules = {parameter: module for module, parameter in self._by_module(model or self.model)}
        groups = []
        # The common rate first: it is the one that Trainer logs as `learning_rate`.
        for name in sorted(self._rates, key=lambda name: self._rates[name] != self.args.learning_rate):
            for group in optimizer.param_groups:
                parameters = [parameter for parameter in group["params"] if modules[parameter] == name]
                if parameters:
                    groups.append({**group, "params": parameters, "lr": self._rates[name], "module": name})
        optimizer.param_groups = groups
        return optimizer

    def _by_module(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters with the names of their modules. By name, as sharding replaces parameters."""
        named = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for wrapper in WRAPPERS:
                    name = name.replace(wrapper, "")
                named.append((self._modules[name], parameter))
        return named

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A forward and backward pass.

        Returns:
            The loss without what [`KeyAlignment`] adds, so that runs with and without it are comparable.

        Raises:
            FloatingPointError: if the loss is not finite.
        """
        if self._stream is not None:
            self._stream.trained_on(inputs.pop(PLACE))
        # A batch without labels is one without rows.
        num_tokens = int(attended_tokens(inputs).sum() * (inputs["labels"] != IGNORED).any())
        if self._mfu is not None:
            self._mfu.begin()
        loss = super().training_step(model, inputs, *args, **kwargs)
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"The loss is {loss.item()} in step {self.state.global_step + 1}; lower the learning rate, or look at "
                "the rows of this step."
            )
        if self._key_alignment is not None:
            loss = loss - self._penalty
        self._seen += torch.tensor([loss.item(), num_tokens], dtype=torch.float64)
        if self._mfu is not None:
            self._mfu.add(inputs)
        return loss

    @override
    def note_answers(self, answers: list[Answer]) -> None:
        """Write all answers to answers.jsonl, and some to the terminal."""
        self._console.answers = answers
        self._answers.append(self.state, map(dataclasses.asdict, answers))

    @override
    def leave_out(self, seconds: float) -> None:
        """Don't count seconds that have just passed as training, in tokens/s, time left and MFU."""
        self._console.seconds_left_out += seconds
        if self._mfu is not None:
            self._mfu.leave_out(seconds)

    @override
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Measure the modules' gradient norms, then clip, all together or module by module.

        Returns:
            Norm of the whole gradient before clipping.
        """
        scaler = self.accelerator.scaler  # float16's loss scaler
        # DeepSpeed does its own clipping and leaves no gradients to measure.
        if (self._monitor.active or self._clip_by_module) and not self.is_deepspeed_enabled:
            by_module: dict[str, list[nn.Parameter]] = {}
            for module, parameter in self._by_module(self.accelerator.unwrap_model(model)):
                if parameter.grad is not None:
                    by_module.setdefault(module, []).append(parameter)
            if self._clip_by_module:
                self.accelerator.unscale_gradients()
            scale = 1.0 if scaler is None or self._clip_by_module else scaler.get_scale()
            norms = {module: total_norm(parameters) / scale for module, parameters in by_module.items()}
            self._monitor.gradients = norms
        if self._clip_by_module:
            for module, parameters in by_module.items():
                nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norms[module])
            norm = torch.stack(list(norms.values())).norm()
        else:
            norm = super()._clip_grad_norm(model)
        if scaler is None and not math.isfinite(float(norm)):  # a scaler skips such a step itself
            raise FloatingPointError(
                f"The gradient's norm is {float(norm)} in step {self.state.global_step + 1}; lower the learning rate, "
                "or look at the rows of this step."
            )
        return norm

    def _progress(self) -> Progress:
        """Tokens and losses of the run since its first start. Every process must call this."""
        seen = self._seen
        if self.accelerator.num_processes > 1:
            seen = self._sum_over_processes(seen)
        loss_sum, num_tokens = seen.tolist()
        return Progress(
            num_tokens=self._seen_before.num_tokens + round(num_tokens),
            loss_sum=self._seen_before.loss_sum + loss_sum / self.accelerator.num_processes,
        )

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss with the step's measurements; sums are over the whole run, also after a resume. Gradient norms
        that are not finite are left out."""
        if "loss" in logs:
            # The scheduler has stepped already; these are the rates of the step that is logged, as `learning_rate` is.
            scale = logs["learning_rate"] / self.args.learning_rate
            logs |= {f"learning_rate/{name}": rate * scale for name, rate in self._rates.items()}
            for measures in (self._monitor, self._key_alignment):
                if measures is not None:
                    logs |= measures.collect(self._sum_over_processes)
            if self._mfu is not None:
                logs["mfu"] = self._mfu.collect(self._sum_over_processes, self.accelerator.num_processes)
            # TRL's own count restarts at 0 on every resume.
            self._metrics["train"]["num_tokens"] = [self._progress().num_tokens]
        if "train_loss" in logs:
            logs["train_loss"] = self._progress().loss_sum / max(self.state.global_step, 1)
        # A step that float16's scaler skipped has no gradient norm, and JSON no infinity.
        known = {
            name: value for name, value in logs.items() if not name.startswith("grad_norm") or math.isfinite(value)
        }
        super().log(known, start_time)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let Trainer save a checkpoint aside, then move it to its place in one step."""
        name, output_dir, best = f"checkpoint-{self.state.global_step}", self.args.output_dir, None
        with write_aside(Path(output_dir), name, self.accelerator) as aside:
            progress = self._progress()
            self.args.output_dir = str(aside)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = output_dir
            if self.state.best_global_step is not None:  # Trainer names its folder aside
                best = str(Path(output_dir) / f"checkpoint-{self.state.best_global_step}")
            self.state.best_model_checkpoint = best
            self.accelerator.wait_for_everyone()
            if self._stream is not None:
                self._stream.write_place(aside / name, self.is_world_process_zero())
            if self.is_world_process_zero():
                if self.is_fsdp_enabled:  # which saves shards of weights, and nothing beside them
                    self._unwrapped().config.save_pretrained(aside / name)
                    self.processing_class.save_pretrained(aside / name)
                self._run.write(aside / name, progress)
                self.state.save_to_json(str(aside / name / STATE_FILE))
                save(aside / name, Path(output_dir) / name)
                rotate_checkpoints(output_dir, self.args.save_total_limit, best)

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and processor. The run's result, for which no folder is given, appears only once all is written.
        Every process must call this."""
        if output_dir is not None:
            super().save_model(output_dir, _internal_call=True)
            return
        with write_aside(Path(self.args.output_dir), "The trained model", self.accelerator) as aside:
            if self.is_fsdp_enabled:
                weights = self.accelerator.get_state_dict(self.model)  # gathered in the main process's memory
                if self.is_world_process_zero() and self._unwrapped() is self.accelerator.unwrap_model(self.model):
                    write_unsharded(self._unwrapped(), weights, self.processing_class, aside)
                elif self.is_world_process_zero():
                    self._save(str(aside), state_dict=weights)  # adapters
            else:
                super().save_model(str(aside), _internal_call=True)
            self.accelerator.wait_for_everyone()
            if self.is_world_process_zero():
                self._run.write(aside)
                self.state.save_to_json(str(aside / STATE_FILE))
                publish(aside, Path(self.args.output_dir))

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: TRL's card would overwrite the checkpoint's own, which says more."""

    @override
    def _send_telemetry(self) -> None:
        """Do nothing: training runs are private."""
