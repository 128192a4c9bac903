"""Trains a NormLlava: its loss, learning rates and clipping by module, measures, checkpoints that are whole."""

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from torch import nn
from torch.utils.data import DataLoader, Sampler
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints
from typing_extensions import override

from conversations.measured import row_lengths
from conversations.tokens import IGNORED
from diagnostics.tokens import attended_tokens
from training.checkpoints import STATE_FILE, check_weights, publish, save, write_aside, write_unsharded
from training.flops import MfuMeter
from training.held_out import HeldOutQuestions, held_out_losses
from training.loss import SupervisedTrainer
from training.monitor import ConsoleTable, Epochs, InterfaceMonitor, MetricsFile, StepsFile, total_norm
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
        eval_sampler: The sampler of held-out rows.
        questions: Held-out questions to answer at each evaluation.
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
        eval_sampler: BatchRebalanceSampler | None = None,
        questions: HeldOutQuestions | None = None,
        **kwargs: Any,
    ) -> None:
        # Only names: sharding replaces parameters, and unsharded ones referenced here would stay on the device.
        self._modules = {name: group.name for group in groups for name in group.parameters}
        self._rates = {group.name: group.learning_rate for group in groups if group.learning_rate is not None}
        self._run = run
        self._sampler, self._stream = sampler, stream
        self._clip_by_module, self._mfu = clip_by_module, mfu
        self._eval_sampler, self._questions = eval_sampler, questions
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
        self.add_callback(Epochs(sampler))
        if stream is not None:
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
        """Train, from a checkpoint if one is named; `ValueError` is raised if its weights are not the model's."""
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
        modules, groups = self._by_module(model or self.model), []
        # The common rate first: it is the one that Trainer logs as `learning_rate`.
        for name in sorted(modules, key=lambda name: self._rates[name] != self.args.learning_rate):
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
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on the held-out rows without any effect on training: its mode and its random state, from which a
        data loader takes a number for its workers, are restored."""
        training, device, started = self.model.training, self.args.device, time.monotonic()
        self.model.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            metrics = super().evaluate(*args, **kwargs)
        self.model.train(training)
        self.leave_out(time.monotonic() - started)
        return metrics

    @override
    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._eval_sampler

    @override
    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """The loss on held-out rows, with their pictures and with blank ones, and how many questions are answered."""

        def loss_of(batch: dict[str, Any]) -> float:
            # TRL multiplies by the number of processes, since DDP averages over them.
            loss: Any = self.compute_loss(self.model, batch, num_items_in_batch=self.accelerator.num_processes)
            return loss.item()

        blank = self.data_collator.pixels([]).to(self.args.device) if any(self.eval_dataset["num_images"]) else None
        metrics = held_out_losses(map(self._prepare_inputs, dataloader), blank, loss_of, self._sum_over_processes)
        self._metrics["eval"].clear()  # TRL's own, averaged over batches, and over tokens since the last resume
        if self._questions is not None:
            self._console.answers = answers = self._questions.answer(self.model, self.accelerator)
            self._answers.append(self.state, map(dataclasses.asdict, answers))
            metrics["exact_match"] = share = sum(answer.right for answer in answers) / len(answers)
            metrics["exact_match_stderr"] = math.sqrt(share * (1 - share) / len(answers))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, metrics, self.num_examples(dataloader))

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """A forward and backward pass; the loss without what [`KeyAlignment`] adds, so that runs with and without it
        are comparable. `FloatingPointError` is raised if it is not finite."""
        if self._stream is not None:
            self._stream.trained_on(inputs.pop(PLACE))
        # A batch without labels is one without rows.
        num_tokens = int(attended_tokens(inputs).sum() * (inputs["labels"] != IGNORED).any())
        if self._mfu is not None:
            self._mfu.begin()
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._check_finite("loss", loss.item())
        if self._key_alignment is not None:
            loss = loss - self._penalty
        self._seen += torch.tensor([loss.item(), num_tokens], dtype=torch.float64)
        if self._mfu is not None:
            self._mfu.add(inputs)
        return loss

    def leave_out(self, seconds: float) -> None:
        """Don't count seconds that have just passed as training, in tokens/s, time left and MFU."""
        self._console.seconds_left_out += seconds
        if self._mfu is not None:
            self._mfu.leave_out(seconds)

    @override
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Measure the gradient, whole and by module, then clip the one or the others; the whole norm before that."""
        if self.is_deepspeed_enabled:  # which clips by itself and leaves no gradients to measure
            return super()._clip_grad_norm(model)
        self.accelerator.unscale_gradients()
        modules = self._by_module(self.accelerator.unwrap_model(model))
        norms = {module: total_norm(parameters) for module, parameters in modules.items()}
        norm = torch.stack(list(norms.values())).norm()
        for module, parameters in modules.items():
            limited = norms[module] if self._clip_by_module else norm
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, limited)
        self._monitor.gradients = norms
        if self.accelerator.scaler is None:  # float16's scaler skips a step that is not finite
            self._check_finite("gradient's norm", float(norm))
        return norm

    def _check_finite(self, name: str, value: float) -> None:
        if not math.isfinite(value):
            raise FloatingPointError(
                f"The {name} is {value} in step {self.state.global_step + 1}; lower the learning rate, or look at "
                "the rows of this step."
            )

    def _progress(self) -> Progress:
        """Tokens and losses of the run since its first start. Every process must call this."""
        before, (loss_sum, num_tokens) = self._seen_before, self._sum_over_processes(self._seen).tolist()
        loss_sum /= self.accelerator.num_processes
        return Progress(num_tokens=before.num_tokens + round(num_tokens), loss_sum=before.loss_sum + loss_sum)

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log the loss with the step's measurements; sums are over the whole run, also after a resume. Gradient norms
        that are not finite are left out."""
        if "loss" in logs:
            # The scheduler has stepped already; these are the rates of the step that is logged, as `learning_rate` is.
            scale = logs["learning_rate"] / self.args.learning_rate
            logs |= {f"learning_rate/{name}": rate * scale for name, rate in self._rates.items()}
            logs |= self._monitor.collect(self._sum_over_processes)
            if self._key_alignment is not None:
                logs |= self._key_alignment.collect(self._sum_over_processes)
            if self._mfu is not None:
                logs["mfu"] = self._mfu.collect(self._sum_over_processes, self.accelerator.num_processes)
            # TRL's own count restarts at 0 on every resume.
            self._metrics["train"]["num_tokens"] = [self._progress().num_tokens]
        if "train_loss" in logs:
            logs["train_loss"] = self._progress().loss_sum / max(self.state.global_step, 1)
        # A step that float16's scaler skipped has no gradient norm, and JSON no infinity.
        known = {name: value for name, value in logs.items() if "grad_norm" not in name or math.isfinite(value)}
        super().log(known, start_time)

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Let Trainer save a checkpoint aside, then move it to its place in one step."""
        name, output_dir = f"checkpoint-{self.state.global_step}", self.args.output_dir
        with write_aside(Path(output_dir), name, self.accelerator) as aside:
            progress = self._progress()
            self.args.output_dir = str(aside)
            try:
                super()._save_checkpoint(model, trial)
            finally:
                self.args.output_dir = output_dir
            self.state.best_model_checkpoint = None  # Trainer names the folder aside
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
                rotate_checkpoints(output_dir, self.args.save_total_limit)

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
