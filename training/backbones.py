"""Loads what a NormLlava is composed of, and refuses what would answer otherwise in it."""

import os

import torch
from tokenizers import AddedToken
from transformers import (
    MODEL_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from conversations.chat_template import chat_format
from modeling_normllava import NormLlavaConfig, NormLlavaForConditionalGeneration


# Tokens that language models have but never use in text: with one of them the embeddings need no new row.
IMAGE_TOKEN_CANDIDATES = ("<image>", "<|image_pad|>", "<|reserved_special_token_0|>", "<unused0>")
PAD_TOKEN_CANDIDATES = ("<|finetune_right_pad_id|>", "<|endoftext|>", "<pad>")
EXPERT_FIELDS = ("output_router_logits", "n_routed_experts", "moe_num_experts")


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
        ValueError: if it is no decoder, mixes experts, or is quantized.
    """
    config = AutoConfig.from_pretrained(path)
    require_unquantized(config, path)
    if hasattr(config, "vision_config") or config.is_encoder_decoder:
        raise ValueError(f"{path}: model_type {config.model_type!r} is not a decoder-only language model.")
    if any(hasattr(config, name) for name in EXPERT_FIELDS):
        raise ValueError(
            f"{path}: the family {config.model_type!r} mixes experts, which can't be trained here: Llava returns no "
            "router logits, which balance them, and adapters don't reach their weights."
        )
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto")


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
    if tokenizer.pad_token is None:
        vocabulary = tokenizer.get_vocab()
        spare = [token for token in PAD_TOKEN_CANDIDATES if vocabulary.get(token, num_embeddings) < num_embeddings]
        tokenizer.pad_token = spare[0] if spare else tokenizer.eos_token


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


def require_reloadable(
    config: NormLlavaConfig, vision_model: PreTrainedModel, text_model: PreTrainedModel, path: str
) -> None:
    """Raise `ValueError` if the model that the config describes would not have the weights of these parts."""
    decoder = text_model.get_decoder()
    refusal = f"{path}: Llava would not rebuild {{}} from its config: {{}}"
    try:
        with torch.device("meta"):
            rebuilt = NormLlavaForConditionalGeneration(config)
    except AttributeError as error:  # a head that is tied to embeddings of another name
        raise ValueError(refusal.format(type(decoder).__name__, error)) from error
    pairs = (
        (vision_model, rebuilt.model.vision_tower),
        (decoder, rebuilt.model.language_model),
        (text_model.get_output_embeddings(), rebuilt.lm_head),
    )
    for part, again in pairs:
        shapes, shapes_again = ({k: v.shape for k, v in module.state_dict().items()} for module in (part, again))
        if shapes != shapes_again:
            differing = sorted(name for name, _ in shapes.items() ^ shapes_again.items())
            problem = f"{len(differing)} weights differ, first {differing[0]!r}."
            raise ValueError(refusal.format(type(part).__name__, problem))


@torch.no_grad()
def require_same_answers(model: NormLlavaForConditionalGeneration, text_model: PreTrainedModel, path: str) -> None:
    """Raise `ValueError` if the model answers text otherwise than the language model that it is made of."""
    input_ids = torch.arange(8)[None]
    found, expected = model.eval()(input_ids=input_ids).logits, text_model.eval()(input_ids=input_ids).logits
    if not torch.equal(found, expected):
        raise ValueError(
            f"{path}: its logits change by up to {(found - expected).abs().max():.3g} in a Llava, whose head is a "
            "linear layer and nothing else: look in config.json for a softcap, scale or multiplier of the logits."
        )
