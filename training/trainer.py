"""TRL's SFTTrainer with packed rows, learning rates by module, whole checkpoints and this project's measurements."""

import json
import math
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint, rotate_checkpoints
from trl import SFTTrainer

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration, modeling_normllava
from training.callbacks import InterfaceMonitor, MetricsFile, total_norm
from training.checkpoints import RUN_FILE, SAVING_FOLDER, publish, publish_files
from training.packing import PackedBatchSampler
from training.stages import ModuleGroup
from training.tokenization import IGNORED


# What wrappers put into parameter names.
WRAPPER_PREFIXES = ("base_model.model.", "_orig_mod.", "_checkpoint_wrapped_module.")


def write_class_files(folder: Path) -> None:
    """Name the model's class in a saved folder's config, and put its files there.

    Saving does so by itself, but FSDP2 makes a class of its own on the fly, whose name nobody can import.
    """
    NormLlavaConfig.from_pretrained(folder).save_pretrained(folder)
    shutil.copy(modeling_normllava.__file__, folder)


class EpochSetter(TrainerCallback):
    """Tells a sampler the epoch where Trainer does not: where several processes resume in the middle of one."""

    def __init__(self, sampler: PackedBatchSampler) -> None:
        self._sampler = sampler

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The epoch's number, whole also where a run goes on in the middle of one."""
        self._sampler.set_epoch(int(state.epoch or 0))


class NormLlavaTrainer(SFTTrainer):
    """[`SFTTrainer`] for a model that [`~training.stages.prepare_stage`] has prepared.

    Args:
        model: The model, or the `PeftModel` around it.
        groups: What `prepare_stage` returned: learning rates and names of the modules.
        run: What the run is made of, written into each checkpoint.
        environment: What it is made with and on, written beside `run` when it is finished.
        sampler: Sampler of packed rows; `None` for padded batches and for streams.
        clip_by_module: Clip the gradient of each module to `max_grad_norm` rather than that of all together.
        kwargs: As for [`SFTTrainer`].
    """

    def __init__(
        self,
        model: nn.Module,
        groups: list[ModuleGroup],
        run: dict[str, Any],
        environment: dict[str, Any] | None = None,
        sampler: PackedBatchSampler | None = None,
        clip_by_module: bool = False,
        **kwargs: Any,
    ) -> None:
        self._groups = {name: group for group in groups for name in group.parameters}
        self._trained = [group.name for group in groups if group.learning_rate is not None]
        self._run = run
        self._environment = environment
        self._sampler = sampler
        self._clip_by_module = clip_by_module
        self._saving = False
        self._scored: torch.Tensor | None = None
        # TRL rounds what a quantized model trains to bfloat16, in which small steps and most of the gain are lost.
        masters = {parameter: parameter.data for parameter in model.parameters() if parameter.requires_grad}
        super().__init__(model=model, **kwargs)
        for parameter, master in masters.items():
            if parameter.dtype != master.dtype:
                parameter.data = master.to(parameter.device)
        base: NormLlavaForConditionalGeneration = self._unwrapped()
        base.model.register_forward_hook(self._keep_scored)
        self._monitor = InterfaceMonitor(base, self.processing_class)
        self.add_callback(self._monitor)
        self.add_callback(MetricsFile(Path(self.args.output_dir) / "metrics.jsonl"))
        if sampler is not None:
            self.add_callback(EpochSetter(sampler))

    def _unwrapped(self) -> Any:
        model = self.accelerator.unwrap_model(self.model)
        return model.get_base_model() if hasattr(model, "get_base_model") else model

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Sampler | None:
        return self._sampler if self._sampler is not None else super()._get_train_sampler(*args, **kwargs)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, its parameter groups split by module, each with its learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        modules = {parameter: module for module, parameter in self._by_module(model or self.model)}
        groups = []
        # The common rate first: it is the one that Trainer logs as `learning_rate`.
        for name in sorted(self._trained, key=lambda name: self._rate(name) != self.args.learning_rate):
            for group in optimizer.param_groups:
                parameters = [parameter for parameter in group["params"] if modules[parameter] == name]
                if parameters:
                    groups.append({**group, "params": parameters, "lr": self._rate(name), "module": name})
        optimizer.param_groups = groups
        return optimizer

    def _rate(self, module: str) -> float | None:
        return next(group.learning_rate for group in self._groups.values() if group.name == module)

    def _by_module(self, model: nn.Module) -> list[tuple[str, nn.Parameter]]:
        """Trained parameters with the names of their modules. By name, as sharding replaces parameters."""
        named = []
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                for prefix in WRAPPER_PREFIXES:
                    name = name.replace(prefix, "")
                named.append((self._groups[name].name, parameter))
        return named

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A forward and backward pass.

        Raises:
            FloatingPointError: if the loss is not finite.
        """
        loss = super().training_step(*args, **kwargs)
        if not math.isfinite(loss.item()):
            raise FloatingPointError(
                f"The loss is {loss.item()} in step {self.state.global_step + 1}. The weights are those of step "
                f"{self.state.global_step}, unharmed; lower the learning rate, or look at the rows of this step."
            )
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor | tuple[torch.Tensor, Any]:
        """TRL's loss, with the head applied to supervised positions alone.

        TRL does so by itself where it has Triton; elsewhere it scores every position, the pictures' included.
        """
        labels = nn.functional.pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)  # of the next token
        self._scored = labels != IGNORED
        shift_labels = labels[self._scored][None]  # [1, num_supervised]
        try:
            return super().compute_loss(model, {**inputs, "shift_labels": shift_labels}, *args, **kwargs)
        finally:
            self._scored = None

    def _keep_scored(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._scored is not None:
            output.last_hidden_state = output.last_hidden_state[self._scored][None]  # [1, num_supervised, hidden_size]
        return output

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip, all together or module by module, and measure the modules' norms beforehand.

        Returns:
            Norm of the whole gradient before clipping.
        """
        scaler = self.accelerator.scaler  # of float16, which multiplies the loss
        # DeepSpeed clips by itself and leaves no gradients to look at.
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
        if scaler is None and not math.isfinite(float(norm)):  # the scaler skips such a step by itself
            raise FloatingPointError(
                f"The gradient's norm is {float(norm)} in step {self.state.global_step + 1}, before its update; lower "
                "the learning rate, or look at the rows of this step."
            )
        return norm

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the measurements of the step beside the loss."""
        if "loss" in logs:
            # The scheduler has stepped already; these are the rates of the step that is logged, as `learning_rate` is.
            scale = logs["learning_rate"] / self.args.learning_rate
            logs |= {f"learning_rate/{name}": self._rate(name) * scale for name in self._trained}
            logs |= self._monitor.collect(
                lambda sums: self.accelerator.reduce(sums.to(self.accelerator.device), "sum")
            )
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        output_dir = super()._get_output_dir(trial)
        return str(Path(output_dir) / SAVING_FOLDER) if self._saving else output_dir

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint aside, then move it to its place in one step. See [`~training.checkpoints.publish`].

        Raises:
            OSError: if it can't be written; the checkpoints before it are untouched.
        """
        try:
            self._save_aside(model, trial)
        except (OSError, RuntimeError, SafetensorError) as error:
            last = get_last_checkpoint(self.args.output_dir)
            raise OSError(
                f"checkpoint-{self.state.global_step} could not be written ({error}). Make room and go on with "
                f"--resume_from_checkpoint true; the last checkpoint is {last or 'the start'}."
            ) from error

    def _save_aside(self, model: nn.Module, trial: Any) -> None:
        output_dir = Path(self.args.output_dir)
        aside = output_dir / SAVING_FOLDER
        if self.is_world_process_zero() and aside.exists():
            shutil.rmtree(aside)
        self.accelerator.wait_for_everyone()
        self._saving = True
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._saving = False
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            folder = aside / f"checkpoint-{self.state.global_step}"
            (folder / RUN_FILE).write_text(json.dumps(self._run, indent=2) + "\n", encoding="utf-8")
            publish(folder, output_dir / folder.name)
            shutil.rmtree(aside)
            rotate_checkpoints(output_dir=str(output_dir), save_total_limit=self.args.save_total_limit, use_mtime=True)
        self.accelerator.wait_for_everyone()

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model; that of the whole run, for which no folder is named, only once it is all written."""
        if output_dir is not None:
            super().save_model(output_dir, _internal_call)
            return
        aside = Path(self.args.output_dir) / SAVING_FOLDER
        if self.is_world_process_zero() and aside.exists():
            shutil.rmtree(aside)
        self.accelerator.wait_for_everyone()
        super().save_model(str(aside), _internal_call=True)
        self.accelerator.wait_for_everyone()
        if self.is_world_process_zero():
            run = self._run | {"environment": self._environment}
            (aside / RUN_FILE).write_text(json.dumps(run, indent=2) + "\n", encoding="utf-8")
            publish_files(aside, Path(self.args.output_dir))
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save model and processor."""
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
        if self.args.should_save and (folder / "config.json").exists():
            write_class_files(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        adapter = Path(resume_from_checkpoint) / "adapter_model.safetensors"
        if adapter.exists():
            from peft import get_peft_model_state_dict  # an extra

            with safe_open(adapter, framework="pt") as file:
                self._compare_keys(set(file.keys()), set(get_peft_model_state_dict(self.model)))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Raise where the base class warns: weights of a checkpoint that don't fit the model are an error."""
        tied = set(getattr(self._unwrapped(), "all_tied_weights_keys", None) or ())
        expected = set(self._unwrapped().state_dict())
        self._compare_keys(expected - set(load_result.missing_keys) | set(load_result.unexpected_keys), expected, tied)
        self._unwrapped().tie_weights()

    @staticmethod
    def _compare_keys(given: set[str], expected: set[str], tied: Iterable[str] = ()) -> None:
        missing, unexpected = sorted(expected - given - set(tied)), sorted(given - expected - set(tied))
        if missing or unexpected:
            raise ValueError(
                f"The checkpoint's weights are not those of the model. Missing: {missing or 'none'}; unexpected: "
                f"{unexpected or 'none'}. Resume with the model that the run began with."
            )

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: TRL's card would overwrite the one of the checkpoint, which says more."""

    def _send_telemetry(self) -> None:
        """Nothing: a training run is its owner's business."""
