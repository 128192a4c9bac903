"""Maps and draws where in a picture a word looks: the attention of the word's tokens to the picture's image tokens.

"The Unseen Bias" (arXiv 2512.08374, App. G) has such a figure, but doesn't say which layers and heads it shows.
Here a few layers are drawn, evenly spread from the first to the last, and the weights are means over heads.
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

from normllava.diagnostics.attention_call import AttentionCalls
from normllava.diagnostics.loading import Question, questions_about
from normllava.diagnostics.plots import WIDTH, styled
from normllava.inputs import Message, eval_mode, prepare_inputs
from normllava.parts import DiagnosticsError, choose_layers, find_decoder, image_token_id
from normllava.tokens import Inputs


# Number of layers that are mapped, unless the user names layers.
NUM_LAYERS = 4
# Largest number of pictures that the report shows.
MAX_PICTURES = 3
# Number of characters of a model's name, and of a text, that are shown above a row of maps. A longer name keeps its
# end, because the names of checkpoints differ at their end.
NAME_CHARACTERS = 40
TEXT_CHARACTERS = 60
# matplotlib's colour map from yellow to red.
COLOURS = "YlOrRd"
# Opacity of the strongest attention in a drawing. The opacity of no attention is 0.
MAX_OPACITY = 0.8
# The scale of colours ends at this quantile of the attention to all patches. If the scale ended at the largest
# attention, a single patch with massive attention would leave all other patches without colour.
SCALE_QUANTILE = 0.99


@dataclass(frozen=True)
class AttentionMap:
    """What one word looks at in one picture.

    Attributes:
        word: The word.
        text: The text that contains the word, for titles.
        picture: The picture as the vision encoder gets it, cropped and resized.
        layers: Numbers of the mapped layers.
        weights: Attention to each image token, `(num_layers, num_rows, num_columns)`, with the top of the picture
            first. A weight is the mean of the attention probability over heads and over the word's tokens. The sum of
            a layer's weights is the share of the word's attention that falls on the picture.
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
    """What a word of a question, or of its answer, looks at in a picture.

    Args:
        model: The model. Its decoder has to run with `attn_implementation="sdpa"`.
        processor: The model's processor.
        picture: The picture, which the model is given before the question.
        question: The question.
        word: A word, or several words in a row, of the question or the answer. Only its first occurrence counts.
        layers: Numbers of the layers to map; four layers that are evenly spread by default.
        answer: An answer to the question, which the model is given too. Needed if the word is in the answer.

    Returns:
        The map. `draw_attention_maps({"before": [...], "after": [...]})` draws maps of several models.

    Raises:
        DiagnosticsError: if neither question nor answer has the word, or if the model's attention can't be mapped.
    """
    (question_about_picture,) = questions_about([picture], question, num_samples=1).questions
    question_with_answer = replace(question_about_picture, answer=answer)
    return map_question(model, processor, question_with_answer, word, layers)


def map_questions(
    model: PreTrainedModel,
    processor: Any,
    questions: Iterable[Question],
    word: str,
    layers: Sequence[int] | None = None,
) -> list[AttentionMap]:
    """What a word looks at in the pictures of the first `MAX_PICTURES` questions that have the word."""
    chosen = questions_with_word(questions, word)
    return [map_question(model, processor, question, word, layers) for question in chosen]


def questions_with_word(questions: Iterable[Question], word: str) -> list[Question]:
    """The first `MAX_PICTURES` questions about a single picture that have the word after the picture or in the answer.

    Raises:
        DiagnosticsError: if there is no such question.
    """
    pattern = word_pattern(word)
    chosen = []
    for question in questions:
        text = text_after_picture(question)
        if pattern.search(text):
            chosen.append(question)

    if not chosen:
        raise DiagnosticsError(
            f'--attention_map: no question about a single picture, and no answer, has "{word}" after the picture.'
        )
    return chosen[:MAX_PICTURES]


def text_after_picture(question: Question) -> str:
    """The texts that follow a question's picture, with the answer; empty if the question has several pictures."""
    parts: list[dict[str, Any]] = []  # a part is a picture or a text
    for message in question.prompt:
        parts += message["content"]
    types = [part["type"] for part in parts]
    if types.count("image") != 1:
        return ""

    picture_index = types.index("image")
    texts = [part["text"] for part in parts[picture_index + 1 :]]
    return "\n".join([*texts, question.answer]).strip()


def map_question(
    model: PreTrainedModel, processor: Any, question: Question, word: str, layers: Sequence[int] | None
) -> AttentionMap:
    """What a word of a question, or of its answer, looks at in the question's only picture."""
    inputs = prepare_inputs(model, processor, messages_with_answer(question))
    return map_attention(model, processor, inputs, word, text_after_picture(question), layers)


def messages_with_answer(question: Question) -> list[Message]:
    """The messages of a question's prompt, and then its answer if it has one."""
    if not question.answer:
        return question.prompt
    answer_message = {"role": "assistant", "content": [{"type": "text", "text": question.answer}]}
    return [*question.prompt, answer_message]


@torch.no_grad()
def map_attention(
    model: PreTrainedModel,
    processor: Any,
    inputs: Inputs,
    word: str,
    text: str,
    layers: Sequence[int] | None = None,
) -> AttentionMap:
    """Run a model on one prompt, in eval mode, and map the attention of a word that comes after the prompt's picture.

    Args:
        model: The model. Its decoder has to run with `attn_implementation="sdpa"`.
        processor: The model's processor.
        inputs: The model's inputs for one prompt with one picture, with `input_ids` of shape `(1, S)`.
        word: A word, or several words in a row. Case is ignored.
        text: The text that contains the word, for the map's title.
        layers: Numbers of the layers to map; four layers that are evenly spread by default.

    Raises:
        DiagnosticsError: if the prompt does not have the word, or if the model's attention can't be mapped.
    """
    decoder = find_decoder(model)
    layer_numbers = choose_layers(len(decoder.layers), layers, count=NUM_LAYERS)

    input_ids = inputs["input_ids"][0].cpu()  # [S]
    is_image_token = input_ids == image_token_id(model)
    image_positions = is_image_token.nonzero()[:, 0]  # [num_image_tokens]
    num_rows, num_columns = find_grid(model, inputs.get("pixel_values"), len(image_positions))
    word_positions = find_word(processor.tokenizer, input_ids, image_positions, word)

    calls = AttentionCalls(
        decoder,
        layers={number: decoder.layers[number] for number in layer_numbers},
        queries=word_positions,
        key_positions=image_positions,  # keys and values are recorded too, but not used here
        length=len(input_ids),
    )
    with eval_mode(model), calls:
        model.base_model(**inputs)

    missing = [str(number) for number in layer_numbers if number not in calls.attention]
    if missing:
        raise DiagnosticsError(
            f"The attention of layer {', '.join(missing)} was not recorded: it has none, or the model doesn't run "
            'with attn_implementation="sdpa".'
        )

    weights_by_layer = []
    for number in layer_numbers:
        attention = calls.attention[number][:, :, image_positions]  # [num_heads, num_word_tokens, num_image_tokens]
        weights = attention.mean(dim=(0, 1))  # [num_image_tokens]
        weights_by_layer.append(weights.reshape(num_rows, num_columns))
    return AttentionMap(
        word=word,
        text=text,
        picture=undo_normalization(processor.image_processor, inputs["pixel_values"][0]),
        layers=layer_numbers,
        weights=torch.stack(weights_by_layer).numpy(),
    )


def find_grid(model: PreTrainedModel, pixel_values: torch.Tensor | None, num_image_tokens: int) -> tuple[int, int]:
    """Number of rows and number of columns in which the image tokens lie on their picture.

    These numbers are known only if each image token is one patch of one picture.

    Args:
        model: The model, whose config has the size of a patch.
        pixel_values: The pixels of the prompt's picture. Only the shape `(1, 3, height, width)` can be mapped.
        num_image_tokens: Number of image tokens in the prompt.

    Raises:
        DiagnosticsError: if the image tokens are not the patches of one picture.
    """
    vision_config = getattr(model.config, "vision_config", None)
    patch_size = getattr(vision_config, "patch_size", None)  # a number, or a pair of height and width
    shape: tuple[int, ...] = ()
    if pixel_values is not None:
        shape = tuple(pixel_values.shape)

    is_one_picture = len(shape) == 4 and shape[0] == 1
    if is_one_picture and patch_size is not None:
        _, _, height, width = shape
        patch_height, patch_width = np.broadcast_to(patch_size, 2).tolist()  # a single number stands for both
        num_rows = height // patch_height
        num_columns = width // patch_width
        if num_rows * num_columns == num_image_tokens:
            return num_rows, num_columns

    raise DiagnosticsError(
        f"{type(model).__name__} can't be drawn as an attention map yet: its {num_image_tokens} image tokens are not "
        "one for each patch of one picture, since it merges patches, cuts pictures into tiles or was given several."
    )


def find_word(tokenizer: Any, input_ids: torch.Tensor, image_positions: torch.Tensor, word: str) -> torch.Tensor:
    """Positions of the tokens of a word, `(num_word_tokens,)`, at its first occurrence after the picture.

    Occurrences before the picture don't count, because a decoder's tokens attend only to earlier tokens.

    Args:
        tokenizer: The model's tokenizer.
        input_ids: The prompt, `(S,)`.
        image_positions: Positions of the image tokens, `(num_image_tokens,)`.
        word: The word, which has to stand alone: see [`word_pattern`].

    Raises:
        DiagnosticsError: if the word doesn't occur after the picture.
    """
    start = int(image_positions[-1]) + 1
    ids = input_ids[start:].tolist()
    text = tokenizer.decode(ids)
    match = word_pattern(word).search(text)
    if match is None:
        raise DiagnosticsError(f'"{word}" is not in the text after the picture: "{text.strip()}"')

    # A token that shares a character with the match is one of the word's tokens. `token_start` and `token_end` count
    # characters of the text.
    positions = []
    token_start = 0
    for index in range(len(ids)):
        # A letter may consist of several tokens. Without its last token the letter is decoded as "�", which doesn't
        # count.
        text_so_far = tokenizer.decode(ids[: index + 1]).rstrip("�")
        token_end = len(text_so_far)
        if token_start < match.end() and token_end > match.start():
            positions.append(start + index)
        token_start = token_end
    return torch.tensor(positions)


def word_pattern(word: str) -> re.Pattern[str]:
    """A pattern for a word, or several words in a row, in any case. "cat" matches in "A Cat.", not in "category"."""
    # No letter, digit or underscore may stand directly before the word, and none directly after it.
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)


def undo_normalization(image_processor: Any, pixel_values: torch.Tensor) -> Image.Image:
    """The picture that pixel values show: the image processor's normalization is undone, cropping and resizing stay.

    Args:
        image_processor: The image processor that made the pixel values.
        pixel_values: What the vision encoder is given, `(3, height, width)`.
    """
    intensities = pixel_values.float().cpu()
    if getattr(image_processor, "do_normalize", False):
        mean = torch.tensor(image_processor.image_mean)[:, None, None]  # [3, 1, 1]
        deviation = torch.tensor(image_processor.image_std)[:, None, None]
        intensities = intensities * deviation + mean
    bytes_of_pixels = (255 * intensities.clamp(0, 1)).round().to(torch.uint8)
    return Image.fromarray(bytes_of_pixels.permute(1, 2, 0).numpy())  # [height, width, 3]


@styled
def draw_attention_maps(models: Mapping[str, Sequence[AttentionMap]]) -> Figure:
    """Draw maps of the same word in the same pictures: a row for each picture and model, a column for each layer.

    Colours show the attention to a patch in multiples of the mean over the picture's patches, on the same scale in all
    maps. Below each map stands the share of the word's attention that falls on the picture.

    Args:
        models: The maps of each model by its name, one for each picture.
    """
    # For each row of the figure, the model's name and the map. The first picture's rows come first.
    figure_rows: list[tuple[str, AttentionMap]] = []
    num_pictures = max(len(maps) for maps in models.values())
    for number in range(num_pictures):
        for name, maps in models.items():
            figure_rows.append((name, maps[number]))

    all_maps = [word_map for _, word_map in figure_rows]
    scale = choose_scale(all_maps)

    # The first column of the figure shows the picture, and each other column shows a layer.
    num_figure_columns = 1 + max(len(word_map.layers) for word_map in all_maps)
    # In inches: 0.6 is the width of the margins, 0.42 the height of a row's text, and the other 0.6 the height of the
    # colour bar.
    column_width = (WIDTH - 0.6) / num_figure_columns
    height_over_width = max(word_map.picture.height / word_map.picture.width for word_map in all_maps)
    row_height = height_over_width * column_width + 0.42
    figure, axes = plt.subplots(
        len(figure_rows),
        num_figure_columns,
        figsize=(WIDTH, row_height * len(figure_rows) + 0.6),
        squeeze=False,
        layout=ConstrainedLayoutEngine(h_pad=0.07),  # so that a label and the title below it stay apart
    )
    for axis in axes.flat:
        axis.axis("off")

    for row_of_axes, (name, word_map) in zip(axes, figure_rows, strict=True):
        row_of_axes[0].imshow(word_map.picture)
        row_of_axes[0].set_title(name[-NAME_CHARACTERS:], loc="left", fontweight="bold")
        text_on_one_line = " ".join(word_map.text.split())
        row_of_axes[1].set_title(f"“{word_map.word}” in: {text_on_one_line[:TEXT_CHARACTERS]}", loc="left")
        _draw_map(row_of_axes[1:], word_map, scale)

    bar = figure.colorbar(
        ScalarMappable(scale, COLOURS), ax=axes, extend="max", location="bottom", aspect=50, shrink=0.5, pad=0.02
    )
    bar.set_label("attention to a patch, in multiples of the mean over the picture's patches")
    return figure


def choose_scale(maps: Sequence[AttentionMap]) -> Normalize:
    """The scale of colours for the [`relative_weights`] of several maps.

    The scale reaches at least to 2, so that small differences in nearly even attention aren't drawn in strong colours.
    """
    weights_by_map = [relative_weights(word_map).ravel() for word_map in maps]
    all_weights = np.concatenate(weights_by_map)
    quantile = float(np.quantile(all_weights, SCALE_QUANTILE))
    return Normalize(0, max(2.0, quantile))


def relative_weights(word_map: AttentionMap) -> np.ndarray:
    """A map's weights in multiples of the mean of their layer, `(num_layers, num_rows, num_columns)`."""
    means = word_map.weights.mean(axis=(1, 2), keepdims=True)
    nonzero_means = np.maximum(means, 1e-12)  # a layer may give the picture no attention
    return word_map.weights / nonzero_means


def _draw_map(axes: Sequence[Axes], word_map: AttentionMap, scale: Normalize) -> None:
    """Draw the picture in grey, and each layer's attention over it in colour, the more opaque the stronger it is."""
    grey = word_map.picture.convert("L")
    # Left, right, bottom and top edge of the picture in pixels, so that the patches are stretched over all of it.
    extent = (-0.5, grey.width - 0.5, grey.height - 0.5, -0.5)

    relative = relative_weights(word_map)
    for index, layer in enumerate(word_map.layers):
        axis = axes[index]
        axis.imshow(grey, cmap="gray", vmin=0, vmax=255)
        opacity = MAX_OPACITY * np.clip(scale(relative[index]), 0, 1)
        axis.imshow(relative[index], extent=extent, cmap=COLOURS, norm=scale, alpha=opacity, interpolation="nearest")

        share = word_map.weights[index].sum()
        label = f"layer {layer}, {share:.0%} on picture"
        # In the middle, just below the map.
        axis.text(0.5, -0.04, label, fontsize=7, ha="center", va="top", transform=axis.transAxes)
