"""Measures norms up to the decoder, how layers turn tokens, attention to the picture, and the projector's norm module.

Sources: "The Unseen Bias" (arXiv 2512.08374), Tables 1 to 3 and 5, Fig. 1b, 3 to 5, App. G. Every function that
measures returns rows of [`~normllava.diagnostics.table`]. The report's page defines each measure.
"""

from collections.abc import Sequence
from math import sqrt

import numpy as np
import pandas as pd
import torch
from accelerate.utils import align_module_device
from transformers import PreTrainedModel

from normllava.diagnostics.probe import TINY, Record
from normllava.diagnostics.table import make_rows, ratio_rows
from normllava.norms import input_scale, text_norm_target, vocabulary_norms
from normllava.parts import find_projector_norm


def measure_all(model: PreTrainedModel, records: Sequence[Record]) -> pd.DataFrame:
    """Rows of all measures of this module.

    Args:
        model: The model.
        records: The record of each picture.
    """
    measured = [
        measure_interface(records, vocabulary_norms(model)),
        measure_layers(records),
        measure_projector_norm(model),
        measure_attention(records),
    ]
    return pd.concat([rows for rows in measured if rows is not None], ignore_index=True)


def measure_interface(records: Sequence[Record], vocabulary: torch.Tensor) -> pd.DataFrame:
    """Rows of the mean norm at each place up to the decoder, and of the ratio of image to text norms.

    Args:
        records: The record of each picture.
        vocabulary: Norm of the text embedding of each token id, `(vocab_size,)`.
    """
    image_norms = []
    text_norms = []
    embedded_norms = []
    for record in records:
        norms_at_decoder = record.layer_norms[0]
        image_norms.append(norms_at_decoder[record.tokens.image])
        text_norms.append(norms_at_decoder[record.tokens.text])
        text_ids = record.input_ids[record.tokens.text]
        embedded_norms.append(vocabulary[text_ids])

    # Some decoders multiply their input, image and text tokens alike. The norms of embeddings are multiplied by the
    # same factor, so that they can be compared with norms at the decoder.
    scale = input_scale(torch.cat(text_norms), torch.cat(embedded_norms))
    # The mean norm of all text embeddings. The paper gives image tokens this norm.
    target = text_norm_target(scale * vocabulary)
    image_means = mean_by_sample(image_norms)
    text_means = mean_by_sample(text_norms)
    in_prompt_means = mean_by_sample([scale * norms for norms in embedded_norms])

    tables = []
    for place in ("encoder_output", "projector_input", "projector_output"):
        # All records are of one model, so they have the same places.
        if place in records[0].interface:
            means = mean_by_sample([record.interface[place] for record in records])
            tables.append(make_rows(place, means, "image"))
    tables += [
        make_rows("at_decoder", image_means, "image"),
        make_rows("at_decoder", text_means, "text"),
        make_rows("in_prompt", in_prompt_means, "text"),
        make_rows("vocabulary", modality="text", whole=target),
        ratio_rows("ratio", image_means, text_means),
        make_rows("ratio_to_vocabulary", image_means / target),
    ]
    return pd.concat(tables)


def mean_by_sample(samples: Sequence[torch.Tensor]) -> np.ndarray:
    """Mean over the tokens of each sample, `(num_samples,)`.

    Args:
        samples: For each sample, a number for each token, `(num_tokens,)`.
    """
    return np.array([numbers.double().mean().item() for numbers in samples])


def measure_layers(records: Sequence[Record]) -> pd.DataFrame:
    """Rows of norms and turning by layer and modality, and of differences between the modalities.

    Turning is 1 minus the cosine of a layer's input and output.
    """
    image_masks = [record.tokens.image for record in records]
    text_masks = [record.tokens.text for record in records]
    layer_norms = [record.layer_norms for record in records]
    cosines = [record.cosines for record in records]

    num_layers = len(cosines[0])
    layers = range(num_layers)
    # Norms are those of each layer's input, and then of the last layer's output.
    norm_layers = range(num_layers + 1)

    tables = []
    for modality, masks in (("image", image_masks), ("text", text_masks)):
        tables += [
            make_rows("norm", mean_by_layer(layer_norms, masks), modality, norm_layers),
            make_rows("turning", 1 - mean_by_layer(cosines, masks), modality, layers),
        ]

    image_norms = mean_by_layer(layer_norms, image_masks)
    text_norms = mean_by_layer(layer_norms, text_masks)
    gap = mean_by_layer(cosines, image_masks) - mean_by_layer(cosines, text_masks)
    tables.append(ratio_rows("norm_ratio", image_norms, text_norms, norm_layers))
    tables.append(make_rows("gap", gap, layers=layers))
    return pd.concat(tables)


def mean_by_layer(samples: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> np.ndarray:
    """Mean over the chosen tokens of each sample, by layer: `(num_samples, num_layers)`.

    Args:
        samples: For each sample, a number for each layer and token, `(num_layers, S)`.
        masks: For each sample, True for the chosen tokens, `(S,)`.
    """
    means = []
    for numbers, mask in zip(samples, masks, strict=True):
        chosen = numbers[:, mask].double()  # [num_layers, num_chosen]
        means.append(chosen.mean(dim=1).numpy())
    return np.stack(means)


def measure_attention(records: Sequence[Record]) -> pd.DataFrame | None:
    """Rows of the text's attention to the picture by layer; `None` if the model's attention was not recorded."""
    recorded_layers = [set(record.attention) for record in records]
    layers = sorted(set.intersection(*recorded_layers))
    if not layers:
        return None

    # For each measure and picture, the share in each layer.
    shares: dict[str, list[list[float]]] = {
        "attention": [],
        "attention_even": [],
        "attention_without_sinks": [],
        "attention_even_without_sinks": [],
    }
    for record in records:
        measured = [record.attention[layer] for layer in layers]  # [num_heads, num_queries, S] each
        # Uniform attention has the same weight for each key that a query sees.
        even = [record.visible[layer][None] for layer in layers]  # [1, num_queries, S] each

        # Shares over all keys. A sink (a token with a massive norm) at a picture's position counts as an image token.
        image_keys_with_sinks = record.tokens_with_sinks.image
        all_keys = torch.ones_like(image_keys_with_sinks)
        shares["attention"].append(attention_shares(measured, image_keys_with_sinks, all_keys))
        shares["attention_even"].append(attention_shares(even, image_keys_with_sinks, all_keys))

        # Shares over image and text tokens that are no sinks.
        image_keys = record.tokens.image
        ordinary_keys = image_keys | record.tokens.text
        shares["attention_without_sinks"].append(attention_shares(measured, image_keys, ordinary_keys))
        shares["attention_even_without_sinks"].append(attention_shares(even, image_keys, ordinary_keys))

    return pd.concat([make_rows(measure, by_picture, layers=layers) for measure, by_picture in shares.items()])


def attention_shares(
    attention: Sequence[torch.Tensor], is_image_token: torch.Tensor, is_counted_key: torch.Tensor
) -> list[float]:
    """By layer, the share of the attention to counted keys that goes to image tokens, as mean over heads and queries.

    Args:
        attention: For each layer, weights that don't have to sum to 1, `(num_heads, num_queries, S)`.
        is_image_token: Mask of the keys that are image tokens, `(S,)`.
        is_counted_key: Mask of the keys that count; the attention to all other keys is set to 0, `(S,)`.
    """
    shares = []
    for weights in attention:
        counted_weights = weights.double() * is_counted_key
        to_image = counted_weights[..., is_image_token].sum(dim=-1)  # [num_heads, num_queries]
        to_all = counted_weights.sum(dim=-1).clamp(min=TINY)  # [num_heads, num_queries]
        shares.append((to_image / to_all).mean().item())
    return shares


def measure_projector_norm(model: PreTrainedModel) -> pd.DataFrame | None:
    """Rows on the gain and bias of the norm module that ends the projector; `None` for a model without this module."""
    norm = find_projector_norm(model)
    if norm is None:
        return None

    # Offloaded weights are on the meta device; inside this context they are loaded.
    with align_module_device(norm):
        gain = norm.weight.detach().double().cpu()
        bias = torch.zeros_like(gain) if norm.bias is None else norm.bias.detach().double().cpu()

    # LayerNorm gives a token the L2 norm √width, and then multiplies it by the gain. When a model is composed, each
    # entry of the gain is set so that the product has the target norm. Without a target norm each entry is 1.
    target = getattr(model.config, "projector_norm_target", None)
    gain_at_start = 1.0 if target is None else target / sqrt(len(gain))
    return pd.concat([
        make_rows("gain_l2", whole=gain.norm().item()),
        make_rows("bias_l2", whole=bias.norm().item()),
        make_rows("gain_drift", whole=(gain - gain_at_start).norm().item()),
    ])  # fmt: skip
