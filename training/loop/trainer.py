"""TRL's trainer with our batches, loss, learning rates by module, measurements and checkpoints."""

import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from accelerate.utils import AutocastKwargs, TorchDynamoPlugin
from datasets import Dataset
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import TrainerControl
from transformers.trainer import OPTIMIZER_NAME
from transformers.trainer_callback import PrinterCallback
from trl import SFTTrainer
from typing_extensions import override

from normllava.monitor import NormMonitor
from normllava.parts import find_decoder
from normllava.tokens import IGNORED
from training.folders.checkpoints import SAVING_FOLDER, checkpoint_folder, result_folder, write_unsharded
from training.folders.run import Run
from training.loop.answers import HeldOutAnswers
from training.loop.checkpointing import choose_checkpointing
from training.loop.finite import FiniteWatch
from training.loop.measurements import StepMeasurements
from training.loop.monitor import ConsoleTable, MetricsFile
from training.loop.positions import head_at_positions, image_positions, images_at_positions, supervised_tokens
from training.loop.rehearsal import largest_batches, rehearsal
from training.modules.attention import unread_mask
from training.modules.compiling import compile_modules, modules_to_compile
from training.modules.key_alignment import KeyAlignment, gradient_alone
from training.modules.module_parameters import TrainedModules, gradient_norm
from training.modules.stages import ModuleGroup, base_model
from training.rows.batches import Batches
from training.rows.streams import PLACE, StreamBatches


# The keys under which a prepared batch has the positions before its supervised tokens, and those of its image tokens.
POSITIONS = "supervised_positions"
IMAGE_POSITIONS = "image_positions"


class NormLlavaTrainer(SFTTrainer):
    """Trains a model that [`~training.modules.stages.prepare_stage`] has prepared.

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
        num_answers: How many held-out rows are answered at each evaluation.
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
        num_answers: int = 0,
        key_alignment: KeyAlignment | None = None,
        **kwargs: Any,
    ) -> None:
        self._modules = TrainedModules(groups)
        self._run = run
        self._sampler = sampler
        self._stream = stream
        self._clip_by_module = clip_by_module
        self._eval_sampler = eval_sampler
        self._key_alignment = key_alignment
        # The trained parameters of each module, or this process's shards of them; listed when training begins.
        self._trained_parameters: dict[str, list[nn.Parameter]] = {}

        with keep_dtypes(model):
            super().__init__(model=model, **kwargs)

        self._finite_watch = FiniteWatch(self.args.device)
        self._measurements = StepMeasurements(self.args.device)
        attention = find_decoder(self._unwrapped()).config._attn_implementation
        self._reads_no_mask = self.data_collator.packed and attention == "varlen"

        # Autocast would keep a copy of every trained weight in bfloat16 until the forward pass ends, though a pass
        # reads each weight once.
        self.accelerator.autocast_handler = AutocastKwargs(cache_enabled=False)

        # Where a run clips nothing, Trainer wouldn't call `_clip_grad_norm`, which also watches the gradient.
        if not self.args.max_grad_norm:
            self.args.max_grad_norm = math.inf

        if stream is not None:
            self.args.ignore_data_skip = True  # a resumed stream itself goes on at the row where it stopped

        fsdp_plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if fsdp_plugin is not None and fsdp_plugin.mixed_precision_policy is not None:
            # With an output_dtype, FSDP2 would round each loss to bfloat16.
            policy = dataclasses.replace(fsdp_plugin.mixed_precision_policy, output_dtype=None)
            fsdp_plugin.mixed_precision_policy = policy
        if self.is_fsdp_enabled:
            # Shard gradients after each pass. By default a process would keep all of them, in the arithmetic of the
            # pass, until the last pass of a step.
            self.accelerator.gradient_state.plugin_kwargs["sync_each_batch"] = True

        # Our callbacks replace Trainer's progress bar, whose class differs between notebooks and terminals.
        self.remove_callback(transformers.trainer.DEFAULT_PROGRESS_CALLBACK)
        self.remove_callback(PrinterCallback)
        self.add_callback(ConsoleTable())
        self.add_callback(MetricsFile(Path(self.args.output_dir) / "metrics.jsonl"))
        if self.eval_dataset is not None and num_answers > 0:
            self.add_callback(HeldOutAnswers(self, self.eval_dataset, num_answers))
        NormMonitor(self._unwrapped(), self.processing_class).attach(self)

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
        has_workers = self.args.dataloader_num_workers > 0
        return DataLoader(
            rows,
            batch_sampler=batches,
            collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers,
            pin_memory=self.args.dataloader_pin_memory,
            prefetch_factor=self.args.dataloader_prefetch_factor,
            persistent_workers=has_workers and self.args.dataloader_persistent_workers,
            generator=torch.Generator(),  # otherwise the loader would draw from the random numbers of training
        )

    @override
    def _prepare_for_training(
        self, max_steps: int, train_dataloader: DataLoader, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, DataLoader]:
        """Compile the layers if the run asks for it, and rehearse the largest batches.

        Both must come after a resumed run has loaded its checkpoint and before the first step. The only callback in
        between is `on_train_begin`, which gets neither the batches nor the model that accelerate has prepared.
        """
        # A resumed run logs and saves at the intervals that it is given now, not at those of its checkpoint.
        self.state.compute_steps(self.args, max_steps)

        # Listed before FSDP's activation checkpointing wraps the layers, to be compiled inside the wrappers.
        modules = modules_to_compile(self._unwrapped()) if self.args.torch_compile else []
        model, loader = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)
        if modules:
            compile_modules(modules, self.args.torch_compile_backend)

        # From here on, FSDP2 replaces no parameters.
        self._trained_parameters = self._modules.list_parameters(self.accelerator.unwrap_model(model))
        self._finite_watch.start(self.state.global_step)

        if self._sampler is not None:
            self._rehearse(model, self._sampler)
        self._run = self._run.with_checkpointing(bool(self.args.gradient_checkpointing))
        return model, loader

    @override
    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the states of optimizer and scheduler, but keep the rates and the options that this run is given.

        Trainer would put the checkpoint's in their place, though `resume_changed` may have allowed others. The rates
        of a scheduler that follows the loss depend on the run so far: those remain the checkpoint's.
        """
        if checkpoint is None:
            return
        self._sort_as_saved(Path(checkpoint) / OPTIMIZER_NAME)
        given_options = []
        for group in self.optimizer.param_groups:
            given_options.append({name: value for name, value in group.items() if name not in ("params", "lr")})
        super()._load_optimizer_and_scheduler(checkpoint)

        groups = self.optimizer.param_groups
        for group, options in zip(groups, given_options, strict=True):
            group.update(options)
        scheduler = self.lr_scheduler
        if isinstance(scheduler, LambdaLR):
            scheduler.base_lrs = [group["initial_lr"] for group in groups]
            for group, schedule in zip(groups, scheduler.lr_lambdas, strict=True):
                group["lr"] = group["initial_lr"] * schedule(scheduler.last_epoch)
            scheduler._last_lr = [group["lr"] for group in groups]  # what is logged for the next step

    def _sort_as_saved(self, file: Path) -> None:
        """Bring the optimizer's groups into the order of a saved optimizer, whose states torch loads by their order.

        Groups are ordered by their rates, which may have changed. FSDP2 has no such file, and loads states by names.
        """
        if file.exists():
            saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
            modules = [group["module"] for group in saved["param_groups"]]
            self.optimizer.param_groups.sort(key=lambda group: modules.index(group["module"]))

    def _rehearse(self, model: nn.Module, sampler: Batches) -> None:
        """Run the batch with the most tokens and the batch with the most tiles, so that lack of memory shows now.

        If the recipe doesn't say whether layers are checkpointed, the memory of these batches decides.
        """
        passes = []
        for row_numbers in largest_batches(sampler, self.train_dataset, is_padded=not self.data_collator.packed):
            passes.append(partial(self._rehearse_pass, model, row_numbers))

        # A training step reads this number, which Trainer sets only in its loop.
        self.current_gradient_accumulation_steps = self.args.gradient_accumulation_steps
        device = self.args.device
        optimizer = self.optimizer.optimizer  # without accelerate's wrapper
        with rehearsal(model, optimizer, device):
            for run_pass in passes:
                run_pass()
            # Without the optimizer's states, which some optimizers allocate later, the peak isn't known yet.
            if self.args.chooses_checkpointing and optimizer.state:
                keeps_checkpointing = choose_checkpointing(model, passes, device, self._sum_over_processes)
                self.args.gradient_checkpointing = keeps_checkpointing

        # The log must not contain what is measured here.
        self._measurements.forget_predictions()
        if self._key_alignment is not None:
            self._key_alignment.collect(self._sum_over_processes)

    def _rehearse_pass(self, model: nn.Module, row_numbers: list[int]) -> None:
        """Take the forward and backward pass of a batch."""
        # If training accumulates gradients over several passes, a pass needs memory for the gradients of earlier
        # passes too. So gradients are freed here only if a step has a single pass.
        if self.args.gradient_accumulation_steps == 1:
            model.zero_grad()
        batch = self.data_collator([self.train_dataset[number] for number in row_numbers])
        # This is TRL's step. Our own would count these tokens, and watch whether this loss is finite.
        super().training_step(model, batch, num_items_in_batch=torch.tensor(1))

    @override
    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """An optimizer with parameter groups by module: Trainer would give all parameters the same learning rate."""
        if self.optimizer is not None:
            return self.optimizer
        optimizer = super().create_optimizer(model)

        if model is None:
            model = self.model
        self._modules.set_rates(optimizer, model, self.args.learning_rate)
        return optimizer

    @override
    def _run_epoch(self, *, model: nn.Module, epoch: int, **kwargs: Any) -> None:
        """Run an epoch, unless all steps are done: Trainer would add a step to a finished run that is resumed."""
        if self._sampler is not None:
            self._sampler.set_epoch(epoch)

        self.control.should_training_stop = self.state.global_step >= self.state.max_steps
        if not self.control.should_training_stop:
            super()._run_epoch(model=model, epoch=epoch, **kwargs)

    @override
    def _get_num_items_in_batch(self, batch_samples: list[dict[str, Any]], device: torch.device) -> torch.Tensor:
        """The number of supervised tokens in all batches of a step, over all processes, on the device.

        Tokens are counted before the batches are copied to the device. Trainer would wait until the number has been
        copied too.
        """
        num_supervised = torch.tensor(0)
        for batch in batch_samples:
            num_supervised += (batch["labels"][:, 1:] != IGNORED).sum()
        return self._sum_over_processes(num_supervised).to(device, non_blocking=True)

    @override
    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Take a forward and backward pass.

        Trainer would count padding as tokens. Nothing here waits for the device: tokens are counted before the batch
        is copied, and whether the loss is finite is only noted.

        Returns:
            The loss of the pass.
        """
        if self._stream is not None:
            self._stream.record_trained(inputs.pop(PLACE))

        # The scheduler sets the optimizer's rates of the next step before the current step is logged.
        rates = {group["module"]: group["lr"] for group in self.optimizer.param_groups}
        self._measurements.learning_rates = rates
        self._measurements.count_tokens(inputs)

        loss = super().training_step(model, inputs, *args, **kwargs)
        self._finite_watch.note(loss)
        return loss

    @override
    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch on the device, with the positions before supervised tokens instead of its labels.

        All positions are found before the batch is copied. On the device, Python would have to wait for their number.
        """
        inputs = dict(inputs)
        positions, next_tokens = supervised_tokens(inputs.pop("labels"))
        inputs[POSITIONS] = positions  # [num_supervised]
        inputs["shift_labels"] = next_tokens[None]  # [1, num_supervised]
        inputs[IMAGE_POSITIONS] = image_positions(inputs["input_ids"], self._unwrapped().config.image_token_id)
        # Without a mask sdpa has faster kernels, which is worth the wait when transformers then looks for packed rows.
        if "attention_mask" in inputs and bool(inputs["attention_mask"].all()):
            del inputs["attention_mask"]
        return super()._prepare_inputs(inputs)

    @override
    def _prepare_input(self, data: Any) -> Any:
        """Copy tensors to the device. Trainer would wait for each copy."""
        if isinstance(data, torch.Tensor):
            if self.args.device.type == "cuda":
                data = data.pin_memory()  # the loader hasn't pinned positions, and CUDA waits for what isn't pinned
            return data.to(self.args.device, non_blocking=True)
        return super()._prepare_input(data)

    @override
    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """TRL's loss of the supervised tokens, with the gradient of the losses on keys.

        The loss is the sum over the tokens of the batch, divided by the number of supervised tokens in the step, and
        multiplied by the number of processes, since DDP and FSDP2 average over processes. TRL would also read its
        measurements from the device, in every pass.
        """
        outputs = self._score_tokens(model, inputs)
        token_losses = -outputs.log_probs  # [1, num_supervised]
        if self.args.loss_type == "dft":  # it weighs each token by its probability
            token_losses = token_losses * outputs.log_probs.exp().detach()
        loss = token_losses.sum() / num_items_in_batch * self.accelerator.num_processes

        self._measurements.add_predictions(outputs)
        if self._key_alignment is None:
            return loss
        # A step adds up the gradients of its passes. The division makes the step's penalty the mean over its passes.
        penalty = self._key_alignment.penalty().to(loss.device) / self.current_gradient_accumulation_steps
        # Only the penalty's gradient is added, so that logged losses of runs with and without key losses can be
        # compared.
        return loss + gradient_alone(penalty)

    def _score_tokens(self, model: nn.Module, inputs: dict[str, Any]) -> Any:
        """The model's output for a prepared batch: the log probability of each supervised token, and its entropy.

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

        model_inputs = dict(inputs)
        positions = model_inputs.pop(POSITIONS)
        images = model_inputs.pop(IMAGE_POSITIONS)
        mask = unread_mask(self.args.device) if self._reads_no_mask else None
        with images_at_positions(unwrapped, images, mask), head_at_positions(unwrapped, positions):
            return model(**model_inputs, use_cache=False, fused_lm_head=True)

    @override
    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Zero: Trainer would count all parameters in every pass, for a figure that counts padding."""
        return 0

    @override
    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip the gradients of a step, after their norms have been measured by module.

        Trainer measures and clips only the whole gradient.

        Returns:
            The norm of the whole gradient before clipping.
        """
        self.accelerator.unscale_gradients()  # float16's scaler has scaled them
        norms = {}
        for module, parameters in self._trained_parameters.items():
            norms[module] = gradient_norm(parameters)
        whole_norm = torch.stack(list(norms.values())).norm()
        self._measurements.grad_norms = norms

        for module, parameters in self._trained_parameters.items():
            norm = norms[module] if self._clip_by_module else whole_norm
            nn.utils.clip_grads_with_norm_(parameters, self.args.max_grad_norm, norm)

        # In float16 there is a scaler, which skips a step whose gradient isn't finite.
        if self.accelerator.scaler is None:
            self._finite_watch.note(whole_norm)
        return whole_norm

    def _check_finite(self) -> None:
        """Stop the run if a loss or a gradient since the last check was not finite. Every process must call this.

        Raises:
            UserError: if such a value was found.
        """
        self._finite_watch.check(self.state.global_step, self._sum_over_processes)

    @override
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log a step with our measurements, and without Trainer's figures that are wrong here.

        Trainer and TRL would log figures that count padding, or that begin at 0 again when a run is resumed.

        Raises:
            UserError: if a loss or a gradient since the last check was not finite.
        """
        self._check_finite()
        self._add_up_tokens()
        if "loss" in logs:  # not in the logs of an evaluation or of the whole run
            logs |= self._measurements.collect(self._sum_over_processes)
            if self._key_alignment is not None:
                logs |= self._key_alignment.collect(self._sum_over_processes)

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
        """Bring the number of tokens in the trainer's state up to date. Every process must call this.

        Checkpoints keep the state, so that a resumed run goes on counting.
        """
        self.state.num_input_tokens_seen += self._measurements.take_tokens(self._sum_over_processes)

    @override
    @torch.no_grad()
    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Mean loss of the held-out rows' supervised tokens, with their pictures and with blank pictures.

        The two losses are returned and logged as `eval_loss` and `eval_loss_blank`. Trainer would log a mean over
        batches. The random state is restored, so that training goes on as it would without an evaluation.

        Raises:
            UserError: if a loss or a gradient since the last check was not finite.
        """
        self._check_finite()
        device = self.args.device
        cuda_devices = [device] if device.type == "cuda" else []
        blank = self.data_collator.process_images([]).to(device)  # [1, 3, height, width]
        sums = torch.zeros(3, dtype=torch.float64)  # loss, loss with blank pictures, number of supervised tokens
        assert self._eval_sampler is not None

        self.model.eval()
        with torch.random.fork_rng(cuda_devices):
            for batch in self._data_loader(self.eval_dataset, self._eval_sampler):
                batch = self._prepare_inputs(batch)
                blank_batch = {**batch, "pixel_values": blank.expand_as(batch["pixel_values"])}
                sums[0] += self._summed_loss(batch)
                sums[1] += self._summed_loss(blank_batch)
                sums[2] += len(batch[POSITIONS])

        loss, loss_blank, num_tokens = self._sum_over_processes(sums).tolist()
        metrics = {"eval_loss": loss / num_tokens, "eval_loss_blank": loss_blank / num_tokens}
        self.log(metrics)  # before model.train(): in training mode TRL would add its metrics of training
        self.model.train()
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _summed_loss(self, batch: dict[str, Any]) -> float:
        """The sum of the losses of a batch's supervised tokens."""
        return -self._score_tokens(self.model, batch).log_probs.sum().item()

    @override
    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Save a checkpoint in a separate folder, and rename it when it is complete.

        Trainer would write directly into the checkpoint's final folder, which a killed run would leave half-written.

        Raises:
            UserError: if a loss or a gradient since the last check was not finite.
        """
        self._check_finite()
        self._add_up_tokens()

        # transformers converts the names of saved weights to the Hub's names, which for DINOv2 differ from the names
        # in the model. Trainer loads a checkpoint by the names in the model, so conversions are turned off.
        self._unwrapped()._weight_conversions = []

        output_dir = Path(self.args.output_dir)
        num_kept = self.args.save_total_limit
        with checkpoint_folder(output_dir, self.accelerator, self._run, self.state, num_kept) as checkpoint:
            super()._save_checkpoint(model, trial)  # into this folder, by `_get_output_dir`
            if self._stream is not None:
                self._stream.write_place(checkpoint, self.is_world_process_zero())

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
        published only when it is complete. Trainer would write shards, and directly into the run's folder.

        Raises:
            UserError: if a loss or a gradient since the last check was not finite.
        """
        if output_dir is not None:
            super().save_model(output_dir, _internal_call=True)
            return

        self._check_finite()

        # The final model gets the Hub's names again, which `_save_checkpoint` has turned off.
        self._unwrapped().__dict__.pop("_weight_conversions", None)

        run_folder = Path(self.args.output_dir)
        with result_folder(run_folder, self.accelerator, self._run, self.state) as folder:
            if self.is_fsdp_enabled:
                self._save_gathered(folder)
            else:
                super().save_model(str(folder), _internal_call=True)

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
        return self.accelerator.reduce(sums.to(self.accelerator.device, non_blocking=True), "sum")


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
