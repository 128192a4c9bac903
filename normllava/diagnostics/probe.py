"""Records one forward pass of a vision-language model with hooks. The measures are computed from the record.

Recording works for every model of transformers whose parts `normllava.parts` finds. The logits stay the same, bit
for bit. Hidden states are not kept: the hooks reduce them to a few float32 numbers per token. Attention is kept for
chosen queries only, and keys and values for chosen tokens only.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from normllava.diagnostics.attention_call import AttentionCalls
from normllava.hooks import InterfaceHooks
from normllava.norms import token_norms
from normllava.parts import DiagnosticsError, find_decoder, image_token_id, layer_input
from normllava.tokens import Inputs, Tokens, exclude_newlines, find_sinks


# Maximum number of queries per sample whose attention is kept.
MAX_QUERIES = 16
# Names that `InterfaceHooks` gives to the places before the decoder.
PLACES_BEFORE_DECODER = ("encoder_output", "projector_input", "projector_output")
# Smallest divisor, so that a zero vector does not give NaN.
TINY = 1e-30


@dataclass
class Record:
    """Results of one forward pass over one sample of length `S`, with `L` decoder layers.

    In `attention`, `visible`, `keys` and `values`, a layer that was not recorded is missing.

    Attributes:
        input_ids: Token ids of the sample, `(S,)`.
        tokens: Type of each position; sinks are excluded.
        tokens_with_sinks: Type of each position, where sinks still count as image or text tokens.
        interface: By place, norms of the picture's features, `(num_features,)`, for each of the
            `PLACES_BEFORE_DECODER` that the model has.
        layer_norms: L2 norm of each layer's input, and then of the last layer's output before the decoder's final
            norm module, `(L + 1, S)`.
        cosines: Cosine of each layer's input and output, `(L, S)`.
        attention: By layer, attention probabilities of the queries, `(num_heads, num_queries, S)`.
        visible: By layer, mask of the keys that each query sees, `(num_queries, S)`.
        keys: By layer, keys before rotary embedding, `(num_key_value_heads, num_kept, head_dim)`.
        values: By layer, values as attention gets them, `(num_key_value_heads, num_kept, value_head_dim)`.
        queries: Positions of the queries in `attention` and `visible`, `(num_queries,)`.
        key_positions: Positions of the tokens in `keys` and `values`, `(num_kept,)`.
        notes: What could not be recorded, and why.
    """

    input_ids: torch.Tensor
    tokens: Tokens
    tokens_with_sinks: Tokens
    interface: dict[str, torch.Tensor]
    layer_norms: torch.Tensor
    cosines: torch.Tensor
    attention: dict[int, torch.Tensor]
    visible: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    queries: torch.Tensor
    key_positions: torch.Tensor
    notes: list[str]


class Probe:
    """A context manager that records a model's forward pass over one sample, and removes its hooks on exit.

        with Probe(model, inputs, tokens) as probe:
            model(**inputs)
        record = probe.record()

    Args:
        model: The model. Attention is recorded if its decoder runs with `attn_implementation="sdpa"`.
        inputs: What the model's processor returns for one sample, `input_ids` of shape `(1, S)`.
        tokens: What [`~normllava.tokens.classify_sample`] returns: the type of each position, from the inputs alone.
        layers: Layers whose attention, keys and values are kept; all by default.
        key_positions: Positions in the sample whose keys and values are kept, `(num_kept,)`; all by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Inputs,
        tokens: Tokens,
        layers: Collection[int] | None = None,
        key_positions: torch.Tensor | None = None,
    ) -> None:
        self._model = model
        self._inputs = inputs
        self._tokens = tokens
        self._length = len(tokens.text)  # `text` is a mask over all positions
        self._layers = layers
        self._queries = choose_queries(tokens)
        self._key_positions = torch.arange(self._length) if key_positions is None else key_positions
        self._hooks = ExitStack()
        self._interface: dict[str, torch.Tensor] = {}
        # What `describe_change` returns for each layer, by the layer's number.
        self._changes: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Self:
        decoder = find_decoder(self._model)

        # If registering fails, leaving the `with` block removes the hooks that are registered already. If it succeeds,
        # `pop_all` takes the hooks out of the block, and they stay until `__exit__`.
        with ExitStack() as hooks:
            self._register(hooks, decoder)
            self._hooks = hooks.pop_all()
        return self

    def _register(self, hooks: ExitStack, decoder: Any) -> None:
        """Register all hooks of the probe, and add their removal to `hooks`."""
        interface_hooks = InterfaceHooks(self._model, self._record_place)
        self._notes = hooks.enter_context(interface_hooks).notes

        chosen_layers = {}
        for number, layer in enumerate(decoder.layers):
            handle = layer.register_forward_hook(partial(self._record_layer, number), with_kwargs=True)
            hooks.callback(handle.remove)
            if self._layers is None or number in self._layers:
                chosen_layers[number] = layer

        attention_calls = AttentionCalls(
            decoder,
            layers=chosen_layers,
            queries=self._queries,
            key_positions=self._key_positions,
            length=self._length,
        )
        self._calls = hooks.enter_context(attention_calls)

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    @torch.no_grad()
    def _record_place(self, place: str, features: torch.Tensor) -> None:
        """Record the norms of features at a place before the decoder. At the decoder, look for newline features."""
        if place == "decoder":
            self._check_decoder_input(features)
            self._tokens = exclude_newlines(self._model, features[0], self._tokens)
            return
        if place not in PLACES_BEFORE_DECODER:  # inside of the projector
            return

        if place == "encoder_output":
            features = self._without_padding(features)
        norms = token_norms(features).flatten().cpu()
        # A model that encodes the tiles of a picture one by one reaches a place once for each tile.
        norms_of_earlier_tiles = self._interface.get(place, torch.empty(0))
        self._interface[place] = torch.cat([norms_of_earlier_tiles, norms])

    def _without_padding(self, features: torch.Tensor) -> torch.Tensor:
        """The encoder's features, except those of the empty patches with which LFM2-VL pads a tile."""
        is_real_patch = self._inputs.get("pixel_attention_mask")
        if is_real_patch is None:
            return features
        # In other model families the mask is over pixels, not over patches, so its shape differs.
        if is_real_patch.shape != features.shape[:-1]:
            return features
        return features[is_real_patch.bool().to(features.device)]

    def _check_decoder_input(self, embeddings: torch.Tensor) -> None:
        """Check that the decoder's input has shape `(1, S, hidden_size)` and holds a picture's features.

        Raises:
            DiagnosticsError: if the shape differs, or if there are no features of a picture.
        """
        name = type(self._model).__name__
        if embeddings.shape[:-1] != (1, self._length):
            raise DiagnosticsError(
                f"{name} can't be measured: the input of its decoder's first layer has shape "
                f"{tuple(embeddings.shape)}, not one hidden state for each of {self._length} tokens."
            )

        # Without features, a picture's positions hold the embedding of the image token, which is only a placeholder.
        placeholder_id = torch.tensor([[image_token_id(self._model)]], device=embeddings.device)
        placeholder = self._model.get_input_embeddings()(placeholder_id)[0].to(embeddings)  # [1, hidden_size]
        image_tokens = embeddings[0, self._tokens.image]
        if torch.equal(image_tokens, placeholder.expand_as(image_tokens)):
            raise DiagnosticsError(
                f"{name} has no image tokens: at a picture's positions its decoder gets the embedding of a "
                "placeholder, so pictures reach it another way, such as cross-attention."
            )

    @torch.no_grad()
    def _record_layer(self, number: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        """Forward hook of layer `number` of the decoder: records how the layer changes each token."""
        before = layer_input(args, kwargs)
        after = output if isinstance(output, torch.Tensor) else output[0]
        # Where a model is spread over devices, a layer may get its input from another device.
        sample_before = before[0].to(after.device, torch.float32)  # [S, hidden_size]
        sample_after = after[0].float()  # [S, hidden_size]
        self._changes[number] = describe_change(sample_before, sample_after).cpu()

    def record(self) -> Record:
        """The record of the forward pass, which has to be over.

        Raises:
            DiagnosticsError: if the hidden states overflowed.
        """
        changes = torch.stack([self._changes[number] for number in sorted(self._changes)], dim=1)  # [3, L, S]
        norms_before, norms_after, cosines = changes  # [L, S] each
        layer_norms = torch.cat([norms_before, norms_after[-1:]])  # [L + 1, S]

        tokens_with_sinks = self._tokens
        is_image_or_text = tokens_with_sinks.image | tokens_with_sinks.text
        if not layer_norms[:, is_image_or_text].isfinite().all():
            raise DiagnosticsError(
                f"Hidden states overflow in {self._model.dtype}: load the model with --dtype bfloat16 or float32."
            )

        is_sink = find_sinks(layer_norms, tokens_with_sinks)
        return Record(
            input_ids=self._inputs["input_ids"][0].cpu(),
            tokens=tokens_with_sinks.exclude("sink", is_sink),
            tokens_with_sinks=tokens_with_sinks,
            interface=self._interface,
            layer_norms=layer_norms,
            cosines=cosines,
            attention=self._calls.attention,
            visible=self._calls.visible,
            keys=self._calls.keys,
            values=self._calls.values,
            queries=self._queries,
            key_positions=self._key_positions,
            notes=[*self._notes, *self._calls.notes()],
        )


def describe_change(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """Three numbers for each token that say how a layer changes its hidden state.

    Args:
        before: The layer's input, `(S, hidden_size)`, float32.
        after: The layer's output, `(S, hidden_size)`, float32.

    Returns:
        `(3, S)`: the norm of the input, the norm of the output, and the cosine of input and output.
    """
    norms_before = token_norms(before)
    norms_after = token_norms(after)
    cosines = (before * after).sum(dim=-1) / (norms_before * norms_after).clamp(min=TINY)
    return torch.stack([norms_before, norms_after, cosines])


def choose_queries(tokens: Tokens) -> torch.Tensor:
    """Positions of the queries whose attention is kept, in order, `(num_queries,)`.

    These are the last ordinary text tokens after the last picture, at most `MAX_QUERIES` - 1 of them, and the last
    token of the prompt, from which the model predicts the answer's first token.
    """
    is_in_prompt = ~tokens.excluded["padding"]
    prompt_positions = is_in_prompt.nonzero()[:, 0]
    last_image_position = tokens.image.nonzero()[-1, 0]
    is_text_after_picture = (prompt_positions > last_image_position) & tokens.text[prompt_positions]
    text_positions = prompt_positions[is_text_after_picture]

    last_text_positions = text_positions[-(MAX_QUERIES - 1) :]
    last_position = prompt_positions[-1:]
    queries = torch.cat([last_text_positions, last_position])
    # If the prompt's last token is ordinary text, it is in both tensors. `unique` keeps it once, and sorts.
    return torch.unique(queries)
