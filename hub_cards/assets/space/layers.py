"""Measure and draw the L2 norm and the turning of a question's tokens at each layer, as the diagnostics do.

The turning of a token at a layer is 1 - cosine of the layer's input and output for this token.
"""

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


# A token is an attention sink if its L2 norm is more than this many times the median norm of its modality.
SINK_FACTOR = 10.0
COLOURS = {"image": "#d55e00", "text": "#0072b2"}
# A mean for each layer, by measure ("norm", "turning"), then by modality ("image", "text").
LayerMeans = dict[str, dict[str, list[float]]]


def measure_tokens(model: Any, processor: Any, inputs: Mapping[str, torch.Tensor]) -> LayerMeans:
    """Measure means over the image tokens and over the text tokens of one question, without special tokens and sinks.

    The norm is that of each layer's input and, as the last value, of the last layer's output.
    """
    norms, turning = run_layers(model, inputs)  # [num_layers + 1, num_tokens], [num_layers, num_tokens]
    input_ids = inputs["input_ids"][0].cpu()  # [num_tokens]
    is_image = input_ids == model.config.image_token_id
    is_text = ~is_image & ~is_special_token(processor, input_ids)

    means: LayerMeans = {"norm": {}, "turning": {}}
    for modality, mask in (("image", is_image), ("text", is_text)):
        mask = without_sinks(norms, mask)
        means["norm"][modality] = norms[:, mask].mean(dim=1).tolist()
        means["turning"][modality] = turning[:, mask].mean(dim=1).tolist()
    return means


@torch.no_grad()
def run_layers(model: Any, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the model once, and measure the norm and the turning of every token at each layer.

    Returns:
        Norms, `(num_layers + 1, num_tokens)`, and turning, `(num_layers, num_tokens)`.
    """
    # An entry for each layer, `(num_tokens,)`.
    input_norms: list[torch.Tensor] = []
    output_norms: list[torch.Tensor] = []
    turning: list[torch.Tensor] = []

    def measure_layer(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        # Depending on the model, a layer gets its input by position or by name, and returns a tensor or a tuple.
        layer_input = args[0] if args else kwargs["hidden_states"]
        layer_output = output if isinstance(output, torch.Tensor) else output[0]

        after = layer_output[0].float()  # [num_tokens, hidden_size]
        before = layer_input[0].to(after)  # on the same device, with the same dtype
        input_norms.append(before.norm(dim=-1).cpu())
        output_norms.append(after.norm(dim=-1).cpu())
        turning.append(1 - torch.cosine_similarity(before, after, dim=-1).cpu())

    with ExitStack() as hooks:
        for layer in model.get_decoder().layers:
            hooks.enter_context(layer.register_forward_hook(measure_layer, with_kwargs=True))
        model.base_model(**inputs)

    norms = [*input_norms, output_norms[-1]]
    return torch.stack(norms), torch.stack(turning)


def is_special_token(processor: Any, input_ids: torch.Tensor) -> torch.Tensor:
    """Mask of the special tokens, such as those of the chat format, `(num_tokens,)`."""
    tokenizer = processor.tokenizer
    special_ids = set(tokenizer.all_special_ids)
    for token_id, token in tokenizer.added_tokens_decoder.items():
        if token.special:
            special_ids.add(token_id)
    return torch.isin(input_ids, torch.tensor(sorted(special_ids)))


def without_sinks(norms: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The mask of a modality, `(num_tokens,)`, without the tokens that are attention sinks after any layer."""
    norms_after_layers = norms[1:, mask]  # [num_layers, num_tokens_of_modality]
    medians = norms_after_layers.median(dim=-1, keepdim=True).values  # [num_layers, 1]
    is_sink = (norms_after_layers > SINK_FACTOR * medians).any(dim=0)  # [num_tokens_of_modality]

    # `is_sink` has an entry for each token of the modality, which are the tokens that `mask` selects.
    new_mask = mask.clone()
    new_mask[mask] = ~is_sink
    return new_mask


def draw_layers(means: LayerMeans, means_without_norm_layer: LayerMeans | None) -> Figure:
    """Draw the L2 norm in one panel and the turning in another.

    Args:
        means: The means of the model as it is.
        means_without_norm_layer: The means without the norm layer after the projector, drawn as dashed lines; `None`
            if the model has no such norm layer.
    """
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    norm_panel, turning_panel = figure.subplots(1, 2)
    norm_panel.set(ylabel="L2 norm of tokens", yscale="log")
    turning_panel.set(ylabel="turning, 1 − cosine")

    for measure, panel in (("norm", norm_panel), ("turning", turning_panel)):
        panel.set_xlabel("layer")
        panel.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        for modality, colour in COLOURS.items():
            values = means[measure][modality]
            panel.plot(values, label=modality, color=colour, marker=".")
            if means_without_norm_layer is not None:
                values = means_without_norm_layer[measure][modality]
                label = f"{modality}, without norm"
                panel.plot(values, label=label, color=colour, marker=".", linestyle="--")

    # Both panels have the same lines, so one legend is enough.
    turning_panel.legend(frameon=False)
    return figure
