"""A model's inputs for pictures and questions, made by its processor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor, BaseImageProcessor, BatchFeature, PreTrainedModel

from normllava.errors import UserError
from normllava.parts import DiagnosticsError, complete_processor
from normllava.tokens import Inputs, token_ids


# A message of a chat, as processors take it: a role, and a list of parts.
Message = dict[str, Any]

# The number of pictures of noise, and their size in pixels a side where the encoder takes pictures of any size.
NUM_NOISE = 8
NOISE_SIZE = 336
# The number of text tokens beside a picture, for a model without a tokenizer.
NUM_WORDS = 8


@contextmanager
def eval_mode(model: PreTrainedModel) -> Iterator[None]:
    """Keep the model in eval mode inside the context. Afterwards each module is in the mode that it had before."""
    # `model.train()` at the end would also change modules that were in eval mode before.
    training_modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training_modules:
            module.training = True


def noise_pictures(model: PreTrainedModel) -> list[Image.Image]:
    """Eight pictures of seeded noise, of the size that the model's encoder takes if it takes only one."""
    size = getattr(getattr(model.config, "vision_config", None), "image_size", NOISE_SIZE)
    if isinstance(size, list | tuple):
        size = size[0]
    noise = np.random.default_rng(0).integers(0, 256, size=(NUM_NOISE, size, size, 3), dtype=np.uint8)
    return [Image.fromarray(pixels) for pixels in noise]


def load_processor(model: PreTrainedModel) -> Any:
    """The processor in the folder or repository that a model was loaded from, or else its image processor.

    Raises:
        UserError: if there is neither, or if the model wasn't loaded from anywhere.
    """
    name = model.name_or_path
    if not name:
        raise UserError("The model wasn't loaded from a folder or the Hub: give its processor too.")
    for auto_class in (AutoProcessor, AutoImageProcessor):  # some processors also need packages for videos
        try:
            return auto_class.from_pretrained(name)
        except (OSError, ValueError, ImportError):
            continue
    raise UserError(
        f"{name} has no processor that can be loaded here: give the model's processor, or image processor."
    )


def prepare_inputs(model: PreTrainedModel, processor: Any, messages: list[Message]) -> Inputs:
    """The model's inputs for chat messages, on the model's device.

    Raises:
        DiagnosticsError: if the processor refuses the messages, for example because its template does not know a
            role, or because a picture is too small.
    """
    complete_processor(processor, model)
    try:
        prepared = _run_processor(processor, messages)
    except (TemplateError, ValueError) as error:
        raise DiagnosticsError(f"The processor can't prepare it: {error}") from error

    # PaliGemma's processor also returns labels, which are for training.
    inputs = {name: value for name, value in prepared.items() if name != "labels"}
    return _on_device(model, inputs)


def prepare_picture(model: PreTrainedModel, processor: Any, picture: Image.Image) -> Inputs:
    """The model's inputs for a picture and a few words, on the model's device.

    Args:
        model: The model.
        processor: The model's processor; or its image processor, to which the image tokens are added here.
        picture: The picture.
    """
    if isinstance(processor, BaseImageProcessor):
        return _add_token_ids(model, _on_device(model, dict(processor(images=picture, return_tensors="pt"))))
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "What does the picture show?"}]
    return prepare_inputs(model, processor, [{"role": "user", "content": content}])


def _on_device(model: PreTrainedModel, inputs: Inputs) -> Inputs:
    """Inputs on the model's device. Only floats are cast to the model's dtype."""
    return dict(BatchFeature(inputs).to(model.device, dtype=model.dtype))


@torch.no_grad()
def _add_token_ids(model: PreTrainedModel, picture_inputs: Inputs) -> Inputs:
    """The inputs of a picture, with the ids of its image tokens and of a few tokens of text."""
    ids = token_ids(model)
    feature_extractor: Any = model if hasattr(model, "get_image_features") else model.base_model
    num_image_tokens = _count_features(feature_extractor.get_image_features(**picture_inputs))
    num_embeddings = model.get_input_embeddings().num_embeddings
    ordinary = [token_id for token_id in range(num_embeddings) if token_id not in ids.special | {ids.image}]
    words = ordinary[:: max(1, len(ordinary) // NUM_WORDS)][:NUM_WORDS]  # evenly spread over the vocabulary

    input_ids = torch.tensor([[ids.image] * num_image_tokens + words], device=model.device)
    is_image = input_ids == ids.image
    return {
        **picture_inputs,
        "input_ids": input_ids,
        "attention_mask": torch.ones_like(input_ids),
        # Families that tell pictures from text by such types take one of the two; others ignore them.
        "mm_token_type_ids": is_image.long(),
        "token_type_ids": is_image.long(),
    }


def _count_features(features: Any) -> int:
    """The number of features that `get_image_features` has returned: a tensor, tensors, or an output with them."""
    features = getattr(features, "pooler_output", features)
    if isinstance(features, torch.Tensor):
        return features[..., 0].numel()  # all but the last dimension, the width
    return sum(_count_features(part) for part in features)


def _run_processor(processor: Any, messages: list[Message]) -> Any:
    """What the processor returns for the messages.

    If the processor has no chat template, each text and each picture of the messages gets a line of its own.
    """
    if getattr(processor, "chat_template", None):
        return processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt", add_generation_prompt=True
        )

    image_mark = getattr(processor, "image_token", "<image>")  # the text that stands for a picture
    lines = []
    images = []
    for message in messages:
        for part in message["content"]:
            if part["type"] == "text":
                lines.append(part["text"])
            else:  # a picture
                lines.append(image_mark)
                images.append(part["image"])
    return processor(images=images or None, text="\n".join(lines), return_tensors="pt")
