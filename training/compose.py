"""Compose an untrained model from a vision encoder and a language model, or from a Llava checkpoint.

    python training/compose.py --vision_model google/siglip-so400m-patch14-384 \
        --text_model Qwen/Qwen2.5-7B-Instruct --projector_norm gwc --output_dir checkpoints/composed
    python training/compose.py --llava_model llava-hf/llava-1.5-7b-hf --projector_norm gwc \
        --output_dir checkpoints/converted

With `--aligned_start`, the first command also aligns the new projector. Both commands try the model on a picture,
print how large image tokens are, write a complete checkpoint folder with a recipe of each stage, and end with the
commands to type next.
"""

import argparse
import logging
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from normllava.command_line import command, new_folder, parse

import torch
from PIL import Image
from transformers import (
    AutoImageProcessor,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerBase,
)

import normllava.projector
from modeling_normllava import NormLlavaConfig, NormLlavaProcessor
from modeling_normllava.configuration_normllava import ProjectorNorm
from normllava.conversations.chat_template import chat_format, find_format, holds_pictures, write_template
from normllava.conversations.loading import load_rows
from normllava.conversations.tiles import cuts_tiles
from normllava.errors import UserError, errors_named_after
from normllava.files import let_others_read, write_whole
from normllava.hooks import InterfaceHooks
from normllava.inputs import NUM_NOISE, noise_pictures
from normllava.llava import add_norm, as_llava
from normllava.norms import text_norm_target, token_norms, vocabulary_norms
from normllava.parts import vision_tokens
from training.composing.align import align, only_picture
from training.composing.backbones import (
    absolute_or_id,
    choose_image_token,
    describe_shapes,
    fit_processor,
    join_parts,
    load_text_model,
    load_vision_model,
    read_config,
    require_hidden_state,
    require_unchanged_logits,
    require_whole_squares,
    tiling_processor,
)
from training.composing.recipes import Composition, launch_commands, plan_recipes
from training.folders.run import Composed
from training.modules.stages import Stage


logger = logging.getLogger(__name__)


def compose(
    vision_model_path: str,
    text_model_path: str,
    projector_norm: str = "gwc",
    *,
    align_norm: bool = True,
    vision_feature_layer: int = -2,
    seed: int = 42,
    scale_projector: bool = False,
    norm_target_ratio: float = 1.0,
    center_crop: bool = False,
    spatial_merge_size: int = 1,
    max_tiles: int = 1,
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A model made of a vision encoder, a language model and a new projector; and the model's processor.

    The model is transformers' own Llava if that computes the same, and otherwise a NormLlava. Below, T is the mean L2
    norm of text embeddings at the decoder's input.

    Args:
        vision_model_path, text_model_path: Folders or Hub ids of the parts.
        projector_norm: The kind of norm layer at the projector's end. [`NormLlavaConfig`] lists the kinds.
        align_norm: Whether the norm layer's gains start so that image tokens have the L2 norm T. Otherwise gains start
            at 1.
        vision_feature_layer: The number of the encoder's hidden state that the projector reads; -2, the last but one,
            as in LLaVA.
        seed: The seed of new weights.
        scale_projector: Whether to scale a projector without a norm layer, so that image tokens start at T.
        norm_target_ratio: A factor of T: with 2, image tokens start at 2 T.
        center_crop: Whether to crop pictures as the encoder's own processor does. Otherwise they are squashed.
        spatial_merge_size: Number of patches along each side of the squares that are joined into one image token.
        max_tiles: The largest number of tiles that a picture is cut into; 1 leaves pictures whole.

    Raises:
        UserError: if the parts or the arguments don't fit. The message names the field, weight or argument.
    """
    require_fitting_scale(projector_norm, scale_projector)
    require_fitting_tiles(max_tiles, center_crop)
    require_fitting_ratio(projector_norm, align_norm, norm_target_ratio)

    # Load the parts.
    text_model = load_text_model(absolute_or_id(text_model_path))
    vision_model = load_vision_model(absolute_or_id(vision_model_path), text_model.dtype)
    require_hidden_state(vision_model, vision_feature_layer)
    require_whole_squares(vision_model, spatial_merge_size)
    with errors_named_after(vision_model_path):
        image_processor = AutoImageProcessor.from_pretrained(vision_model_path)
    with errors_named_after(text_model_path):
        # `generate` needs batches that are padded on the left.
        tokenizer = AutoTokenizer.from_pretrained(text_model_path, padding_side="left")

    fit_processor(image_processor, vision_model.config.image_size, keeps_crop=center_crop)
    if max_tiles > 1:
        image_processor = tiling_processor(image_processor, max_tiles)
    num_patches, num_additional = vision_tokens(vision_model, image_processor)

    # If the norm layer's gains start aligned, find the norm at which image tokens start.
    target = None
    if align_norm and projector_norm != "none":
        # A new image token is added only after this, because its embedding would change T.
        target = text_norm_target(vocabulary_norms(text_model)) * norm_target_ratio

    # Choose the image token. If it is a new token, it gets a random embedding, so random numbers are seeded here.
    torch.manual_seed(seed)
    image_token = choose_image_token(tokenizer)
    num_embeddings = text_model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > num_embeddings:
        text_model.resize_token_embeddings(len(tokenizer), pad_to_multiple_of=64)  # a size that GPUs are fast with

    # Join the parts. "default" leaves out the first feature of a picture, such as a CLS token; "full" keeps all.
    select_strategy = "default" if num_additional != 0 else "full"
    config = NormLlavaConfig(
        vision_config=vision_model.config,
        text_config=text_model.config,
        image_token_index=tokenizer.convert_tokens_to_ids(image_token),
        image_seq_length=num_patches // spatial_merge_size**2,
        vision_feature_select_strategy=select_strategy,
        vision_feature_layer=vision_feature_layer,
        spatial_merge_size=spatial_merge_size,
        projector_norm=projector_norm,
        projector_norm_target=target,
        dtype=text_model.dtype,
        # Without this argument the config would reset the attention of its parts, which are built already.
        attn_implementation=text_model.config._attn_implementation,
    )
    model = join_parts(config, vision_model, text_model, text_model_path)

    # Initialize the projector.
    projector = model.model.multi_modal_projector
    for linear in (projector.linear_1, projector.linear_2):
        # torch's initialization, as in LLaVA. transformers' std of 0.02 would be too small in narrow models.
        linear.reset_parameters()
    projector.to(text_model.dtype)

    # Check that the language model is unchanged, make the processor, and try the model with it.
    require_unchanged_logits(model, text_model)
    model.generation_config = text_model.generation_config
    chat = chat_format(tokenizer)
    if find_format(tokenizer) is None:
        logger.warning(
            "Chat format Vicuna: the language model has no chat template, or one that can't be written with pictures "
            "and marked answers. A model that was trained with another format will answer worse at first."
        )
    template = write_template(chat, tokenizer, image_token)
    processor = make_processor(model, image_processor, tokenizer, image_token, num_additional, template)
    complete_generation(model, tokenizer, chat.end_of_turn)
    try_picture(model, processor)
    if scale_projector:
        logger.info("%s", normllava.projector.scale_projector(model, processor))

    is_plain = projector_norm == "none" and spatial_merge_size == 1 and max_tiles == 1
    return (as_llava(model) if is_plain else model), processor


def convert_llava(
    llava_model_path: str,
    projector_norm: str = "gwc",
    *,
    align_norm: bool = True,
    scale_projector: bool = False,
    norm_target_ratio: float = 1.0,
) -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A model with the weights of a Llava checkpoint and, if one is asked for, a new norm layer; and its processor.

    Without a norm it stays transformers' own Llava. Arguments are those of [`compose`]. The checkpoint is loaded by
    transformers' Llava class, which also reads legacy names of weights.

    Raises:
        UserError: if the checkpoint isn't a Llava (a NormLlava is refused too, since it has a norm layer already), if
            its encoder doesn't take pictures of one fixed size, if the checkpoint is quantized, or if
            `norm_target_ratio` doesn't fit.
    """
    require_fitting_scale(projector_norm, scale_projector)
    require_fitting_ratio(projector_norm, align_norm, norm_target_ratio)
    model_type = read_config(llava_model_path).model_type
    if model_type != "llava":
        raise UserError(f"{llava_model_path} has model_type {model_type!r}, a Llava is needed.")

    # Load the checkpoint.
    with errors_named_after(llava_model_path):
        llava = LlavaForConditionalGeneration.from_pretrained(llava_model_path, dtype="auto")
        old_processor = AutoProcessor.from_pretrained(llava_model_path)
        tokenizer = AutoTokenizer.from_pretrained(llava_model_path, padding_side="left")
    vision_model = llava.model.vision_tower

    # Count the features of a picture.
    image_processor = old_processor.image_processor
    # A crop is kept, since the checkpoint was trained with it.
    fit_processor(image_processor, vision_model.config.image_size, keeps_crop=True)
    num_patches, num_additional = vision_tokens(vision_model, image_processor)
    num_features = num_patches + num_additional
    if llava.config.vision_feature_select_strategy == "default":
        num_features -= 1  # "default" leaves out the first feature

    model: LlavaForConditionalGeneration = llava
    if projector_norm != "none":
        model = add_norm(llava, projector_norm, norm_target_ratio if align_norm else None)
    model.config.image_seq_length = num_features

    # Make the processor, and try the model with it.
    image_token = old_processor.image_token
    template, end_of_turn = keep_chat_template(llava_model_path, tokenizer, old_processor.chat_template, image_token)
    processor = make_processor(model, image_processor, tokenizer, image_token, num_additional, template)
    complete_generation(model, tokenizer, end_of_turn)
    try_picture(model, processor)
    if scale_projector:
        logger.info("%s", normllava.projector.scale_projector(model, processor))
    return model, processor


def keep_chat_template(
    name: str, tokenizer: PreTrainedTokenizerBase, processor_template: str | None, image_token: str
) -> tuple[str, str]:
    """The chat template of a converted Llava, which has the format that the Llava was trained with.

    Args:
        name: Folder or Hub id of the Llava, for a warning.
        tokenizer: The Llava's tokenizer. Its own template may be the language model's, which the Llava doesn't use.
        processor_template: The chat template of the Llava's processor, if it has one.
        image_token: The token that stands for a picture's features.

    Returns:
        The template, and the token that ends an answer.
    """
    # A template that writes no image token was made for the language model alone, and not for the Llava.
    if processor_template is None or not holds_pictures(tokenizer, processor_template, image_token):
        chat = chat_format(tokenizer)
        return write_template(chat, tokenizer, image_token), chat.end_of_turn

    found = find_format(tokenizer, processor_template)
    if found is not None:
        return write_template(found, tokenizer, image_token), found.end_of_turn
    if re.search(r"\{%-?\s*generation\b", processor_template) is None:
        logger.warning(
            "%s keeps its chat template, which doesn't mark answers: before training, put them inside "
            "{%% generation %%} and {%% endgeneration %%}.",
            name,
        )
    return processor_template, tokenizer.eos_token


def require_fitting_scale(projector_norm: str, scale_projector: bool) -> None:
    """Refuse to scale a projector with a norm.

    Raises:
        UserError: if the projector has a norm and shall be scaled.
    """
    if scale_projector and projector_norm != "none":
        raise UserError(
            "scale_projector scales a projector without a norm: with one, its gains set the size of image tokens."
        )


def require_fitting_ratio(projector_norm: str, align_norm: bool, norm_target_ratio: float) -> None:
    """Refuse a ratio that isn't above 0, or that would be ignored since no norm layer starts at the text's norm.

    Raises:
        UserError: if the ratio doesn't fit.
    """
    starts_at_text = projector_norm != "none" and align_norm
    is_ignored = norm_target_ratio != 1 and not starts_at_text
    if norm_target_ratio <= 0 or is_ignored:
        raise UserError("norm_target_ratio is a number above 0, for a norm that starts at the text's norm.")


def require_fitting_tiles(max_tiles: int, center_crop: bool) -> None:
    """Refuse a number of tiles below 1, and options by which pictures would be both cropped and cut into tiles.

    Raises:
        UserError: if the options don't fit.
    """
    if max_tiles < 1:
        raise UserError(f"max_tiles {max_tiles}: it is at least 1, which leaves pictures whole.")
    if max_tiles > 1 and center_crop:
        raise UserError("center_crop leaves out a picture's edges, and tiles show all of it: give one of them.")


def make_processor(
    model: LlavaForConditionalGeneration,
    image_processor: BaseImageProcessor,
    tokenizer: PreTrainedTokenizerBase,
    image_token: str,
    num_additional: int,
    chat_template: str,
) -> LlavaProcessor:
    """The processor of a model.

    Args:
        model: The model with all of its parts.
        image_processor: An image processor that gives pictures of the encoder's size.
        tokenizer: The language model's tokenizer. A tokenizer without a padding token gets one.
        image_token: The token that stands for a picture's features.
        num_additional: Number of tokens that the encoder adds to a picture's patches.
        chat_template: The Jinja template of conversations.
    """
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    # The processor counts image tokens as if each stood for one patch. An image token stands for a square of patches,
    # so the processor gets the size of this square.
    patch_size = model.config.vision_config.patch_size * getattr(model.config, "spatial_merge_size", 1)
    processor_class = NormLlavaProcessor if cuts_tiles(image_processor) else LlavaProcessor
    return processor_class(
        image_processor=image_processor,
        tokenizer=tokenizer,
        patch_size=patch_size,
        vision_feature_select_strategy=model.config.vision_feature_select_strategy,
        num_additional_image_tokens=num_additional,
        image_token=image_token,
        chat_template=chat_template,
    )


def complete_generation(
    model: LlavaForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, end_of_turn: str
) -> None:
    """Let the model stop generating at the end of an answer, and never generate an image token.

    `end_of_turn` is the token that ends an answer.
    """
    generation = model.generation_config

    end_ids = [tokenizer.convert_tokens_to_ids(end_of_turn)]
    if isinstance(generation.eos_token_id, int):
        end_ids.append(generation.eos_token_id)
    elif generation.eos_token_id is not None:
        end_ids.extend(generation.eos_token_id)
    generation.eos_token_id = list(dict.fromkeys(end_ids))  # without duplicates
    generation.pad_token_id = tokenizer.pad_token_id

    # Vicuna's generation config sets these fields without sampling, and transformers refuses to save such a config.
    if not generation.do_sample:
        generation.temperature = None
        generation.top_p = None

    # If the image token were generated, the next pass would look for a picture's features.
    suppressed_ids = set(generation.suppress_tokens or ())
    suppressed_ids.add(model.config.image_token_id)
    generation.suppress_tokens = sorted(suppressed_ids)


@torch.no_grad()
def try_picture(model: LlavaForConditionalGeneration, processor: LlavaProcessor) -> None:
    """Pass a picture through processor and model, and check that they fit together.

    Raises:
        UserError: if there are more or fewer image tokens than features, or if logits are not finite.
    """
    picture = Image.new("RGB", (64, 48))  # width and height; any size would do
    inputs = processor(images=picture, text=f"{processor.image_token}\n", return_tensors="pt")
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    # For each tile, its features [num_features, hidden_size]. A picture that isn't cut is one tile.
    features_by_tile = model.model.get_image_features(inputs["pixel_values"]).pooler_output
    num_features = sum(len(features) for features in features_by_tile)

    num_written = int((inputs["input_ids"] == model.config.image_token_id).sum())
    # vLLM and training count image tokens by this method, which takes height and width.
    (num_counted,) = processor._get_num_multimodal_tokens(image_sizes=[(48, 64)]).num_image_tokens
    num_expected = model.config.image_seq_length * len(features_by_tile)
    counts_agree = num_written == num_counted == num_features == num_expected
    if not counts_agree:
        raise UserError(
            f"A picture should be {num_expected} tokens, but the processor writes {num_written} and counts "
            f"{num_counted}, and the encoder gives {num_features}: set size and crop_size in "
            "preprocessor_config.json to vision_config.image_size. The encoder must take pictures of one size, and "
            "give one token for each patch and at most one token besides."
        )

    logits = model.eval()(**inputs).logits
    if not logits.isfinite().all():
        raise UserError("The composed model's logits are not finite: look at the parts' weights and dtypes.")


@torch.no_grad()
def interface_norms(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, pictures: list[Image.Image] | None = None
) -> dict[str, float]:
    """Mean L2 norms of embeddings from the vision encoder to the decoder, by default on pictures of noise.

    Returns:
        The norm of text under the key `"text"`, and the norms of image tokens under the names that [`InterfaceHooks`]
        gives to the places: `"projector_input"`, `"norm_input"` (before the norm layer, if there is one),
        `"projector_output"` and others.
    """
    if pictures is None:
        pictures = noise_pictures(model)
    pixel_values = processor.image_processor(pictures, return_tensors="pt")["pixel_values"].to(model.dtype)

    norms = {"text": text_norm_target(vocabulary_norms(model))}

    def measure(place: str, features: torch.Tensor) -> None:
        norms[place] = token_norms(features).mean().item()

    with InterfaceHooks(model, measure):
        model.model.get_image_features(pixel_values)
    return norms


def describe_model(
    model: LlavaForConditionalGeneration, processor: LlavaProcessor, pictures: list[Image.Image] | None = None
) -> str:
    """The text that the command prints: a table of mean norms and their ratios to the text's norm, then settings.

    Norms are measured on `pictures` of the user's, or on noise.
    """
    norms = interface_norms(model, processor, pictures)
    labels = {  # by the keys of `norms`
        "text": "text embeddings (T)",
        "projector_input": "vision encoder output",
        "norm_input": "image tokens before the norm",
        "projector_output": "image tokens that enter the decoder",
    }
    lines = [f"{'':38}{'mean L2 norm':>12}{'of text':>10}"]
    for place, label in labels.items():
        if place in norms:
            ratio = norms[place] / norms["text"]
            lines.append(f"{label:38}{norms[place]:12.4f}{ratio:9.2f}x")
    shown = "noise" if pictures is None else "--captions"
    lines.append(f"(norms of image tokens on pictures of {shown})")

    config = model.config
    unit = "tile" if cuts_tiles(processor.image_processor) else "picture"
    chat = find_format(processor.tokenizer, processor.chat_template)
    norm = getattr(config, "projector_norm", "none")
    lines.append(
        f"projector norm: {norm}, image token: {processor.image_token} ({config.image_token_id}), "
        f"{config.image_seq_length} tokens a {unit}, chat format: {chat.name if chat else 'its own'}"
    )
    lines.append(describe_shapes(processor.image_processor))
    return "\n".join(lines)


# What is known of the arms, for the command's help and for the error if none is chosen; docs/method.md says more.
WHICH_NORM = """\
Points of right names over plain Llava, with 95% intervals, in two studies of one decoder (135M, drawings; plain
Llava's image tokens entered at 3.6 to 3.7 times the norm of text): with all steps of the recipe, at the same learning
rates, and with half of them, each at a rate of its own.

                                                                            all steps           half
  --projector_norm none --scale_projector   scaled once to the text's norm  0.8 (-1.1 to 2.6)   6.6 (4.2 to 9.0)
  --projector_norm gwc                      the paper's LayerNorm           0.6 (-1.3 to 2.4)   3.7 (1.6 to 5.8)
  --projector_norm none                     plain Llava

With all steps each pair is undecided. Photographs and larger decoders weren't tried.
`normllava diagnose` measures your model's ratio of image to text norms on your pictures."""


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and leaves the lines of `WHICH_NORM` as they are."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of the command's options."""
    parser = argparse.ArgumentParser(
        description="Compose a model, and write the recipes of its training.",
        epilog=WHICH_NORM,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--output_dir", type=new_folder, required=True, help="folder to write")
    parser.add_argument("--vision_model", help="vision encoder: folder or Hub id")
    parser.add_argument("--text_model", help="decoder language model: folder or Hub id")
    parser.add_argument("--llava_model", help="Llava checkpoint to convert instead: folder or Hub id")
    parser.add_argument(
        "--projector_norm", choices=get_args(ProjectorNorm), help="required; the end of --help compares the arms"
    )
    parser.add_argument("--no_align_norm", action="store_true", help="start the norm at gain 1, not at text's norm")
    parser.add_argument(
        "--norm_target_ratio", type=float, default=1, help="initial norm of image tokens, a multiple of text's"
    )
    parser.add_argument("--scale_projector", action="store_true", help="without a norm: scale to start at text's norm")
    parser.add_argument("--captions", help="rows of stage 1 for the recipes; by default those of the paper")
    parser.add_argument("--data", help="rows of stage 2 for the recipes; by default those of the paper")
    parser.add_argument(
        "--aligned_start",
        action="store_true",
        help="first point a new projector's image tokens at the words of --captions; not in the paper",
    )
    parser.add_argument("--image_folder", help="prefix of the image paths in --captions and --data")
    parser.add_argument(
        "--center_crop",
        action="store_true",
        help="crop as the encoder's own processor does; else pictures are squashed",
    )
    parser.add_argument(
        "--spatial_merge_size", type=int, default=1, help="join squares of so many patches a side into an image token"
    )
    parser.add_argument(
        "--max_tiles", type=int, default=1, help="cut pictures into at most so many tiles, and add a thumbnail"
    )
    parser.add_argument("--vision_feature_layer", type=int, default=-2, help="hidden state of the encoder to read")
    parser.add_argument("--seed", type=int, default=42, help="seed of new weights")
    return parser


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse `argv`, by default the command line. Options that don't go together end the command with a message."""
    parser = build_parser()
    options = parse(parser, argv)

    gives_both_parts = options.vision_model is not None and options.text_model is not None
    gives_no_part = options.vision_model is None and options.text_model is None
    gives_llava = options.llava_model is not None
    is_composition = gives_both_parts and not gives_llava
    is_conversion = gives_llava and gives_no_part
    if not (is_composition or is_conversion):
        parser.error("give either --vision_model and --text_model, or only --llava_model")
    if options.projector_norm is None:
        parser.error(f"give --projector_norm; no arm is the default.\n\n{WHICH_NORM}")

    if is_conversion:
        sets_layer = options.vision_feature_layer != parser.get_default("vision_feature_layer")
        if options.aligned_start or sets_layer:
            parser.error("--aligned_start and --vision_feature_layer are for a new projector")
        if options.spatial_merge_size != 1:
            parser.error("--spatial_merge_size is for a new projector; a converted Llava keeps its own")
        if options.max_tiles != 1:
            parser.error("--max_tiles is for a new model; a converted Llava keeps its image processor")
        if options.center_crop:
            parser.error("--center_crop is for a new model; a converted Llava keeps its image processor")

    if options.aligned_start and options.captions is None:
        parser.error("--aligned_start needs --captions")
    if options.image_folder and not (options.captions or options.data):
        parser.error("--image_folder is for the rows of --captions and --data")
    try:
        require_fitting_ratio(options.projector_norm, not options.no_align_norm, options.norm_target_ratio)
    except UserError as error:
        parser.error(str(error))
    return options


def describe_composing(options: argparse.Namespace) -> Composed:
    """The record of what these options did to the model."""
    return Composed(
        projector_scaled=options.scale_projector,
        projector_aligned=options.aligned_start,
        llava_name_or_path=None if options.llava_model is None else absolute_or_id(options.llava_model),
    )


def describe_for_recipes(
    options: argparse.Namespace, argv: Sequence[str] | None, model: LlavaForConditionalGeneration
) -> Composition:
    """What the recipes need to know of a model that was composed with these options."""
    text_modules = (model.model.language_model, model.lm_head)
    text_parameters = {parameter for module in text_modules for parameter in module.parameters()}  # a tied head once
    return Composition(
        folder=options.output_dir,
        command=sys.argv[1:] if argv is None else argv,
        projector_scaled=options.scale_projector,
        projector_aligned=options.aligned_start,
        config=model.config,
        text_weights=sum(parameter.numel() for parameter in text_parameters),
        max_tiles=options.max_tiles,
        captions=options.captions,
        data=options.data,
        image_folder=options.image_folder,
    )


def describe_next(folder: Path) -> str:
    """The commands to type after composing."""
    commands = {stage: launch_commands(stage, folder / f"{stage}.yaml") for stage in Stage}
    lines = []
    for number, devices in enumerate(("one device", "eight devices")):
        lines.append(f"Next, on {devices}:")
        lines += [f"  {commands[stage][number]}" for stage in (Stage.ALIGN, Stage.INSTRUCT)]
        lines += ["with LoRA, in place of the second:", f"  {commands[Stage.ADAPT][number]}"]
    merge = f"python training/merge.py --adapter {folder / Stage.ADAPT} --output_dir {folder / 'merged'}"
    return "\n".join([*lines, "and then, to join LoRA and the model:", f"  {merge}"])


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command with `argv`, by default the command line."""
    options = parse_options(argv)
    if options.llava_model is not None:
        model, processor = convert_llava(
            options.llava_model,
            projector_norm=options.projector_norm,
            align_norm=not options.no_align_norm,
            scale_projector=options.scale_projector,
            norm_target_ratio=options.norm_target_ratio,
        )
    else:
        model, processor = compose(
            options.vision_model,
            options.text_model,
            projector_norm=options.projector_norm,
            align_norm=not options.no_align_norm,
            vision_feature_layer=options.vision_feature_layer,
            seed=options.seed,
            scale_projector=options.scale_projector,
            norm_target_ratio=options.norm_target_ratio,
            center_crop=options.center_crop,
            spatial_merge_size=options.spatial_merge_size,
            max_tiles=options.max_tiles,
        )
    pictures = None
    if options.aligned_start:
        rows: Any = load_rows(options.captions, options.image_folder)
        align(model, processor, rows, options.seed)
        num_shown = min(NUM_NOISE, len(rows))
        pictures = [only_picture(row) for row in rows.select(range(num_shown))]

    logger.info("%s\nPlanning the recipes ...", describe_model(model, processor, pictures))
    recipes = plan_recipes(describe_for_recipes(options, argv, model))

    model.save_pretrained(options.output_dir)
    processor.save_pretrained(options.output_dir)
    describe_composing(options).write(options.output_dir)
    for name, text in recipes.items():
        write_whole(options.output_dir / name, text)
    let_others_read(options.output_dir)
    logger.info("Saved to %s\n%s", options.output_dir, describe_next(options.output_dir))


if __name__ == "__main__":
    main()
