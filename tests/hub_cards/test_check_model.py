"""A run's folder that a stranger may load, and every fault that is planted in it, found before anything is staged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3MoeConfig

from conversations.files import sha256
from hub_cards.build import build
from hub_cards.check_model import find_model_faults, stored_tensors
from hub_cards.weights import FLOATS, read_weights
from plants import CONFIG, WEIGHTS, Plant, append, delete, edit, put, shard, tensors, write


NORM = "model.multi_modal_projector.norm"
VISION = "model.vision_tower.encoder.layers.0.mlp.fc1.weight"
MODELING = "modeling_normllava.py"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def fill(name: str, value: float) -> Plant:
    return tensors(lambda weights: weights[name].view(-1)[:1].fill_(value))


def cast(name: str, dtype: torch.dtype) -> Plant:
    return tensors(lambda weights: weights.update({name: weights[name].to(dtype)}))


def as_it_starts(weights: dict[str, torch.Tensor]) -> None:
    weights[f"{NORM}.weight"].fill_(0.0134)
    weights[f"{NORM}.bias"].zero_()


def twice(parts: list[dict[str, torch.Tensor]], weight_map: dict[str, str]) -> None:
    parts[1]["lm_head.weight"] = parts[0]["lm_head.weight"]


def lost(parts: list[dict[str, torch.Tensor]], weight_map: dict[str, str]) -> None:
    parts[0].pop("lm_head.weight")


def moved(parts: list[dict[str, torch.Tensor]], weight_map: dict[str, str]) -> None:
    parts[1]["lm_head.weight"] = parts[0].pop("lm_head.weight")


def stale(folder: Path) -> None:
    weights = (folder / WEIGHTS).read_bytes()
    shard(folder)
    (folder / WEIGHTS).write_bytes(weights)


def both(first: Plant, second: Plant) -> Plant:
    return lambda folder: (first(folder), second(folder))


OTHER_CODE = "you/repo--modeling.Class"
# What is planted, the file that the finding names, and what its reason says.
FAULTS: dict[str, tuple[Plant, str, str]] = {
    "no head": (tensors(lambda w: w.pop("lm_head.weight")), WEIGHTS, "lacks lm_head.weight, which the model has"),
    "no norm": (tensors(lambda w: w.pop(f"{NORM}.bias")), WEIGHTS, f"lacks {NORM}.bias"),
    "a vision tensor less": (tensors(lambda w: w.pop(VISION)), WEIGHTS, f"lacks {VISION}"),
    "two tensors less": (
        tensors(lambda w: (w.pop(VISION), w.pop("lm_head.weight"))), WEIGHTS, "lacks lm_head.weight (and 1 more)"
    ),
    "a row less": (
        tensors(lambda w: w.update({"lm_head.weight": w["lm_head.weight"][:-1].clone()})),
        WEIGHTS, "holds lm_head.weight of [319, 32], not [320, 32]",
    ),
    "transposed": (
        tensors(lambda w: w.update({"lm_head.weight": w["lm_head.weight"].T.contiguous()})), WEIGHTS, "of [32, 320]"
    ),
    "a tensor more": (
        tensors(lambda w: w.update(extra=torch.zeros(2))), WEIGHTS, "holds extra, which the model does not have"
    ),
    "a head beside a tied one": (
        put(CONFIG, tie_word_embeddings=True), WEIGHTS, "holds lm_head.weight, which the model does not have"
    ),
    "Llava's old names": (
        tensors(lambda w: w.update({"language_model.lm_head.weight": w.pop("lm_head.weight")})), WEIGHTS, "lacks lm"
    ),
    "weights of another dtype": (cast(VISION, torch.float16), WEIGHTS, f"holds {VISION} as F16, not F32"),
    "weights of twice the size": (cast(VISION, torch.float64), WEIGHTS, f"holds {VISION} as F64, not F32"),
    "weights as whole numbers": (cast(VISION, torch.int8), WEIGHTS, f"holds {VISION} as I8, not F32"),
    "a norm in bfloat16": (cast(f"{NORM}.weight", torch.bfloat16), WEIGHTS, f"{NORM}.weight as BF16, not F32"),
    "another dtype in the config": (put(CONFIG, dtype="bfloat16"), WEIGHTS, "as F32, not BF16"),
    "no dtype in the config": (put(CONFIG, dtype=None), CONFIG, "has no dtype"),
    "NaN": (fill(VISION, float("nan")), WEIGHTS, f"holds {VISION} with NaN or infinite"),
    "infinity": (fill("lm_head.weight", -float("inf")), WEIGHTS, "lm_head.weight with NaN or infinite"),
    "a gain of 0": (tensors(lambda w: w[f"{NORM}.weight"].zero_()), WEIGHTS, "a norm with a gain of 0"),
    "a norm that was not trained": (
        tensors(as_it_starts), WEIGHTS, "an untrained norm, gain 0.0134 and bias 0 everywhere, after 8 steps"
    ),
    "no norm in the config": (put(CONFIG, projector_norm="none"), WEIGHTS, f"{NORM}.bias (and 1 more), which"),
    "an arm that is not": (put(CONFIG, projector_norm="rms"), CONFIG, "no model can be built"),
    "more layers": (put(CONFIG, vision_config__num_hidden_layers=4), WEIGHTS, "lacks model.vision"),
    "fewer layers": (put(CONFIG, vision_config__num_hidden_layers=2), WEIGHTS, "does not have"),
    "another width": (put(CONFIG, text_config__hidden_size=64), WEIGHTS, "not [320, 64]"),
    "a larger vocabulary": (put(CONFIG, text_config__vocab_size=400), WEIGHTS, "of [320, 32], not [400, 32]"),
    "another model type": (put(CONFIG, model_type="llava"), CONFIG, "no model can be built"),
    "another architecture": (
        put(CONFIG, architectures=["LlavaForConditionalGeneration"]), CONFIG, "architectures is ['LlavaForCond"
    ),
    "quantised in the config alone": (
        put(CONFIG, quantization_config={"load_in_4bit": True}), CONFIG, "has a quantization_config"
    ),
    "quantised text model": (put(CONFIG, text_config__quantization_config={}), CONFIG, "has a quantization_config"),
    "another image token": (put(CONFIG, image_token_index=7), CONFIG, "image_token_index is 7, "),
    "another patch size in the processor": (
        put("processor_config.json", patch_size=28), "processor_config.json", "makes 1 tokens of a picture"
    ),
    "another way to choose features": (
        put(CONFIG, vision_feature_select_strategy="default"), "processor_config.json", "makes 4 tokens of a picture"
    ),
    "another size of pictures": (
        put("processor_config.json", image_processor__size={"height": 56, "width": 56}),
        "processor_config.json", "can't prepare a picture and a question",
    ),
    "a token more": (
        put("tokenizer.json", model__vocab__zebra=320), "tokenizer.json", "has more tokens than the model's 320"
    ),
    "an end that is none": (
        put("generation_config.json", eos_token_id=3), "generation_config.json", "eos_token_id is 3, without the"
    ),
    "a dict for tokens": (
        put("generation_config.json", return_dict_in_generate=True), "generation_config.json", "has return_dict_in_gen"
    ),
    "a chat template without the question": (
        write("chat_template.jinja", "<|image_pad|>"), "chat_template.jinja", "of the question 'What is it?'"
    ),
    "no chat template": (delete("chat_template.jinja"), "processor_config.json", "can't prepare a picture"),
    "a broken chat template": (write("chat_template.jinja", "{% if %}"), "processor_config.json", "can't prep"),
    "no processor": (delete("processor_config.json"), "processor_config.json", "is missing"),
    "no tokenizer": (delete("tokenizer.json"), "tokenizer.json", "is missing"),
    "a torn tokenizer": (write("tokenizer.json", "{"), "processor_config.json", "can't prepare a picture"),
    "not JSON": (write("tokenizer_config.json", "{"), "tokenizer_config.json", "is not valid JSON"),
    "NaN in JSON": (put(CONFIG, projector_norm_eps=float("nan")), CONFIG, "NaN is not a JSON value"),
    "a shard lost": (
        both(shard, delete(SECOND)), SECOND, "is in the index but missing"
    ),
    "a tensor in two shards": (lambda f: shard(f, twice), SECOND, "holds duplicate"),
    "a tensor lost from a shard": (lambda f: shard(f, lost), FIRST, "lacks lm_head.weight, which the model has"),
    "a tensor in another shard": (lambda f: shard(f, moved), SECOND, "which the index puts elsewhere"),
    "a single file beside shards": (stale, WEIGHTS, "is not in the index"),
    "shards without an index": (both(shard, delete(INDEX)), SECOND, "is not in the index"),
    "another class file": (append(MODELING, "\n"), MODELING, "differs from this version's file"),
    "no class file": (delete("configuration_normllava.py"), "configuration_normllava.py", "is missing"),
    "no auto_map": (put(CONFIG, auto_map=None), CONFIG, "its auto_map is not"),
    "another class": (put(CONFIG, auto_map__AutoModel="modeling_normllava.Other"), CONFIG, "its auto_map is not"),
    "another repository's class": (put(CONFIG, auto_map__AutoModel=OTHER_CODE), CONFIG, "its auto_map is not"),
    "code of a part": (
        put(CONFIG, text_config__auto_map={"AutoModel": OTHER_CODE}), CONFIG, "would run other code"
    ),
    "code of a pipeline": (
        put(CONFIG, custom_pipelines={"image-text-to-text": {"impl": "a.B"}}), CONFIG, "has custom_pipelines"
    ),
    **{
        f"code in {name}": (put(name, auto_map={"Auto": OTHER_CODE}), name, "has auto_map")
        for name in ("processor_config.json", "tokenizer_config.json", "generation_config.json")
    },
    "code of an image processor": (
        put("processor_config.json", image_processor__auto_map={"AutoImageProcessor": OTHER_CODE}),
        "processor_config.json", "has auto_map",
    ),
    **{
        f"another file or kernel, by {field}": (put(CONFIG, **{field: "you/kernel"}), CONFIG, f"has {name}")
        for field, name in {
            "transformers_weights": "transformers_weights", "configuration_files": "configuration_files",
            "text_config__attn_implementation": "attn_implementation",
        }.items()
    },
    "another tokenizer file": (
        put("tokenizer_config.json", fast_tokenizer_files=["a.json"]), "tokenizer_config.json", "has fast_tokenizer"
    ),
    "two auto_maps": (edit(CONFIG, '"auto_map"', '"auto_map": {}, "auto_map"'), CONFIG, "duplicate key auto_map"),
    "a number that is none": (edit(CONFIG, ": 1e-05", ": 1e999"), CONFIG, "1e999 is not a JSON value"),
    "another number of tokens in the config": (
        put(CONFIG, image_seq_length=999), CONFIG, "image_seq_length is 999, but a picture becomes 4 tokens"
    ),
    "code of another repository in any field": (
        put("tokenizer_config.json", tokenizer_class=OTHER_CODE), "tokenizer_config.json", "points to another"
    ),
}  # fmt: skip


def copy(trained: Path, folder: Path) -> Path:
    shutil.copytree(trained, folder)
    return folder


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_runs_folder_is_found(fault: str, trained: Path, tmp_path: Path) -> None:
    plant, file, reason = FAULTS[fault]
    run = copy(trained, tmp_path / "run")
    plant(run)
    findings = [*find_model_faults(run, read_weights(run), steps=8)]
    assert any(finding.file == file and reason in finding.reason and finding.fix for finding in findings), findings


@pytest.mark.parametrize("name", ["torn", "short", "long", "no header", "no index", "no metadata", "pairs"])
def test_weights_that_can_not_be_read_are_named(name: str, trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    content = (run / WEIGHTS).read_bytes()
    broken = {"torn": content[:100], "short": content[:-4], "long": content + b"\0\0\0\0", "no header": b"\x10\0"}
    if name in broken:
        (run / WEIGHTS).write_bytes(broken[name])
    else:
        indices = {"no index": [], "no metadata": {"weight_map": {}}, "pairs": {"metadata": {}, "weight_map": []}}
        (run / INDEX).write_text(json.dumps(indices[name]))
    with pytest.raises(ValueError, match=rf"{WEIGHTS if name in broken else INDEX} can't be read"):
        read_weights(run)


@pytest.mark.parametrize(
    ("vision", "text"),
    [("siglip", "qwen2"), ("siglip2", "llama"), ("clip", "qwen3"), ("siglip", "gemma3"), ("clip", "vicuna")],
)
def test_every_family_as_composed_has_no_faults(vision: str, text: str, composed: Callable[..., Path]) -> None:
    folder = composed(vision=vision, text=text)
    assert [*map(str, find_model_faults(folder, read_weights(folder), steps=0))] == []


def test_a_model_that_is_stored_under_other_names_has_no_faults(composed: Callable[..., Path], tmp_path: Path) -> None:
    # The experts of a layer are one tensor in memory and many in files.
    config = AutoConfig.from_pretrained(composed())
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config.text_config = Qwen3MoeConfig(**(config.text_config.to_dict() | {"model_type": "qwen3_moe"} | sizes))
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    names = {tensor.name: tensor.shape for tensor in read_weights(tmp_path).tensors}
    assert any(".experts.3." in name for name in names)
    assert names == {name: tensor.shape for name, tensor in stored_tensors(model).items()}


def test_shards_have_no_faults_and_are_staged(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    shard(run)
    (run / "evaluation.json").unlink()  # of other files
    stage = build(run, tmp_path / "stage", "me/Mine", prose, own_licence="apache-2.0")
    names = {path.name for path in stage.glob("model*") if path.suffix != ".py"}
    assert names == {FIRST, SECOND, INDEX}


def test_weights_are_read_once_and_right(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub_cards.weights.PIECE", 64)  # most tensors take several pieces
    weights = read_weights(trained)
    content = load_file(trained / WEIGHTS)
    assert weights.sha256 == {WEIGHTS: sha256(trained / WEIGHTS)}
    stored = {tensor.name: (FLOATS[tensor.dtype], tensor.shape) for tensor in weights.tensors}
    assert stored == {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()}
    assert sum(weights.count("part").values()) == sum(tensor.numel() for tensor in content.values())


@pytest.mark.parametrize("place", [0, 63, 64, -1])
def test_a_nan_is_found_wherever_it_is(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hub_cards.weights.PIECE", 128)
    for number, dtype in enumerate(FLOATS.values()):
        broken = torch.zeros(1000, dtype=dtype)
        broken[place] = float("nan")
        save_file({"a": torch.zeros(77, dtype=dtype), "b": broken}, tmp_path / WEIGHTS)
        assert [tensor.is_finite for tensor in read_weights(tmp_path).tensors] == [True, False], number


def test_all_faults_are_said_and_nothing_is_staged(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    for fault in ("no head", "NaN", "an end that is none", "quantised in the config alone"):
        FAULTS[fault][0](run)
    with pytest.raises(ValueError, match="run can't be published") as refused:
        build(run, tmp_path / "stage", "me/Mine", prose, own_licence="apache-2.0")
    for reason in ("lacks lm_head.weight", "NaN or infinite", "eos_token_id is 3", "has a quantization_config"):
        assert reason in str(refused.value)
    assert not [*tmp_path.glob("stage*")]


def test_a_norm_that_was_not_trained_is_one_that_claims_no_training(composed: Callable[..., Path]) -> None:
    weights: Any = read_weights(composed())
    assert [*find_model_faults(composed(), weights, steps=0)] == []
    (finding,) = find_model_faults(composed(), weights, steps=1)
    assert "an untrained norm" in finding.reason


def test_code_is_not_run_before_it_is_compared(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / MODELING).write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + (run / MODELING).read_text())
    config = json.loads((run / CONFIG).read_text())
    (run / CONFIG).write_text(json.dumps(config | {"model_type": "unknown"}))
    assert [finding.file for finding in find_model_faults(run, read_weights(run), steps=8)] == [MODELING]
    assert not (tmp_path / "ran").exists()
