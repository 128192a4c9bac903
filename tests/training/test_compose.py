"""Composing: the parts keep their answers, the norm starts at the text's, and what doesn't fit is named."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    ConvNextConfig,
    ConvNextModel,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    FalconH1Config,
    Gemma2Config,
    GPT2Config,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PhiConfig,
    PreTrainedConfig,
    Qwen3MoeConfig,
    Siglip2VisionConfig,
    Siglip2VisionModel,
)

from common.errors import UserError
from conversations.chat_template import chat_format, chat_template
from conversations.tokens import RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from training.backbones import load_text_model, load_vision_model
from training.compose import compose, convert_llava, interface_norms, main


SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
TEXT_SIZES = {**SIZES, "num_key_value_heads": 2, "vocab_size": 320}
FALCON = {
    **TEXT_SIZES, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "eos_token_id": 256
}  # fmt: skip
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": "A dog."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
]
RENDERED = {
    "qwen2": (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|image_pad|>\nWhat is it?<|im_end|>\n"
        "<|im_start|>assistant\nA dog.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
    ),
    "llama": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\n<|reserved_special_token_0|>\nWhat is it?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nA dog.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nSure?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes.<|eot_id|>"
    ),
    "gemma3": (
        "<bos><start_of_turn>user\nBe brief.\n\n<unused0>\nWhat is it?<end_of_turn>\n"
        "<start_of_turn>model\nA dog.<end_of_turn>\n<start_of_turn>user\nSure?<end_of_turn>\n"
        "<start_of_turn>model\nYes.<end_of_turn>\n"
    ),
    "vicuna": "<s>Be brief. USER: <image>\nWhat is it? ASSISTANT: A dog.</s>USER: Sure? ASSISTANT: Yes.</s>",
}
RENDERED["qwen3"] = RENDERED["qwen2"]
EMBEDDING_SCALE = {"gemma3": 32**0.5}  # Gemma multiplies its embeddings by the root of the width


@pytest.mark.parametrize(
    ("vision", "text"),
    [("siglip", "llama"), ("siglip2", "qwen2"), ("clip", "qwen3"), ("dinov2", "gemma3"), ("siglip", "vicuna")],
)
def test_families(
    backbones: Callable[[str], Path], composed: Callable[..., Path], picture: Image.Image, vision: str, text: str
) -> None:
    folder = composed(vision=vision, text=text)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder).eval()
    processor = AutoProcessor.from_pretrained(folder)
    language_model = AutoModelForCausalLM.from_pretrained(backbones(text)).eval()

    # T by hand: the mean norm of the embeddings as the decoder gets them.
    rows = language_model.get_input_embeddings().weight.detach().double().norm(dim=-1) * EMBEDDING_SCALE.get(text, 1)
    target = rows[rows > 0].mean().item()
    assert model.config.projector_norm_target == pytest.approx(target, rel=1e-6)
    gain = model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain, torch.full_like(gain, target / 32**0.5))
    norms = interface_norms(model, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-2)
    assert vision == "dinov2" or norms["norm_input"] > 2 * norms["text"]

    assert not [name for name in model.state_dict() if name.startswith("model.vision_tower.head")]  # SigLIP's pooling

    # The language model says what it said before.
    input_ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=input_ids).logits[..., :320], language_model(input_ids=input_ids).logits)

    assert processor.apply_chat_template(CONVERSATION) == RENDERED[text]
    messages = [dict(message) for message in CONVERSATION]
    messages[1] = {"role": "user", "content": [{"type": "image", "image": picture}, CONVERSATION[1]["content"][1]]}
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    input_ids, mask = batch["input_ids"][0], batch["assistant_masks"][0].bool()
    end, space = processor.tokenizer.eos_token, " " if text == "vicuna" else ""
    assert processor.tokenizer.decode(input_ids[mask]) == f"{space}A dog.{end}{space}Yes.{end}"
    assert (input_ids == model.config.image_token_id).sum() == model.config.image_seq_length == 4
    assert RowTokenizer(processor, processor.chat_template).tokens_per_image == 4  # what training counts
    bos = processor.tokenizer.bos_token_id
    assert bos is None or (input_ids == bos).sum() == 1
    end_of_turn = processor.tokenizer.convert_tokens_to_ids(processor.tokenizer.eos_token)
    assert end_of_turn in model.generation_config.eos_token_id
    assert model.generation_config.suppress_tokens == [model.config.image_token_id]


@pytest.mark.parametrize("vision", ["siglip", "clip", "dinov2"])
def test_all_of_a_wide_picture_is_seen(backbones: Callable[[str], Path], vision: str) -> None:
    """Unless the central square is asked for, as CLIP's and DINOv2's own processors take it."""
    wide = Image.new("RGB", (400, 100), "white")
    other = wide.copy()
    other.paste((255, 0, 0), (340, 40, 400, 60))  # at the right edge

    def are_the_same(processor: LlavaProcessor) -> bool:
        pictures = [
            processor.image_processor(picture, return_tensors="pt")["pixel_values"] for picture in (wide, other)
        ]
        assert pictures[0].shape == (1, 3, 28, 28)
        return torch.equal(*pictures)

    paths = (str(backbones(vision)), str(backbones("llama")))
    assert not are_the_same(compose(*paths)[1])
    assert are_the_same(compose(*paths, center_crop=True)[1]) == (vision != "siglip")


OWN_TEMPLATES = {
    "Zephyr": (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt }}"
    ),
    "Mistral": (
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}"
        "{% elif m['role'] == 'user' %}{{ '[INST] ' + ns.system + m['content'] + '[/INST]' }}{% set ns.system = '' %}"
        "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}{% endfor %}"
    ),
}


@pytest.mark.parametrize("refusal", ["{{ raise_exception('no system') }}", ""])
def test_a_chat_format_without_system_messages_is_kept(backbones: Callable[[str], Path], refusal: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbones("vicuna"))
    tokenizer.chat_template = (
        OWN_TEMPLATES["Zephyr"]
        .replace("%}{{ '<|'", "%}{% if m['role'] == 'system' %}" + refusal + "{% else %}{{ '<|'")
        .replace("'\n' }}{% endfor", "'\n' }}{% endif %}{% endfor")
    )
    assert chat_format(tokenizer).user == "<|user|>\n"
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    written = tokenizer.apply_chat_template(asked, chat_template=chat_template(tokenizer, "<image>"), tokenize=False)
    assert written.removeprefix("<s>") == "<|user|>\nBe brief.\n\nWhat?</s>\n"


@pytest.mark.parametrize("name", OWN_TEMPLATES)
def test_a_chat_format_that_is_not_known_is_kept(backbones: Callable[[str], Path], name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbones("vicuna"))
    tokenizer.chat_template = OWN_TEMPLATES[name]
    assert chat_format(tokenizer).name == "the language model's own"
    ours = chat_template(tokenizer, "<image>")
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "Sure?"},
    ]
    own = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    written = tokenizer.apply_chat_template(
        conversation, chat_template=ours, tokenize=False, add_generation_prompt=True
    )
    assert written.removeprefix("<s>") == own.removeprefix("<s>")

    # Pictures get a line of their own, and the answer is marked up to the token that ends it.
    asked = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}, conversation[2]]
    encoded = tokenizer.apply_chat_template(
        asked, chat_template=ours, return_dict=True, return_assistant_tokens_mask=True
    )
    trained = [token for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
    assert tokenizer.decode(trained).strip() == "A dog.</s>"
    assert "<image>\nWhat?" in tokenizer.decode(encoded["input_ids"])


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] }} {% endfor %}",  # nothing ends an answer
        "{{ raise_exception('no') }}",
        "{% for m in messages %}{{ loop.index ~ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}",
    ],
)
def test_a_chat_format_that_cannot_be_kept_is_replaced_and_said(
    backbones: Callable[[str], Path],
    tmp_path: Path,
    caplog: Any,
    template: str | None,
) -> None:
    shutil.copytree(backbones("vicuna"), tmp_path / "text")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "text")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "text")
    arguments = [f"--vision_model={backbones('siglip')}", f"--text_model={tmp_path / 'text'}"]
    with caplog.at_level("INFO"):
        main([*arguments, f"--output_dir={tmp_path / 'out'}"])
    assert "Chat format Vicuna: the language model has no chat template" in caplog.text
    assert "a picture that isn't square is squashed to 28 x 28 pixels" in caplog.text


def test_gemma_keeps_every_system_turn(composed: Callable[..., Path]) -> None:
    """Its format has none: they stand before the user's next turn, or are one. Only the last before it was kept."""
    tokenizer = AutoProcessor.from_pretrained(composed(text="gemma3")).tokenizer
    told = [{"role": "system", "content": text} for text in ("One.", "Two.", "Three.")]
    messages = [*told[:2], {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}, told[2]]
    template = chat_template(tokenizer, "<unused0>")
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nOne.\n\nTwo.\n\nWhy?<end_of_turn>\n<start_of_turn>model\nSo.<end_of_turn>\n"
        "<start_of_turn>user\nThree.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_quantized_parts_are_refused(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """What is composed would be saved in 4 bits and loaded as if its projector were, too."""
    folder = shutil.copytree(backbones("qwen2"), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantized is quantized: start from the weights before"):
        load_text_model(str(folder))


def test_arms(backbones: Callable[[str], Path]) -> None:
    parts = str(backbones("siglip")), str(backbones("qwen2"))
    default, _ = compose(*parts, align_norm=False)
    assert default.config.projector_norm_target is None
    assert (default.model.multi_modal_projector.norm.weight == 1).all()
    stretched, processor = compose(*parts, norm_target_ratio=3.0)
    norms = interface_norms(stretched, processor)
    assert norms["projector_output"] == pytest.approx(3 * norms["text"], rel=1e-2)
    none, _ = compose(*parts, projector_norm="none")
    assert not any("norm" in name for name, _ in none.model.multi_modal_projector.named_parameters())
    scaled, processor = compose(*parts, projector_norm="none", scale_projector=True)
    norms = interface_norms(scaled, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-5)
    assert (none.config.projector_scaled, scaled.config.projector_scaled) == (False, True)
    with pytest.raises(ValueError, match="scale_projector scales a projector without a norm"):
        compose(*parts, scale_projector=True)
    with pytest.raises(ValueError, match="vision_feature_layer 99: the encoder's are -4 to 3"):
        compose(*parts, vision_feature_layer=99)
    first, scaled_first = (model.model.multi_modal_projector.linear_1.weight for model in (none, scaled))
    assert torch.equal(first, scaled_first)


def test_bfloat16_stays_and_zero_rows_do_not_count(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    language_model = AutoModelForCausalLM.from_pretrained(backbones("qwen2"), dtype=torch.bfloat16)
    expected = language_model.get_input_embeddings().weight[:300].float().norm(dim=-1).mean().item()
    with torch.no_grad():
        language_model.get_input_embeddings().weight[300:] = 0  # as rows that only fill the vocabulary up
    language_model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path)
    model, _ = compose(str(backbones("siglip")), str(tmp_path))
    assert model.config.projector_norm_target == pytest.approx(expected, rel=1e-6)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    norm = {name for name in dtypes if "multi_modal_projector.norm" in name}
    assert {dtypes[name] for name in norm} == {torch.float32}
    assert {dtype for name, dtype in dtypes.items() if name not in norm} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("vision", "strategy", "count"), [("siglip", "full", 4), ("clip", "full", 5), ("siglip", "default", 3)]
)
def test_llava_keeps_every_weight_and_number_of_image_tokens(
    vision: str, strategy: str, count: int, composed: Callable[..., Path], picture: Image.Image, tmp_path: Path
) -> None:
    """Of the four patches of a picture, with and without what stands before them."""
    source = NormLlavaForConditionalGeneration.from_pretrained(composed(vision=vision, text="vicuna"))
    fields = {name: getattr(source.config, name) for name in ("vision_config", "text_config", "image_token_index")}
    torch.manual_seed(1)
    llava = LlavaForConditionalGeneration(LlavaConfig(**fields, vision_feature_select_strategy=strategy)).eval()
    llava.save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(composed(vision=vision, text="vicuna"))
    processor.vision_feature_select_strategy = strategy
    processor.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    # What llava-hf's checkpoints look like: the language model's own prefix, and an inner one of the vision tower.
    assert any(key.startswith("language_model.model.") for key in weights)
    if (vision, strategy) == ("siglip", "full"):
        prefix, inner = "vision_tower.", "vision_tower.vision_model."
        legacy = {
            key.replace(prefix, inner, 1) if inner not in key else key: weight for key, weight in weights.items()
        }
        save_file(legacy, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for projector_norm, added in (("none", set()), ("gwc", {"weight", "bias"})):
        model, converted = convert_llava(str(tmp_path), projector_norm, norm_target_ratio=2.0)
        target = model.config.projector_norm_target
        assert target == (pytest.approx(2 * interface_norms(model, converted)["text"]) if added else None)
        assert model.config.llava_name_or_path == str(tmp_path)  # for the card
        state = model.eval().state_dict()
        for name, weight in llava.state_dict().items():
            assert torch.equal(state.pop(name), weight), name
        assert set(state) == {f"model.multi_modal_projector.norm.{name}" for name in added}
        inputs = converted(images=picture, text="USER: <image>\nWhat? ASSISTANT:", return_tensors="pt")
        image_tokens = int((inputs["input_ids"] == model.config.image_token_id).sum())
        assert image_tokens == model.config.image_seq_length == count
        with torch.no_grad():
            assert added or torch.equal(model(**inputs).logits, llava(**inputs).logits)
        model.save_pretrained(tmp_path / projector_norm)
        again = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / projector_norm).state_dict()
        assert all(torch.equal(again[name], weight) for name, weight in model.state_dict().items())


def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none_such"}')
    with pytest.raises(UserError, match=rf"{tmp_path} can't be loaded: .*`none_such`"):
        load_text_model(str(tmp_path))


def test_parts_that_do_not_fit(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no language model with a decoder alone"):
        load_text_model(str(backbones("siglip2")))
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    Siglip2VisionModel(Siglip2VisionConfig(**sizes, patch_size=14)).save_pretrained(tmp_path / "naflex")
    # A convolutional encoder has a size of pictures, but no width of its tokens.
    ConvNextModel(ConvNextConfig(image_size=28, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])).save_pretrained(
        tmp_path / "convolutional"
    )
    for encoder in ("naflex", "convolutional"):
        with pytest.raises(UserError, match=r"no vision encoder for pictures of one fixed size.*NaFlex"):
            load_vision_model(str(tmp_path / encoder), torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PhiConfig(**TEXT_SIZES), "can't rebuild this language model: .*lm_head.bias"),
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320), "can't rebuild this language model: GPT2Model"),
        (Qwen3MoeConfig(**TEXT_SIZES, num_experts=4), "qwen3_moe.* mixes experts"),
        (Gemma2Config(**TEXT_SIZES, head_dim=8), "logits change by up to .* softcap"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_language_models_that_would_not_be_themselves(
    config: PreTrainedConfig, message: str, backbones: Callable[[str], Path], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"(?s){message}"):
        compose(str(backbones("siglip")), str(tmp_path))


def test_buffers_without_weights_are_filled_on_loading(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """Falcon-H1 multiplies by one that held whatever was in memory."""
    AutoModelForCausalLM.from_config(FalconH1Config(**FALCON)).save_pretrained(tmp_path / "text")
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path / "text")
    model, _ = compose(str(backbones("siglip")), str(tmp_path / "text"))
    model.save_pretrained(tmp_path / "composed")
    again = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "composed").eval()
    input_ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids).logits, model.eval()(input_ids).logits)


def test_only_a_llava_checkpoint_is_converted(composed: Callable[..., Path]) -> None:
    # Converting starts the norm anew: a trained gain would be lost.
    with pytest.raises(ValueError, match="has model_type 'normllava', a Llava is needed"):
        convert_llava(str(composed()))


def test_a_picture_that_does_not_become_its_tokens(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    encoder = Dinov2WithRegistersModel(Dinov2WithRegistersConfig(**sizes, image_size=28, patch_size=14))
    encoder.save_pretrained(tmp_path)
    AutoImageProcessor.from_pretrained(backbones("dinov2")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="should be 4 tokens, but the processor writes 8 and counts 8"):
        compose(str(tmp_path), str(backbones("qwen2")), vision_feature_layer=-1)


def test_command_line(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    parts = ["--vision_model", backbones("siglip"), "--text_model", backbones("qwen2")]
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    caption = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "black"}]
    (tmp_path / "captions.json").write_text(json.dumps([{"image": "black.png", "conversations": caption}]))
    command = [sys.executable, Path(__file__).parents[2] / "training" / "compose.py", *parts]
    command += ["--captions", tmp_path / "captions.json", "--output_dir", tmp_path / "out"]
    command += ["--projector_norm=layernorm", "--norm_target_ratio=3", "--vision_feature_layer=-1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "text embeddings (T)" in result.stderr
    model = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    of, text = model.config, interface_norms(model, AutoProcessor.from_pretrained(tmp_path / "out"))["text"]
    assert (of.projector_aligned, of.projector_norm, of.vision_feature_layer) == (True, "layernorm", -1)
    assert of.projector_norm_target == pytest.approx(3 * text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--output_dir {full}", "is not empty"),
        ("--output_dir out", "give either --vision_model and --text_model, or only --llava_model"),
        ("--output_dir out --vision_model x", "give either --vision_model and --text_model, or only --llava_model"),
        ("--output_dir out --text_model x --llava_model y", "give either --vision_model and --text_model, or only"),
        ("--output_dir out --llava_model x --center_crop", "--center_crop is for a new model"),
        ("--output_dir out --llava_model x --scale_projector", "are for a new projector"),
        ("--output_dir out --llava_model x --no_align_norm --norm_target_ratio 3", "for a norm that starts at"),
    ],
)
def test_options_that_do_not_go_together(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit):
        main(options.format(full=tmp_path).split())
    assert message in capsys.readouterr().err
