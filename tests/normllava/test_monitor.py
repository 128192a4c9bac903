"""What the monitor logs, in a loop of one's own and in trainers: the figures of logged steps alone."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForImageTextToText, AutoProcessor, Trainer, TrainerCallback, TrainingArguments
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from typing_extensions import override

from families import FAMILIES, build, inputs, record_sample
from normllava import NormMonitor, scale_projector
from normllava.errors import UserError
from normllava.monitor import describe_ratio


FIGURES = {"norm/image", "norm/text", "norm/ratio", "turning/image", "turning/text"}


@pytest.mark.parametrize("name", FAMILIES)
def test_figures_of_a_family_are_those_of_the_diagnostics(name: str) -> None:
    model = build(name)
    sample = inputs(name, padding=3)
    monitor = NormMonitor(model)
    monitor.watch()
    model(**sample)
    figures = monitor.collect()

    record = record_sample(model, sample)
    tokens = record.tokens
    newlines = tokens.excluded.get("newline")
    image = tokens.image if newlines is None else tokens.image | newlines  # found only by a forward pass
    sinks = tokens.excluded.get("sink", torch.zeros_like(image))
    assert not sinks.any()
    for kind, mask in (("image", image), ("text", tokens.text)):
        assert figures[f"norm/{kind}"] == pytest.approx(record.layer_norms[0][mask].mean().item(), rel=1e-4)
        expected_turning = (1 - record.cosines[0][mask]).mean().item()
        assert figures[f"turning/{kind}"] == pytest.approx(expected_turning, rel=1e-3, abs=1e-6)
    assert figures["norm/ratio"] == pytest.approx(figures["norm/image"] / figures["norm/text"])


class OperationCounter(TorchDispatchMode):
    """Counts the operations on tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def count_operations(model: Any) -> int:
    with OperationCounter() as counter:
        model(**inputs("llava-clip"))
    return counter.count


def test_in_a_step_that_is_not_watched_no_tensor_is_touched() -> None:
    model = build("llava-clip")
    expected = count_operations(model)
    monitor = NormMonitor(model)
    assert count_operations(model) == expected
    monitor.watch()
    assert count_operations(model) > expected
    monitor.collect()
    assert count_operations(model) == expected


def test_passes_without_gradients_are_left_out() -> None:
    """They generate, evaluate, or ask a reference model."""
    model = build("llava-clip")
    monitor = NormMonitor(model)
    monitor.watch()
    with torch.no_grad():
        model(**inputs("llava-clip"))
    assert monitor.collect() == {}


def test_gradient_checkpointing_adds_no_token_twice() -> None:
    model = build("llava-clip").train()
    model.gradient_checkpointing_enable()
    monitor = NormMonitor(model)
    monitor.watch()
    model(**inputs("llava-clip"), use_cache=False).logits.sum().backward()
    assert monitor._sums is not None
    assert monitor._sums[:, 2].tolist() == [16, 12]  # image tokens, and words


def test_after_an_error_in_a_pass_the_next_figures_are_right() -> None:
    model = build("llava-clip")
    monitor = NormMonitor(model)
    monitor.watch()
    model(**inputs("llava-clip"))
    expected = monitor.collect()

    monitor.watch()
    with pytest.raises(ValueError, match=r".+"):
        model(**(inputs("llava-clip") | {"pixel_values": torch.zeros(2, 3, 28, 28)}))  # a picture too many
    monitor.watch()
    model(**inputs("llava-clip"))
    assert monitor.collect() == expected


def test_without_its_hooks_a_monitor_measures_nothing() -> None:
    model = build("llava-clip")
    monitor = NormMonitor(model)
    monitor.remove()
    monitor.watch()
    model(**inputs("llava-clip"))
    assert monitor.collect() == {}


@pytest.fixture
def rows(make_model_folder: Callable[..., Path]) -> list[dict[str, torch.Tensor]]:
    """Eight rows for transformers' Trainer, with labels. The model is that of `make_model_folder`."""
    processor = AutoProcessor.from_pretrained(make_model_folder())
    rows = []
    for number in range(8):
        picture = Image.new("RGB", (30, 20), (number * 30, 80, 120))
        content = [{"type": "image", "image": picture}, {"type": "text", "text": f"number {number}?"}]
        messages = [{"role": "user", "content": content}]
        row = processor.apply_chat_template(messages, tokenize=True, return_dict=True, return_tensors="pt")
        rows.append({name: value[0] for name, value in row.items()} | {"labels": row["input_ids"][0]})
    return rows


class LogKeeper(TrainerCallback):
    """Keeps what a callback is told, as a tracker would."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    @override
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


def make_trainer(
    folder: Path, output_dir: Path, rows: list[Any], callback: TrainerCallback, **options: Any
) -> Trainer:
    model = AutoModelForImageTextToText.from_pretrained(folder)
    settings = {"max_steps": 4, "per_device_train_batch_size": 1, "logging_steps": 2, "report_to": "none", **options}
    args = TrainingArguments(str(output_dir), use_cpu=True, save_strategy="no", disable_tqdm=True, **settings)
    return Trainer(model, args, train_dataset=rows, eval_dataset=rows[:2], callbacks=[callback])


def test_a_trainer_logs_the_figures_to_its_history_and_its_trackers(
    make_model_folder: Callable[..., Path], rows: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keeper = LogKeeper()
    options = {"eval_strategy": "steps", "eval_steps": 2}
    trainer = make_trainer(make_model_folder(), tmp_path, rows, keeper, **options)
    NormMonitor(trainer.model, AutoProcessor.from_pretrained(make_model_folder())).attach(trainer)
    trainer.train()

    steps = [log for log in trainer.state.log_history if "loss" in log]
    assert [step["step"] for step in steps] == [2, 4]
    for log in trainer.state.log_history:
        assert (log.keys() & FIGURES == FIGURES) == ("loss" in log)
    told = [log for log in keeper.logs if "loss" in log]
    assert [log["norm/ratio"] for log in told] == [step["norm/ratio"] for step in steps]
    assert capsys.readouterr().err.count("times the norm of text embeddings") == 1


def make_trl_rows(num_rows: int) -> tuple[Dataset, Dataset]:
    """Rows for TRL's SFT and for its DPO."""
    sft_rows = []
    dpo_rows = []
    for number in range(num_rows):
        picture = Image.new("RGB", (30, 20), (number * 30, 80, 120))
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
        answer = {"role": "assistant", "content": [{"type": "text", "text": f"number {number}"}]}
        wrong = {"role": "assistant", "content": [{"type": "text", "text": "none"}]}
        sft_rows.append({"images": [picture], "messages": [question, answer]})
        dpo_rows.append({"images": [picture], "prompt": [question], "chosen": [answer], "rejected": [wrong]})
    return Dataset.from_list(sft_rows), Dataset.from_list(dpo_rows)


@pytest.mark.parametrize("kind", ["SFT", "DPO"])
def test_trls_trainers_log_the_figures(kind: str, make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    processor = AutoProcessor.from_pretrained(make_model_folder(projector_norm="none"))
    unscaled = AutoModelForImageTextToText.from_pretrained(make_model_folder(projector_norm="none"))
    scale_projector(unscaled, processor)
    unscaled.save_pretrained(tmp_path / "scaled")
    model = AutoModelForImageTextToText.from_pretrained(tmp_path / "scaled")
    sft_rows, dpo_rows = make_trl_rows(4)
    options: dict[str, Any] = {
        "max_steps": 1,
        "logging_steps": 1,
        "per_device_train_batch_size": 2,
        "max_length": None,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
    }
    trainer: Trainer
    if kind == "SFT":
        args = SFTConfig(str(tmp_path / "out"), **options)
        trainer = SFTTrainer(model, args, train_dataset=sft_rows, processing_class=processor)
    else:
        dpo_args = DPOConfig(str(tmp_path / "out"), **options)
        trainer = DPOTrainer(model, args=dpo_args, train_dataset=dpo_rows, processing_class=processor)
    NormMonitor(model, processor).attach(trainer)
    trainer.train()

    log = trainer.state.log_history[0]
    assert log.keys() >= FIGURES
    assert log["norm/ratio"] == pytest.approx(1, rel=0.3)  # scaled, on pictures of noise
    if kind == "DPO":  # the reference model, which is loaded from the same folder, agrees with the untrained one
        assert log["rewards/margins"] == pytest.approx(0, abs=1e-6)


def test_peft_changes_no_figure(make_model_folder: Callable[..., Path], rows: list[Any], tmp_path: Path) -> None:
    """Adapters start at zero, so the first step's figures are those of the model without adapters."""
    first_logs = []
    for with_adapters in (False, True):
        trainer = make_trainer(make_model_folder(), tmp_path, rows, LogKeeper(), max_steps=1, logging_steps=1)
        if with_adapters:
            trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))
            trainer.model_wrapped = trainer.model
        NormMonitor(trainer.model).attach(trainer)
        trainer.train()
        first_logs.append({name: trainer.state.log_history[0][name] for name in FIGURES})
    assert first_logs[0] == pytest.approx(first_logs[1], rel=1e-6)


def test_a_trainer_that_does_not_log_by_steps_is_refused(
    make_model_folder: Callable[..., Path], rows: list[Any], tmp_path: Path
) -> None:
    trainer = make_trainer(make_model_folder(), tmp_path, rows, LogKeeper(), logging_strategy="epoch")
    with pytest.raises(UserError, match="needs logging_strategy 'steps', got 'epoch'"):
        NormMonitor(trainer.model).attach(trainer)


def test_the_first_ratio_is_told_in_words() -> None:
    assert describe_ratio(38.21) == (
        "In this step image embeddings enter the decoder with 38.2 times the norm of text embeddings. "
        "normllava.scale_projector starts a new projector at 1, and a lower learning rate keeps it nearer; what that "
        "was worth is in docs/findings.md of NormLlava."
    )
    assert describe_ratio(1.02).endswith("with 1.02 times the norm of text embeddings.")
