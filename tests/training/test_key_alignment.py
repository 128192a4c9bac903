"""Losses on keys: the formulas, which keys and tokens they are of, and runs that are trained with them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import launch
from transformers import AutoModelForImageTextToText, AutoProcessor


peft = pytest.importorskip("peft")

from modeling_normllava import NormLlavaForConditionalGeneration  # noqa: E402
from modeling_normllava import NormLlavaKeyAdapterForConditionalGeneration as Adapted  # noqa: E402
from script_runs import PACKED, collate, read_metrics, run  # noqa: E402
from training.adapters import add_adapters  # noqa: E402
from training.add_key_adapters import add_key_adapters  # noqa: E402
from training.key_alignment import KeyAlignment, gram_distance, mmd  # noqa: E402
from training.loss import gradient_alone  # noqa: E402
from training.merge import merge  # noqa: E402
from training.stages import LearningRates, Stage, prepare_stage  # noqa: E402


BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
ADAPT: dict[str, Any] = {"stage": "adapt", "lora_r": 4, "lora_alpha": 8, "learning_rate": 5e-3}


def plain_mmd(visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The U-statistic, pair by pair, with exp(-|x - y|² / (s σ²))."""
    heads = []
    for v, t in zip(visual, text, strict=True):
        both, (n, m) = torch.cat([v, t]), (len(v), len(t))
        distances = (both[:, None] - both[None]).square().sum(-1)
        scale = (distances.sum() / ((n + m) * (n + m - 1))).detach()
        kernel = sum(torch.exp(-distances / (s * scale)) for s in BANDWIDTHS) / len(BANDWIDTHS)
        vv = sum(kernel[i, j] for i in range(n) for j in range(n) if i != j) / (n * (n - 1))
        tt = sum(kernel[n + i, n + j] for i in range(m) for j in range(m) if i != j) / (m * (m - 1))
        heads.append(vv + tt - 2 * kernel[:n, n:].mean())
    return torch.stack(heads).mean()


def plain_gram(keys: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """|G - G_ref|²_F / n² of cosines between centred keys."""
    heads = []
    for of_head in zip(keys, reference, strict=True):
        k, r = (states - states.mean(0) for states in of_head)
        cosines = [torch.nn.functional.cosine_similarity(s[:, None], s[None], dim=-1) for s in (k, r)]
        heads.append((cosines[0] - cosines[1]).square().sum() / len(k) ** 2)
    return torch.stack(heads).mean()


def test_losses_and_gradients_are_the_formulas() -> None:
    generator = torch.Generator().manual_seed(0)
    visual, text, reference = (
        torch.randn(3, n, 4, dtype=torch.double, generator=generator).requires_grad_() for n in (7, 5, 7)
    )
    for found, expected, leaves in (
        (mmd(visual, text + 0.7), plain_mmd(visual, text + 0.7), (visual, text)),
        (gram_distance(visual, reference), plain_gram(visual, reference), (visual, reference)),
    ):
        assert found.item() == pytest.approx(expected.item(), abs=1e-12)
        for ours, plain in zip(torch.autograd.grad(found, leaves), torch.autograd.grad(expected, leaves), strict=True):
            assert plain.abs().max() > 1e-3
            torch.testing.assert_close(ours, plain, rtol=1e-9, atol=1e-12)


def test_a_loss_of_which_the_gradient_alone_is_taken_changes_no_figure() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    loss = 1.5 * weight + gradient_alone(weight.square())
    assert loss.item() == 4.5
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.item() == 1.5 + 2 * 3


class Batch:
    """A padded or packed batch of rows, and where its visual and text tokens are."""

    def __init__(self, folder: Path, data: Path, packed: bool, pictures: tuple[int, ...] = (7, 8)) -> None:
        processor = AutoProcessor.from_pretrained(folder)
        rows: list[dict[str, Any]] = [
            {"images": [str(data.parent / f"{n}.png")], "source": "row",
             "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"number {n}"}]}
            for n in pictures
        ]  # fmt: skip
        turns = [{"from": "human", "value": "Say."}, {"from": "gpt", "value": "something much longer than that"}]
        rows.append({"images": [], "source": "row", "conversations": turns})
        self.inputs = {**collate(folder, rows, packed), "use_cache": False}
        ids = self.inputs["input_ids"]
        special = torch.isin(ids, torch.tensor(processor.tokenizer.all_special_ids))  # padding, BOS, delimiters
        self.visual = (ids == processor.image_token_id) if pictures else torch.zeros_like(special)
        self.text = ~special & (ids != processor.image_token_id)
        assert special.any()


@pytest.fixture
def moved_keys(composed: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Folder of a model whose key adapters are not at their start, where some gradients are 0, without dropout."""

    def folder(text: str = "qwen2") -> Path:
        model = NormLlavaForConditionalGeneration.from_pretrained(composed(text=text))
        model = add_key_adapters(model, 4, alpha=8, dropout=0.0)
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("key_adapter.up"):
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        model.save_pretrained(tmp_path / "moved")
        AutoProcessor.from_pretrained(composed(text=text)).save_pretrained(tmp_path / "moved")
        return tmp_path / "moved"

    return folder


def watch(folder: Path) -> tuple[NormLlavaForConditionalGeneration, KeyAlignment]:
    """A model in float64 with LoRA, in training mode, and what watches it."""
    model = Adapted.from_pretrained(folder, attn_implementation="sdpa").double()
    add_adapters(model, rank=2, alpha=4)
    return model.train(), KeyAlignment(model, AutoProcessor.from_pretrained(folder), 0.3, 0.7)


def plain_penalty(model: NormLlavaForConditionalGeneration, batch: Batch, with_norm: bool = False) -> torch.Tensor:
    """By formula, from what each `k_proj` is given and returns in a pass of its own."""
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []
    attentions = [layer.self_attn for layer in model.model.language_model.layers]
    hooks = [
        attention.k_proj.register_forward_hook(lambda module, args, output: calls.append((args[0], output)))
        for attention in attentions
    ]
    model(**batch.inputs)
    for hook in hooks:
        hook.remove()
    total = torch.zeros((), dtype=torch.double)
    for attention, (states, keys) in zip(attentions, calls, strict=True):
        base = attention.k_proj.base
        reference = (states.detach() @ base.weight.T + (0 if base.bias is None else base.bias)).detach()
        of = {}
        for name, mask in (("visual", batch.visual), ("text", batch.text)):
            for kind, made in (("keys", keys), ("reference", reference)):
                heads = made[mask].unflatten(-1, (-1, attention.head_dim))
                heads = attention.k_norm(heads) if with_norm else heads
                of[name, kind] = heads.transpose(0, 1)
        grams = [plain_gram(of[name, "keys"], of[name, "reference"].detach()) for name in ("visual", "text")]
        total = total + 0.3 * plain_mmd(of["visual", "keys"], of["text", "keys"]) + 0.7 * sum(grams) / 2
    return total / len(attentions)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed and checkpointed"])
@pytest.mark.parametrize("text", ["qwen2", "llama", "gemma3"])
def test_the_penalty_is_the_formulas_on_ordinary_tokens(
    moved_keys: Callable[..., Path], data: Path, text: str, packed: bool
) -> None:
    model, alignment = watch(moved_keys(text))
    batch = Batch(moved_keys(text), data, packed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if packed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    model(**batch.inputs)
    found = alignment.penalty()
    gradients = torch.autograd.grad(found, trained, allow_unused=True)
    model.gradient_checkpointing_disable()
    expected = plain_penalty(model, batch, with_norm=text == "gemma3")
    logs = alignment.collect(lambda sums: sums)  # measures without their weights
    assert 0.3 * logs["key_mmd"] + 0.7 * logs["key_gram"] == pytest.approx(expected.item(), rel=1e-9)
    assert alignment.collect(lambda sums: sums) == {}
    assert found.dtype == torch.double  # float32 where the model is of less
    assert found.item() == pytest.approx(expected.item(), rel=1e-9)
    assert sum(gradient is not None and bool(gradient.any()) for gradient in gradients) > 10
    for ours, plain in zip(gradients, torch.autograd.grad(expected, trained, allow_unused=True), strict=True):
        if plain is None:
            assert ours is None or not ours.any()
        else:
            rounding = 1e-6 if text == "gemma3" else 1e-12  # its norms are in float32
            torch.testing.assert_close(ours, plain, rtol=1e-6, atol=rounding)


def test_sinks_stay_out(moved_keys: Callable[..., Path], data: Path) -> None:
    model, alignment = watch(moved_keys())
    batch = Batch(moved_keys(), data, packed=False)
    sink = int(batch.inputs["input_ids"][2][batch.text[2]][3])
    model.get_input_embeddings().weight.data[sink] *= 1000
    batch.text &= batch.inputs["input_ids"] != sink
    model(**batch.inputs)
    assert alignment.penalty().item() == pytest.approx(plain_penalty(model, batch).item(), rel=1e-9)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_batch_without_pictures_adds_nothing(moved_keys: Callable[..., Path], data: Path, packed: bool) -> None:
    model, alignment = watch(moved_keys())
    model(**Batch(moved_keys(), data, packed, pictures=()).inputs)  # with a blank picture
    assert alignment.penalty().item() == 0
    model.eval()(**Batch(moved_keys(), data, packed).inputs)
    assert alignment.penalty().item() == 0
    assert alignment.collect(lambda sums: sums) == {}


@pytest.fixture
def same_rows(data: Path) -> Path:
    """Sixteen times the same row."""
    rows = [row for row in json.loads(data.read_text()) if row["id"] == 7] * 16
    (data.parent / "same.json").write_text(json.dumps(rows))
    return data.parent / "same.json"


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_accumulation_and_processes_change_nothing(
    moved_keys: Callable[..., Path], same_rows: Path, tmp_path: Path, processes: int
) -> None:
    # Every pass has the same rows, so the mean over passes is that of one.
    fields = {**ADAPT, "model_name_or_path": str(moved_keys()), "dataset_name": str(same_rows), "max_steps": 2}
    fields |= {"key_mmd_weight": 30.0, "key_gram_weight": 3.0, "optim": "sgd", "learning_rate": 0.1}
    fields |= {"max_grad_norm": 0, "per_device_train_batch_size": 2, "logging_steps": 1}
    run(tmp_path, **fields, global_batch_size=2, output_dir=str(tmp_path / "one"))
    fields |= {"global_batch_size": 4, "output_dir": str(tmp_path / "more")}
    if processes == 1:
        run(tmp_path, **fields)
    else:
        launch(tmp_path, "--config_file", "training/accelerate/cpu_ddp.yaml", **fields)
    one, more = ([line for line in read_metrics(tmp_path / name) if "loss" in line] for name in ("one", "more"))
    for line, expected in zip(more, one, strict=True):
        names = [name for name in expected if name.startswith(("loss", "grad_norm", "key_"))]
        assert {name: line[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-4
        )
    adapter = load_file(tmp_path / "one" / "adapter_model.safetensors")
    for name, tensor in load_file(tmp_path / "more" / "adapter_model.safetensors").items():
        torch.testing.assert_close(tensor, adapter[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_a_run_moves_keys_reloads_and_merges(
    composed: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    fields = {**ADAPT, **packing, "model_name_or_path": str(composed(key_adapter_rank=4)), "dataset_name": str(data)}
    fields |= {"num_train_epochs": 4, "key_mmd_weight": 2.0, "key_gram_weight": 0.1, "logging_steps": 4}
    fields["gradient_checkpointing"] = bool(packing)
    run(tmp_path, **fields, output_dir=str(tmp_path / "adapter"))
    lines = [line for line in read_metrics(tmp_path / "adapter") if "loss" in line]
    assert lines[-1]["key_mmd"] < 0.5 * lines[0]["key_mmd"]
    assert lines[-1]["key_gram"] > 0
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.rsplit(".", 1)[-1] for name in saved if ".key_adapter." in name} == {
        "down", "up", "gate_weight", "gate_bias"
    }  # fmt: skip
    assert not any("k_proj" in name and "lora_" in name for name in saved)

    merged = merge(tmp_path / "adapter").eval()
    assert not any("lora" in name or "modules_to_save" in name for name, _ in merged.named_parameters())
    merged.save_pretrained(tmp_path / "merged")
    inputs = Batch(composed(key_adapter_rank=4), data, packed=False).inputs
    base = Adapted.from_pretrained(composed(key_adapter_rank=4), dtype=torch.float32)
    with torch.no_grad():
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(**inputs).logits
        again = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged").eval()
        torch.testing.assert_close(again(**inputs).logits, expected, rtol=1e-4, atol=1e-5)
        adapted = AutoModelForImageTextToText.from_pretrained(tmp_path / "adapter").eval()
        torch.testing.assert_close(adapted(**inputs).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", Stage)
def test_what_a_stage_trains_of_key_adapters(composed: Callable[..., Path], stage: Stage) -> None:
    model = Adapted.from_pretrained(composed(key_adapter_rank=4))
    if stage is Stage.ADAPT:
        add_adapters(model, rank=2, alpha=4)
    prepare_stage(model, stage, LearningRates(1e-3, 1e-4, 1e-5))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    of_keys = {name for name, _ in model.named_parameters() if ".key_adapter." in name}
    assert of_keys & trained == {name for name in of_keys if ".original_module." not in name and stage != Stage.ALIGN}
    assert any(".original_module." in name for name in of_keys) == (stage is Stage.ADAPT)
    assert not any("k_proj.base" in name for name in trained) or stage is Stage.INSTRUCT
