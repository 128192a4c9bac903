"""TRL's SFTTrainer with learning rates by module and the measurements of this project."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from trl import SFTTrainer

from modeling_normllava import NormLlavaForConditionalGeneration
from training.callbacks import InterfaceMonitor, MetricsFile
from training.stages import ModuleGroup


class NormLlavaTrainer(SFTTrainer):
    """[`SFTTrainer`] for a model that [`~training.stages.prepare_stage`] has prepared.

    Args:
        model: The model.
        groups: What `prepare_stage` returned: learning rates and names of the modules.
        kwargs: As for [`SFTTrainer`].
    """

    def __init__(self, model: NormLlavaForConditionalGeneration, groups: list[ModuleGroup], **kwargs: Any) -> None:
        self._learning_rates = {
            name: group.learning_rate
            for group in groups
            for name in group.parameters
            if group.learning_rate is not None
        }
        super().__init__(model=model, **kwargs)
        self._monitor = InterfaceMonitor(model, groups)
        self.add_callback(self._monitor)
        self.add_callback(MetricsFile(Path(self.args.output_dir) / "metrics.jsonl"))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer of the arguments, its groups split where learning rates differ."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)
        names = {parameter: name for name, parameter in (model or self.model).named_parameters()}
        # The common rate first: it is the one that Trainer logs as `learning_rate`.
        rates = sorted(set(self._learning_rates.values()), key=lambda rate: rate != self.args.learning_rate)
        groups = []
        for rate in rates:
            for group in optimizer.param_groups:
                parameters = [p for p in group["params"] if self._learning_rates[names[p]] == rate]
                if parameters:
                    groups.append({**group, "params": parameters, "lr": rate})
        optimizer.param_groups = groups
        return optimizer

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A forward and backward pass; on a logged step, the gradient norms are taken once they are complete."""
        loss = super().training_step(*args, **kwargs)
        if self._monitor.active and self.accelerator.sync_gradients:
            scaler = self.accelerator.scaler
            self._monitor.record_gradients(1.0 if scaler is None else scaler.get_scale())
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log, with the measurements of the step beside the loss."""
        if "loss" in logs:
            for rate in set(self._learning_rates.values()) - {self.args.learning_rate}:
                # Every group follows the same schedule.
                logs["vision_learning_rate"] = logs["learning_rate"] * rate / self.args.learning_rate
            logs |= self._monitor.collect(
                lambda sums: self.accelerator.reduce(sums.to(self.accelerator.device), "sum")
            )
        super().log(logs, start_time)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: TRL's card would overwrite the one of the checkpoint, which says more."""

    def _send_telemetry(self) -> None:
        """Nothing: a training run is its owner's business."""
