"""Fixtures that many tests share: small random backbones and models in checkpoint folders, made once a run."""

# ruff: noqa: E402 - these environment variables must be set before datasets, transformers and matplotlib are imported
import os
import tempfile


# Each run of the tests, and each worker of pytest-xdist, has caches of its own, which are deleted at its end.
_caches = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
os.environ["HF_DATASETS_CACHE"] = os.path.join(_caches.name, "datasets")
os.environ["HF_MODULES_CACHE"] = os.path.join(_caches.name, "modules")
os.environ.setdefault("MPLBACKEND", "Agg")  # matplotlib opens no window, also in processes that tests start

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    AutoProcessor,
    BitImageProcessorPil,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    Dinov2Config,
    Dinov2Model,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SiglipConfig,
    SiglipImageProcessor,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    set_seed,
)

from modeling_normllava import NormLlavaForConditionalGeneration
from training.add_key_adapters import add_key_adapters
from training.compose import compose


# Some tests send the signal of Ctrl-C, which pytest ignores if a shell has started pytest in the background.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files whose tests start several processes, or a server on a port. One worker of pytest-xdist runs them all, so that
# no two run at the same time.
IN_ONE_WORKER = ("test_distributed.py", "test_kill.py", "test_serving.py", "test_space.py")

# The sizes of the random backbones. The vocabulary has room for 256 bytes and the special tokens. A picture of 28 x 28
# pixels has 2 x 2 patches.
TEXT_SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 512, "vocab_size": 320,
}  # fmt: skip
VISION_SIZES = {
    "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


@dataclass(frozen=True)
class TextFamily:
    """A family of language models: its classes, and its tokenizer's special tokens.

    `other_tokens` are all special tokens except BOS and EOS, including `pad_token`.
    """

    config_class: type
    model_class: type
    bos_token: str | None
    eos_token: str
    other_tokens: tuple[str, ...] = ()
    pad_token: str | None = None


QWEN_TOKENS = ("<|im_start|>", "<|endoftext|>", "<|image_pad|>")
TEXT_FAMILIES = {
    "llama": TextFamily(
        LlamaConfig,
        LlamaForCausalLM,
        bos_token="<|begin_of_text|>",
        eos_token="<|eot_id|>",
        other_tokens=("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_0|>"),
    ),
    "qwen2": TextFamily(
        Qwen2Config,
        Qwen2ForCausalLM,
        bos_token=None,
        eos_token="<|im_end|>",
        other_tokens=QWEN_TOKENS,
        pad_token="<|endoftext|>",
    ),
    "qwen3": TextFamily(
        Qwen3Config,
        Qwen3ForCausalLM,
        bos_token=None,
        eos_token="<|im_end|>",
        other_tokens=QWEN_TOKENS,
        pad_token="<|endoftext|>",
    ),
    "gemma3": TextFamily(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        bos_token="<bos>",
        eos_token="<end_of_turn>",
        other_tokens=("<start_of_turn>", "<pad>", "<unused0>"),
        pad_token="<pad>",
    ),
    # Like Vicuna, this family has no unused special token for the image token, so composing has to add one.
    "vicuna": TextFamily(LlamaConfig, LlamaForCausalLM, bos_token="<s>", eos_token="</s>"),
}
VISION_FAMILIES = ("siglip", "siglip2", "clip", "dinov2")


def byte_tokenizer(family_name: str) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for each byte, so that it can encode any text, and with the family's special tokens."""
    family = TEXT_FAMILIES[family_name]
    special_tokens = [family.eos_token, *family.other_tokens]
    if family.bos_token is not None:
        special_tokens.insert(0, family.bos_token)

    characters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one for each byte
    vocabulary = {character: index for index, character in enumerate(characters)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special_tokens)
    if family.bos_token is not None:
        bos_token_id = backend.token_to_id(family.bos_token)
        backend.post_processor = processors.TemplateProcessing(
            single=f"{family.bos_token} $A",  # every text starts with BOS
            special_tokens=[(family.bos_token, bos_token_id)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos_token,
        eos_token=family.eos_token,
        pad_token=family.pad_token,
        additional_special_tokens=special_tokens,
    )


def text_model(family_name: str) -> PreTrainedModel:
    """A small random language model of a family."""
    family = TEXT_FAMILIES[family_name]
    has_tied_head = family_name == "gemma3"
    config = family.config_class(**TEXT_SIZES, tie_word_embeddings=has_tied_head)
    return family.model_class(config)


def vision_model(family_name: str) -> tuple[PreTrainedModel, object]:
    """A small random vision encoder of a family, and its image processor."""
    size = VISION_SIZES["image_size"]
    if family_name == "clip":
        processor = CLIPImageProcessor(size={"shortest_edge": size}, crop_size={"height": size, "width": size})
        return CLIPVisionModel(CLIPVisionConfig(**VISION_SIZES)), processor

    if family_name == "dinov2":
        # As on the Hub, DINOv2's processor crops pictures to fewer pixels than the model's `image_size`: 14, not 28.
        processor = BitImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 14, "width": 14})
        return Dinov2Model(Dinov2Config(**VISION_SIZES)), processor

    processor = SiglipImageProcessor(size={"height": size, "width": size})
    if family_name == "siglip":
        return SiglipVisionModel(SiglipVisionConfig(**VISION_SIZES)), processor

    # SigLIP2 checkpoints of fixed resolution are whole SigLIP models, with a text encoder.
    text_config = {
        "hidden_size": TEXT_SIZES["hidden_size"],
        "intermediate_size": TEXT_SIZES["intermediate_size"],
        "num_attention_heads": TEXT_SIZES["num_attention_heads"],
        "num_hidden_layers": 1,
    }
    return SiglipModel(SiglipConfig(vision_config=VISION_SIZES, text_config=text_config)), processor


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of `IN_ONE_WORKER` into one group, which pytest-xdist's `--dist loadgroup` gives to one worker.

    These tests come first, since they take minutes.
    """
    grouped_items = [item for item in items if item.path.name in IN_ONE_WORKER]
    other_items = [item for item in items if item.path.name not in IN_ONE_WORKER]
    for item in grouped_items:
        item.add_marker(pytest.mark.xdist_group("processes"))
    items[:] = grouped_items + other_items  # pytest runs the tests in the order of this list


@pytest.fixture(scope="session")
def backbones(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A function that gives the folder of a family's random backbone, which is saved on first use."""
    root = tmp_path_factory.mktemp("backbones")

    def backbone_folder(family_name: str) -> Path:
        folder = root / family_name
        if folder.exists():
            return folder

        set_seed(0)
        if family_name in VISION_FAMILIES:
            model, image_processor = vision_model(family_name)
            image_processor.save_pretrained(folder)
        else:
            model = text_model(family_name)
            byte_tokenizer(family_name).save_pretrained(folder)
        model.save_pretrained(folder)
        if family_name == "vicuna":
            # Vicuna on the Hub has sampling options, but no `do_sample`. transformers reads such options, but refuses
            # to save them.
            (folder / "generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
        return folder

    return backbone_folder


@pytest.fixture(scope="session")
def make_model_folder(
    backbones: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """A function that gives the folder of a NormLlava composed from two families.

    The folder is saved on first use, and shared by all tests, so a test must not write to it.
    """
    root = tmp_path_factory.mktemp("composed")

    def model_folder(
        vision: str = "siglip",
        text: str = "qwen2",
        projector_norm: str = "gwc",
        key_adapter_rank: int = 0,
        spatial_merge_size: int = 1,
        max_tiles: int = 1,
    ) -> Path:
        folder = root / f"{vision}-{text}-{projector_norm}-{key_adapter_rank}-{spatial_merge_size}-{max_tiles}"
        if folder.exists():
            return folder

        model, processor = compose(
            str(backbones(vision)),
            str(backbones(text)),
            projector_norm=projector_norm,
            spatial_merge_size=spatial_merge_size,
            max_tiles=max_tiles,
        )
        if key_adapter_rank > 0:
            model = add_key_adapters(model, key_adapter_rank, alpha=2 * key_adapter_rank, dropout=0.05)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder

    return model_folder


@pytest.fixture(scope="session")
def always_a(make_model_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A function that gives the folder of a model that answers "A" to everything, saved on first use.

    After the "A" the model ends its turn, or with `ends=False` goes on with commas.
    """
    root = tmp_path_factory.mktemp("always_a")

    def model_folder(ends: bool = True) -> Path:
        folder = root / f"ends_{ends}"
        if folder.exists():
            return folder

        model = NormLlavaForConditionalGeneration.from_pretrained(make_model_folder())
        processor = AutoProcessor.from_pretrained(make_model_folder())
        answer_always(model, processor.tokenizer, ends)
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder

    return model_folder


@torch.no_grad()
def answer_always(model: NormLlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, ends: bool) -> None:
    """Change a model's weights in place, so that it answers "A", and then ends its turn or goes on with commas."""
    letter, comma, end_of_turn = tokenizer.convert_tokens_to_ids(["A", ",", "<|im_end|>"])
    # No layer adds anything, so the next token depends only on the embedding of the last token.
    for layer in model.model.language_model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    # In every embedding, dimension 0 is 1, and raises the letter's logit. In the embeddings of the letter and the
    # comma, dimension 1 is 10, and raises the logit of the token that follows both.
    embeddings = model.get_input_embeddings().weight
    embeddings.zero_()
    embeddings[:, 0] = 1.0
    embeddings[[letter, comma], 1] = 10.0
    lm_head = model.get_output_embeddings().weight
    lm_head.zero_()
    lm_head[letter, 0] = 1.0
    token_after_letter = end_of_turn if ends else comma
    lm_head[token_after_letter, 1] = 1.0


@pytest.fixture(scope="session")
def harness_python() -> Path:
    """The Python of `.venv-evaluation`, the environment with the evaluation harnesses, made if it is missing."""
    root = Path(__file__).parents[1]
    command = ["make", ".venv-evaluation/installed", f"PYTHON={sys.executable}"]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, f"the environment could not be made:\n{result.stderr[-3000:]}"
    return root / ".venv-evaluation/bin/python"


@pytest.fixture
def model(make_model_folder: Callable[..., Path]) -> NormLlavaForConditionalGeneration:
    """A fresh copy of the SigLIP and Qwen2 NormLlava, in eval mode."""
    return NormLlavaForConditionalGeneration.from_pretrained(make_model_folder()).eval()


@pytest.fixture
def picture() -> Image.Image:
    """A picture of 40 x 30 pixels that is black at the top and white at the bottom."""
    pixels = torch.linspace(0, 255, 30 * 40 * 3).to(torch.uint8)
    pixels = pixels.reshape(30, 40, 3)  # [height, width, channels]
    return Image.fromarray(pixels.numpy())
