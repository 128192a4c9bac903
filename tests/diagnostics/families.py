"""Small random models of every family that the diagnostics are tested on, with a sample for each."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from diagnostics.probe import Probe, Record
from diagnostics.tokens import Tokens, classify_sample, token_ids


VOCAB = 200
# Token ids: the image token, the tokens before and after a picture, and the first token of a prompt.
IMAGE = 199
START = 198
END = 197
BOS = 1
TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB,
    "bos_token_id": BOS,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
GRID = torch.tensor([[1, 4, 6]])  # patches of a picture: time, height, width


@dataclass(frozen=True)
class Family:
    """How to make a small model of a family and pictures for it.

    Attributes:
        config: The model's config.
        pictures: Returns what the image processor would return for one picture.
        image_tokens: Number of image tokens of one picture.
        token_types: Name of the input that marks image tokens, if the family has one.
        boundaries: Whether a picture stands between two tokens that the config names.
    """

    config: Any
    pictures: Callable[[], dict[str, torch.Tensor]]
    image_tokens: int
    token_types: str | None = None
    boundaries: bool = False


def config(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields)


def text(model_type: str, **fields: Any) -> Any:
    return config(model_type, **TEXT, **fields)


def siglip(**fields: Any) -> Any:
    """Config of a SigLIP encoder that returns a feature for each patch."""
    return config("siglip_vision_model", **VISION, vision_use_head=False, **fields)


def square(*shape: int, **extra: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
    """Makes one picture of 28 x 28 pixels, with these dimensions between the batch's and the channels'."""
    return lambda: {"pixel_values": torch.rand(1, *shape, 3, 28, 28) * 2 - 1, **extra}


def patches(*shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Makes one picture that is cut into patches of this shape."""
    return lambda: {"pixel_values": torch.randn(int(GRID.prod()), *shape), "image_grid_thw": GRID}


def llava(vision: str, model_type: str = "llava", **fields: Any) -> Any:
    """Config of a family that joins a vision encoder to a decoder as Llava does, by default to a Llama."""
    text_config = fields.pop("text_config", text("llama"))
    vision_config = config(vision, **VISION)
    return config(model_type, vision_config=vision_config, image_token_index=IMAGE, text_config=text_config, **fields)


def normllava(model_type: str = "normllava", **fields: Any) -> Family:
    options = {"vision_feature_select_strategy": "full", "projector_norm_target": 0.4, **fields}
    return Family(llava("siglip_vision_model", model_type, **options), square(), 16)


def tiled(vision: str, model_type: str, **fields: Any) -> Family:
    """A family that takes a picture as a whole and as two tiles, and ends each row of the tiles with a newline."""
    pinpoints = [[28, 56], [56, 28]]
    pictures = square(3, image_sizes=torch.tensor([pinpoints[0]]))
    whole = 16
    tiles = 4 * 8
    newlines = 4
    family_config = llava(vision, model_type, image_grid_pinpoints=pinpoints, **fields)
    return Family(family_config, pictures, whole + tiles + newlines)


def joined(model_type: str, image_tokens: int, pictures: Any = None, decoder: Any = None, **fields: Any) -> Family:
    """A family that joins an encoder to a decoder, by default to a Llama."""
    fields = {"image_token_id": IMAGE, "vision_config": VISION, **fields}
    family_config = config(model_type, text_config=decoder or text("llama"), **fields)
    return Family(family_config, pictures or square(), image_tokens)


def in_patches(model_type: str, decoder: Any, vision: Any, tokens: Any, pictures: Any = None) -> Family:
    """A family that takes a picture as the patches of a grid, and merges four patches to one image token."""
    family_config = config(model_type, text_config={**TEXT, **decoder}, vision_config=vision, **tokens)
    return Family(family_config, pictures or patches(3 * 2 * 4 * 4), 6, "mm_token_type_ids", boundaries=True)


def grid_vision(**fields: Any) -> Any:
    """Vision config of the families that [`in_patches`] makes."""
    return {**GRID_VISION, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, **fields}


GRID_VISION = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4}
MROPE = {"rope_parameters": ROPE}
GLM_ROPE = {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}
WINDOWS = {"window_size": 16, "fullatt_block_indexes": [1]}
TOKENS = {"image_token_id": IMAGE, "video_token_id": 196}
QWEN_TOKENS = {**TOKENS, "vision_start_token_id": START, "vision_end_token_id": END}
GLM_TOKENS = {**TOKENS, "image_start_token_id": START, "image_end_token_id": END}
GEMMA_TOKENS = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
PIXTRAL = {"vision_config": config("pixtral", **VISION), "spatial_merge_size": 2}
ONE_SIZE = square(image_sizes=torch.tensor([[28, 28]]))

FAMILIES: dict[str, Family] = {
    "llava-clip": Family(llava("clip_vision_model"), square(), 16),
    "llava-siglip": Family(llava("siglip_vision_model", vision_feature_select_strategy="full"), square(), 16),
    "normllava": normllava(),
    "normllava, key adapters, qk-norm": normllava(
        "normllava_key_adapters", key_adapter_rank=4, text_config=text("qwen3", head_dim=8)
    ),
    "llava_next": tiled("clip_vision_model", "llava_next"),
    "llava_onevision": tiled("siglip_vision_model", "llava_onevision", video_token_index=196),
    "vipllava": Family(llava("clip_vision_model", "vipllava", vision_feature_layers=[-1, -2]), square(), 16),
    "qwen2_vl": in_patches(
        "qwen2_vl", MROPE,
        {"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        QWEN_TOKENS,
    ),
    "qwen2_5_vl": in_patches("qwen2_5_vl", MROPE, grid_vision(**WINDOWS), QWEN_TOKENS),
    "qwen3_vl": in_patches(
        "qwen3_vl", {"head_dim": 8, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
        grid_vision(num_position_embeddings=16, deepstack_visual_indexes=[0, 1]), QWEN_TOKENS,
    ),
    "qwen3_5": in_patches(  # its second layer is no attention
        "qwen3_5",
        {
            "head_dim": 8, "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                **ROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5
            },
        },
        grid_vision(num_position_embeddings=16), QWEN_TOKENS,
    ),
    "glm4v": in_patches("glm4v", GLM_ROPE, grid_vision(image_size=28), GLM_TOKENS),
    "paddleocr_vl": in_patches(
        "paddleocr_vl", {**MROPE, "head_dim": 8}, {**VISION, "spatial_merge_size": 2}, QWEN_TOKENS, patches(3, 7, 7)
    ),
    "gemma3": Family(
        config(
            "gemma3", text_config={**TEXT, "head_dim": 8, "sliding_window": 64}, vision_config=siglip(),
            mm_tokens_per_image=4, **GEMMA_TOKENS,
        ),
        square(), 4, "token_type_ids", boundaries=True,
    ),
    "paligemma": Family(
        config(
            "paligemma", text_config=text("gemma", head_dim=8), vision_config=siglip(projection_dim=32),
            image_token_index=IMAGE, projection_dim=32, hidden_size=32, vocab_size=VOCAB,
        ),
        square(), 16, "token_type_ids",
    ),
    "idefics3": joined("idefics3", 4, square(1), scale_factor=2),
    "smolvlm": joined("smolvlm", 4, square(1), scale_factor=2),
    "internvl": joined(
        "internvl", 4, decoder=text("qwen2"), image_seq_length=4,
        vision_config={**VISION, "image_size": [28, 28], "patch_size": [7, 7]},
    ),
    "mistral3": Family(
        config("mistral3", text_config=text("mistral", head_dim=8), image_token_index=IMAGE, **PIXTRAL), ONE_SIZE, 4
    ),
    "lighton_ocr": joined("lighton_ocr", 4, ONE_SIZE, text("qwen3", head_dim=8), **PIXTRAL),
    "deepseek_vl": joined("deepseek_vl", 16, vision_config=siglip()),
    "lfm2_vl": joined(  # its second layer is no attention
        "lfm2_vl", 4,
        lambda: {
            "pixel_values": torch.randn(1, 16, 3 * 7 * 7),
            "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        },
        text("lfm2", layer_types=["full_attention", "conv", "full_attention"]),
        vision_config=config(
            "siglip2_vision_model", **{key: VISION[key] for key in VISION if key != "image_size"}, num_patches=16,
            vision_use_head=False,
        ),
        projector_hidden_size=24,
    ),
    "cohere2_vision": joined(
        "cohere2_vision", 4, decoder=text("cohere2", sliding_window=64), vision_config=siglip(),
        alignment_intermediate_size=48,
    ),
    "gemma4": Family(
        config(
            "gemma4",
            text_config={
                **TEXT, "head_dim": 8, "global_head_dim": 16, "sliding_window": 64,
                "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
            },
            vision_config={
                "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "head_dim": 12, "global_head_dim": 12, "patch_size": 7,
                "position_embedding_size": 16, "pooling_kernel_size": 2, "default_output_length": 4,
            },
            image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END,
        ),
        lambda: {
            "pixel_values": torch.rand(1, 16, 3 * 7 * 7),
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)[None],
        },
        4, "mm_token_type_ids", boundaries=True,
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """A random model of the family, the same on every call, in eval mode."""
    set_seed(0)
    model = AutoModelForImageTextToText.from_config(deepcopy(FAMILIES[name].config)).eval()
    for parameter in model.parameters():
        if parameter.ndim in (2, 3) and not parameter.any():  # Gemma 3 starts its projector at zero, key adapters B
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def inputs(name: str, padding: int = 0) -> dict[str, torch.Tensor]:
    """One sample with this much padding on the left: BOS, three words, a picture, nine words.

    If the family has delimiters of pictures, the picture stands between them.
    """
    family = FAMILIES[name]
    words = torch.randint(10, 150, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    picture = [IMAGE] * family.image_tokens
    if family.boundaries:
        picture = [START, *picture, END]
    prompt = [BOS, *words[:3], *picture, *words[3:]]
    input_ids = torch.tensor([[0] * padding + prompt])
    attention_mask = torch.tensor([[0] * padding + [1] * len(prompt)])
    torch.manual_seed(2)
    sample = {"input_ids": input_ids, "attention_mask": attention_mask, **family.pictures()}
    if family.token_types is not None:
        sample[family.token_types] = (input_ids == IMAGE).long()
    return sample


def tokens_of(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> Tokens:
    """The type of each position of a sample, as far as its inputs tell."""
    return classify_sample(sample, token_ids(model))


@torch.no_grad()
def record_sample(model: PreTrainedModel, sample: dict[str, torch.Tensor], **options: Any) -> Record:
    """The record of a model's forward pass over one sample."""
    with Probe(model, sample, tokens_of(model, sample), **options) as probe:
        model(**sample)
    return probe.record()
