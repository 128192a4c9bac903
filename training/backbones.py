"""Loads the parts of which a NormLlava is composed, and refuses parts that would give other answers in it."""

import os
from typing import Any

import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BaseImageProcessor,
    GotOcr2ImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from common.errors import UserError, errors_named_after
from common.files import folder_or_id
from conversations.tiles import cuts_tiles
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration


# Tokens that language models have but never use in text. One of them can be the image token without a new row in the
# embeddings.
IMAGE_TOKEN_CANDIDATES = ("<image>", "<|image_pad|>", "<|reserved_special_token_0|>", "<unused0>")
# Each config of a mixture of experts has one of these fields.
EXPERT_FIELDS = ("output_router_logits", "n_routed_experts", "moe_num_experts")
# The config of a vision encoder for pictures of one fixed size has all of these fields, as integers.
ENCODER_FIELDS = ("image_size", "patch_size", "hidden_size", "num_hidden_layers")


def absolute_or_id(name: str) -> str:
    """The absolute path of a folder; a Hub id is returned as it is.

    The model's config records the name, and a relative path such as `a/b` would be taken for a Hub id.
    """
    if os.path.isdir(name):
        return os.path.abspath(name)
    return name


def read_config(path: str) -> Any:
    """The config of a checkpoint.

    Raises:
        UserError: if the config can't be read, or says that the checkpoint is quantized. A composed model would take
            over this field, and its other parts would be treated as quantized too.
    """
    name = folder_or_id(path)
    with errors_named_after(path):
        config = AutoConfig.from_pretrained(name)
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(f"{path} is quantized: start from the weights before; load_in_4bit quantizes them to train.")
    return config


def load_vision_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The vision encoder at `path`, without the text encoder that CLIP and SigLIP checkpoints also hold.

    Raises:
        UserError: if there is no vision encoder for pictures of one fixed size, or if it is quantized.
    """
    config = read_config(path)
    config = getattr(config, "vision_config", config)
    has_fixed_size = all(isinstance(getattr(config, name, None), int) for name in ENCODER_FIELDS)
    if type(config) not in MODEL_MAPPING or not has_fixed_size:
        raise UserError(
            f"{path}: {config.model_type!r} is no vision encoder for pictures of one fixed size. Of SigLIP2, take a "
            "checkpoint with a resolution in its name, not a NaFlex one."
        )
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # Llava doesn't read SigLIP's pooling head, and vLLM on a CPU can't run it
    with errors_named_after(path):
        return MODEL_MAPPING[type(config)].from_pretrained(path, config=config, dtype=dtype)


def load_text_model(path: str) -> PreTrainedModel:
    """The causal language model at `path`, in its checkpoint's dtype.

    Raises:
        UserError: if it is no decoder-only language model, is a mixture of experts, or is quantized.
    """
    config = read_config(path)
    has_vision = hasattr(config, "vision_config")
    has_experts = any(hasattr(config, name) for name in EXPERT_FIELDS)
    is_decoder = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder
    if has_vision or has_experts or not is_decoder:
        raise UserError(
            f"{path}: {config.model_type!r} is no language model with a decoder alone, or mixes experts, which Llava "
            "can't train: it returns no router logits, which balance them, and adapters don't reach their weights."
        )
    with errors_named_after(path):
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


def require_hidden_state(vision_model: PreTrainedModel, vision_feature_layer: int) -> None:
    """Refuse a `vision_feature_layer` for which the encoder has no hidden state.

    Raises:
        UserError: if the encoder has no such hidden state. The message names the numbers that it has.
    """
    depth = vision_model.config.num_hidden_layers
    has_hidden_state = -depth - 1 <= vision_feature_layer <= depth  # the embeddings' output is number 0
    if not has_hidden_state:
        raise UserError(f"vision_feature_layer {vision_feature_layer}: the encoder's are {-depth - 1} to {depth}.")


def require_whole_squares(vision_model: PreTrainedModel, spatial_merge_size: int) -> None:
    """Refuse a `spatial_merge_size` with which the squares of merged patches don't fill the picture.

    Raises:
        UserError: if the size doesn't divide the number of patches along a side. The message names sizes that do.
    """
    num_patches = vision_model.config.image_size // vision_model.config.patch_size
    if spatial_merge_size < 1 or num_patches % spatial_merge_size != 0:
        divisors = [str(size) for size in range(1, num_patches + 1) if num_patches % size == 0]
        raise UserError(
            f"spatial_merge_size {spatial_merge_size} doesn't divide the encoder's {num_patches} x {num_patches} "
            f"patches: take one of {', '.join(divisors)}, or an encoder of another size."
        )


def fit_processor(image_processor: BaseImageProcessor, size: int, keeps_crop: bool) -> None:
    """Let an image processor give pictures of the encoder's size.

    The image processor always gets a `crop_size`, by which LlavaProcessor counts tokens. SigLIP's image processor
    has no `crop_size` of its own. DINOv2's on the Hub crops pictures to 224 pixels, although its encoder takes 518.

    Args:
        image_processor: The image processor of the encoder, which is changed in place.
        size: Number of pixels along a side.
        keeps_crop: Whether a processor that crops pictures to their central square goes on to do so. Otherwise it
            squashes them, so that all of a wide picture is seen, as in the paper (arXiv 2512.08374, App. E).
    """
    square = {"height": size, "width": size}
    crops = bool(getattr(image_processor, "do_center_crop", False))
    squashes_instead = crops and not keeps_crop
    if squashes_instead:
        image_processor.size = square
    elif crops and image_processor.crop_size["height"] != size:
        image_processor.size = {"shortest_edge": size}
    image_processor.do_center_crop = crops and keeps_crop
    image_processor.crop_size = square


def tiling_processor(image_processor: BaseImageProcessor, max_tiles: int) -> GotOcr2ImageProcessorPil:
    """An image processor that cuts pictures into tiles, and treats each tile as `image_processor` treats a picture.

    Args:
        image_processor: The image processor of the encoder, which gives pictures of the encoder's size.
        max_tiles: The largest number of tiles of a grid.
    """
    tile_size = image_processor.crop_size
    return GotOcr2ImageProcessorPil(
        size={"height": tile_size["height"], "width": tile_size["width"]},
        crop_size={"height": tile_size["height"], "width": tile_size["width"]},
        resample=image_processor.resample,
        rescale_factor=image_processor.rescale_factor,
        image_mean=image_processor.image_mean,
        image_std=image_processor.image_std,
        crop_to_patches=True,
        max_patches=max_tiles,
    )


def describe_shapes(image_processor: BaseImageProcessor) -> str:
    """A sentence that tells what the image processor does with a picture that isn't square."""
    size = image_processor.crop_size["height"]
    if cuts_tiles(image_processor):
        return (
            f"a picture is cut into up to {image_processor.max_patches} tiles of {size} x {size} pixels, in the grid "
            "nearest to its shape; if it has two tiles or more, the whole picture follows as one more"
        )
    if image_processor.do_center_crop:
        return f"of a picture that isn't square only the central square is seen, at {size} x {size} pixels"
    return f"a picture that isn't square is squashed to {size} x {size} pixels"


def vision_tokens(vision_model: PreTrainedModel, image_processor: BaseImageProcessor) -> tuple[int, int]:
    """The number of a picture's patches, and of the tokens that the encoder adds to them, such as a CLS token."""
    pixel_values = image_processor(Image.new("RGB", (64, 48)), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        num_tokens = vision_model(pixel_values.to(vision_model.dtype)).last_hidden_state.shape[1]

    config = vision_model.config
    num_patches = (config.image_size // config.patch_size) ** 2
    return num_patches, num_tokens - num_patches


def choose_image_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """A token of the tokenizer that can stand for a picture. If it has none, `<image>` is added to it."""
    taken = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    for token in IMAGE_TOKEN_CANDIDATES:
        if token in tokenizer.added_tokens_encoder and token not in taken:
            return token
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)], special_tokens=True)
    return "<image>"


def join_parts(
    config: NormLlavaConfig, vision_model: PreTrainedModel, text_model: PreTrainedModel, text_model_path: str
) -> NormLlavaForConditionalGeneration:
    """The NormLlava that consists of these parts and a new projector.

    Raises:
        UserError: if the config would not rebuild the language model with the same weights, so that the saved model
            could not be loaded.
    """
    decoder = text_model.get_decoder()
    head = text_model.get_output_embeddings()
    try:
        model = NormLlavaForConditionalGeneration(config, vision_model, decoder, head)
        with torch.device("meta"):
            rebuilt = NormLlavaForConditionalGeneration(config)
        rebuilt.load_state_dict(model.state_dict(), assign=True)
    except (AttributeError, RuntimeError) as error:
        # transformers raises an AttributeError if it doesn't find the embeddings to tie, torch a RuntimeError if the
        # rebuilt model has other weights.
        raise UserError(f"{text_model_path}: Llava can't rebuild this language model: {error}") from error
    return model


@torch.no_grad()
def require_unchanged_logits(model: NormLlavaForConditionalGeneration, text_model: PreTrainedModel) -> None:
    """Refuse a composed model whose logits on text differ from those of its language model.

    Raises:
        UserError: if a logit differs.
    """
    input_ids = torch.arange(8)[None]  # any tokens would do
    logits = model.eval()(input_ids=input_ids).logits
    expected = text_model.eval()(input_ids=input_ids).logits
    if not torch.equal(logits, expected):
        raise UserError(
            f"The language model's logits change by up to {(logits - expected).abs().max():.3g} in a Llava, whose "
            "head is a linear layer and nothing else: look in config.json for a softcap, scale or multiplier of the "
            "logits."
        )
