"""Compose an untrained NormLlava from a vision encoder and a language model, or from a Llava checkpoint.

    python training/compose.py --vision_model google/siglip-so400m-patch14-384 \
        --text_model Qwen/Qwen2.5-7B-Instruct --output_dir checkpoints/composed
    python training/compose.py --llava_model llava-hf/llava-1.5-7b-hf --output_dir checkpoints/composed

With `--captions`, the first also aligns the new projector. Both try a picture, print the norms at the modality
interface before and after the norm, and write a complete checkpoint folder.
"""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    HfArgumentParser,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)
from transformers.hf_argparser import HfArg

from conversations.chat_template import chat_format, chat_template
from conversations.loading import load_rows
from diagnostics.hooks import InterfaceHooks
from diagnostics.norms import embedding_norms, text_norm_target, token_norms
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from modeling_normllava.configuration_normllava import ProjectorNorm
from training.align import align
from training.backbones import (
    choose_image_token,
    generation_config,
    load_text_model,
    load_vision_model,
    plain_name,
    require_reloadable,
    require_same_answers,
    require_unquantized,
    set_pad_token,
)


logger = logging.getLogger(__name__)

# What a converted model keeps of a Llava's config.
LLAVA_FIELDS = (
    "vision_config", "text_config", "image_token_index", "projector_hidden_act", "vision_feature_select_strategy",
    "vision_feature_layer", "multimodal_projector_bias", "tie_word_embeddings", "dtype",
)  # fmt: skip


@dataclass
class ComposeArguments:
    """The command line."""

    output_dir: str = HfArg(help="Folder to write; must be empty or not exist yet.")
    vision_model: str | None = HfArg(default=None, help="Vision encoder: folder or Hub id.")
    text_model: str | None = HfArg(default=None, help="Decoder language model: folder or Hub id.")
    llava_model: str | None = HfArg(default=None, help="Llava checkpoint to convert: folder or Hub id.")
    projector_norm: ProjectorNorm = HfArg(  # noqa: RUF009 - it is `dataclasses.field`
        default="gwc", help="Norm after the projector: compensated, ordinary, or none (plain Llava)."
    )
    align_norm: bool = HfArg(
        default=True, help="Start visual tokens at the text embeddings' norm; otherwise at gain 1."
    )
    scale_projector: bool = HfArg(
        default=False, help="Without a norm: scale a new projector, so that visual tokens start at that norm too."
    )
    captions: str | None = HfArg(
        default=None,
        help="Pictures with captions, as for stage 1: point visual tokens at the captions' embeddings before "
        "training. Not part of the paper; see training/align.py.",
    )
    image_folder: str | None = HfArg(default=None, help="Prefix of the image paths in --captions.")
    vision_feature_layer: int = HfArg(default=-2, help="Hidden state of the vision encoder to read, LLaVA's -2.")
    seed: int = HfArg(default=42, help="Seed of new weights.")

    def __post_init__(self) -> None:
        if {self.vision_model is None, self.text_model is None} != {self.llava_model is not None}:
            raise ValueError("Give either --vision_model and --text_model, or only --llava_model.")
        if self.llava_model and (self.scale_projector or self.captions or self.vision_feature_layer != -2):
            raise ValueError(
                "--scale_projector, --captions and --vision_feature_layer are for a new projector, and --llava_model "
                "has one: leave them out."
            )


def vision_tokens(vision_model: PreTrainedModel, image_processor: BaseImageProcessor) -> tuple[int, int]:
    """Number of patches of a picture, and of tokens before them: 1 for an encoder with a CLS token.

    Raises:
        ValueError: if the image processor's pictures don't fit the encoder, naming the field.
    """
    config = vision_model.config
    pixel_values = image_processor(Image.new("RGB", (64, 48)), return_tensors="pt")["pixel_values"]
    if tuple(pixel_values.shape[-2:]) != (config.image_size, config.image_size):
        raise ValueError(
            f"vision_config.image_size is {config.image_size}, but preprocessor_config.json makes pictures of "
            f"{tuple(pixel_values.shape[-2:])}: set its `size` (and `crop_size`) to the encoder's. Encoders that take "
            "pictures of any size, as Pixtral does, are not supported."
        )
    with torch.no_grad():
        length = vision_model(pixel_values.to(vision_model.dtype)).last_hidden_state.shape[1]
    num_patches = (config.image_size // config.patch_size) ** 2
    if length not in (num_patches, num_patches + 1):
        raise ValueError(
            f"The vision encoder returns {length} tokens for a picture; vision_config.image_size {config.image_size} "
            f"and vision_config.patch_size {config.patch_size} give {num_patches}, or one more with a CLS token."
        )
    return num_patches, length - num_patches


def build_processor(
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    image_token: str,
    config: NormLlavaConfig,
    num_additional_image_tokens: int,
) -> LlavaProcessor:
    """The processor that goes with `config`, with a chat template in the language model's format, if it is known.

    `num_additional_image_tokens` are those that the encoder puts before a picture's patches.
    """
    if not (getattr(image_processor, "crop_size", None) and image_processor.do_center_crop):
        # LlavaProcessor counts tokens by `crop_size`. SigLIP's image processor has none, and DINOv2's keeps 224 where
        # it crops nothing; without a crop, the pixels stay the same.
        size = config.vision_config.image_size
        image_processor.crop_size = {"height": size, "width": size}
        image_processor.do_center_crop = False
    return LlavaProcessor(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=config.vision_config.patch_size,
        vision_feature_select_strategy=config.vision_feature_select_strategy,
        num_additional_image_tokens=num_additional_image_tokens,
        image_token=image_token,
        chat_template=chat_template(tokenizer, image_token),
    )


def measure_target(language_model: PreTrainedModel) -> float:
    """T (eq. 11) of a language model: the mean norm of what its embedding layer returns."""
    embeddings = language_model.get_input_embeddings()
    return text_norm_target(embedding_norms(embeddings, language_model.config.vocab_size))


def compose(
    vision_model_path: str,
    text_model_path: str,
    projector_norm: str = "gwc",
    align_norm: bool = True,
    vision_feature_layer: int = -2,
    seed: int = 42,
    scale_projector: bool = False,
) -> tuple[NormLlavaForConditionalGeneration, LlavaProcessor]:
    """A NormLlava from a vision encoder and a language model, with a new projector. Arguments as on the command line.

    Raises:
        ValueError: if the parts don't fit, naming the field.
    """
    if scale_projector and projector_norm != "none":
        raise ValueError("scale_projector scales a projector without a norm; with one the gain sets the start.")
    vision_model_path, text_model_path = plain_name(vision_model_path), plain_name(text_model_path)
    text_model = load_text_model(text_model_path)
    vision_model = load_vision_model(vision_model_path, text_model.dtype)
    num_layers = vision_model.config.num_hidden_layers
    if not -num_layers - 1 <= vision_feature_layer <= num_layers:
        raise ValueError(
            f"vision_feature_layer {vision_feature_layer} is out of range: the vision encoder has {num_layers} "
            f"layers, hidden states {-num_layers - 1} to {num_layers}."
        )
    image_processor = AutoImageProcessor.from_pretrained(vision_model_path)
    num_patches, num_additional = vision_tokens(vision_model, image_processor)

    tokenizer = AutoTokenizer.from_pretrained(text_model_path, padding_side="left")  # for batches in `generate`
    num_embeddings = text_model.get_input_embeddings().weight.shape[0]
    target = measure_target(text_model) if align_norm and projector_norm != "none" else None
    image_token = choose_image_token(tokenizer, num_embeddings)
    set_pad_token(tokenizer, num_embeddings)
    set_seed(seed)
    if len(tokenizer) > num_embeddings:
        text_model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)

    config = NormLlavaConfig(
        vision_config=vision_model.config,
        text_config=text_model.config,
        image_token_index=tokenizer.convert_tokens_to_ids(image_token),
        image_seq_length=num_patches,
        vision_feature_select_strategy="default" if num_additional else "full",
        vision_feature_layer=vision_feature_layer,
        projector_norm=projector_norm,
        projector_norm_target=target,
        dtype=text_model.dtype,
        # A new config would reset the attention implementation of its parts, which are built already.
        attn_implementation=text_model.config._attn_implementation,
    )
    require_reloadable(config, vision_model, text_model, text_model_path)
    model = NormLlavaForConditionalGeneration(
        config, vision_model, text_model.get_decoder(), text_model.get_output_embeddings()
    )
    projector = model.model.multi_modal_projector
    for linear in (projector.linear_1, projector.linear_2):
        linear.reset_parameters()  # as LLaVA does; transformers' fixed std of 0.02 is too small in narrow models
    projector.to(text_model.dtype)
    model.generation_config = generation_config(text_model.generation_config, tokenizer, config.image_token_index)
    processor = build_processor(image_processor, tokenizer, image_token, config, num_additional)
    require_same_answers(model, text_model, text_model_path)
    try_picture(model, processor)
    if scale_projector:
        norms = interface_norms(model, processor)
        with torch.no_grad():
            for parameter in projector.linear_2.parameters():
                parameter *= norms["text"] / norms["projector_output"]
        config.projector_scaled = True
    return model, processor


def convert_llava(
    llava_model_path: str, projector_norm: str = "gwc", align_norm: bool = True
) -> tuple[NormLlavaForConditionalGeneration, LlavaProcessor]:
    """A NormLlava from a Llava checkpoint: all weights are kept, only the norm is new.

    The native class does the loading, so that checkpoints with legacy keys come out right.

    Raises:
        ValueError: if it is no Llava checkpoint (a NormLlava is none: it has a norm), if its encoder doesn't take
            pictures of one fixed size, or if it is quantized.
    """
    llava_model_path = plain_name(llava_model_path)
    old_config = AutoConfig.from_pretrained(llava_model_path)
    if old_config.model_type != "llava":
        raise ValueError(
            f"{llava_model_path} has model_type {old_config.model_type!r}, a Llava is needed. A NormLlava has a norm "
            "already, and a language model is composed with --vision_model and --text_model."
        )
    require_unquantized(old_config, llava_model_path)
    llava = LlavaForConditionalGeneration.from_pretrained(llava_model_path, dtype="auto")
    old_processor = AutoProcessor.from_pretrained(llava_model_path)
    language_model = llava.model.language_model
    num_patches, num_additional = vision_tokens(llava.model.vision_tower, old_processor.image_processor)
    fields: dict[str, Any] = {name: getattr(llava.config, name) for name in LLAVA_FIELDS}
    config = NormLlavaConfig(
        **fields,
        image_seq_length=num_patches + num_additional - (llava.config.vision_feature_select_strategy == "default"),
        attn_implementation=llava.config._attn_implementation,
        projector_norm=projector_norm,
        projector_norm_target=(measure_target(language_model) if align_norm and projector_norm != "none" else None),
        llava_name_or_path=llava_model_path,
    )
    model = NormLlavaForConditionalGeneration(config, llava.model.vision_tower, language_model, llava.lm_head)
    projector, old_projector = model.model.multi_modal_projector, llava.model.multi_modal_projector
    projector.linear_1, projector.linear_2 = old_projector.linear_1, old_projector.linear_2

    tokenizer = AutoTokenizer.from_pretrained(llava_model_path, padding_side="left")
    set_pad_token(tokenizer, config.text_config.vocab_size)
    model.generation_config = generation_config(llava.generation_config, tokenizer, config.image_token_index)
    parts = (old_processor.image_processor, tokenizer, old_processor.image_token)
    processor = build_processor(*parts, config, num_additional)
    try_picture(model, processor)
    return model, processor


@torch.no_grad()
def try_picture(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
    """Pass a picture through processor and model. Raises `ValueError` if tokens and features differ in number."""
    inputs = processor(images=Image.new("RGB", (64, 48)), text=f"{processor.image_token}\n", return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    (features,) = model.model.get_image_features(inputs["pixel_values"]).pooler_output
    written = int((inputs["input_ids"] == model.config.image_token_id).sum())
    (counted,) = processor._get_num_multimodal_tokens(image_sizes=[(48, 64)]).num_image_tokens  # by vLLM and training
    if not written == counted == len(features) == model.config.image_seq_length:
        raise ValueError(
            f"The processor writes {written} image tokens for a picture and counts {counted}, and the encoder gives "
            f"{len(features)} features: set size and crop_size in preprocessor_config.json to what the encoder takes."
        )
    if not model.eval()(**inputs).logits.isfinite().all():
        raise ValueError("The composed model's logits are not finite: look at the parts' weights and dtypes.")


@torch.no_grad()
def interface_norms(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> dict[str, float]:
    """Mean L2 norms at the modality interface on eight pictures of seeded noise, since there is no data here.

    Keys are the places of [`InterfaceHooks`] before the decoder, and `"text"` for T. Without a norm, `"norm_input"` is
    what the projector returns.
    """
    size = model.config.vision_config.image_size
    noise = np.random.default_rng(0).integers(0, 256, size=(8, size, size, 3), dtype=np.uint8)
    pictures = [Image.fromarray(pixels) for pixels in noise]
    pixel_values = processor.image_processor(pictures, return_tensors="pt")["pixel_values"].to(model.dtype)
    norms = {"text": model.config.projector_norm_target or measure_target(model.model.language_model)}
    with InterfaceHooks(model, lambda place, features: norms.update({place: token_norms(features).mean().item()})):
        model.model.get_image_features(pixel_values)
    return {"norm_input": norms["projector_output"]} | norms


def describe(model: NormLlavaForConditionalGeneration, processor: LlavaProcessor) -> str:
    """The table that composing prints: mean norms, their ratio to text, and what was chosen."""
    norms = interface_norms(model, processor)
    labels = {
        "text": "text embeddings (T)",
        "projector_input": "vision encoder output",
        "norm_input": "visual tokens before the norm",
        "projector_output": "visual tokens that enter the decoder",
    }
    lines = [f"{'':38}{'mean L2 norm':>12}{'of text':>10}"]
    lines += [f"{label:38}{norms[key]:12.4f}{norms[key] / norms['text']:9.2f}x" for key, label in labels.items()]
    lines += [
        "(visual norms on 8 pictures of noise)",
        f"projector norm: {model.config.projector_norm}, image token: {processor.image_token} "
        f"({model.config.image_token_id}), {model.config.image_seq_length} tokens a picture, "
        f"chat format: {chat_format(processor.tokenizer).name}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (args,) = HfArgumentParser(ComposeArguments).parse_args_into_dataclasses()
    output_dir = Path(args.output_dir)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise SystemExit(f"--output_dir {output_dir} is not empty. Choose another folder, or empty it first.")
    if args.llava_model is not None:
        model, processor = convert_llava(args.llava_model, args.projector_norm, args.align_norm)
    else:
        options = (args.projector_norm, args.align_norm, args.vision_feature_layer, args.seed, args.scale_projector)
        model, processor = compose(args.vision_model, args.text_model, *options)
        if args.captions is not None:
            rows: Any = load_rows(args.captions, args.image_folder)
            align(model, processor, rows, args.seed)
    logger.info("%s", describe(model, processor))
    model.save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    logger.info("Saved to %s", output_dir)


if __name__ == "__main__":
    main()
