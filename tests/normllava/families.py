"""Small random models of every family that the diagnostics are tested on, with a sample for each.

A family is a model class of transformers, or one of its variants with another encoder or decoder. `FAMILIES` has them
all by name, `build` makes a family's model, and `inputs` makes its sample.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from normllava.diagnostics.probe import Probe, Record
from normllava.tokens import Tokens, classify_sample, token_ids


VOCAB = 200
# Token ids.
IMAGE = 199  # the image token
START = 198  # before a picture
END = 197  # after a picture
VIDEO = 196  # the video token
BOS = 1

# Sizes of the decoders.
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
# Sizes of the vision encoders of most families. Each takes a picture of 28 x 28 pixels.
VISION: dict[str, Any] = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
NUM_PATCHES = 4 * 4  # 28 / 7 on each side
NUM_MERGED = NUM_PATCHES // 4  # number of image tokens in families that merge 2 x 2 patches to one

# Sizes of the vision encoders that take a picture as the patches of a grid of any size.
GRID_VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 48,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
}
GRID = torch.tensor([[1, 4, 6]])  # number of patches along time, height and width
NUM_MERGED_OF_GRID = 4 * 6 // 4  # number of image tokens: 2 x 2 patches are merged to one

# Rotary embedding with positions in time, height and width, as in Qwen2-VL. The sections add up to half a head's size.
ROPE_OF_THREE_AXES = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}

# The token ids, by the names of the fields that hold them in the configs of Qwen-VL and of GLM-4V.
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
GLM_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": START,
    "image_end_token_id": END,
}


@dataclass(frozen=True)
class Family:
    """How to make a family's small model, and a picture for the model.

    Attributes:
        config: The model's config.
        make_picture: A function that returns what the family's image processor would return for one picture.
        num_image_tokens: Number of image tokens of one picture.
        token_types: Name of the input that marks image tokens, if the family has one.
        has_boundaries: Whether a picture stands between the tokens `START` and `END`.
    """

    config: Any
    make_picture: Callable[[], dict[str, torch.Tensor]]
    num_image_tokens: int
    token_types: str | None = None
    has_boundaries: bool = False


def make_config(model_type: str, **fields: Any) -> Any:
    """A config of transformers by its `model_type`."""
    return CONFIG_MAPPING[model_type](**fields)


def text_config(model_type: str, **fields: Any) -> Any:
    """Config of a small decoder of this type."""
    return make_config(model_type, **TEXT, **fields)


def siglip_config(**fields: Any) -> Any:
    """Config of a SigLIP encoder, without the head that would reduce all patches to one feature."""
    return make_config("siglip_vision_model", **VISION, vision_use_head=False, **fields)


def llava_config(vision: str, model_type: str = "llava", **fields: Any) -> Any:
    """Config of a family that is built like Llava, by default with a Llama decoder. `vision` is the encoder's type."""
    defaults = {
        "vision_config": make_config(vision, **VISION),
        "text_config": text_config("llama"),
        "image_token_index": IMAGE,
    }
    return make_config(model_type, **{**defaults, **fields})


def square_picture_maker(tiles: int | None = None, **extra: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that makes a picture of 28 x 28 pixels.

    Args:
        tiles: Number of tiles of 28 x 28 pixels, for families whose pictures consist of tiles.
        extra: Whatever the image processor returns beside the pixels.
    """
    shape = (1, 3, 28, 28) if tiles is None else (1, tiles, 3, 28, 28)

    def make_picture() -> dict[str, torch.Tensor]:
        pixels = torch.rand(shape) * 2 - 1  # from -1 to 1
        return {"pixel_values": pixels, **extra}

    return make_picture


def grid_picture_maker(*patch_shape: int) -> Callable[[], dict[str, torch.Tensor]]:
    """A function that makes a picture as the patches of `GRID`, each of this shape."""
    num_patches = int(GRID.prod())

    def make_picture() -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(num_patches, *patch_shape), "image_grid_thw": GRID}

    return make_picture


def lfm2_picture() -> dict[str, torch.Tensor]:
    """A picture for LFM2-VL: a list of patches, the shape of their grid, and a mask, in which no patch is padding."""
    return {
        "pixel_values": torch.randn(1, NUM_PATCHES, 3 * 7 * 7),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_attention_mask": torch.ones(1, NUM_PATCHES, dtype=torch.long),
    }


def gemma4_picture() -> dict[str, torch.Tensor]:
    """A picture for Gemma 4: a list of patches, and the column and the row of each."""
    rows_and_columns = torch.cartesian_prod(torch.arange(4), torch.arange(4))  # [num_patches, 2]
    columns_and_rows = rows_and_columns.flip(1)
    return {
        "pixel_values": torch.rand(1, NUM_PATCHES, 3 * 7 * 7),
        "image_position_ids": columns_and_rows[None],
    }


def tiled_family(vision: str, model_type: str, **fields: Any) -> Family:
    """A Llava that takes a picture as a whole and as two tiles, and ends each row of the tiles with a newline feature.

    The picture has 28 x 56 pixels, so its tiles lie side by side: 4 rows of 8 patches.
    """
    resolutions = [[28, 56], [56, 28]]  # height and width of the two tiles together
    num_rows = 4
    num_columns = 8
    num_newlines = num_rows
    return Family(
        config=llava_config(vision, model_type, image_grid_pinpoints=resolutions, **fields),
        # Three squares of 28 x 28 pixels: the whole picture made smaller, and two tiles.
        make_picture=square_picture_maker(tiles=3, image_sizes=torch.tensor([[28, 56]])),
        num_image_tokens=NUM_PATCHES + num_rows * num_columns + num_newlines,
    )


def grid_family(model_type: str, vision: dict[str, Any], text: dict[str, Any], tokens: dict[str, int]) -> Family:
    """A family that takes a picture as the patches of `GRID`, and merges 2 x 2 patches to one image token.

    Args:
        model_type: The family's `model_type`.
        vision: Fields of the vision encoder's config.
        text: Fields of the decoder's config, beside its sizes.
        tokens: Fields with token ids.
    """
    return Family(
        config=make_config(model_type, vision_config=vision, text_config={**TEXT, **text}, **tokens),
        make_picture=grid_picture_maker(3 * 2 * 4 * 4),  # channels, time, height and width of a patch
        num_image_tokens=NUM_MERGED_OF_GRID,
        token_types="mm_token_type_ids",
        has_boundaries=True,
    )


FAMILIES: dict[str, Family] = {
    # A vision encoder, an MLP and a decoder.
    "llava-clip": Family(
        config=llava_config("clip_vision_model"),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
    ),
    "llava-siglip": Family(
        config=llava_config("siglip_vision_model", vision_feature_select_strategy="full"),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
    ),
    "vipllava": Family(
        config=llava_config("clip_vision_model", "vipllava", vision_feature_layers=[-1, -2]),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
    ),
    "normllava": Family(
        config=llava_config(
            "siglip_vision_model",
            "normllava",
            vision_feature_select_strategy="full",
            projector_norm_target=0.4,
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
    ),
    "normllava, key adapters, qk-norm": Family(
        config=llava_config(
            "siglip_vision_model",
            "normllava_key_adapters",
            vision_feature_select_strategy="full",
            projector_norm_target=0.4,
            key_adapter_rank=4,
            text_config=text_config("qwen3", head_dim=8),
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
    ),
    "deepseek_vl": Family(
        config=make_config(
            "deepseek_vl",
            vision_config=siglip_config(),
            text_config=text_config("llama"),
            image_token_id=IMAGE,
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
    ),
    "paligemma": Family(
        config=make_config(
            "paligemma",
            vision_config=siglip_config(projection_dim=32),
            text_config=text_config("gemma", head_dim=8),
            projection_dim=32,
            hidden_size=32,
            vocab_size=VOCAB,
            image_token_index=IMAGE,
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_PATCHES,
        token_types="token_type_ids",
    ),
    # The picture is cut into tiles.
    "llava_next": tiled_family("clip_vision_model", "llava_next"),
    "llava_onevision": tiled_family("siglip_vision_model", "llava_onevision", video_token_index=VIDEO),
    # Patches are merged.
    "idefics3": Family(
        config=make_config(
            "idefics3",
            vision_config=VISION,
            text_config=text_config("llama"),
            scale_factor=2,
            image_token_id=IMAGE,
        ),
        make_picture=square_picture_maker(tiles=1),
        num_image_tokens=NUM_MERGED,
    ),
    "smolvlm": Family(
        config=make_config(
            "smolvlm",
            vision_config=VISION,
            text_config=text_config("llama"),
            scale_factor=2,
            image_token_id=IMAGE,
        ),
        make_picture=square_picture_maker(tiles=1),
        num_image_tokens=NUM_MERGED,
    ),
    "internvl": Family(
        config=make_config(
            "internvl",
            vision_config={**VISION, "image_size": [28, 28], "patch_size": [7, 7]},
            text_config=text_config("qwen2"),
            image_seq_length=NUM_MERGED,
            image_token_id=IMAGE,
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_MERGED,
    ),
    "mistral3": Family(
        config=make_config(
            "mistral3",
            vision_config=make_config("pixtral", **VISION),
            text_config=text_config("mistral", head_dim=8),
            spatial_merge_size=2,
            image_token_index=IMAGE,
        ),
        make_picture=square_picture_maker(image_sizes=torch.tensor([[28, 28]])),
        num_image_tokens=NUM_MERGED,
    ),
    "lighton_ocr": Family(
        config=make_config(
            "lighton_ocr",
            vision_config=make_config("pixtral", **VISION),
            text_config=text_config("qwen3", head_dim=8),
            spatial_merge_size=2,
            image_token_id=IMAGE,
        ),
        make_picture=square_picture_maker(image_sizes=torch.tensor([[28, 28]])),
        num_image_tokens=NUM_MERGED,
    ),
    "cohere2_vision": Family(
        config=make_config(
            "cohere2_vision",
            vision_config=siglip_config(),
            text_config=text_config("cohere2", sliding_window=64),
            alignment_intermediate_size=48,
            image_token_id=IMAGE,
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_MERGED,
    ),
    "lfm2_vl": Family(  # the second layer of its decoder has no attention
        config=make_config(
            "lfm2_vl",
            vision_config=make_config(
                "siglip2_vision_model",
                hidden_size=24,
                intermediate_size=40,
                num_hidden_layers=3,
                num_attention_heads=2,
                patch_size=7,
                num_patches=NUM_PATCHES,
                vision_use_head=False,
            ),
            text_config=text_config("lfm2", layer_types=["full_attention", "conv", "full_attention"]),
            projector_hidden_size=24,
            image_token_id=IMAGE,
        ),
        make_picture=lfm2_picture,
        num_image_tokens=NUM_MERGED,
    ),
    "gemma3": Family(
        config=make_config(
            "gemma3",
            vision_config=siglip_config(),
            text_config={**TEXT, "head_dim": 8, "sliding_window": 64},
            mm_tokens_per_image=NUM_MERGED,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        make_picture=square_picture_maker(),
        num_image_tokens=NUM_MERGED,
        token_types="token_type_ids",
        has_boundaries=True,
    ),
    "gemma4": Family(
        config=make_config(
            "gemma4",
            vision_config={
                "hidden_size": 24,
                "intermediate_size": 40,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 12,
                "global_head_dim": 12,
                "patch_size": 7,
                "position_embedding_size": 16,
                "pooling_kernel_size": 2,
                "default_output_length": NUM_MERGED,
            },
            text_config={
                **TEXT,
                "head_dim": 8,
                "global_head_dim": 16,
                "sliding_window": 64,
                "vocab_size_per_layer_input": VOCAB,
                "hidden_size_per_layer_input": 8,
            },
            image_token_id=IMAGE,
            boi_token_id=START,
            eoi_token_id=END,
        ),
        make_picture=gemma4_picture,
        num_image_tokens=NUM_MERGED,
        token_types="mm_token_type_ids",
        has_boundaries=True,
    ),
    # The picture is a grid of any size, and its patches are merged.
    "qwen2_vl": grid_family(
        "qwen2_vl",
        vision={"depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4},
        text={"rope_parameters": ROPE_OF_THREE_AXES},
        tokens=QWEN_TOKENS,
    ),
    "qwen2_5_vl": grid_family(
        "qwen2_5_vl",
        vision={**GRID_VISION, "window_size": 16, "fullatt_block_indexes": [1]},
        text={"rope_parameters": ROPE_OF_THREE_AXES},
        tokens=QWEN_TOKENS,
    ),
    "qwen3_vl": grid_family(
        "qwen3_vl",
        vision={**GRID_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
        text={"head_dim": 8, "rope_parameters": {**ROPE_OF_THREE_AXES, "mrope_interleaved": True}},
        tokens=QWEN_TOKENS,
    ),
    "qwen3_5": grid_family(  # the second layer of its decoder has no attention in the usual sense
        "qwen3_5",
        vision={**GRID_VISION, "num_position_embeddings": 16},
        text={
            "head_dim": 8,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "rope_parameters": {
                **ROPE_OF_THREE_AXES,
                "partial_rotary_factor": 0.5,  # of each head
                "mrope_section": [1, 1, 0],  # adds up to half of the part that is rotated
                "mrope_interleaved": True,
            },
        },
        tokens=QWEN_TOKENS,
    ),
    "glm4v": grid_family(
        "glm4v",
        vision={**GRID_VISION, "image_size": 28},
        text={"rope_parameters": {**ROPE_OF_THREE_AXES, "partial_rotary_factor": 1.0}},
        tokens=GLM_TOKENS,
    ),
    "paddleocr_vl": Family(
        config=make_config(
            "paddleocr_vl",
            vision_config={**VISION, "spatial_merge_size": 2},
            text_config={**TEXT, "head_dim": 8, "rope_parameters": ROPE_OF_THREE_AXES},
            **QWEN_TOKENS,
        ),
        make_picture=grid_picture_maker(3, 7, 7),
        num_image_tokens=NUM_MERGED_OF_GRID,
        token_types="mm_token_type_ids",
        has_boundaries=True,
    ),
}


def build(name: str) -> PreTrainedModel:
    """A random model of the family, the same on every call, in eval mode."""
    set_seed(0)
    config = deepcopy(FAMILIES[name].config)  # transformers changes the config that it is given
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.parameters():
        # Gemma 3's projector and the second matrices of key adapters start at zero, and would hide what enters them.
        # An adapter's matrices for text and image tokens are stacked, in three dimensions.
        is_matrix = parameter.ndim in (2, 3)
        if is_matrix and not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def inputs(name: str, padding: int = 0) -> dict[str, torch.Tensor]:
    """One sample: BOS, three words, a picture, nine words. A word is one token.

    In a family with `has_boundaries`, the picture stands between `START` and `END`. `padding` is the number of padding
    tokens before BOS.
    """
    family = FAMILIES[name]
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(10, 150, (12,), generator=generator).tolist()  # no special token has an id from 10 to 149
    picture = [IMAGE] * family.num_image_tokens
    if family.has_boundaries:
        picture = [START, *picture, END]

    prompt = [BOS, *words[:3], *picture, *words[3:]]
    pad = TEXT["pad_token_id"]
    input_ids = torch.tensor([[pad] * padding + prompt])
    attention_mask = torch.tensor([[0] * padding + [1] * len(prompt)])

    torch.manual_seed(2)  # so that the picture's random values are the same on every call
    sample = {"input_ids": input_ids, "attention_mask": attention_mask, **family.make_picture()}
    if family.token_types is not None:
        sample[family.token_types] = (input_ids == IMAGE).long()
    return sample


def tokens_of(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> Tokens:
    """The type of each position of a sample, by the sample's token ids and masks."""
    return classify_sample(sample, token_ids(model))


@torch.no_grad()
def record_sample(model: PreTrainedModel, sample: dict[str, torch.Tensor], **options: Any) -> Record:
    """The record of a model's forward pass over one sample. The options are those of [`Probe`]."""
    with Probe(model, sample, tokens_of(model, sample), **options) as probe:
        model(**sample)
    return probe.record()
