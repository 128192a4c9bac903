"""The losses on attention keys (training/modules/key_alignment.py), and runs that train key adapters with them.

MMD, the maximum mean discrepancy, is the distance between the keys of visual and of text tokens. The Gram distance is
how far the angles between keys have moved from those of the original `k_proj`. The weighted sum of both is called the
penalty.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_distributed import TWO_PROCESSES, launch
from transformers import AutoModelForImageTextToText, AutoProcessor


peft = pytest.importorskip("peft")

from modeling_normllava import (  # noqa: E402
    NormLlavaForConditionalGeneration,
    NormLlavaKeyAdapterForConditionalGeneration,
)
from script_runs import PACKED, collate, read_steps, run  # noqa: E402
from training.add_key_adapters import add_key_adapters  # noqa: E402
from training.merge import merge  # noqa: E402
from training.modules.adapters import add_adapters  # noqa: E402
from training.modules.key_alignment import KeyAlignment, gradient_alone, gram_distance, mmd  # noqa: E402
from training.modules.stages import LearningRates, Stage, prepare_stage  # noqa: E402


# The bandwidths s of MMD's kernel, whose formula is in `plain_mmd`.
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)
ADAPT: dict[str, Any] = {"stage": "adapt", "lora_r": 4, "lora_alpha": 8, "learning_rate": 5e-3}


def plain_mmd(visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The mean over heads of MMD², computed pair by pair.

    The kernel is the mean of exp(-|x - y|² / (s σ²)) over all s in `BANDWIDTHS`, where σ² is the mean squared distance
    between two keys.

    Args:
        visual, text: Keys, `(num_heads, num_tokens, head_dim)`.
    """

    def mean_over_pairs(matrix: torch.Tensor) -> torch.Tensor:
        """The mean of a matrix without its diagonal, which pairs each token with itself."""
        num_tokens = len(matrix)
        total = torch.zeros((), dtype=matrix.dtype)
        for i in range(num_tokens):
            for j in range(num_tokens):
                if i != j:
                    total = total + matrix[i, j]
        return total / (num_tokens * (num_tokens - 1))

    mmd_of_heads = []
    for visual_keys, text_keys in zip(visual, text, strict=True):
        keys = torch.cat([visual_keys, text_keys])
        squared_distances = (keys[:, None] - keys[None]).square().sum(-1)  # [num_tokens, num_tokens]
        sigma_squared = mean_over_pairs(squared_distances).detach()  # a constant in the gradient
        kernels = [torch.exp(-squared_distances / (bandwidth * sigma_squared)) for bandwidth in BANDWIDTHS]
        kernel = torch.stack(kernels).mean(0)  # [num_tokens, num_tokens]

        num_visual = len(visual_keys)
        within_visual = mean_over_pairs(kernel[:num_visual, :num_visual])
        within_text = mean_over_pairs(kernel[num_visual:, num_visual:])
        across = kernel[:num_visual, num_visual:].mean()
        mmd_of_heads.append(within_visual + within_text - 2 * across)
    return torch.stack(mmd_of_heads).mean()


def plain_gram(keys: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """The mean over heads of |G - G_ref|²_F / n², where G and G_ref are cosines between centred keys.

    Args:
        keys, reference: Keys of the same n tokens, `(num_heads, n, head_dim)`.
    """

    def cosines(keys_of_head: torch.Tensor) -> torch.Tensor:
        centred = keys_of_head - keys_of_head.mean(0)
        return torch.cosine_similarity(centred[:, None], centred[None], dim=-1)  # [n, n]

    distance_of_heads = []
    for head_keys, head_reference in zip(keys, reference, strict=True):
        difference = cosines(head_keys) - cosines(head_reference)
        distance_of_heads.append(difference.square().sum() / len(head_keys) ** 2)
    return torch.stack(distance_of_heads).mean()


def random_keys(num_tokens: int, seed: int) -> torch.Tensor:
    """Keys of three heads, `(3, num_tokens, 4)`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(3, num_tokens, 4, dtype=torch.double, generator=generator)


Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


# The MMD may compare keys of different numbers of tokens. The Gram distance compares keys of the same tokens.
@pytest.mark.parametrize(
    ("loss_function", "plain_function", "num_second_keys"),
    [pytest.param(mmd, plain_mmd, 5, id="mmd"), pytest.param(gram_distance, plain_gram, 7, id="gram distance")],
)
def test_losses_and_gradients_follow_the_formulas(
    loss_function: Loss, plain_function: Loss, num_second_keys: int
) -> None:
    first = random_keys(7, seed=0).requires_grad_()
    second = random_keys(num_second_keys, seed=1) + 0.7  # without this shift the MMD would be about 0
    second.requires_grad_()
    loss = loss_function(first, second)
    expected_loss = plain_function(first, second)
    assert loss.item() == pytest.approx(expected_loss.item(), abs=1e-12)

    gradients = torch.autograd.grad(loss, (first, second))
    expected_gradients = torch.autograd.grad(expected_loss, (first, second))
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        assert expected.abs().max() > 1e-3  # far above the tolerance
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_gradient_alone_adds_a_gradient_but_no_value() -> None:
    weight = torch.tensor(3.0, requires_grad=True)
    loss = 1.5 * weight + gradient_alone(weight.square())
    assert loss.item() == 1.5 * 3
    (gradient,) = torch.autograd.grad(loss, weight)
    assert gradient.item() == 1.5 + 2 * 3  # d/dw (1.5 w + w²)


class Batch:
    """A padded or packed batch of rows. The last row has no picture.

    Args:
        folder: The folder of a model.
        data: The path of the fixture `data`, beside which the pictures are.
        packed: Whether the batch is packed.
        picture_numbers: For each row before the last, the number of its picture.

    Attributes:
        inputs: Arguments for the model.
        visual: Which tokens are image tokens of a row's picture, `(num_rows, row_length)`.
        text: Which tokens are text, and no special tokens, `(num_rows, row_length)`.
    """

    def __init__(self, folder: Path, data: Path, packed: bool, picture_numbers: tuple[int, ...] = (7, 8)) -> None:
        processor = AutoProcessor.from_pretrained(folder)
        rows: list[dict[str, Any]] = []
        for number in picture_numbers:
            turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": f"number {number}"}]
            images = [str(data.parent / f"{number}.png")]
            rows.append({"images": images, "source": "row", "conversations": turns})
        turns = [{"from": "human", "value": "Say."}, {"from": "gpt", "value": "something much longer than that"}]
        rows.append({"images": [], "source": "row", "conversations": turns})

        self.inputs = collate(folder, rows, packed)
        self.inputs["use_cache"] = False

        input_ids = self.inputs["input_ids"]
        is_image_token = input_ids == processor.image_token_id
        is_special = torch.isin(input_ids, torch.tensor(processor.tokenizer.all_special_ids))
        assert is_special.any()  # special tokens are padding, BOS and delimiters
        self.text = ~is_special & ~is_image_token
        if picture_numbers:
            self.visual = is_image_token
        else:  # all image tokens are of a blank picture, which the collator has added
            self.visual = torch.zeros_like(is_image_token)


@pytest.fixture
def with_key_adapters(make_model_folder: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """A function that gives the folder of a model whose key adapters are random.

    New key adapters would have `up` at 0, and so some gradients of 0.
    """

    def save_model(text: str = "qwen2") -> Path:
        model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(text=text))
        model = add_key_adapters(model, rank=4, alpha=8, dropout=0.0)  # dropout would make passes differ
        generator = torch.Generator().manual_seed(0)
        for name, parameter in model.named_parameters():
            if name.endswith("key_adapter.up"):
                parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
        folder = tmp_path / "key_adapters"
        model.save_pretrained(folder)
        processor = AutoProcessor.from_pretrained(make_model_folder(text=text))
        processor.save_pretrained(folder)
        return folder

    return save_model


# The weights of the two losses in the penalty.
MMD_WEIGHT = 0.3
GRAM_WEIGHT = 0.7


def load_with_alignment(folder: Path) -> tuple[NormLlavaForConditionalGeneration, KeyAlignment]:
    """A model with key adapters and LoRA, in float64 and in training mode, and the losses on its keys."""
    model = NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa").double()
    add_adapters(model, rank=2, alpha=4)  # changes the model in place
    processor = AutoProcessor.from_pretrained(folder)
    return model.train(), KeyAlignment(model, processor, mmd_weight=MMD_WEIGHT, gram_weight=GRAM_WEIGHT)


def sum_over_one_process(sums: torch.Tensor) -> torch.Tensor:
    return sums


def keys_by_head(keys: torch.Tensor, attention: Any, with_norm: bool) -> torch.Tensor:
    """The output of `k_proj`, `(num_tokens, num_heads * head_dim)`, as `(num_heads, num_tokens, head_dim)`.

    If `with_norm`, the attention layer's norm of keys is applied.
    """
    heads = keys.unflatten(-1, (-1, attention.head_dim))  # [num_tokens, num_heads, head_dim]
    if with_norm:
        heads = attention.k_norm(heads)
    return heads.transpose(0, 1)


def plain_penalty(model: NormLlavaForConditionalGeneration, batch: Batch, with_norm: bool = False) -> torch.Tensor:
    """The penalty by its formula, from the inputs and outputs of each `k_proj` in another forward pass.

    Args:
        model: The model.
        batch: The batch for the forward pass.
        with_norm: Whether the model's attention normalizes its keys.
    """
    calls: list[tuple[torch.Tensor, torch.Tensor]] = []

    def record_call(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
        calls.append((args[0], output))

    attentions = [layer.self_attn for layer in model.model.language_model.layers]
    hooks = [attention.k_proj.register_forward_hook(record_call) for attention in attentions]
    model(**batch.inputs)
    for hook in hooks:
        hook.remove()

    total = torch.zeros((), dtype=torch.double)
    for attention, (hidden_states, keys) in zip(attentions, calls, strict=True):
        with torch.no_grad():
            # The reference is what the original `k_proj` gives, without the key adapter.
            reference = attention.k_proj.base(hidden_states)
            visual_reference = keys_by_head(reference[batch.visual], attention, with_norm)
            text_reference = keys_by_head(reference[batch.text], attention, with_norm)
        visual = keys_by_head(keys[batch.visual], attention, with_norm)
        text = keys_by_head(keys[batch.text], attention, with_norm)
        visual_gram = plain_gram(visual, visual_reference)
        text_gram = plain_gram(text, text_reference)
        mean_gram = (visual_gram + text_gram) / 2
        total = total + MMD_WEIGHT * plain_mmd(visual, text) + GRAM_WEIGHT * mean_gram
    return total / len(attentions)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed and checkpointed"])
@pytest.mark.parametrize("text", ["qwen2", "llama", "gemma3"])
def test_the_penalty_follows_its_formula(
    with_key_adapters: Callable[..., Path], data: Path, text: str, packed: bool
) -> None:
    folder = with_key_adapters(text)
    model, alignment = load_with_alignment(folder)
    batch = Batch(folder, data, packed)
    trained_parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if packed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()  # as TRL does for adapters with checkpointing

    model(**batch.inputs)
    penalty = alignment.penalty()
    gradients = torch.autograd.grad(penalty, trained_parameters, allow_unused=True)

    model.gradient_checkpointing_disable()
    has_key_norm = text == "gemma3"
    expected_penalty = plain_penalty(model, batch, with_norm=has_key_norm)
    expected_gradients = torch.autograd.grad(expected_penalty, trained_parameters, allow_unused=True)

    assert penalty.dtype == torch.double
    assert penalty.item() == pytest.approx(expected_penalty.item(), rel=1e-9)
    nonzero_gradients = [gradient for gradient in gradients if gradient is not None and gradient.any()]
    assert len(nonzero_gradients) > 10  # otherwise the comparison below would show little
    absolute_tolerance = 1e-6 if text == "gemma3" else 1e-12  # Gemma's norm layers compute in float32
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        if expected is None:  # the penalty doesn't depend on the parameter
            assert gradient is None or not gradient.any()
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=absolute_tolerance)

    # The two losses are logged without their weights, and only once.
    logs = alignment.collect(sum_over_one_process)
    weighted_sum = MMD_WEIGHT * logs["key_mmd"] + GRAM_WEIGHT * logs["key_gram"]
    assert weighted_sum == pytest.approx(expected_penalty.item(), rel=1e-9)
    assert alignment.collect(sum_over_one_process) == {}


def test_the_penalty_leaves_out_sinks(with_key_adapters: Callable[..., Path], data: Path) -> None:
    folder = with_key_adapters()
    model, alignment = load_with_alignment(folder)
    batch = Batch(folder, data, packed=False)
    # Give a text token of the last row a huge norm, which makes the token a sink.
    last_row = batch.inputs["input_ids"][-1]
    text_ids = last_row[batch.text[-1]]
    sink_id = int(text_ids[3])  # any token of the text
    model.get_input_embeddings().weight.data[sink_id] *= 1000
    batch.text &= batch.inputs["input_ids"] != sink_id  # in all rows
    model(**batch.inputs)
    assert alignment.penalty().item() == pytest.approx(plain_penalty(model, batch).item(), rel=1e-9)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_batch_without_pictures_adds_nothing(
    with_key_adapters: Callable[..., Path], data: Path, packed: bool
) -> None:
    folder = with_key_adapters()
    model, alignment = load_with_alignment(folder)
    batch = Batch(folder, data, packed, picture_numbers=())
    model(**batch.inputs)
    assert alignment.penalty().item() == 0


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_a_pass_in_eval_mode_adds_nothing(with_key_adapters: Callable[..., Path], data: Path, packed: bool) -> None:
    folder = with_key_adapters()
    model, alignment = load_with_alignment(folder)
    model.eval()
    model(**Batch(folder, data, packed).inputs)
    assert alignment.penalty().item() == 0
    assert alignment.collect(sum_over_one_process) == {}


@pytest.fixture
def same_rows(data: Path) -> Path:
    """The path of a file that has one row of the fixture `data` sixteen times."""
    (row,) = [row for row in json.loads(data.read_text()) if row["id"] == 7]
    path = data.parent / "same.json"
    path.write_text(json.dumps([row] * 16))
    return path


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_on_equal_rows_a_step_of_two_passes_is_like_a_step_of_one_pass(
    with_key_adapters: Callable[..., Path],
    same_rows: Path,
    tmp_path: Path,
    num_processes: int,
) -> None:
    """The two passes of a step come one after the other, or in two processes."""
    fields = {**ADAPT, "model_name_or_path": str(with_key_adapters()), "dataset_name": str(same_rows), "max_steps": 2}
    fields |= {"key_mmd_weight": 30.0, "key_gram_weight": 3.0, "optim": "sgd", "learning_rate": 0.1}
    fields |= {"max_grad_norm": 0, "per_device_train_batch_size": 2, "logging_steps": 1}
    one_pass = tmp_path / "one pass"
    two_passes = tmp_path / "two passes"
    run(tmp_path, **fields, global_batch_size=2, output_dir=str(one_pass))
    fields |= {"global_batch_size": 4, "output_dir": str(two_passes)}
    if num_processes == 1:
        run(tmp_path, **fields)
    else:
        launch(tmp_path, *TWO_PROCESSES, **fields)

    expected_steps = read_steps(one_pass)
    steps = read_steps(two_passes)
    for step, expected in zip(steps, expected_steps, strict=True):
        for name in expected:
            if name.startswith(("loss", "grad_norm", "key_")):
                assert step[name] == pytest.approx(expected[name], rel=1e-4), name

    expected_weights = load_file(one_pass / "adapter_model.safetensors")
    weights = load_file(two_passes / "adapter_model.safetensors")
    assert weights.keys() == expected_weights.keys()
    for name, expected_weight in expected_weights.items():
        torch.testing.assert_close(weights[name], expected_weight, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("packing", [{}, PACKED], ids=["padded", "packed"])
def test_a_run_aligns_keys_and_its_adapter_loads_and_merges(
    make_model_folder: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    folder = make_model_folder(key_adapter_rank=4)
    fields = {**ADAPT, **packing, "model_name_or_path": str(folder), "dataset_name": str(data)}
    fields |= {"num_train_epochs": 4, "key_mmd_weight": 2.0, "key_gram_weight": 0.1, "logging_steps": 4}
    fields["gradient_checkpointing"] = bool(packing)
    run(tmp_path, **fields, output_dir=str(tmp_path / "adapter"))

    steps = read_steps(tmp_path / "adapter")
    assert steps[-1]["key_mmd"] < 0.5 * steps[0]["key_mmd"]
    assert steps[-1]["key_gram"] > 0

    # Key adapters are saved with all their weights, and `k_proj` has no LoRA besides.
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    key_adapter_weights = {name.split(".")[-1] for name in saved if ".key_adapter." in name}
    assert key_adapter_weights == {"down", "up", "gate_weight", "gate_bias"}
    assert not any("k_proj" in name and "lora_" in name for name in saved)

    # The merged model and the adapter, loaded from their folders, give the logits of the trained model.
    merged = merge(tmp_path / "adapter").eval()
    for name, _ in merged.named_parameters():
        assert "lora" not in name
        assert "modules_to_save" not in name
    merged.save_pretrained(tmp_path / "merged")
    inputs = Batch(folder, data, packed=False).inputs
    base = NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    trained = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        expected_logits = trained(**inputs).logits
        for name in ("merged", "adapter"):
            loaded = AutoModelForImageTextToText.from_pretrained(tmp_path / name).eval()
            torch.testing.assert_close(loaded(**inputs).logits, expected_logits, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", Stage)
def test_which_stages_train_key_adapters(make_model_folder: Callable[..., Path], stage: Stage) -> None:
    model = NormLlavaKeyAdapterForConditionalGeneration.from_pretrained(make_model_folder(key_adapter_rank=4))
    if stage is Stage.ADAPT:
        add_adapters(model, rank=2, alpha=4)
    prepare_stage(model, stage, LearningRates(common=1e-3, vision=1e-4, norm=1e-5))

    num_originals = 0  # in stage "adapt", PEFT trains copies of modules, and keeps the original modules
    for name, parameter in model.named_parameters():
        if ".original_module." in name:
            num_originals += 1
            assert not parameter.requires_grad, name
        elif ".key_adapter." in name:
            assert parameter.requires_grad == (stage is not Stage.ALIGN), name
        elif "k_proj.base" in name:
            assert parameter.requires_grad == (stage is Stage.INSTRUCT), name
    assert (num_originals > 0) == (stage is Stage.ADAPT)
