"""Compose an untrained NormLlava from a vision encoder and a language model, or from a Llava checkpoint.

    python training/compose.py --vision_model google/siglip-so400m-patch14-384 \
        --text_model Qwen/Qwen2.5-7B-Instruct --output_dir checkpoints/composed
    python training/compose.py --llava_model llava-hf/llava-1.5-7b-hf --output_dir checkpoints/composed
    python training/compose.py --normllava_model checkpoints/stage1 --key_adapter_rank 16 --output_dir checkpoints/keys

With `--captions`, the first also aligns the new projector. The last adds key adapters to an existing NormLlava. All
print the norms at the modality interface before and after the norm, and write a complete checkpoint folder.
"""

import copy
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoProcessor,
    AutoTokenizer,
    BaseImageProcessor,
    GenerationConfig,
    HfArgumentParser,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from conversations.chat_template import chat_format, chat_template, differs_from_own
from conversations.loading import load_rows
from diagnostics.hooks import InterfaceHooks
from diagnostics.norms import embedding_norms, text_norm_target, token_norms
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration
from modeling_normllava.configuration_normllava import ProjectorNorm
from training.align import align
from training.checkpoints import copy_record
from training.model_type import require_model_type


logger = logging.getLogger(__name__)

# Tokens that language models have but never use in text: with one of them the embeddings need no new row.
IMAGE_TOKEN_CANDIDATES = ("<image>", "<|image_pad|>", "<|reserved_special_token_0|>", "<unused0>")
PAD_TOKEN_CANDIDATES = ("<|finetune_right_pad_id|>", "<|endoftext|>", "<pad>")
# Llava's head is a plain linear layer: anything else that a language model does to its logits would be lost.
LOGIT_FIELDS = {
    "final_logit_softcapping": None, "logit_scale": 1.0, "logits_scaling": 1.0, "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
}  # fmt: skip
EXPERT_FIELDS = ("output_router_logits", "n_routed_experts", "moe_num_experts")


@dataclass
class ComposeArguments:
    """The command line."""

    output_dir: str = field(metadata={"help": "Folder to write; must be empty or not exist yet."})
    vision_model: str | None = field(default=None, metadata={"help": "Vision encoder: folder or Hub id."})
    text_model: str | None = field(default=None, metadata={"help": "Decoder language model: folder or Hub id."})
    llava_model: str | None = field(default=None, metadata={"help": "Llava checkpoint to convert: folder or Hub id."})
    normllava_model: str | None = field(
        default=None, metadata={"help": "NormLlava to add key adapters to: folder or Hub id."}
    )
    projector_norm: ProjectorNorm = field(
        default="gwc", metadata={"help": "Norm after the projector: compensated, ordinary, or none (plain Llava)."}
    )
    align_norm: bool = field(
        default=True, metadata={"help": "Start visual tokens at the text embeddings' norm; otherwise at gain 1."}
    )
    scale_projector: bool = field(
        default=False,
        metadata={
            "help": "Without a norm: scale the projector's second layer, so that visual tokens start at the text "
            "embeddings' norm."
        },
    )
    captions: str | None = field(
        default=None,
        metadata={
            "help": "Pictures with captions, as for stage 1: point visual tokens at the captions' embeddings before "
            "training. Not part of the paper; see training/align.py."
        },
    )
    image_folder: str | None = field(default=None, metadata={"help": "Prefix of the image paths in --captions."})
    vision_feature_layer: int = field(
        default=-2, metadata={"help": "Hidden state of the vision encoder to read, LLaVA's -2 by default."}
    )
    key_adapter_rank: int = field(
        default=0, metadata={"help": "Rank of gated key adapters (MaLoRA-style); 0 for none."}
    )
    key_adapter_alpha: float = field(default=32, metadata={"help": "Key adapters are scaled by alpha / rank."})
    key_adapter_dropout: float = field(default=0.05, metadata={"help": "Dropout before key adapters."})
    seed: int = field(default=42, metadata={"help": "Seed of new weights."})

    def __post_init__(self) -> None:
        parts = (self.vision_model is not None, self.text_model is not None)
        wholes = (self.llava_model is not None, self.normllava_model is not None)
        if sum(wholes) + any(parts) != 1 or any(parts) != all(parts):
            raise ValueError(
                "Give either --vision_model and --text_model, or only --llava_model, or only --normllava_model."
            )
        if self.key_adapter_rank < 0 or (self.normllava_model is not None and self.key_adapter_rank == 0):
            raise ValueError("Give --key_adapter_rank, 1 or more: the rank of the key adapters that are to be added.")
        idle = {
            "projector_norm": self.normllava_model is not None,
            "align_norm": self.normllava_model is not None,
            "scale_projector": self.vision_model is None or self.projector_norm != "none",
            "vision_feature_layer": self.vision_model is None,
            "captions": self.vision_model is None,
            "image_folder": self.captions is None,
            "key_adapter_alpha": self.key_adapter_rank == 0,
            "key_adapter_dropout": self.key_adapter_rank == 0,
        }
        for name, is_idle in idle.items():
            if is_idle and getattr(self, name) != getattr(ComposeArguments, name):
                raise ValueError(f"--{name} does nothing here: leave it out.")


def plain_name(name: str) -> str:
    """A folder's absolute path, since the config records it and `a/b` would be taken for a Hub id; an id unchanged."""
    return os.path.abspath(name) if os.path.isdir(name) else name


def load_vision_model(path: str, dtype: torch.dtype) -> PreTrainedModel:
    """The vision encoder at `path`, without the text encoder that CLIP and SigLIP checkpoints also hold.

    Raises:
        ValueError: if it doesn't take whole pictures of one fixed size, can't be loaded without its text encoder, or
            is quantized.
    """
    config = AutoConfig.from_pretrained(path)
    require_unquantized(config, path)
    config = getattr(config, "vision_config", config)
    for name in ("hidden_size", "num_hidden_layers", "image_size", "patch_size"):
        if not isinstance(getattr(config, name, None), int):
            raise ValueError(
                f"{path}: vision_config.{name} is {getattr(config, name, None)!r}, an integer is needed. NormLlava "
                f"needs a vision transformer with a fixed picture size; {config.model_type!r} is not one (for "
                "SigLIP2, use a fixed-resolution checkpoint, not a NaFlex one)."
            )
    if type(config) not in MODEL_MAPPING:
        raise ValueError(f"{path}: transformers can't load a vision encoder of type {config.model_type!r} by itself.")
    if hasattr(config, "vision_use_head"):
        config.vision_use_head = False  # SigLIP's pooling, which Llava doesn't read and vLLM on CPU can't run
    return MODEL_MAPPING[type(config)].from_pretrained(path, config=config, dtype=dtype)


def load_text_model(path: str) -> PreTrainedModel:
    """The causal language model at `path`, in its checkpoint's dtype.

    Raises:
        ValueError: if its computation doesn't fit into Llava's, naming the field or part, or if it is quantized.
    """
    config = AutoConfig.from_pretrained(path)
    require_unquantized(config, path)
    if hasattr(config, "vision_config") or config.is_encoder_decoder:
        raise ValueError(f"{path}: model_type {config.model_type!r} is not a decoder-only language model.")
    for name, neutral in LOGIT_FIELDS.items():
        if getattr(config, name, neutral) not in (None, neutral):
            raise ValueError(
                f"{path}: text_config.{name} is {getattr(config, name)!r}. Llava's head can't do this to the "
                "logits, so the answers would differ from the language model's own."
            )
    if any(hasattr(config, name) for name in EXPERT_FIELDS):
        raise ValueError(
            f"{path}: the family {config.model_type!r} mixes experts, which can't be trained here: Llava returns no "
            "router logits, which balance them, and adapters don't reach their weights."
        )
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    decoder = model.get_decoder()
    if model.get_output_embeddings().bias is not None:
        raise ValueError(f"{path}: the language model's head has a bias, which Llava's would lose.")
    if type(decoder) is not MODEL_MAPPING.get(type(config), None):
        raise ValueError(f"{path}: Llava would not rebuild the language model's decoder ({type(decoder).__name__}).")
    if config.tie_word_embeddings and not hasattr(decoder, "embed_tokens"):
        raise ValueError(f"{path}: the head is tied to embeddings that {type(decoder).__name__} calls otherwise.")
    return model


def require_unquantized(config: PreTrainedConfig, path: str) -> None:
    """Raise `ValueError` for a quantized checkpoint: its quantizer would take hold of all parts of the new model."""
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{path} is quantized: start from the unquantized weights; load_in_4bit quantizes them for training."
        )


def choose_image_token(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> str:
    """A token of the tokenizer that can stand for a picture; adds `<image>` if there is none.

    A token counts only if the embedding has a row for it: Gemma 3's text checkpoints have none for their
    `<image_soft_token>`.
    """
    vocabulary = tokenizer.get_vocab()
    taken = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token}
    for token in IMAGE_TOKEN_CANDIDATES:
        has_row = vocabulary.get(token, num_embeddings) < num_embeddings
        if has_row and token in tokenizer.added_tokens_encoder and token not in taken:
            return token
    tokenizer.add_tokens([AddedToken("<image>", special=True, normalized=False)], special_tokens=True)
    return "<image>"


def set_pad_token(tokenizer: PreTrainedTokenizerBase, num_embeddings: int) -> None:
    """Give the tokenizer a pad token that is not the end-of-turn one, if it has a spare one."""
    if tokenizer.pad_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    spare = [token for token in PAD_TOKEN_CANDIDATES if vocabulary.get(token, num_embeddings) < num_embeddings]
    tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token


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
    if differs_from_own(tokenizer):
        logger.warning(
            "The language model's own chat template writes turns in another way than the %s format, which is used "
            "here. It may answer worse; docs/extend.md says how to add its format.",
            chat_format(tokenizer).name,
        )
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


def generation_config(
    text_generation_config: GenerationConfig, tokenizer: PreTrainedTokenizerBase, image_token_id: int
) -> GenerationConfig:
    """The language model's own, extended to stop at the end of a turn, with the pad token, and without the image
    token, for which the next pass would look for a picture's features."""
    end_of_turn = tokenizer.convert_tokens_to_ids(chat_format(tokenizer).end_of_turn)
    known = text_generation_config.eos_token_id
    known = [] if known is None else known if isinstance(known, list) else [known]
    text_generation_config.eos_token_id = list(dict.fromkeys([end_of_turn, *known]))
    text_generation_config.pad_token_id = tokenizer.pad_token_id
    text_generation_config.suppress_tokens = sorted({*(text_generation_config.suppress_tokens or ()), image_token_id})
    return text_generation_config


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
    model = NormLlavaForConditionalGeneration(
        config, vision_model, text_model.get_decoder(), text_model.get_output_embeddings()
    )
    projector = model.model.multi_modal_projector
    for linear in (projector.linear_1, projector.linear_2):
        linear.reset_parameters()  # as LLaVA does; transformers' fixed std of 0.02 is too small in narrow models
    projector.to(text_model.dtype)
    model.generation_config = generation_config(text_model.generation_config, tokenizer, config.image_token_index)
    processor = build_processor(image_processor, tokenizer, image_token, config, num_additional)
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
        ValueError: if `llava_model_path` is not a Llava checkpoint; a NormLlava, which already has a norm, is not.
            Also if its encoder doesn't take pictures of one fixed size, or it is quantized.
    """
    llava_model_path = plain_name(llava_model_path)
    require_model_type(llava_model_path, "llava")
    require_unquantized(AutoConfig.from_pretrained(llava_model_path), llava_model_path)
    llava = LlavaForConditionalGeneration.from_pretrained(llava_model_path, dtype="auto")
    old_processor = AutoProcessor.from_pretrained(llava_model_path)
    language_model = llava.model.language_model
    num_patches, num_additional = vision_tokens(llava.model.vision_tower, old_processor.image_processor)

    fields: dict[str, Any] = {
        name: getattr(llava.config, name)
        for name in (
            "vision_config",
            "text_config",
            "image_token_index",
            "projector_hidden_act",
            "vision_feature_select_strategy",
            "vision_feature_layer",
            "multimodal_projector_bias",
            "tie_word_embeddings",
            "dtype",
        )
    }
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
    return model, build_processor(*parts, config, num_additional)


def add_key_adapters(
    model: NormLlavaForConditionalGeneration, rank: int, alpha: float, dropout: float, seed: int = 42
) -> NormLlavaForConditionalGeneration:
    """The same model with key adapters, which change nothing until they are trained; its parts are reused.

    Raises:
        ValueError: if it has key adapters already or is quantized, or its decoder can't have any.
        huggingface_hub.errors.StrictDataclassError: if rank, alpha or dropout are invalid.
    """
    if model.config.key_adapter_rank:
        raise ValueError(f"The model already has key adapters of rank {model.config.key_adapter_rank}.")
    require_unquantized(model.config, "The model")
    config = copy.deepcopy(model.config)
    config.key_adapter_rank, config.key_adapter_alpha, config.key_adapter_dropout = rank, alpha, dropout
    config.validate()
    set_seed(seed)
    adapted = NormLlavaForConditionalGeneration(
        config, model.model.vision_tower, model.model.language_model, model.lm_head
    )
    adapted.model.multi_modal_projector = model.model.multi_modal_projector
    adapted.generation_config = model.generation_config
    with torch.no_grad():  # fails if the decoder doesn't pass on what its adapters need
        adapted.eval()(input_ids=torch.zeros((1, 1), dtype=torch.long))
    return adapted


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
    adapters = [parameter.numel() for name, parameter in model.named_parameters() if ".key_adapter." in name]
    if adapters:
        lines.append(f"key adapters: rank {model.config.key_adapter_rank}, {sum(adapters):,} parameters")
    return "\n".join(lines)


def main() -> None:
    """Run the command line."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    (args,) = HfArgumentParser(ComposeArguments).parse_args_into_dataclasses()
    output_dir = Path(args.output_dir)
    if output_dir.exists() and any(output_dir.iterdir()):
        raise SystemExit(f"--output_dir {output_dir} is not empty. Choose another folder, or empty it first.")
    if args.normllava_model is not None:
        require_model_type(args.normllava_model, "normllava")
        model = NormLlavaForConditionalGeneration.from_pretrained(args.normllava_model, dtype="auto")
        processor = AutoProcessor.from_pretrained(args.normllava_model)
    elif args.llava_model is None:
        model, processor = compose(
            args.vision_model,
            args.text_model,
            args.projector_norm,
            args.align_norm,
            args.vision_feature_layer,
            args.seed,
            args.scale_projector,
        )
        if args.captions is not None:
            rows: Any = load_rows(args.captions, args.image_folder)
            align(model, processor, rows, args.seed)
    else:
        model, processor = convert_llava(args.llava_model, args.projector_norm, args.align_norm)
    if args.key_adapter_rank:
        model = add_key_adapters(
            model, args.key_adapter_rank, args.key_adapter_alpha, args.key_adapter_dropout, args.seed
        )
    logger.info("%s", describe(model, processor))
    model.save_pretrained(output_dir)
    processor.save_pretrained(output_dir)
    if args.normllava_model is not None:
        copy_record(Path(args.normllava_model), output_dir)
    logger.info("Saved to %s", output_dir)


if __name__ == "__main__":
    main()
