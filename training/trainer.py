"""Trains a NormLlava: learning rates by module, safe checkpoints, and measurements besides the loss."""

import dataclasses
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import TorchDynamoPlugin
from safetensors import SafetensorError
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints
from trl import SFTTrainer
from typing_extensions import override

from conversations.files import fresh_folder
from conversations.tokens import IGNORED
from diagnostics.tokens import attended_tokens
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration, modeling_normllava
from training.callbacks import ConsoleTable, InterfaceMonitor, MetricsFile, StepsFile, total_norm
from training.checkpoints import (
    CHECKPOINTED_BLOCK,
    SAVING_FOLDER,
    STATE_FILE,
    best_checkpoint,
    check_weights,
    checkpoints,
    publish,
    publish_checkpoint,
    publish_files,
    write_sharded_weights,
)
from training.compiling import LayerCompiler, eagerly
from training.flops import MfuMeter
from training.held_out import HeldOutQuestions
from training.key_alignment import KeyAlignment
from training.overrides import checks_overrides
from training.run import Progress, Run
from training.stages import ModuleGroup, base_model
from training.streams import PLACE, StreamBatches


# What wrappers put into parameter names.
WRAPPER_PREFIXES = ("base_model.model.", CHECKPOINTED_BLOCK)


def supervised_positions(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a next token is supervised, a mask `(batch_size, sequence_length)`, and these tokens,
    `(1, num_supervised)`."""
    following = nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED)
    scored = following != IGNORED
    return scored, following[scored][None]


def gather_head(model: NormLlavaForConditionalGeneration) -> None:
    """Make FSDP2 gather a sharded head, so that its gradient is averaged over processes. TRL would gather it without
    FSDP2, and each process would keep its own gradient."""
    head = model.get_output_embeddings()
    if isinstance(head, FSDPModule):
        head.unshard()


def write_class_files(folder: Path) -> None:
    """Write the model's class into a saved folder's config, and copy its files there.

    Saving normally does this, but FSDP2 creates a class on the fly that can't be imported by name.
    """
    NormLlavaConfig.from_pretrained(folder).save_pretrained(folder)
    shutil.copy(modeling_normllava.__file__, folder)


@checks_overrides
class EpochSetter(TrainerCallback):
    """Sets a sampler's epoch where Trainer does not: when several processes resume in the middle of one."""

    def __init__(self, sampler: BatchRebalanceSampler) -> None:
        self._sampler = sampler

    @override
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the epoch's number, an integer also when a run resumes in the middle of one."""
        self._sampler.set_epoch(int(state.epoch or 0))


@checks_overrides
class StreamEpoch(TrainerCallback):
    """Sets how much of a run is done, which Trainer counts from 0 again when it resumes without skipping."""

    @override
    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Set the part of the run's steps that is done, as Trainer computes it in an uninterrupted run."""
        state.epoch = state.global_step / state.max_steps


@checks_overrides
class NormLlavaTrainer(SFTTrainer):
    """[`SFTTrainer`] for a model that [`~training.stages.prepare_stage`] has prepared.

    Args:
        model: The model, or the `PeftModel` around it.
        groups: What `prepare_stage` returned: learning rates and names of the modules.
        run: The run's record, written into each checkpoint and with the result.
        sampler: Deals batches of padded or packed rows to the processes; `None` for a stream.
        stream: The batches of a stream; a resumed run continues where it was.
        eval_sampler: The sampler of held-out rows.
        questions: Held-out questions to answer at each evaluation.
        key_alignment: Losses on the decoder's keys.
        mfu: Measures how much of the devices' peak is reached.
        clip_by_module: Clip the gradient of each module to `max_grad_norm` instead of the whole gradient.
        kwargs: As for [`SFTTrainer`].
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ModuleGroup],
        run: Run,
        sampler: BatchRebalanceSampler | None = None,
        stream: StreamBatches | None = None,
        eval_sampler: BatchRebalanceSampler | None = None,
        questions: HeldOutQuestions | None = None,
        key_alignment: KeyAlignment | None = None,
        mfu: MfuMeter | None = None,
        clip_by_module: bool = False,
        **kwargs: Any,
    ) -> None:
        # Only names: sharding replaces parameters, and unsharded ones referenced here would stay on the device.
        self._modules = {name: group.name for group in groups for name in group.parameters}
        self._rates = {group.name: group.learning_rate for group in groups if group.learning_rate is not None}
        self._run = run
        self._sampler, self._eval_sampler, self._questions = sampler, eval_sampler, questions
        self._stream = stream
        self._clip_by_module, self._mfu = clip_by_module, mfu
        self._key_alignment, self._penalty = key_alignment, torch.zeros(())
        held_out = kwargs.get("eval_dataset")
        self._eval_has_pictures = held_out is not None and any(held_out["num_images"])
        self._scored: torch.Tensor | None = None
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
        if self.args.load_best_model_at_end and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError("load_best_model_at_end does not support sharded checkpoints: remove it.")
        base: NormLlavaForConditionalGeneration = self._unwrapped()
        base.model.register_forward_hook(self._keep_scored)
        self._monitor = InterfaceMonitor(base, self.processing_class)
        self.add_callback(self._monitor)
        self.add_callback(LayerCompiler(base))
        self.add_callback(MetricsFile(Path(self.args.output_dir) / "metrics.jsonl"))
        self._answers = StepsFile(Path(self.args.output_dir) / "answers.jsonl")
        if questions is not None:
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

    def _unwrapped(self) -> Any:
        return base_model(self.accelerator.unwrap_model(self.model))

    def _saves_shards(self) -> bool:
        """Whether each process saves its part of the weights: under FSDP, except for an adapter, which is small."""
        return self.is_fsdp_enabled and self._unwrapped() is self.accelerator.unwrap_model(self.model)

    @override
    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """Without compiling the whole model: [`LayerCompiler`] compiles its layers."""
        return super()._build_accelerator_args(**kwargs) | {"dynamo_plugin": TorchDynamoPlugin(backend="no")}

    @override
    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._sampler

    @override
    def get_train_dataloader(self) -> DataLoader:
        """The training data loader; for a stream that of `StreamBatches`, which deals rows to processes itself."""
        return super().get_train_dataloader() if self._stream is None else self._stream.loader(self.args)

    @override
    def _get_eval_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._eval_sampler

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
                for prefix in WRAPPER_PREFIXES:
                    name = name.replace(prefix, "")
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
    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """TRL's loss, with the head applied only to supervised positions, and in training the losses on keys.

        TRL itself does this only with Triton; without, it scores every position, image tokens included.
        """
        self._scored, shift_labels = supervised_positions(inputs["labels"])
        if model.training:
            gather_head(self._unwrapped())
        try:
            loss = super().compute_loss(model, {**inputs, "shift_labels": shift_labels}, *args, **kwargs)
        finally:
            self._scored = None
        if self._key_alignment is not None and model.training:
            # The mean over the passes of a step, and over processes, whose gradients are averaged.
            penalty = self._key_alignment.penalty().to(loss.device) / self.current_gradient_accumulation_steps
            self._penalty = penalty.detach()
            loss = loss + penalty
        return loss

    @override
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate on the held-out rows without any effect on training: its mode and its random state, from which a
        data loader takes a number for its workers, are restored."""
        training, device, started = self.model.training, self.args.device, time.monotonic()
        self.model.eval()
        with torch.random.fork_rng([device] if device.type == "cuda" else []), eagerly(self.args):
            metrics = super().evaluate(*args, **kwargs)
        self.model.train(training)
        self.leave_out(time.monotonic() - started)
        return metrics

    def leave_out(self, seconds: float) -> None:
        """Don't count seconds that have just passed as training, in tokens/s, time left and MFU."""
        self._console.seconds_left_out += seconds
        if self._mfu is not None:
            self._mfu.leave_out(seconds)

    @override
    @torch.no_grad()
    def evaluation_loop(
        self, dataloader: DataLoader, *args: Any, metric_key_prefix: str = "eval", **kwargs: Any
    ) -> EvalLoopOutput:
        """The loss on held-out rows, with their pictures and with blank ones, and how many questions are answered.

        Every supervised token has the same weight. transformers' own loop averages the means of batches, whatever
        their size.
        """
        has_pictures = self._eval_has_pictures
        blank = self.data_collator.pixels([]).to(self.args.device)
        sums = torch.zeros(3, dtype=torch.float64)  # of the loss, of the loss with blank pictures, of tokens
        for inputs in dataloader:
            inputs = self._prepare_inputs(inputs)
            batches = [inputs]
            if has_pictures:
                batches.append({**inputs, "pixel_values": blank.expand_as(inputs["pixel_values"])})
            for number, batch in enumerate(batches):
                # TRL multiplies by the number of processes, since DDP averages over them.
                loss: Any = self.compute_loss(self.model, batch, num_items_in_batch=self.accelerator.num_processes)
                sums[number] += loss.item()
            sums[2] += (inputs["labels"] != IGNORED).sum().item()
        if self.accelerator.num_processes > 1:
            sums = self._sum_over_processes(sums)
        total, total_blank, num_tokens = sums.tolist()
        metrics = {"loss": total / num_tokens} | ({"loss_blank": total_blank / num_tokens} if has_pictures else {})
        self._metrics["eval"].clear()  # TRL's own, averaged over batches, and over tokens since the last resume
        if self._questions is not None:
            answers = self._questions.answer(self.model, self.accelerator)
            self._console.answers = answers
            self._answers.append(self.state, map(dataclasses.asdict, answers))
            metrics["exact_match"] = share = sum(answer.right for answer in answers) / len(answers)
            metrics["exact_match_stderr"] = math.sqrt(share * (1 - share) / len(answers))
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(
            predictions=None, label_ids=None, metrics=metrics, num_samples=self.num_examples(dataloader)
        )

    def _keep_scored(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._scored is not None:
            output.last_hidden_state = output.last_hidden_state[self._scored][None]  # [1, num_supervised, hidden_size]
        return output

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

    def _sum_over_processes(self, sums: torch.Tensor) -> torch.Tensor:
        return self.accelerator.reduce(sums.to(self.accelerator.device), "sum")

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
        """Save a checkpoint aside, then move it to its place in one step. See [`~training.checkpoints.publish`].

        Raises:
            OSError: if it can't be written; the checkpoints before it are untouched.
        """
        try:
            self._save_aside(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            raise self._not_written(f"checkpoint-{self.state.global_step}", error) from error

    def _not_written(self, name: str, error: Exception) -> OSError:
        last = next(iter(checkpoints(Path(self.args.output_dir))), None)
        return OSError(
            f"{name} could not be written ({error}). Free disk space and resume with --resume_from_checkpoint true; "
            f"last checkpoint: {last or 'none'}."
        )

    def _save_aside(self, model: nn.Module, trial: Any) -> None:
        output_dir = self.args.output_dir
        aside = self._make_aside()
        progress = self._progress()
        self.args.output_dir = str(aside)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self.args.output_dir = output_dir
        # It would be a path in the temporary folder. The best one is known by its step, and not loaded at the end.
        self.state.best_model_checkpoint = None
        self.accelerator.wait_for_everyone()
        folder = aside / f"checkpoint-{self.state.global_step}"
        if self._stream is not None:
            self._stream.write_place(folder, self.is_world_process_zero())
        if self.is_world_process_zero():
            self._run.write(folder, progress)
            self.state.save_to_json(str(folder / STATE_FILE))
            publish(folder, Path(output_dir) / folder.name)
            shutil.rmtree(aside)
            best = self.state.best_global_step  # a path without a best step would count as a kept one
            rotate_checkpoints(
                output_dir=output_dir,
                save_total_limit=self.args.save_total_limit,
                best_model_checkpoint=None if best is None else str(Path(output_dir) / f"checkpoint-{best}"),
            )
        self.accelerator.wait_for_everyone()

    def _make_aside(self) -> Path:
        aside = Path(self.args.output_dir) / SAVING_FOLDER
        if self.is_world_process_zero():
            fresh_folder(aside)
        self.accelerator.wait_for_everyone()
        return aside

    @override
    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save model and processor. The run's result, for which no folder is given, appears only once all is written.

        Raises:
            OSError: if the result can't be written; the checkpoints are untouched.
        """
        if output_dir is None:
            try:
                self._save_result()
            except (OSError, RuntimeError, SafetensorError) as error:
                raise self._not_written("The trained model", error) from error
            return
        super().save_model(output_dir, _internal_call=True)
        if not self.args.should_save:
            return
        if self._saves_shards():
            base = self._unwrapped()
            base.config.save_pretrained(output_dir)  # not saved with sharded weights
            base.generation_config.save_pretrained(output_dir)
            self.processing_class.save_pretrained(output_dir)
        if (Path(output_dir) / "config.json").exists():
            write_class_files(Path(output_dir))

    def _save_result(self) -> None:
        if self.args.load_best_model_at_end:
            if self.is_world_process_zero():
                state, output_dir = dataclasses.asdict(self.state), Path(self.args.output_dir)
                best = best_checkpoint(state, output_dir)
                publish_checkpoint(best, output_dir, state, self._run.environment.resumed)
            self.accelerator.wait_for_everyone()
            return
        aside = self._make_aside()
        if self.is_fsdp_enabled and not self._saves_shards():
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        self.save_model(str(aside))
        if self._saves_shards():
            write_sharded_weights(self._unwrapped(), aside, self.is_world_process_zero())
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            self._run.write(aside)
            self.state.save_to_json(str(aside / STATE_FILE))
            publish_files(aside, Path(self.args.output_dir))
        self.accelerator.wait_for_everyone()

    @override
    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: TRL's card would overwrite the checkpoint's own, which says more."""

    @override
    def _send_telemetry(self) -> None:
        """Do nothing: training runs are private."""
