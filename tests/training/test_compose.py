"""Composed and converted models: they compute what their parts did, and image tokens start at the norm of text.

Parts and options that don't fit are refused.
"""

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
    AddedToken,
    AutoImageProcessor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoProcessor,
    AutoTokenizer,
    ConvNextConfig,
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
)

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from normllava.conversations.chat_template import chat_format, chat_template
from normllava.conversations.row_tokenizer import RowTokenizer
from normllava.errors import UserError
from normllava.llava import add_norm
from script_runs import ROOT
from training.compose import compose, convert_llava, interface_norms, main
from training.composing.backbones import load_text_model, load_vision_model
from training.folders.run import Composed, read_composed


# Sizes of small language models and vision encoders.
TEXT_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 320,
}  # fmt: skip
VISION_SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}

CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": "A dog."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
]
# CONVERSATION in the chat format of each language model. The picture stands as the model's image token:
# <|image_pad|>, <|reserved_special_token_0|>, <unused0> or <image>.
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
# Pairs of a vision encoder and a language model.
FAMILIES = [("siglip", "llama"), ("siglip2", "qwen2"), ("clip", "qwen3"), ("dinov2", "gemma3"), ("siglip", "vicuna")]


@pytest.mark.parametrize(("vision", "text"), FAMILIES)
def test_image_tokens_start_at_the_norm_of_text_embeddings(
    backbones: Callable[[str], Path], make_model_folder: Callable[..., Path], vision: str, text: str
) -> None:
    folder = make_model_folder(vision=vision, text=text)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)

    # The norm of text is the mean norm of the embeddings as the decoder gets them. Embeddings that are all zeros, such
    # as the embedding of padding, don't count.
    language_model = AutoModelForCausalLM.from_pretrained(backbones(text))
    embeddings = language_model.get_input_embeddings().weight.detach().double()
    if text == "gemma3":
        embeddings = embeddings * 32**0.5  # Gemma multiplies its embeddings by the root of the hidden size
    embedding_norms = embeddings.norm(dim=-1)
    text_norm = embedding_norms[embedding_norms > 0].mean().item()
    assert model.config.projector_norm_target == pytest.approx(text_norm, rel=1e-6)

    # If all 32 gains of the norm layer are g, image tokens have the norm g * sqrt(32).
    gain = model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain, torch.full_like(gain, text_norm / 32**0.5))
    norms = interface_norms(model, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-2)
    # Without the norm layer, image tokens would start at more than twice the norm of text. With DINOv2 they may not.
    if vision != "dinov2":
        assert norms["norm_input"] > 2 * norms["text"]


@pytest.mark.parametrize(("vision", "text"), FAMILIES)
def test_the_language_model_gives_the_same_logits_as_before(
    backbones: Callable[[str], Path], make_model_folder: Callable[..., Path], vision: str, text: str
) -> None:
    language_model = AutoModelForCausalLM.from_pretrained(backbones(text)).eval()
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(vision=vision, text=text)).eval()
    input_ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits
        expected_logits = language_model(input_ids=input_ids).logits
    # The language model has 320 embeddings. The composed model may have one more embedding, for image tokens.
    assert torch.equal(logits[..., :320], expected_logits)


@pytest.mark.parametrize(("vision", "text"), FAMILIES)
def test_conversations_have_the_language_models_format_with_four_tokens_for_a_picture(
    make_model_folder: Callable[..., Path], picture: Image.Image, vision: str, text: str
) -> None:
    folder = make_model_folder(vision=vision, text=text)
    config = NormLlavaConfig.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    assert processor.apply_chat_template(CONVERSATION) == RENDERED[text]

    # In the same conversation with a real picture, the template marks the assistant's answers.
    question = [{"type": "image", "image": picture}, {"type": "text", "text": "What is it?"}]
    messages = list(CONVERSATION)
    messages[1] = {"role": "user", "content": question}
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    input_ids = batch["input_ids"][0]
    is_answer = batch["assistant_masks"][0].bool()
    eos = processor.tokenizer.eos_token
    space = " " if text == "vicuna" else ""  # answers in Vicuna's format start with a space
    assert processor.tokenizer.decode(input_ids[is_answer]) == f"{space}A dog.{eos}{space}Yes.{eos}"
    bos_token_id = processor.tokenizer.bos_token_id
    if bos_token_id is not None:
        assert (input_ids == bos_token_id).sum() == 1

    # The processor, the config and training count four image tokens for a picture.
    assert (input_ids == config.image_token_id).sum() == 4
    assert config.image_seq_length == 4
    assert RowTokenizer(processor, processor.chat_template).tokens_per_tile == 4


@pytest.mark.parametrize(("vision", "text"), FAMILIES)
def test_generation_ends_at_the_end_of_a_turn_and_writes_no_image_tokens(
    make_model_folder: Callable[..., Path], vision: str, text: str
) -> None:
    folder = make_model_folder(vision=vision, text=text)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder)
    tokenizer = AutoProcessor.from_pretrained(folder).tokenizer
    assert tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert model.generation_config.suppress_tokens == [model.config.image_token_id]


def test_siglips_pooling_head_is_left_out(make_model_folder: Callable[..., Path]) -> None:
    model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder(vision="siglip"))
    assert not any(name.startswith("model.vision_tower.head") for name in model.state_dict())


@pytest.mark.parametrize("vision", ["siglip", "clip", "dinov2"])
def test_all_of_a_wide_picture_is_seen_unless_it_is_cropped(backbones: Callable[[str], Path], vision: str) -> None:
    white = Image.new("RGB", (400, 100), "white")
    with_red_edge = white.copy()
    with_red_edge.paste((255, 0, 0), (340, 40, 400, 60))  # at the right edge, outside the central square

    def shows_edge(processor: LlavaProcessor) -> bool:
        pixel_values = processor.image_processor([white, with_red_edge], return_tensors="pt")["pixel_values"]
        assert pixel_values.shape == (2, 3, 28, 28)
        return not torch.equal(pixel_values[0], pixel_values[1])

    folders = (str(backbones(vision)), str(backbones("llama")))
    _, processor = compose(*folders)
    assert shows_edge(processor)

    # `center_crop` crops pictures if the encoder's own processor does. SigLIP's processor squashes pictures.
    _, processor = compose(*folders, center_crop=True)
    is_cropped = not shows_edge(processor)
    assert is_cropped == (vision != "siglip")


# Chat templates of two language models, whose formats compose.py doesn't know by name.
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


@pytest.mark.parametrize("on_system", ["{{ raise_exception('no system') }}", ""], ids=["refused", "left out"])
def test_a_chat_format_without_system_messages_is_kept(backbones: Callable[[str], Path], on_system: str) -> None:
    """The language model's template refuses or leaves out system messages, by the code `on_system`.

    The composed model's template puts a system message's text before the user's.
    """
    tokenizer = AutoTokenizer.from_pretrained(backbones("vicuna"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}" + on_system + "{% else %}"
        "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt }}"
    )
    assert chat_format(tokenizer).user == "<|user|>\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    our_template = chat_template(tokenizer, "<image>")
    rendered = tokenizer.apply_chat_template(messages, chat_template=our_template, tokenize=False)
    assert rendered.removeprefix("<s>") == "<|user|>\nBe brief.\n\nWhat?</s>\n"  # "<s>" is the BOS token


@pytest.mark.parametrize("name", OWN_TEMPLATES)
def test_a_chat_format_that_is_not_known_is_kept(backbones: Callable[[str], Path], name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(backbones("vicuna"))
    tokenizer.chat_template = OWN_TEMPLATES[name]
    assert chat_format(tokenizer).name == "the language model's own"
    our_template = chat_template(tokenizer, "<image>")
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
        {"role": "assistant", "content": "A dog."},
        {"role": "user", "content": "Sure?"},
    ]
    expected = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    rendered = tokenizer.apply_chat_template(
        conversation, chat_template=our_template, tokenize=False, add_generation_prompt=True
    )
    assert rendered.removeprefix("<s>") == expected.removeprefix("<s>")  # "<s>" is the BOS token

    # A picture is on a line of its own. The mask marks the answer with the token that ends it.
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    answer = {"role": "assistant", "content": "A dog."}
    encoded = tokenizer.apply_chat_template(
        [question, answer], chat_template=our_template, return_dict=True, return_assistant_tokens_mask=True
    )
    input_ids = torch.tensor(encoded["input_ids"])
    is_answer = torch.tensor(encoded["assistant_masks"]).bool()
    assert tokenizer.decode(input_ids[is_answer]).strip() == "A dog.</s>"
    assert "<image>\nWhat?" in tokenizer.decode(encoded["input_ids"])


# The templates of language models whose vocabulary has ChatML's tokens, and the format that these models know.
CHATML_TOKENS = ["<|im_start|>", "<|im_end|>", "<|im_sep|>"]
TEMPLATES_BESIDE_CHATML = {
    "Phi-4": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '<|im_sep|>' + m['content'] + '<|im_end|>' }}"
        "{% endfor %}"
        "{{ '<|im_start|>assistant<|im_sep|>' if add_generation_prompt }}",
        "<|im_start|>user<|im_sep|>Hi<|im_end|><|im_start|>assistant<|im_sep|>Ho<|im_end|>",
    ),
    "Zephyr, with unused tokens": (OWN_TEMPLATES["Zephyr"], "<|user|>\nHi</s>\n<|assistant|>\nHo</s>\n"),
    # Qwen2.5 and SmolLM2: ChatML after a default system message, which no `ChatFormat` writes.
    "ChatML with a default system message": (
        "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' if add_generation_prompt }}",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n",
    ),
    # Qwen3's thinking models: ChatML whose prompt for an answer goes on.
    "ChatML with a thought": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n",
    ),
    # A base model without a template.
    "no template": (None, "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"),
    # Its turns are not ChatML's, and no format writes them.
    "numbered turns": (
        "{% for m in messages %}{{ loop.index ~ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}",
        "USER: Hi ASSISTANT: Ho</s>",
    ),
}


@pytest.mark.parametrize("name", TEMPLATES_BESIDE_CHATML)
def test_a_models_own_template_counts_more_than_its_vocabulary(backbones: Callable[[str], Path], name: str) -> None:
    template, expected = TEMPLATES_BESIDE_CHATML[name]
    tokenizer = AutoTokenizer.from_pretrained(backbones("vicuna"))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in CHATML_TOKENS], special_tokens=True)
    tokenizer.chat_template = template
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    our_template = chat_template(tokenizer, "<image>")
    rendered = tokenizer.apply_chat_template(messages, chat_template=our_template, tokenize=False)
    assert rendered.removeprefix("<s>") == expected  # "<s>" is the BOS token


# Chat templates whose formats a composed model can't keep.
OTHER_TEMPLATES = {
    "no template": None,
    "no token ends an answer": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    "always raises": "{{ raise_exception('no') }}",
    "numbers each message": (
        "{% for m in messages %}{{ loop.index ~ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("kind", OTHER_TEMPLATES)
def test_a_chat_format_that_cannot_be_kept_is_replaced_by_vicunas_with_a_warning(
    backbones: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    text_folder = shutil.copytree(backbones("vicuna"), tmp_path / "text")
    tokenizer = AutoTokenizer.from_pretrained(text_folder)
    tokenizer.chat_template = OTHER_TEMPLATES[kind]
    tokenizer.save_pretrained(text_folder)
    with caplog.at_level("INFO"):
        main(
            [
                f"--vision_model={backbones('siglip')}",
                f"--text_model={text_folder}",
                f"--output_dir={tmp_path}/out",
                "--projector_norm=gwc",
            ]
        )
    assert "Chat format Vicuna: the language model has no chat template" in caplog.text
    # The log also says what becomes of pictures.
    assert "a picture that isn't square is squashed to 28 x 28 pixels" in caplog.text


def test_gemma_keeps_every_system_turn(make_model_folder: Callable[..., Path]) -> None:
    """Gemma's format has no system turns. A system message stands at the start of the user's turn that follows.

    If no user's turn follows, the message becomes a user's turn itself.
    """
    tokenizer = AutoProcessor.from_pretrained(make_model_folder(text="gemma3")).tokenizer
    messages = [
        {"role": "system", "content": "One."},
        {"role": "system", "content": "Two."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So."},
        {"role": "system", "content": "Three."},
    ]
    template = chat_template(tokenizer, "<unused0>")
    text = tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<bos><start_of_turn>user\nOne.\n\nTwo.\n\nWhy?<end_of_turn>\n<start_of_turn>model\nSo.<end_of_turn>\n"
        "<start_of_turn>user\nThree.<end_of_turn>\n<start_of_turn>model\n"
    )


def test_quantized_parts_are_refused(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """A composed model would inherit `quantization_config`, and so would load its projector as if in 4 bits."""
    folder = shutil.copytree(backbones("qwen2"), tmp_path / "quantized")
    config_file = folder / "config.json"
    config = json.loads(config_file.read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config_file.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantized is quantized: start from the weights before"):
        load_text_model(str(folder))


@pytest.fixture
def parts(backbones: Callable[[str], Path]) -> tuple[str, str]:
    """The folders of a vision encoder and of a language model."""
    return str(backbones("siglip")), str(backbones("qwen2"))


def test_without_align_norm_the_gain_starts_at_1(parts: tuple[str, str]) -> None:
    model, _ = compose(*parts, align_norm=False)
    assert model.config.projector_norm_target is None
    gain = model.model.multi_modal_projector.norm.weight
    assert (gain == 1).all()


def test_with_a_ratio_image_tokens_start_at_a_multiple_of_the_texts_norm(parts: tuple[str, str]) -> None:
    model, processor = compose(*parts, norm_target_ratio=3.0)
    norms = interface_norms(model, processor)
    assert norms["projector_output"] == pytest.approx(3 * norms["text"], rel=1e-2)


def test_a_projector_without_a_norm_can_be_scaled_to_the_texts_norm(parts: tuple[str, str]) -> None:
    plain, _ = compose(*parts, projector_norm="none")
    plain_projector = plain.model.multi_modal_projector
    assert not any("norm" in name for name, _ in plain_projector.named_parameters())

    scaled, processor = compose(*parts, projector_norm="none", scale_projector=True)
    norms = interface_norms(scaled, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-5)
    # Only the second linear layer is scaled.
    assert torch.equal(scaled.model.multi_modal_projector.linear_1.weight, plain_projector.linear_1.weight)


@pytest.mark.parametrize("vision", ["siglip", "dinov2"])
def test_a_model_without_additions_is_transformers_own_llava(
    vision: str, backbones: Callable[[str], Path], picture: Image.Image, tmp_path: Path
) -> None:
    """The NormLlava that adds nothing, of the same parts and random numbers, is the reference."""
    parts = (str(backbones(vision)), str(backbones("gemma3")))
    llava, processor = compose(*parts, projector_norm="none")
    assert type(llava) is LlavaForConditionalGeneration
    assert llava.config.model_type == "llava"
    reference = add_norm(llava, "none").eval()

    llava.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.py")) == []
    assert "auto_map" not in (tmp_path / "config.json").read_text()
    loaded = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    inputs = processor(images=picture, text=f"{processor.image_token}what", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, reference(**inputs).logits)
    assert loaded.generation_config.to_dict() == llava.generation_config.to_dict()


@pytest.mark.parametrize(
    "options",
    [{"projector_norm": "layernorm"}, {"spatial_merge_size": 2}, {"max_tiles": 2}],
    ids=str,
)
def test_a_model_with_what_llava_lacks_is_a_normllava(options: dict[str, Any], parts: tuple[str, str]) -> None:
    model, _ = compose(*parts, **{"projector_norm": "none", **options})
    assert isinstance(model, NormLlavaForConditionalGeneration)


def test_arguments_that_do_not_fit_are_refused(parts: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="scale_projector scales a projector without a norm"):
        compose(*parts, scale_projector=True)
    ratio_message = "norm_target_ratio is a number above 0, for a norm that starts at"
    with pytest.raises(UserError, match=ratio_message):
        compose(*parts, align_norm=False, norm_target_ratio=2)
    with pytest.raises(UserError, match=ratio_message):
        compose(*parts, projector_norm="none", norm_target_ratio=2)
    with pytest.raises(ValueError, match="vision_feature_layer 99: the encoder's are -4 to 3"):
        compose(*parts, vision_feature_layer=99)


def test_embeddings_of_zeros_do_not_count_for_the_texts_norm(parts: tuple[str, str], tmp_path: Path) -> None:
    vision, text = parts
    language_model = AutoModelForCausalLM.from_pretrained(text)
    embeddings = language_model.get_input_embeddings().weight.detach()
    embeddings[300:] = 0  # as in a vocabulary that is padded to a round size: no token has these embeddings
    language_model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(text).save_pretrained(tmp_path)

    model, _ = compose(vision, str(tmp_path))
    expected = embeddings[:300].norm(dim=-1).mean().item()
    assert model.config.projector_norm_target == pytest.approx(expected, rel=1e-6)


def test_a_model_keeps_bfloat16_except_for_the_projectors_norm(parts: tuple[str, str], tmp_path: Path) -> None:
    vision, text = parts
    AutoModelForCausalLM.from_pretrained(text, dtype=torch.bfloat16).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(text).save_pretrained(tmp_path)
    model, _ = compose(vision, str(tmp_path))
    for name, parameter in model.named_parameters():
        is_in_norm = "multi_modal_projector.norm" in name
        expected_dtype = torch.float32 if is_in_norm else torch.bfloat16
        assert parameter.dtype == expected_dtype, name


def save_llava(folder: Path, source: Path, strategy: str) -> LlavaForConditionalGeneration:
    """Save a random Llava of the sizes of the NormLlava in `source`, with the processor of `source`.

    Args:
        folder: The folder to save into.
        source: The folder of a NormLlava.
        strategy: Llava's `vision_feature_select_strategy`: "full" takes all tokens of the vision encoder, "default"
            leaves out the first token.
    """
    config = NormLlavaConfig.from_pretrained(source)
    llava_config = LlavaConfig(
        vision_config=config.vision_config,
        text_config=config.text_config,
        image_token_index=config.image_token_index,
        vision_feature_select_strategy=strategy,
    )
    torch.manual_seed(1)
    llava = LlavaForConditionalGeneration(llava_config).eval()
    llava.save_pretrained(folder)
    # In the file, the language model's weights have the names that they have in llava-hf's checkpoints.
    assert any(name.startswith("language_model.model.") for name in load_file(folder / "model.safetensors"))
    processor = AutoProcessor.from_pretrained(source)
    processor.vision_feature_select_strategy = strategy
    processor.save_pretrained(folder)
    return llava


def rename_as_in_old_checkpoints(folder: Path) -> None:
    """Give the vision tower's weights the longer prefix that they have in llava-hf's first checkpoints."""
    path = folder / "model.safetensors"
    renamed = {}
    for name, weight in load_file(path).items():
        if "vision_tower.vision_model." not in name:
            name = name.replace("vision_tower.", "vision_tower.vision_model.")
        renamed[name] = weight
    save_file(renamed, path, metadata={"format": "pt"})


def test_the_projector_of_a_llava_is_scaled_once(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    llava = save_llava(tmp_path / "llava", make_model_folder(vision="siglip", text="vicuna"), "full")
    main(
        [
            *("--llava_model", str(tmp_path / "llava"), "--projector_norm", "none", "--scale_projector"),
            *("--output_dir", str(tmp_path / "scaled")),
        ]
    )
    model = LlavaForConditionalGeneration.from_pretrained(tmp_path / "scaled")
    norms = interface_norms(model, AutoProcessor.from_pretrained(tmp_path / "scaled"))
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-4)
    assert read_composed(str(tmp_path / "scaled")) == Composed(
        projector_scaled=True, projector_aligned=False, llava_name_or_path=str(tmp_path / "llava")
    )

    weights = llava.state_dict()
    changed = {name for name, weight in model.state_dict().items() if not torch.equal(weight, weights[name])}
    assert changed <= {f"model.multi_modal_projector.linear_2.{name}" for name in ("weight", "bias")}


@pytest.mark.parametrize(
    ("vision", "strategy", "old_names", "num_image_tokens"),
    [
        pytest.param("siglip", "full", True, 4, id="siglip, old names"),
        pytest.param("clip", "full", False, 5, id="clip with its class token"),
        pytest.param("siglip", "default", False, 3, id="siglip without the first token"),
    ],
)
@pytest.mark.parametrize("projector_norm", ["none", "gwc"])
def test_a_converted_llava_keeps_every_weight_and_number_of_image_tokens(
    vision: str,
    strategy: str,
    old_names: bool,
    num_image_tokens: int,
    projector_norm: str,
    make_model_folder: Callable[..., Path],
    picture: Image.Image,
    tmp_path: Path,
) -> None:
    """A picture has four patches. CLIP has a class token before the patches."""
    folder = tmp_path / "llava"
    llava = save_llava(folder, make_model_folder(vision=vision, text="vicuna"), strategy)
    if old_names:
        rename_as_in_old_checkpoints(folder)

    ratio = 1.0 if projector_norm == "none" else 2.0  # other ratios need a norm layer
    model, processor = convert_llava(str(folder), projector_norm, norm_target_ratio=ratio)
    model.eval()

    # All weights are kept, and only the norm layer's weights are added.
    weights = model.state_dict()
    llava_weights = llava.state_dict()
    for name, weight in llava_weights.items():
        assert torch.equal(weights[name], weight), name
    added_names = weights.keys() - llava_weights.keys()
    inputs = processor(images=picture, text="USER: <image>\nWhat? ASSISTANT:", return_tensors="pt")
    if projector_norm == "none":
        assert added_names == set()
        assert type(model) is LlavaForConditionalGeneration
        with torch.no_grad():
            assert torch.equal(model(**inputs).logits, llava(**inputs).logits)
    else:
        assert added_names == {"model.multi_modal_projector.norm.weight", "model.multi_modal_projector.norm.bias"}
        text_norm = interface_norms(model, processor)["text"]
        assert model.config.projector_norm_target == pytest.approx(ratio * text_norm)

    assert (inputs["input_ids"] == model.config.image_token_id).sum() == num_image_tokens
    assert model.config.image_seq_length == num_image_tokens

    model.save_pretrained(tmp_path / "converted")
    loaded_weights = AutoModelForImageTextToText.from_pretrained(tmp_path / "converted").state_dict()
    for name, weight in weights.items():
        assert torch.equal(loaded_weights[name], weight), name


# The chat templates of a Llava's processor, and what they write for a question about a picture.
LLAVA_TEMPLATES = {
    # As in llava-hf's repositories. No token ends its answers, and those of the converted model end with one.
    "Vicuna": (
        "{% for m in messages %}{{ m['role'].upper() + ': ' }}"
        "{% for part in m['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
        "{% for part in m['content'] if part['type'] == 'text' %}{{ part['text'] + ' ' }}{% endfor %}{% endfor %}"
        "{{ 'ASSISTANT:' if add_generation_prompt }}",
        "USER: <image>\nWhat? ASSISTANT:",
    ),
    "another": (
        "{% for m in messages %}{{ '[' + m['role'] + ']' }}"
        "{% for part in m['content'] %}"
        "{{ '<image>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ eos_token }}{% endfor %}"
        "{{ '[assistant]' if add_generation_prompt }}",
        "[user]<image>\nWhat?</s>[assistant]",
    ),
    # No `ChatFormat` writes it, so it stays as it is.
    "numbered turns": (
        "{% for m in messages %}{{ loop.index ~ m['role'] }}{% for part in m['content'] %}"
        "{{ '<image>\n' if part['type'] == 'image' else part['text'] }}{% endfor %}{{ eos_token }}{% endfor %}",
        "1user<image>\nWhat?</s>",
    ),
}


@pytest.mark.parametrize("name", LLAVA_TEMPLATES)
def test_a_converted_llava_keeps_its_processors_chat_format(
    name: str, make_model_folder: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    template, expected = LLAVA_TEMPLATES[name]
    save_llava(tmp_path, make_model_folder(text="vicuna"), "full")
    processor = AutoProcessor.from_pretrained(tmp_path)
    processor.chat_template = template
    # The language model's own template, which the Llava doesn't use.
    processor.tokenizer.chat_template = OWN_TEMPLATES["Zephyr"]
    processor.save_pretrained(tmp_path)

    _, converted = convert_llava(str(tmp_path))
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}]
    prompt = converted.apply_chat_template(messages, add_generation_prompt=True)
    assert prompt.removeprefix("<s>") == expected

    if name == "numbered turns":
        assert "keeps its chat template, which doesn't mark answers" in caplog.text
    else:
        answer = {"role": "assistant", "content": [{"type": "text", "text": "Red."}]}
        assert converted.apply_chat_template([*messages, answer]).endswith("Red.</s>")
        assert "doesn't mark answers" not in caplog.text


def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none_such"}')
    with pytest.raises(UserError, match=rf"{tmp_path} can't be loaded: .*`none_such`"):
        load_text_model(str(tmp_path))


def test_a_vision_encoder_is_no_language_model(backbones: Callable[[str], Path]) -> None:
    with pytest.raises(ValueError, match="no language model with a decoder alone"):
        load_text_model(str(backbones("siglip2")))


# Configs of vision encoders that can't be parts of a composed model.
OTHER_ENCODERS = {
    "for pictures of any size": Siglip2VisionConfig(**VISION_SIZES, patch_size=14),
    # A convolutional encoder's config has an image size, but no hidden size.
    "convolutional": ConvNextConfig(image_size=28, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1]),
}


@pytest.mark.parametrize("kind", OTHER_ENCODERS)
def test_an_encoder_without_patches_of_one_fixed_picture_size_is_refused(tmp_path: Path, kind: str) -> None:
    AutoModel.from_config(OTHER_ENCODERS[kind]).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"no vision encoder for pictures of one fixed size.*NaFlex"):
        load_vision_model(str(tmp_path), torch.float32)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (PhiConfig(**TEXT_SIZES), "can't rebuild this language model: .*lm_head.bias"),
        (GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=320), "can't rebuild this language model: GPT2Model"),
        (Qwen3MoeConfig(**TEXT_SIZES, num_experts=4), "qwen3_moe.* mixes experts"),
        (Gemma2Config(**TEXT_SIZES, head_dim=8), "logits change by up to .* softcap"),
    ],
    ids=["phi", "gpt2", "qwen3_moe", "gemma2"],
)
def test_language_models_that_would_give_other_answers_are_refused(
    config: PreTrainedConfig, message: str, parts: tuple[str, str], tmp_path: Path
) -> None:
    vision, text = parts
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(text).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"(?s){message}"):  # (?s), because the error has several lines
        compose(vision, str(tmp_path))


def test_buffers_that_checkpoints_lack_are_filled_on_loading(parts: tuple[str, str], tmp_path: Path) -> None:
    """Falcon-H1 has such a buffer. Without a value for the buffer, the model would compute with random memory."""
    vision, text = parts
    config = FalconH1Config(
        **TEXT_SIZES, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, eos_token_id=256
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "text")
    AutoTokenizer.from_pretrained(text).save_pretrained(tmp_path / "text")
    model, _ = compose(vision, str(tmp_path / "text"))
    model.eval().save_pretrained(tmp_path / "composed")
    loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "composed").eval()
    input_ids = torch.arange(10)[None]  # [1, 10]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids).logits, model(input_ids).logits)


def test_only_a_llava_checkpoint_is_converted(make_model_folder: Callable[..., Path]) -> None:
    # Converting a NormLlava would replace a trained norm layer.
    with pytest.raises(ValueError, match="has model_type 'normllava', a Llava is needed"):
        convert_llava(str(make_model_folder()))


def test_an_encoder_with_register_tokens_is_refused(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """The encoder has a class token and four registers before the four patches.

    Llava can leave out only the class token, so that eight tokens are left.
    """
    config = Dinov2WithRegistersConfig(**VISION_SIZES, image_size=28, patch_size=14)
    encoder = Dinov2WithRegistersModel(config)
    encoder.save_pretrained(tmp_path)
    AutoImageProcessor.from_pretrained(backbones("dinov2")).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="should be 4 tokens, but the processor writes 8 and counts 8"):
        compose(str(tmp_path), str(backbones("qwen2")), vision_feature_layer=-1)


def test_the_command_line_composes_and_aligns(parts: tuple[str, str], tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "black.png")
    turns = [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": "black"}]
    captions = tmp_path / "captions.json"
    captions.write_text(json.dumps([{"image": "black.png", "conversations": turns}]))

    vision, text = parts
    command = [sys.executable, str(ROOT / "training" / "compose.py")]
    command += [f"--vision_model={vision}", f"--text_model={text}", f"--output_dir={tmp_path / 'out'}"]
    command += ["--projector_norm=layernorm", "--norm_target_ratio=3", "--vision_feature_layer=-1"]
    command += [f"--captions={captions}", "--aligned_start"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "text embeddings (T)" in result.stderr  # a row of the table of norms, which the command prints
    assert "(norms of image tokens on pictures of --captions)" in result.stderr
    modes = {path.stat().st_mode for path in (tmp_path / "out").iterdir()}
    assert len(modes) == 1  # others may read the weights, as all other files

    model = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    text_norm = interface_norms(model, processor)["text"]
    assert read_composed(str(tmp_path / "out")) == Composed(
        projector_scaled=False, projector_aligned=True, llava_name_or_path=None
    )
    assert model.config.projector_norm == "layernorm"
    assert model.config.projector_norm_target == pytest.approx(3 * text_norm)
    assert model.config.vision_feature_layer == -1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--output_dir {full_folder}", "is not empty"),
        ("--output_dir out", "give either --vision_model and --text_model, or only --llava_model"),
        ("--output_dir out --vision_model x", "give either --vision_model and --text_model, or only --llava_model"),
        ("--output_dir out --text_model x --llava_model y", "give either --vision_model and --text_model, or only"),
        ("--output_dir out --llava_model x", "give --projector_norm"),
        # Scaling alone leaves open whether a norm follows.
        ("--output_dir out --vision_model x --text_model y --scale_projector", "give --projector_norm"),
        ("--output_dir out --projector_norm gwc --llava_model x --center_crop", "--center_crop is for a new model"),
        ("--output_dir out --projector_norm gwc --llava_model x --aligned_start", "are for a new projector"),
        (
            "--output_dir out --projector_norm gwc --vision_model x --text_model y --aligned_start",
            "--aligned_start needs --captions",
        ),
        (
            "--output_dir out --projector_norm gwc --llava_model x --no_align_norm --norm_target_ratio 3",
            "for a norm that starts at",
        ),
    ],
)
def test_wrong_options_are_refused(
    options: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()  # so that the folder is not empty
    arguments = options.format(full_folder=tmp_path).split()
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err
