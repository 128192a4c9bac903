"""Norms on the way from the vision encoder into the decoder (Tables 1 to 3 of "The Unseen Bias", arXiv 2512.08374)."""

from collections.abc import Sequence

import numpy as np
import torch

from diagnostics.norms import text_norm_target
from diagnostics.probe import Record
from diagnostics.results import Interface
from diagnostics.statistics import by_picture, estimate, ratio, sample_means, summarize


DEFINITIONS = {
    "encoder_output": "last hidden states of the vision encoder, class token included; the output of a merger inside "
    "the encoder counts as projector_output",
    "projector_input": "input of the projector: from the encoder layer that the model reads, after any cropping or "
    "merging of tokens before the projector",
    "projector_output": "output of the projector",
    "visual_at_decoder": "visual tokens that enter the decoder's first layer",
    "text_at_decoder": "ordinary text tokens that enter the decoder's first layer",
    "text_in_prompt": "output of the embedding layer for the prompt's ordinary text tokens, times what the decoder "
    "multiplies all that enters it by (Granite's embedding_multiplier)",
    "vocabulary": "the same for every token of the vocabulary, all-zero rows left out; its mean is T (eq. 11)",
}


def measure_interface(
    records: Sequence[Record], pictures: np.ndarray, vocabulary: torch.Tensor, hidden_size: int
) -> Interface:
    """Norms at each place of `DEFINITIONS`, and the ratio of visual to text norms.

    Args:
        records: One for each sample.
        pictures: Number of each sample's picture.
        vocabulary: Norms of the embedding layer's output by token id, `(vocab_size,)`.
        hidden_size: Width of the decoder.

    Returns:
        A summary for each place; `ratio`: mean norm of visual tokens over that of text tokens at the decoder;
        `ratio_to_vocabulary`: the same over T.
    """
    before_decoder = {
        place: summarize([record.interface[place][0] for record in records], pictures, records[0].interface[place][1])
        for place in ("encoder_output", "projector_input", "projector_output")
        if place in records[0].interface
    }
    visual = [record.layer_norms[0, record.tokens.visual] for record in records]
    text = [record.layer_norms[0, record.tokens.text] for record in records]
    in_prompt = [vocabulary[record.input_ids[record.tokens.text]] for record in records]
    scale = input_scale(torch.cat(text), torch.cat(in_prompt))
    vocabulary, in_prompt = scale * vocabulary, [scale * norms for norms in in_prompt]
    visual_means, text_means = (by_picture(sample_means(samples), pictures) for samples in (visual, text))
    return Interface(
        **before_decoder,
        visual_at_decoder=summarize(visual, pictures, hidden_size),
        text_at_decoder=summarize(text, pictures, hidden_size),
        text_in_prompt=summarize(in_prompt, pictures, hidden_size),
        vocabulary=summarize([vocabulary[vocabulary > 0]], np.zeros(1), hidden_size),
        ratio=ratio(visual_means, text_means),
        ratio_to_vocabulary=estimate(visual_means / text_norm_target(vocabulary)),
    )


def input_scale(entering: torch.Tensor, embedded: torch.Tensor) -> float:
    """What a decoder multiplies its input by: 1 unless it is the same for every one of several text tokens. Positions
    that are added give them factors of their own.

    Args:
        entering: Norms of the text tokens that enter the first layer, `(num_tokens,)`.
        embedded: Norms of their embeddings, `(num_tokens,)`.
    """
    factors = (entering / embedded)[embedded > 0]
    if len(factors) < 2:
        return 1.0
    scale = factors.median()
    is_one_factor = (factors - scale).abs().max() < 0.02 * scale
    return scale.item() if is_one_factor and (scale - 1).abs() > 0.02 else 1.0
