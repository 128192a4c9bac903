"""Small random models of every family that the diagnostics are tested on, with a sample for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel, set_seed
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import modeling_normllava  # noqa: F401 - registers the classes with the auto classes
from diagnostics.probe import Probe, Record
from diagnostics.tokens import Tokens, classify_sample, token_ids


VOCAB, IMAGE, START, END, BOS = 200, 199, 198, 197, 1
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
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
GRID = torch.tensor([[1, 4, 6]])  # patches of a picture: time, height, width


@dataclass(frozen=True)
class Family:
    """How to make a small model of a family and pictures for it.

    Attributes:
        config: Of the small model.
        pictures: Returns what the image processor would, for one picture.
        image_tokens: Image tokens of one picture.
        token_types: Name of the input that marks image tokens, where the family has one.
        boundaries: Whether pictures stand between two tokens of the vocabulary that the config names.
    """

    config: Callable[[], Any]
    pictures: Callable[[], dict[str, torch.Tensor]]
    image_tokens: int
    token_types: str | None = None
    boundaries: bool = False


def config(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields)


def text(model_type: str, **fields: Any) -> Any:
    return config(model_type, **TEXT, **fields)


def square(size: int = 28, **extra: torch.Tensor) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": torch.rand(1, 3, size, size) * 2 - 1, **extra}


def patches(width: int) -> Callable[[], dict[str, torch.Tensor]]:
    return lambda: {"pixel_values": torch.randn(int(GRID.prod(-1).sum()), width), "image_grid_thw": GRID}


def llava(vision: str, model_type: str = "llava", **fields: Any) -> Callable[[], Any]:
    """Config of the families that join a vision encoder to a Llama as Llava does."""
    return lambda: config(
        model_type,
        vision_config=config(vision, **VISION),
        image_token_index=IMAGE,
        **{"text_config": text("llama"), **fields},
    )


def key_adapters(text_config: Any) -> Callable[[], Any]:
    """Config of a NormLlava with key adapters."""
    return llava(
        "siglip_vision_model",
        "normllava_key_adapters",
        text_config=text_config,
        vision_feature_select_strategy="full",
        projector_norm_target=0.4,
        key_adapter_rank=4,
    )


def grid_vision(model_type: str, **fields: Any) -> Any:
    """Vision config of the families that take a picture as patches with a grid."""
    sizes = {"depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4}
    return {**sizes, "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 32, **fields}


def siglip(**fields: Any) -> Any:
    """Config of a SigLIP encoder that returns a feature for each patch."""
    return config("siglip_vision_model", **VISION, vision_use_head=False, **fields)


# A decoder without rotary embedding, and what takes a picture to it.
OPT = config(
    "opt", hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, vocab_size=VOCAB,
    word_embed_proj_dim=32, max_position_embeddings=128, bos_token_id=BOS, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
QFORMER = {
    "vision_config": {**VISION, "initializer_range": 0.02},
    "qformer_config": {
        "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 30
    },
}  # fmt: skip
TOKENS = {"image_token_id": IMAGE, "video_token_id": 196}
QWEN_TOKENS = {**TOKENS, "vision_start_token_id": START, "vision_end_token_id": END}
GLM_TOKENS = {**TOKENS, "image_start_token_id": START, "image_end_token_id": END}

FAMILIES: dict[str, Family] = {
    "llava-clip": Family(llava("clip_vision_model"), square(), 16),
    "llava-siglip": Family(llava("siglip_vision_model", vision_feature_select_strategy="full"), square(), 16),
    "normllava": Family(
        llava(
            "siglip_vision_model", "normllava", vision_feature_select_strategy="full", projector_norm_target=0.4
        ),
        square(),
        16,
    ),
    "normllava, key adapters": Family(key_adapters(text("llama")), square(), 16),
    "normllava, key adapters, qk-norm": Family(key_adapters(text("qwen3", head_dim=8)), square(), 16),
    "llava_next": Family(
        llava("clip_vision_model", "llava_next", image_grid_pinpoints=[[28, 56], [56, 28]]),
        lambda: {
            "pixel_values": torch.rand(1, 3, 3, 28, 28) * 2 - 1,
            "image_sizes": torch.tensor([[28, 56]]),
        },
        16 + 4 * 8 + 4,  # the whole picture, two tiles, and a newline at the end of each of their rows
    ),
    "qwen2_5_vl": Family(
        lambda: config(
            "qwen2_5_vl",
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config=grid_vision("qwen2_5_vl", window_size=16, fullatt_block_indexes=[1]),
            **QWEN_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "qwen3_vl": Family(
        lambda: config(
            "qwen3_vl",
            text_config={**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_interleaved": True}},
            vision_config=grid_vision("qwen3_vl", num_position_embeddings=16, deepstack_visual_indexes=[0, 1]),
            **QWEN_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "glm4v": Family(
        lambda: config(
            "glm4v",
            text_config={**TEXT, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0}},
            vision_config=grid_vision("glm4v", image_size=28),
            **GLM_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "ovis2": Family(
        lambda: config(
            "ovis2",
            text_config=text("qwen2"),
            vision_config={**VISION, "vocab_size": 64, "num_visual_indicator_tokens": 5},
            image_token_id=IMAGE,
            visual_indicator_token_ids=[START, 195, 194, 193, END],
            vocab_size=VOCAB,
            hidden_size=32,
        ),
        square(),
        16,
        boundaries=True,
    ),
    "gemma3": Family(
        lambda: config(
            "gemma3",
            text_config={**TEXT, "head_dim": 8, "sliding_window": 64},
            vision_config=config("siglip_vision_model", **VISION, vision_use_head=False),
            mm_tokens_per_image=4,
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        square(),
        4,
        "token_type_ids",
        boundaries=True,
    ),
    "idefics3": Family(
        lambda: config(
            "idefics3", text_config=text("llama"), vision_config=VISION, image_token_id=IMAGE, scale_factor=2
        ),
        lambda: {"pixel_values": torch.rand(1, 1, 3, 28, 28) * 2 - 1},
        4,
    ),
    "smolvlm": Family(
        lambda: config(
            "smolvlm", text_config=text("llama"), vision_config=VISION, image_token_id=IMAGE, scale_factor=2
        ),
        lambda: {"pixel_values": torch.rand(1, 1, 3, 28, 28) * 2 - 1},
        4,
    ),
    "internvl": Family(
        lambda: config(
            "internvl",
            text_config=text("qwen2"),
            vision_config={**VISION, "image_size": [28, 28], "patch_size": [7, 7]},
            image_token_id=IMAGE,
            image_seq_length=4,
        ),
        square(),
        4,
    ),
    "paligemma": Family(
        lambda: config(
            "paligemma",
            text_config=text("gemma", head_dim=8),
            vision_config=config("siglip_vision_model", **VISION, vision_use_head=False, projection_dim=32),
            image_token_index=IMAGE,
            projection_dim=32,
            hidden_size=32,
            vocab_size=VOCAB,
        ),
        square(),
        16,
        "token_type_ids",
    ),
    "mistral3": Family(
        lambda: config(
            "mistral3",
            text_config=text("mistral", head_dim=8),
            vision_config=config("pixtral", **VISION),
            image_token_index=IMAGE,
            spatial_merge_size=2,
        ),
        square(28, image_sizes=torch.tensor([[28, 28]])),
        4,
    ),
    "kimi_k25": Family(
        lambda: config(
            "kimi_k25",
            text_config=config(
                "deepseek_v3",
                **{**TEXT, "num_key_value_heads": 4},
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=4,
                qk_nope_head_dim=8,
                v_head_dim=8,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=2,
                moe_intermediate_size=16,
                n_shared_experts=1,
            ),
            vision_config={
                "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 2,
                "patch_size": 7, "pos_emb_height": 8, "pos_emb_width": 8,
            },
            projection_hidden_size=24,
            **QWEN_TOKENS,
        ),
        lambda: {"pixel_values": torch.randn(24, 3, 7, 7), "image_grid_thw": GRID},
        6,
        boundaries=True,
    ),
    "qwen2_vl": Family(
        lambda: config(
            "qwen2_vl",
            text_config={**TEXT, "rope_parameters": MROPE},
            vision_config={
                "depth": 3, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4
            },
            **QWEN_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "qwen3_5": Family(  # its second layer is no attention
        lambda: config(
            "qwen3_5",
            text_config={
                **TEXT, "head_dim": 8, "layer_types": ["full_attention", "linear_attention", "full_attention"],
                "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "rope_parameters": {
                    **MROPE, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "partial_rotary_factor": 0.5
                },
            },
            vision_config=grid_vision("qwen3_5", num_position_embeddings=16),
            **QWEN_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "glm4v_moe": Family(
        lambda: config(
            "glm4v_moe",
            text_config={
                **TEXT, "head_dim": 8, "use_qk_norm": True, "n_routed_experts": 4, "num_experts_per_tok": 2,
                "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2, "moe_intermediate_size": 16,
                "n_shared_experts": 1, "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
            },
            vision_config=grid_vision("glm4v_moe", image_size=28),
            **GLM_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "ernie4_5_vl_moe": Family(
        lambda: config(
            "ernie4_5_vl_moe",
            text_config={
                **TEXT, "moe_intermediate_size": [16, 16], "moe_k": 2, "moe_num_experts": 4,
                "moe_num_shared_experts": 1, "mlp_layer_types": ["dense", "dense", "sparse"],
                "rope_parameters": MROPE,
            },
            vision_config={
                "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 48, "patch_size": 4
            },
            **GLM_TOKENS,
        ),
        patches(3 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "exaone4_5": Family(
        lambda: config(
            "exaone4_5",
            text_config={**TEXT, "model_type": "exaone4", "sliding_window": 64, "sliding_window_pattern": 2},
            vision_config=grid_vision("exaone4_5", window_size=16, fullatt_block_indexes=[1], num_key_value_heads=2),
            **QWEN_TOKENS,
        ),
        patches(3 * 2 * 4 * 4),
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "paddleocr_vl": Family(
        lambda: config(
            "paddleocr_vl",
            text_config={**TEXT, "head_dim": 8, "rope_parameters": MROPE},
            vision_config={**VISION, "spatial_merge_size": 2},
            **QWEN_TOKENS,
        ),
        lambda: {"pixel_values": torch.randn(24, 3, 7, 7), "image_grid_thw": GRID},
        6,
        "mm_token_type_ids",
        boundaries=True,
    ),
    "hunyuan_vl": Family(
        lambda: config(
            "hunyuan_vl",
            text_config={**TEXT, "head_dim": 8, "rope_parameters": {**MROPE, "mrope_section": [1, 1, 1, 1]}},
            vision_config={
                **VISION, "out_hidden_size": 32, "text_hidden_size": 32, "num_key_value_heads": 2,
                "max_image_size": 56,
            },
            image_token_id=IMAGE,
        ),
        lambda: {"pixel_values": torch.randn(24, 3 * 7 * 7), "image_grid_thw": GRID},
        2 * 4 + 2,  # two rows of three tokens with a newline each, and two around them
        "mm_token_type_ids",
    ),
    "llava_onevision": Family(
        llava(
            "siglip_vision_model", "llava_onevision", image_grid_pinpoints=[[28, 56], [56, 28]], video_token_index=196
        ),
        lambda: {
            "pixel_values": torch.rand(1, 3, 3, 28, 28) * 2 - 1,
            "image_sizes": torch.tensor([[28, 56]]),
        },
        16 + 4 * 8 + 4,  # as in LLaVA-NeXT
    ),
    "vipllava": Family(llava("clip_vision_model", "vipllava", vision_feature_layers=[-1, -2]), square(), 16),
    "video_llava": Family(
        llava("clip_vision_model", "video_llava", video_token_index=196),
        lambda: {"pixel_values_images": torch.rand(1, 3, 28, 28) * 2 - 1},
        16,
    ),
    "lighton_ocr": Family(
        lambda: config(
            "lighton_ocr",
            text_config=text("qwen3", head_dim=8),
            vision_config=config("pixtral", **VISION),
            image_token_id=IMAGE,
            spatial_merge_size=2,
        ),
        square(28, image_sizes=torch.tensor([[28, 28]])),
        4,
    ),
    "deepseek_vl": Family(
        lambda: config("deepseek_vl", text_config=text("llama"), vision_config=siglip(), image_token_id=IMAGE),
        square(),
        16,
    ),
    "janus": Family(
        lambda: config(
            "janus",
            text_config=text("llama"),
            vision_config={**VISION, "projection_dim": 32, "num_image_tokens": 16},
            vq_config={
                "num_embeddings": 16, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1, 1],
                "num_res_blocks": 1, "num_patches": 4, "projection_dim": 32, "image_token_embed_dim": 32,
            },
            image_token_id=IMAGE,
        ),
        square(),
        16,
    ),
    "lfm2_vl": Family(  # its second layer is no attention
        lambda: config(
            "lfm2_vl",
            text_config=text("lfm2", layer_types=["full_attention", "conv", "full_attention"]),
            vision_config=config(
                "siglip2_vision_model", **{key: VISION[key] for key in VISION if key != "image_size"}, num_patches=16,
                vision_use_head=False,
            ),
            image_token_id=IMAGE,
            projector_hidden_size=24,
        ),
        lambda: {
            "pixel_values": torch.randn(1, 16, 3 * 7 * 7),
            "spatial_shapes": torch.tensor([[4, 4]]),
            "pixel_attention_mask": torch.ones(1, 16, dtype=torch.long),
        },
        4,
    ),
    "aria": Family(
        lambda: config(
            "aria",
            text_config={**TEXT, "model_type": "aria_text", "head_dim": 8, "moe_num_experts": 4},
            vision_config={**VISION, "model_type": "idefics3_vision"},
            image_token_index=IMAGE,
            projector_patch_to_query_dict={16: 4},
        ),
        square(28, pixel_mask=torch.ones(1, 28, 28, dtype=torch.bool)),
        4,
    ),
    "aya_vision": Family(
        lambda: config(
            "aya_vision",
            text_config=text("cohere2", sliding_window=64),
            vision_config=siglip(),
            image_token_index=IMAGE,
        ),
        square(),
        4,
    ),
    "cohere2_vision": Family(
        lambda: config(
            "cohere2_vision",
            text_config=text("cohere2", sliding_window=64),
            vision_config=siglip(),
            image_token_id=IMAGE,
            alignment_intermediate_size=48,
        ),
        square(),
        4,
    ),
    "granite_docling": Family(
        lambda: config(
            "granite_docling",
            text_config=TEXT,
            vision_config={
                **VISION, "scale_factor": 2, "out_hidden_size": 32, "use_fine_route": False,
                "deepstack_visual_indexes": [0],
            },
            image_token_id=IMAGE,
        ),
        lambda: {
            "pixel_values": torch.rand(1, 1, 3, 28, 28) * 2 - 1,
            "pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool),
        },
        4,
    ),
    "perception_lm": Family(
        lambda: config(
            "perception_lm",
            text_config=text("llama"),
            vision_config=siglip(model_args={"embed_dim": 24}),  # its own encoder needs timm
            image_token_id=IMAGE,
            vision_use_cls_token=False,
            projector_pooling_ratio=2,
        ),
        lambda: {"pixel_values": torch.rand(1, 1, 3, 28, 28) * 2 - 1},
        4,
    ),
    "idefics2": Family(
        lambda: config(
            "idefics2",
            text_config=text("mistral", head_dim=8),
            vision_config=VISION,
            perceiver_config={
                "hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                "resampler_head_dim": 8, "num_key_value_heads": 1,
            },
            image_token_id=IMAGE,
        ),
        lambda: {"pixel_values": torch.rand(1, 1, 3, 28, 28) * 2 - 1},
        4,
    ),
    "blip-2": Family(
        lambda: config("blip-2", text_config=OPT, image_token_index=IMAGE, num_query_tokens=4, **QFORMER),
        square(),
        4,
    ),
    "instructblip": Family(
        lambda: config("instructblip", text_config=OPT, image_token_index=IMAGE, num_query_tokens=4, **QFORMER),
        square(28, qformer_input_ids=torch.ones(1, 3, dtype=torch.long)),
        4,
    ),
    "llama4": Family(  # two layers with a norm after rotation, one without rotation
        lambda: config(
            "llama4",
            text_config={
                **TEXT, "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "moe_layers": [1],
                "no_rope_layers": [1, 1, 0], "attention_chunk_size": 64,
            },
            vision_config={
                **VISION, "intermediate_size": 96, "vision_output_dim": 48, "projector_input_dim": 48,
                "projector_output_dim": 48,
            },
            image_token_index=IMAGE,
            boi_token_index=START,
            eoi_token_index=END,
        ),
        square(),
        4,
        boundaries=True,
    ),
    "fuyu": Family(  # no encoder: patches go through one matrix
        lambda: config(
            "fuyu",
            text_config=config("persimmon", **{key: TEXT[key] for key in TEXT if key != "num_key_value_heads"}),
            patch_size=7,
            hidden_size=32,
            vocab_size=VOCAB,
            image_token_id=IMAGE,
        ),
        lambda: {"image_patches": torch.randn(1, 4, 3 * 7 * 7)},
        4,
    ),
    "gemma4": Family(
        lambda: config(
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
            image_token_id=IMAGE,
            boi_token_id=START,
            eoi_token_id=END,
        ),
        lambda: {
            "pixel_values": torch.rand(1, 16, 3 * 7 * 7),
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4)).flip(1)[None],
        },
        4,
        "mm_token_type_ids",
        boundaries=True,
    ),
}  # fmt: skip


def build(name: str) -> PreTrainedModel:
    """A random model of the family, the same on every call, in eval mode."""
    set_seed(0)
    model = AutoModelForImageTextToText.from_config(FAMILIES[name].config()).eval()
    for parameter in model.parameters():
        if parameter.ndim in (2, 3) and not parameter.any():  # Gemma 3 starts its projector at zero, key adapters B
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def inputs(name: str, padding: int = 0) -> dict[str, torch.Tensor]:
    """One sample: BOS, three words, a picture between its delimiters where there are any, nine words; with so much
    padding on the left."""
    family = FAMILIES[name]
    words = torch.randint(10, 150, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    picture = [IMAGE] * family.image_tokens
    if family.boundaries:
        picture = [START, *picture, END]
    row = [BOS, *words[:3], *picture, *words[3:]]
    input_ids = torch.tensor([[0] * padding + row])
    attention_mask = torch.tensor([[0] * padding + [1] * len(row)])
    torch.manual_seed(2)
    made = {"input_ids": input_ids, "attention_mask": attention_mask, **family.pictures()}
    if family.token_types is not None:
        made[family.token_types] = (input_ids == IMAGE).long()
    return made


def tokens_of(model: PreTrainedModel, sample: dict[str, torch.Tensor]) -> Tokens:
    """Which position of a sample is what, as far as its inputs tell."""
    return classify_sample(sample, token_ids(model))


@torch.no_grad()
def record_sample(model: PreTrainedModel, sample: dict[str, torch.Tensor], **options: Any) -> Record:
    """Run one sample through a model and return what a probe saw."""
    with Probe(model, sample, tokens_of(model, sample), **options) as probe:
        model(**sample)
    return probe.record()
