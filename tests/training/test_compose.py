"""Composed models give their parts' answers and start at the text's norm; parts that don't fit are refused."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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
# The factor by which a decoder multiplies its embeddings: Gemma's is the root of the width.
EMBEDDING_SCALE = {"gemma3": 32**0.5}


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

    # The text's norm T is the mean norm of the embeddings as the decoder gets them.
    embeddings = language_model.get_input_embeddings().weight.detach().double() * EMBEDDING_SCALE.get(text, 1)
    embedding_norms = embeddings.norm(dim=-1)
    target = embedding_norms[embedding_norms > 0].mean().item()
    assert model.config.projector_norm_target == pytest.approx(target, rel=1e-6)
    gain = model.model.multi_modal_projector.norm.weight
    torch.testing.assert_close(gain, torch.full_like(gain, target / 32**0.5))  # the width is 32
    norms = interface_norms(model, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-2)
    if vision != "dinov2":
        assert norms["norm_input"] > 2 * norms["text"]  # without its norm the model would start far above T

    # SigLIP's pooling head is left out.
    assert not any(name.startswith("model.vision_tower.head") for name in model.state_dict())

    # The language model gives the same logits as before. The composed model may have more embeddings than its 320.
    input_ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        logits = model(input_ids=input_ids).logits
        expected_logits = language_model(input_ids=input_ids).logits
    assert torch.equal(logits[..., :320], expected_logits)

    # The chat template renders a conversation in the language model's format, and marks the assistant's answers.
    assert processor.apply_chat_template(CONVERSATION) == RENDERED[text]
    messages = [dict(message) for message in CONVERSATION]
    messages[1] = {"role": "user", "content": [{"type": "image", "image": picture}, CONVERSATION[1]["content"][1]]}
    batch = processor.apply_chat_template(
        messages, tokenize=True, return_dict=True, return_tensors="pt", return_assistant_tokens_mask=True
    )
    input_ids = batch["input_ids"][0]
    is_answer = batch["assistant_masks"][0].bool()
    end = processor.tokenizer.eos_token
    space = " " if text == "vicuna" else ""  # answers in Vicuna's format start with a space
    assert processor.tokenizer.decode(input_ids[is_answer]) == f"{space}A dog.{end}{space}Yes.{end}"
    bos = processor.tokenizer.bos_token_id
    if bos is not None:
        assert (input_ids == bos).sum() == 1

    # A picture is four tokens, by the processor, the config and training.
    assert (input_ids == model.config.image_token_id).sum() == 4
    assert model.config.image_seq_length == 4
    assert RowTokenizer(processor, processor.chat_template).tokens_per_tile == 4

    assert processor.tokenizer.eos_token_id in model.generation_config.eos_token_id
    assert model.generation_config.suppress_tokens == [model.config.image_token_id]


@pytest.mark.parametrize("vision", ["siglip", "clip", "dinov2"])
def test_all_of_a_wide_picture_is_seen_unless_it_is_cropped(backbones: Callable[[str], Path], vision: str) -> None:
    white = Image.new("RGB", (400, 100), "white")
    with_red_edge = white.copy()
    with_red_edge.paste((255, 0, 0), (340, 40, 400, 60))  # at the right edge, outside the central square

    def sees_edge(processor: LlavaProcessor) -> bool:
        pixel_values = processor.image_processor([white, with_red_edge], return_tensors="pt")["pixel_values"]
        assert pixel_values.shape == (2, 3, 28, 28)
        return not torch.equal(pixel_values[0], pixel_values[1])

    paths = (str(backbones(vision)), str(backbones("llama")))
    _, processor = compose(*paths)
    assert sees_edge(processor)
    # CLIP's and DINOv2's own processors crop pictures; SigLIP's squashes them.
    _, processor = compose(*paths, center_crop=True)
    assert sees_edge(processor) == (vision == "siglip")


# Chat templates of language models whose format isn't among those that we know by name.
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


@pytest.mark.parametrize("system", ["{{ raise_exception('no system') }}", ""], ids=["refused", "left out"])
def test_a_chat_format_without_system_messages_is_kept(backbones: Callable[[str], Path], system: str) -> None:
    """Our template then puts system messages before the user's message."""
    tokenizer = AutoTokenizer.from_pretrained(backbones("vicuna"))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}" + system + "{% else %}"
        "{{ '<|' + m['role'] + '|>\n' + m['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt }}"
    )
    assert chat_format(tokenizer).user == "<|user|>\n"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    our_template = chat_template(tokenizer, "<image>")
    rendered = tokenizer.apply_chat_template(messages, chat_template=our_template, tokenize=False)
    assert rendered.removeprefix("<s>") == "<|user|>\nBe brief.\n\nWhat?</s>\n"


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
    assert rendered.removeprefix("<s>") == expected.removeprefix("<s>")

    # A picture is on a line of its own, and the answer is marked up to and with the token that ends it.
    question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    answer = {"role": "assistant", "content": "A dog."}
    encoded = tokenizer.apply_chat_template(
        [question, answer], chat_template=our_template, return_dict=True, return_assistant_tokens_mask=True
    )
    input_ids = torch.tensor(encoded["input_ids"])
    is_answer = torch.tensor(encoded["assistant_masks"]).bool()
    assert tokenizer.decode(input_ids[is_answer]).strip() == "A dog.</s>"
    assert "<image>\nWhat?" in tokenizer.decode(encoded["input_ids"])


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ m['content'] }} {% endfor %}",  # no token ends an answer
        "{{ raise_exception('no') }}",  # it can't be rendered
        # Each message is numbered.
        "{% for m in messages %}{{ loop.index ~ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}",
    ],
)
def test_a_chat_format_that_cannot_be_kept_is_replaced_with_a_warning(
    backbones: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture, template: str | None
) -> None:
    shutil.copytree(backbones("vicuna"), tmp_path / "text")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "text")
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path / "text")
    with caplog.at_level("INFO"):
        main(
            [
                f"--vision_model={backbones('siglip')}",
                f"--text_model={tmp_path / 'text'}",
                f"--output_dir={tmp_path / 'out'}",
            ]
        )
    assert "Chat format Vicuna: the language model has no chat template" in caplog.text
    assert "a picture that isn't square is squashed to 28 x 28 pixels" in caplog.text


def test_gemma_keeps_every_system_turn(composed: Callable[..., Path]) -> None:
    """Gemma's format has no system turns. Their text stands before the next user's turn, or is a user's turn."""
    tokenizer = AutoProcessor.from_pretrained(composed(text="gemma3")).tokenizer
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
    """The composed model would take over the config's field, and its projector would be loaded as if in 4 bits."""
    folder = shutil.copytree(backbones("qwen2"), tmp_path / "quantized")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantized is quantized: start from the weights before"):
        load_text_model(str(folder))


def test_where_the_norm_of_image_tokens_starts(backbones: Callable[[str], Path]) -> None:
    parts = (str(backbones("siglip")), str(backbones("qwen2")))
    with_gain_1, _ = compose(*parts, align_norm=False)
    assert with_gain_1.config.projector_norm_target is None
    assert (with_gain_1.model.multi_modal_projector.norm.weight == 1).all()

    with_ratio_3, processor = compose(*parts, norm_target_ratio=3.0)
    norms = interface_norms(with_ratio_3, processor)
    assert norms["projector_output"] == pytest.approx(3 * norms["text"], rel=1e-2)

    without_norm, _ = compose(*parts, projector_norm="none")
    assert not any("norm" in name for name, _ in without_norm.model.multi_modal_projector.named_parameters())
    assert not without_norm.config.projector_scaled

    scaled, processor = compose(*parts, projector_norm="none", scale_projector=True)
    norms = interface_norms(scaled, processor)
    assert norms["projector_output"] == pytest.approx(norms["text"], rel=1e-5)
    assert scaled.config.projector_scaled
    # Only the second linear layer is scaled.
    first_weight = without_norm.model.multi_modal_projector.linear_1.weight
    assert torch.equal(scaled.model.multi_modal_projector.linear_1.weight, first_weight)


def test_arguments_that_do_not_fit_are_refused(backbones: Callable[[str], Path]) -> None:
    parts = (str(backbones("siglip")), str(backbones("qwen2")))
    with pytest.raises(ValueError, match="scale_projector scales a projector without a norm"):
        compose(*parts, scale_projector=True)
    ignored_ratio = "norm_target_ratio is a number above 0, for a norm that starts at"
    with pytest.raises(UserError, match=ignored_ratio):
        compose(*parts, align_norm=False, norm_target_ratio=2)
    with pytest.raises(UserError, match=ignored_ratio):
        compose(*parts, projector_norm="none", norm_target_ratio=2)
    with pytest.raises(ValueError, match="vision_feature_layer 99: the encoder's are -4 to 3"):
        compose(*parts, vision_feature_layer=99)


def test_bfloat16_stays_and_zero_rows_do_not_count(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    language_model = AutoModelForCausalLM.from_pretrained(backbones("qwen2"), dtype=torch.bfloat16)
    expected = language_model.get_input_embeddings().weight[:300].float().norm(dim=-1).mean().item()
    with torch.no_grad():
        language_model.get_input_embeddings().weight[300:] = 0  # rows without tokens, as in padded vocabularies
    language_model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path)
    model, _ = compose(str(backbones("siglip")), str(tmp_path))
    assert model.config.projector_norm_target == pytest.approx(expected, rel=1e-6)
    for name, parameter in model.named_parameters():
        in_norm = "multi_modal_projector.norm" in name
        assert parameter.dtype == (torch.float32 if in_norm else torch.bfloat16), name


@pytest.mark.parametrize(
    ("vision", "strategy", "num_image_tokens"),
    [("siglip", "full", 4), ("clip", "full", 5), ("siglip", "default", 3)],
)
def test_llava_keeps_every_weight_and_number_of_image_tokens(
    vision: str,
    strategy: str,
    num_image_tokens: int,
    composed: Callable[..., Path],
    picture: Image.Image,
    tmp_path: Path,
) -> None:
    """A picture has four patches. CLIP has a class token before them, and "default" leaves out the first token."""
    source = NormLlavaForConditionalGeneration.from_pretrained(composed(vision=vision, text="vicuna"))
    fields = {name: getattr(source.config, name) for name in ("vision_config", "text_config", "image_token_index")}
    torch.manual_seed(1)
    llava = LlavaForConditionalGeneration(LlavaConfig(**fields, vision_feature_select_strategy=strategy)).eval()
    llava.save_pretrained(tmp_path)
    processor = AutoProcessor.from_pretrained(composed(vision=vision, text="vicuna"))
    processor.vision_feature_select_strategy = strategy
    processor.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    # Like llava-hf's checkpoints, the file has a prefix for the language model, and in one case a longer one for the
    # vision tower.
    assert any(name.startswith("language_model.model.") for name in weights)
    if (vision, strategy) == ("siglip", "full"):
        long_prefix = "vision_tower.vision_model."
        legacy_weights = {}
        for name, weight in weights.items():
            if long_prefix not in name:
                name = name.replace("vision_tower.", long_prefix, 1)
            legacy_weights[name] = weight
        save_file(legacy_weights, tmp_path / "model.safetensors", metadata={"format": "pt"})

    for projector_norm, ratio in (("none", 1.0), ("gwc", 2.0)):
        model, converted_processor = convert_llava(str(tmp_path), projector_norm, norm_target_ratio=ratio)
        assert model.config.llava_name_or_path == str(tmp_path)  # the model card names it

        # All weights are kept, and only the norm's are added.
        new_weights = model.eval().state_dict()
        for name, weight in llava.state_dict().items():
            assert torch.equal(new_weights.pop(name), weight), name
        inputs = converted_processor(images=picture, text="USER: <image>\nWhat? ASSISTANT:", return_tensors="pt")
        if projector_norm == "none":
            assert set(new_weights) == set()
            assert model.config.projector_norm_target is None
            with torch.no_grad():
                assert torch.equal(model(**inputs).logits, llava(**inputs).logits)
        else:
            prefix = "model.multi_modal_projector.norm."
            assert set(new_weights) == {f"{prefix}weight", f"{prefix}bias"}
            text_norm = interface_norms(model, converted_processor)["text"]
            assert model.config.projector_norm_target == pytest.approx(2 * text_norm)

        assert (inputs["input_ids"] == model.config.image_token_id).sum() == num_image_tokens
        assert model.config.image_seq_length == num_image_tokens

        model.save_pretrained(tmp_path / projector_norm)
        loaded = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / projector_norm).state_dict()
        for name, weight in model.state_dict().items():
            assert torch.equal(loaded[name], weight), name


def test_a_model_type_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "none_such"}')
    with pytest.raises(UserError, match=rf"{tmp_path} can't be loaded: .*`none_such`"):
        load_text_model(str(tmp_path))


def test_parts_that_do_not_fit(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no language model with a decoder alone"):
        load_text_model(str(backbones("siglip2")))
    sizes = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2}
    Siglip2VisionModel(Siglip2VisionConfig(**sizes, patch_size=14)).save_pretrained(tmp_path / "naflex")
    # A convolutional encoder's config has an image size, but no hidden size.
    convolutional = ConvNextConfig(image_size=28, num_stages=2, hidden_sizes=[8, 16], depths=[1, 1])
    ConvNextModel(convolutional).save_pretrained(tmp_path / "convolutional")
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
def test_language_models_that_would_give_other_answers_are_refused(
    config: PreTrainedConfig, message: str, backbones: Callable[[str], Path], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"(?s){message}"):
        compose(str(backbones("siglip")), str(tmp_path))


def test_buffers_without_weights_are_filled_on_loading(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """Falcon-H1 has such a buffer. A model that was loaded without filling it would compute with random memory."""
    AutoModelForCausalLM.from_config(FalconH1Config(**FALCON)).save_pretrained(tmp_path / "text")
    AutoTokenizer.from_pretrained(backbones("qwen2")).save_pretrained(tmp_path / "text")
    model, _ = compose(str(backbones("siglip")), str(tmp_path / "text"))
    model.save_pretrained(tmp_path / "composed")
    again = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "composed").eval()
    input_ids = torch.arange(10)[None]
    with torch.no_grad():
        assert torch.equal(again(input_ids).logits, model.eval()(input_ids).logits)


def test_only_a_llava_checkpoint_is_converted(composed: Callable[..., Path]) -> None:
    # A NormLlava is refused, since converting would replace its norm, and with it a trained gain.
    with pytest.raises(ValueError, match="has model_type 'normllava', a Llava is needed"):
        convert_llava(str(composed()))


def test_an_encoder_with_register_tokens_is_refused(backbones: Callable[[str], Path], tmp_path: Path) -> None:
    """It gives four tokens more than patches and its class token, and Llava can leave out only one."""
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
    script = Path(__file__).parents[2] / "training" / "compose.py"
    command = [sys.executable, script, *parts]
    command += ["--captions", tmp_path / "captions.json", "--output_dir", tmp_path / "out"]
    command += ["--projector_norm=layernorm", "--norm_target_ratio=3", "--vision_feature_layer=-1"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "text embeddings (T)" in result.stderr
    model = NormLlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    processor = AutoProcessor.from_pretrained(tmp_path / "out")
    text_norm = interface_norms(model, processor)["text"]
    assert model.config.projector_aligned
    assert model.config.projector_norm == "layernorm"
    assert model.config.projector_norm_target == pytest.approx(3 * text_norm)
    assert model.config.vision_feature_layer == -1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--output_dir {not_empty}", "is not empty"),
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
        main(options.format(not_empty=tmp_path).split())
    assert message in capsys.readouterr().err
