"""Loads the parts of which a NormLlava is composed, and refuses parts that would work wrongly in a NormLlava."""

import os
from typing import Any

import torch
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

from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from normllava.conversations.tiles import cuts_tiles
from normllava.errors import UserError, errors_named_after
from normllava.files import folder_or_id


# Tokens that language models have but never use in text. If one of them becomes the image token, no embedding has to
# be added.
IMAGE_TOKEN_CANDIDATES = ("<image>", "<|image_pad|>", "<|reserved_special_token_0|>", "<unused0>")
# The config of any mixture of experts has at least one of these fields.
EXPERT_FIELDS = ("output_router_logits", "n_routed_experts", "moe_num_experts")
# The config of a vision encoder for pictures of one fixed size has all of these fields, as integers.
ENCODER_FIELDS = ("image_size", "patch_size", "hidden_size", "num_hidden_layers")


def absolute_or_id(name: str) -> str:
    """The absolute path of a folder; a Hub id is returned as it is.

    The result is for the composed model's config, in which a relative path such as `a/b` would look like a Hub id.
    """
    if os.path.isdir(name):
        return os.path.abspath(name)
    return name


def read_config(path: str) -> Any:
    """The config of a checkpoint.

    Raises:
        UserError: if the config can't be read, or says that the checkpoint is quantized.
    """
    name = folder_or_id(path)  # refuses a folder that doesn't exist
    with errors_named_after(path):
        config = AutoConfig.from_pretrained(name)
    # The composed model would get this field too, and its other parts would be treated as quantized.
    if getattr(config, "quantization_config", None) is not None:
        raise UserError(
            f"{path} is quantized: start from the weights before quantization; load_in_4bit quantizes them."
        )
    return config


def load_vision_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The vision encoder at `path`. The text encoder of a CLIP or SigLIP checkpoint is left out.

    Raises:
        UserError: if there is no vision encoder for pictures of one fixed size, or if the encoder is quantized.
    """
    config = read_config(path)
    config = getattr(config, "vision_config", config)  # CLIP and SigLIP checkpoints have a config with two parts
    values = [getattr(config, name, None) for name in ENCODER_FIELDS]
    has_fixed_size = all(isinstance(value, int) for value in values)
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
        UserError: if the model isn't a decoder-only language model, is a mixture of experts, or is quantized.
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
        UserError: if the encoder has no hidden state of this number. The message names the numbers that exist.
    """
    # Hidden state 0 is the output of the embeddings, and hidden state n is the output of layer n. Negative numbers
    # count from the end.
    last = vision_model.config.num_hidden_layers
    first = -last - 1
    if not first <= vision_feature_layer <= last:
        raise UserError(f"vision_feature_layer {vision_feature_layer}: the encoder's are {first} to {last}.")


def require_whole_squares(vision_model: PreTrainedModel, spatial_merge_size: int) -> None:
    """Refuse a `spatial_merge_size` with which the squares of merged patches don't fill the picture.

    Raises:
        UserError: if the size doesn't divide the number of patches along a picture's side. The message names the sizes
            that divide it.
    """
    patches_per_side = vision_model.config.image_size // vision_model.config.patch_size
    if spatial_merge_size < 1 or patches_per_side % spatial_merge_size != 0:
        divisors = [str(size) for size in range(1, patches_per_side + 1) if patches_per_side % size == 0]
        raise UserError(
            f"spatial_merge_size {spatial_merge_size} doesn't divide the encoder's {patches_per_side} x "
            f"{patches_per_side} patches: take one of {', '.join(divisors)}, or an encoder of another size."
        )


def fit_processor(image_processor: BaseImageProcessor, size: int, keeps_crop: bool) -> None:
    """Change an image processor in place, so that it gives pictures of the encoder's size.

    DINOv2's image processor on the Hub, for instance, crops pictures to 224 pixels, although the encoder takes 518. An
    image processor that doesn't crop, such as SigLIP's, keeps its `size`. Every image processor gets a `crop_size`,
    from which LlavaProcessor computes the number of image tokens.

    Args:
        image_processor: The image processor of the encoder.
        size: Number of pixels along a side of the pictures that the encoder takes.
        keeps_crop: Whether an image processor that crops pictures to their central square keeps doing so. Otherwise
            pictures are squashed, so that all of a wide picture is seen, as in the paper (arXiv 2512.08374, App. E).
    """
    square = {"height": size, "width": size}
    crops_now = bool(getattr(image_processor, "do_center_crop", False))
    if crops_now and not keeps_crop:
        image_processor.size = square  # squashes a wide picture
    elif crops_now and image_processor.crop_size["height"] != size:
        image_processor.size = {"shortest_edge": size}  # the size before the crop
    image_processor.do_center_crop = crops_now and keeps_crop
    image_processor.crop_size = square


def tiling_processor(image_processor: BaseImageProcessor, max_tiles: int) -> GotOcr2ImageProcessorPil:
    """An image processor that cuts pictures into tiles, and treats each tile as `image_processor` treats a picture.

    Args:
        image_processor: The image processor of the encoder, which gives pictures of the encoder's size.
        max_tiles: The largest number of tiles of the grid into which a picture is cut.
    """
    tile_size = {"height": image_processor.crop_size["height"], "width": image_processor.crop_size["width"]}
    # This class of transformers calls tiles patches.
    return GotOcr2ImageProcessorPil(
        size=tile_size,
        crop_size=tile_size,  # for LlavaProcessor, as in `fit_processor`
        resample=image_processor.resample,
        rescale_factor=image_processor.rescale_factor,
        image_mean=image_processor.image_mean,
        image_std=image_processor.image_std,
        crop_to_patches=True,
        max_patches=max_tiles,
    )


def describe_shapes(image_processor: BaseImageProcessor) -> str:
    """Words for what the image processor does with a picture that isn't square."""
    size = image_processor.crop_size["height"]
    if cuts_tiles(image_processor):
        return (
            f"a picture is cut into up to {image_processor.max_patches} tiles of {size} x {size} pixels, in the grid "
            "nearest to its shape; if it has two tiles or more, the whole picture follows as one more"
        )
    if image_processor.do_center_crop:
        return f"of a picture that isn't square only the central square is seen, at {size} x {size} pixels"
    return f"a picture that isn't square is squashed to {size} x {size} pixels"


def choose_image_token(tokenizer: PreTrainedTokenizerBase) -> str:
    """The token that stands for a picture: an unused token of the tokenizer, or `<image>`, which is then added."""
    used_tokens = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    for token in IMAGE_TOKEN_CANDIDATES:
        if token in tokenizer.added_tokens_encoder and token not in used_tokens:
            return token
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)], special_tokens=True)
    return "<image>"


def join_parts(
    config: NormLlavaConfig, vision_model: PreTrainedModel, text_model: PreTrainedModel, text_model_path: str
) -> NormLlavaForConditionalGeneration:
    """The NormLlava that consists of these parts and a new projector.

    Raises:
        UserError: if a model built from the config couldn't take the language model's weights. The NormLlava could
            then be saved, but not be loaded again.
    """
    decoder = text_model.get_decoder()
    head = text_model.get_output_embeddings()
    try:
        model = NormLlavaForConditionalGeneration(config, vision_model, decoder, head)
        with torch.device("meta"):
            rebuilt_model = NormLlavaForConditionalGeneration(config)
        rebuilt_model.load_state_dict(model.state_dict(), assign=True)
    except (AttributeError, RuntimeError) as error:
        # transformers raises an AttributeError if it finds no embeddings to tie, and torch a RuntimeError if the
        # rebuilt model has other weights.
        raise UserError(f"{text_model_path}: Llava can't rebuild this language model: {error}") from error
    return model


@torch.no_grad()
def require_unchanged_logits(model: NormLlavaForConditionalGeneration, text_model: PreTrainedModel) -> None:
    """Refuse a composed model whose logits on text differ from those of its language model.

    Raises:
        UserError: if a logit differs.
    """
    input_ids = torch.arange(8)[None]  # [1, 8]; any tokens would do
    logits = model.eval()(input_ids=input_ids).logits
    expected = text_model.eval()(input_ids=input_ids).logits
    if not torch.equal(logits, expected):
        raise UserError(
            f"The language model's logits change by up to {(logits - expected).abs().max():.3g} in a Llava, whose "
            "head is a linear layer and nothing else: look in config.json for a softcap, scale or multiplier of the "
            "logits."
        )
