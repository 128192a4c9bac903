"""Where in a picture a word looks: the attention of its tokens to the image tokens, drawn over the picture.

These are the pictures in App. G of "The Unseen Bias" (arXiv 2512.08374), with the text query under each. Which layers
and heads they show is not said there; here they are a few layers, from the first to the last, and means over heads.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from PIL import Image
from transformers import PreTrainedModel

from diagnostics.attention_call import AttentionCalls
from diagnostics.loading import Message, Question, questions_about
from diagnostics.parts import DiagnosticsError, choose_layers, find_decoder, image_token_id
from diagnostics.plots import WIDTH, styled
from diagnostics.recording import eval_mode, prepare_inputs
from diagnostics.tokens import Inputs


# Layers that are drawn unless others are chosen.
NUM_LAYERS = 4
# Pictures that the report shows.
MAX_PICTURES = 3
COLOURS = "YlOrRd"
# Opacity of the strongest attention; of none it is 0.
MAX_OPACITY = 0.8
# The colours end where this share of all patches lies below, so that a single sink doesn't darken all others.
QUANTILE = 0.99


@dataclass(frozen=True)
class AttentionMap:
    """What one word looks at in one picture.

    Attributes:
        word: The word.
        text: The text that it stands in, for titles.
        picture: The picture as the vision encoder gets it, cropped and resized.
        layers: Numbers of the layers.
        weights: Attention to each image token, `(num_layers, num_rows, num_columns)`, the picture's top row first.
            They are probabilities, means over heads and over the word's tokens; a layer's sum is the share of the
            word's attention that falls on the picture.
    """

    word: str
    text: str
    picture: Image.Image
    layers: list[int]
    weights: np.ndarray


def attention_map(
    model: PreTrainedModel,
    processor: Any,
    picture: Image.Image,
    question: str,
    word: str,
    layers: Sequence[int] | None = None,
    answer: str = "",
) -> AttentionMap:
    """What a word of a question looks at in a picture, or a word of its answer.

    Args:
        model: Its decoder runs with `attn_implementation="sdpa"`.
        processor: Its processor.
        picture: The picture, which comes before the question.
        question: The question.
        word: A word or some words of the question or the answer; of several places, the first.
        layers: Numbers of layers; four by default, from the first to the last.
        answer: What the model is to have answered, if it is a word of this.

    Returns:
        A map whose `weights` are `(num_layers, num_rows, num_columns)`, as [`AttentionMap`] describes them. Draw some
        by `draw_attention_maps({"before": [...], "after": [...]})`.

    Raises:
        DiagnosticsError: if the word is not there, or the model's attention can't be mapped.
    """
    (asked,) = questions_about([picture], question, num_samples=1).questions
    return map_question(model, processor, replace(asked, answer=answer), word, layers)


def map_questions(
    model: PreTrainedModel,
    processor: Any,
    questions: Iterable[Question],
    word: str,
    layers: Sequence[int] | None = None,
) -> list[AttentionMap]:
    """What a word looks at in the first three questions that have it, as [`attention_map`] does for one."""
    chosen = questions_with_word(questions, word)
    return [map_question(model, processor, question, word, layers) for question in chosen]


def questions_with_word(questions: Iterable[Question], word: str) -> list[Question]:
    """The first three questions about one picture that have the word behind it, or in their answer.

    Raises:
        DiagnosticsError: if there is none.
    """
    chosen = [question for question in questions if word_pattern(word).search(text_after_picture(question))]
    if not chosen:
        raise DiagnosticsError(
            f'--attention_map: no question about a single picture, and no answer, has "{word}" after the picture.'
        )
    return chosen[:MAX_PICTURES]


def text_after_picture(question: Question) -> str:
    """What is said after a question's picture, its answer included; empty for one with several pictures."""
    parts = [part for message in question.prompt for part in message["content"]]
    is_picture = [part["type"] == "image" for part in parts]
    if sum(is_picture) != 1:
        return ""
    texts = [part["text"] for part in parts[is_picture.index(True) + 1 :]]
    return "\n".join([*texts, question.answer]).strip()


def map_question(
    model: PreTrainedModel, processor: Any, question: Question, word: str, layers: Sequence[int] | None
) -> AttentionMap:
    """What a word of a question about one picture, or of its answer, looks at."""
    inputs = prepare_inputs(model, processor, with_answer(question))
    return map_attention(model, processor, inputs, word, text_after_picture(question), layers)


def with_answer(question: Question) -> list[Message]:
    """A question's prompt with its answer, where there is one, so that words of the answer can be found too."""
    if not question.answer:
        return question.prompt
    return [*question.prompt, {"role": "assistant", "content": [{"type": "text", "text": question.answer}]}]


@torch.no_grad()
def map_attention(
    model: PreTrainedModel,
    processor: Any,
    inputs: Inputs,
    word: str,
    text: str,
    layers: Sequence[int] | None = None,
) -> AttentionMap:
    """Run a model on one prompt and map the attention of a word behind its picture.

    Args:
        model: Its decoder runs with `attn_implementation="sdpa"`. It runs in eval mode, without dropout.
        processor: Its processor.
        inputs: What the model is given for one prompt with one picture, `input_ids` of `(1, S)`.
        word: A word or some words, in capital or small letters.
        text: For the map's title.
        layers: Numbers of layers; four by default, evenly spread.

    Raises:
        DiagnosticsError: if the word is not there, or the model's attention can't be mapped.
    """
    decoder = find_decoder(model)
    chosen = choose_layers(len(decoder.layers), layers, count=NUM_LAYERS)

    input_ids = inputs["input_ids"][0].cpu()
    image_positions = (input_ids == image_token_id(model)).nonzero()[:, 0]
    num_rows, num_columns = find_grid(model, inputs.get("pixel_values"), len(image_positions))
    word_positions = find_word(processor.tokenizer, input_ids, image_positions, word)

    watched = {number: decoder.layers[number] for number in chosen}
    calls = AttentionCalls(decoder, watched, word_positions, image_positions, len(input_ids))
    with eval_mode(model), calls:
        model.base_model(**inputs)
    missing = [str(number) for number in chosen if number not in calls.attention]
    if missing:
        raise DiagnosticsError(
            f"The attention of layer {', '.join(missing)} was not recorded: it has none, or the model doesn't run "
            'with attn_implementation="sdpa".'
        )

    by_layer = []
    for number in chosen:
        attention = calls.attention[number][:, :, image_positions]  # [num_heads, num_word_tokens, num_image_tokens]
        by_layer.append(attention.mean(dim=(0, 1)).reshape(num_rows, num_columns))
    return AttentionMap(
        word=word,
        text=text,
        picture=seen_picture(processor.image_processor, inputs["pixel_values"][0]),
        layers=chosen,
        weights=torch.stack(by_layer).numpy(),
    )


def find_grid(model: PreTrainedModel, pixel_values: torch.Tensor | None, num_image_tokens: int) -> tuple[int, int]:
    """Rows and columns of a picture's image tokens, of which each is one patch, row by row.

    Args:
        model: Its config names the size of a patch.
        pixel_values: Of one picture as a whole, `(1, 3, height, width)`.
        num_image_tokens: In the prompt.

    Raises:
        DiagnosticsError: if image tokens are no patches of one picture, so that where they lie isn't known.
    """
    patch_size = getattr(getattr(model.config, "vision_config", None), "patch_size", None)
    if patch_size is not None and pixel_values is not None and pixel_values.ndim == 4 and len(pixel_values) == 1:
        patch_height, patch_width = np.broadcast_to(patch_size, 2).tolist()
        num_rows = pixel_values.shape[2] // patch_height
        num_columns = pixel_values.shape[3] // patch_width
        if num_rows * num_columns == num_image_tokens:
            return num_rows, num_columns

    raise DiagnosticsError(
        f"{type(model).__name__} can't be drawn as an attention map yet: its {num_image_tokens} image tokens are not "
        "one for each patch of one picture, since it merges patches, cuts pictures into tiles or was given several."
    )


def find_word(tokenizer: Any, input_ids: torch.Tensor, image_positions: torch.Tensor, word: str) -> torch.Tensor:
    """Positions of the tokens of a word, where it first stands after the picture, `(num_word_tokens,)`.

    Args:
        tokenizer: Of the model.
        input_ids: `(S,)`.
        image_positions: Positions of the image tokens, `(num_image_tokens,)`.
        word: It must stand alone: "cat" isn't in "category".

    Raises:
        DiagnosticsError: if it isn't there. Before the picture a word sees nothing of it.
    """
    start = int(image_positions[-1]) + 1
    ids = input_ids[start:].tolist()

    # How long the text is with the first tokens. A letter counts from its last token, and is "�" until then.
    lengths = [len(tokenizer.decode(ids[:count]).rstrip("�")) for count in range(len(ids) + 1)]
    text = tokenizer.decode(ids)
    match = word_pattern(word).search(text)
    if match is None:
        raise DiagnosticsError(f'"{word}" is not in the text after the picture: "{text.strip()}"')

    positions = []
    for number in range(len(ids)):
        if lengths[number] < match.end() and lengths[number + 1] > match.start():
            positions.append(start + number)
    return torch.tensor(positions)


def word_pattern(word: str) -> re.Pattern[str]:
    """Finds a word or some words that stand alone, in capital or small letters."""
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)


def seen_picture(image_processor: Any, pixels: torch.Tensor) -> Image.Image:
    """The picture that the vision encoder gets, from its pixels `(3, height, width)`, normalized or not."""
    levels = pixels.float().cpu()
    if getattr(image_processor, "do_normalize", False):
        mean = torch.tensor(image_processor.image_mean)[:, None, None]
        deviation = torch.tensor(image_processor.image_std)[:, None, None]
        levels = levels * deviation + mean
    levels = (255 * levels.clamp(0, 1)).round().to(torch.uint8)
    return Image.fromarray(levels.permute(1, 2, 0).numpy())


@styled
def draw_attention_maps(models: Mapping[str, Sequence[AttentionMap]]) -> Figure:
    """Attention over each picture, by layer; models below each other, all in the same colours.

    Colours show a patch's attention in multiples of an even share of what the picture gets. The share of the word's
    attention that the picture gets stands below each map.

    Args:
        models: By name, maps of the same word in the same pictures.
    """
    num_pictures = max(len(maps) for maps in models.values())
    rows: list[tuple[str, AttentionMap]] = []
    for number in range(num_pictures):
        rows += [(name, maps[number]) for name, maps in models.items()]

    num_columns = 1 + max(len(attention_map.layers) for _, attention_map in rows)
    values = np.concatenate([relative_weights(attention_map).ravel() for _, attention_map in rows])
    scale = Normalize(0, max(2.0, float(np.quantile(values, QUANTILE))))

    tallest = max(attention_map.picture.height / attention_map.picture.width for _, attention_map in rows)
    row_height = tallest * (WIDTH - 0.6) / num_columns + 0.42
    figure, axes = plt.subplots(
        len(rows),
        num_columns,
        figsize=(WIDTH, row_height * len(rows) + 0.6),
        squeeze=False,
        layout=ConstrainedLayoutEngine(h_pad=0.07),  # inches, so that a label and the next title stay apart
    )
    for axis in axes.flat:
        axis.axis("off")

    for row, (name, attention_map) in zip(axes, rows, strict=True):
        row[0].imshow(attention_map.picture)
        row[0].set_title(name[-40:], loc="left", fontweight="bold")
        text = " ".join(attention_map.text.split())  # on one line
        row[1].set_title(f"“{attention_map.word}” in: {text[:60]}", loc="left")
        _draw_map(row[1:], attention_map, scale)

    bar = figure.colorbar(
        ScalarMappable(scale, COLOURS), ax=axes, extend="max", location="bottom", aspect=50, shrink=0.5, pad=0.02
    )
    bar.set_label("attention to a patch, in multiples of an even share of the picture's")
    return figure


def relative_weights(attention_map: AttentionMap) -> np.ndarray:
    """A map's weights in multiples of their mean in each layer, `(num_layers, num_rows, num_columns)`."""
    means = attention_map.weights.mean(axis=(1, 2), keepdims=True)
    return attention_map.weights / np.maximum(means, 1e-12)


def _draw_map(axes: Sequence[Axes], attention_map: AttentionMap, scale: Normalize) -> None:
    """One layer's attention on each axis, over the picture in grey, the stronger the less transparent."""
    grey = attention_map.picture.convert("L")
    extent = (-0.5, grey.width - 0.5, grey.height - 0.5, -0.5)
    shares = attention_map.weights.sum(axis=(1, 2))
    layers = zip(axes, attention_map.layers, relative_weights(attention_map), shares, strict=False)
    for axis, layer, relative, share in layers:
        axis.imshow(grey, cmap="gray", vmin=0, vmax=255)
        opacity = MAX_OPACITY * np.clip(scale(relative), 0, 1)
        axis.imshow(relative, extent=extent, cmap=COLOURS, norm=scale, alpha=opacity, interpolation="nearest")
        label = f"layer {layer}, {share:.0%} on picture"
        axis.text(0.5, -0.04, label, fontsize=7, ha="center", va="top", transform=axis.transAxes)
