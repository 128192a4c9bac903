"""Records one forward pass of a vision-language model with hooks; every other measure here is computed from it.

It works for every model of transformers whose parts `diagnostics.parts` finds, and leaves logits unchanged, bit for
bit. Per-token numbers are reduced inside the hooks, in float32, so that no hidden states are kept; attention is kept
for chosen queries only, keys and values for chosen tokens.
"""

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from diagnostics.attention_call import AttentionCalls
from diagnostics.hooks import InterfaceHooks
from diagnostics.norms import token_norms
from diagnostics.parts import DiagnosticsError, find_decoder, image_token_id
from diagnostics.tokens import Inputs, Tokens, find_newlines, find_sinks


# Maximum number of attention rows kept per sample.
MAX_QUERIES = 16
# Places of the hooks whose norms a record has, as far as the model has the place.
BEFORE_DECODER = ("encoder_output", "projector_input", "norm_input", "projector_output")
# What norms are divided by at least.
TINY = 1e-30


@dataclass
class Record:
    """Results of one forward pass over one sample of length `S`, with `L` decoder layers.

    Attributes:
        input_ids: `(S,)`.
        tokens: Type of each position, sinks excluded too.
        with_sinks: The same before sinks were excluded.
        interface: Norms of the tokens at each place of [`InterfaceHooks`] before the decoder that the model has,
            `(num_tokens,)`.
        layer_norms: Norm of each layer's input, and of the last layer's output, which is before the decoder's final
            norm: `(L + 1, S)`.
        cosines: Between a layer's input and output, `(L, S)`.
        update_ratios: Norm of the layer's residual update over that of its input, `(L, S)`.
        update_cosines: Between a layer's input and its residual update, `(L, S)`.
        attention, visible, keys, values: By layer, as in [`AttentionCalls`]; some layers may lack.
        queries: Positions of the queries of `attention`, `(num_queries,)`.
        key_positions: Positions of the keys and values, `(num_kept,)`.
        notes: What could not be recorded, and why.
    """

    input_ids: torch.Tensor
    tokens: Tokens
    with_sinks: Tokens
    interface: dict[str, torch.Tensor]
    layer_norms: torch.Tensor
    cosines: torch.Tensor
    update_ratios: torch.Tensor
    update_cosines: torch.Tensor
    attention: dict[int, torch.Tensor]
    visible: dict[int, torch.Tensor]
    keys: dict[int, torch.Tensor]
    values: dict[int, torch.Tensor]
    queries: torch.Tensor
    key_positions: torch.Tensor
    notes: list[str]


class Probe:
    """Records a model's forward pass over one sample. Use as a context manager, which removes the hooks on exit.

        with Probe(model, inputs, tokens) as probe:
            model(**inputs)
        record = probe.record()

    Args:
        model: The model. Attention is recorded if its decoder runs with `attn_implementation="sdpa"`.
        inputs: What its processor returns for one sample, `input_ids` of shape `(1, S)`.
        tokens: Type of each position, as far as the inputs tell: see [`~diagnostics.tokens.classify_sample`].
        layers: Layers whose attention rows and keys are kept; all by default.
        key_positions: Positions whose keys are kept, of the sample; all by default.
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
        self._length = len(tokens.text)
        self._layers = layers
        self._queries = choose_queries(tokens)
        self._key_positions = torch.arange(self._length) if key_positions is None else key_positions
        self._hooks = ExitStack()
        self._interface: dict[str, torch.Tensor] = {}
        self._turns: dict[int, torch.Tensor] = {}  # By layer, what `describe_turn` returns.

    def __enter__(self) -> Self:
        decoder = find_decoder(self._model)

        interface_hooks = InterfaceHooks(self._model, self._see_interface)
        self._notes = self._hooks.enter_context(interface_hooks).notes

        watched = {}
        for number, layer in enumerate(decoder.layers):
            handle = layer.register_forward_hook(partial(self._see_layer, number), with_kwargs=True)
            self._hooks.callback(handle.remove)
            if self._layers is None or number in self._layers:
                watched[number] = layer

        attention_calls = AttentionCalls(decoder, watched, self._queries, self._key_positions, self._length)
        self._calls = self._hooks.enter_context(attention_calls)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    @torch.no_grad()
    def _see_interface(self, place: str, features: torch.Tensor) -> None:
        if place == "decoder":
            self._check_entrance(features)
            self._tokens = find_newlines(self._model, features[0], self._tokens)
        elif place in BEFORE_DECODER:
            if place == "encoder_output":
                features = self._without_padding(features)
            # A place is passed several times where tiles or views pass one by one.
            before = self._interface.get(place, torch.empty(0))
            self._interface[place] = torch.cat([before, token_norms(features).flatten().cpu()])

    def _without_padding(self, features: torch.Tensor) -> torch.Tensor:
        """The encoder's features without those of the patches that pad a tile (LFM2-VL)."""
        is_real = self._inputs.get("pixel_attention_mask")
        if is_real is None or is_real.shape != features.shape[:-1]:
            return features
        return features[is_real.bool().to(features.device)]

    def _check_entrance(self, embeddings: torch.Tensor) -> None:
        """Check that the decoder's input has one hidden state per token, `(1, S, hidden_size)`, and image tokens."""
        name = type(self._model).__name__
        if embeddings.shape[:-1] != (1, self._length):
            raise DiagnosticsError(
                f"{name} can't be measured: the input of its decoder's first layer has shape "
                f"{tuple(embeddings.shape)}, not one hidden state for each of {self._length} tokens."
            )

        image_token = torch.tensor([[image_token_id(self._model)]], device=embeddings.device)
        placeholder = self._model.get_input_embeddings()(image_token)[0].to(embeddings)  # [1, hidden_size]
        at_picture = embeddings[0, self._tokens.visual]
        if torch.equal(at_picture, placeholder.expand(len(at_picture), -1)):
            raise DiagnosticsError(
                f"{name} has no image tokens: at a picture's positions its decoder gets the embedding of a "
                "placeholder, so pictures reach it another way, such as cross-attention."
            )

    @torch.no_grad()
    def _see_layer(self, number: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        before = args[0] if args else kwargs["hidden_states"]
        after = output if isinstance(output, torch.Tensor) else output[0]
        turn = describe_turn(before[0].to(after.device, torch.float32), after[0].float())
        self._turns[number] = turn.cpu()  # a single transfer

    def record(self) -> Record:
        """The record of the forward pass.

        Raises:
            DiagnosticsError: if the hidden states overflowed.
        """
        turns = torch.stack([self._turns[number] for number in sorted(self._turns)], dim=1)  # [5, L, S]
        norms_before, norms_after, cosines, update_ratios, update_cosines = turns
        layer_norms = torch.cat([norms_before, norms_after[-1:]])  # [L + 1, S]

        with_sinks = self._tokens
        if not layer_norms[:, with_sinks.visual | with_sinks.text].isfinite().all():
            raise DiagnosticsError(
                f"Hidden states overflow in {self._model.dtype}: load the model with --dtype bfloat16 or float32."
            )

        return Record(
            input_ids=self._inputs["input_ids"][0].cpu(),
            tokens=with_sinks.without("sink", find_sinks(layer_norms, with_sinks)),
            with_sinks=with_sinks,
            interface=self._interface,
            layer_norms=layer_norms,
            cosines=cosines,
            update_ratios=update_ratios,
            update_cosines=update_cosines,
            attention=self._calls.attention,
            visible=self._calls.visible,
            keys=self._calls.keys,
            values=self._calls.values,
            queries=self._queries,
            key_positions=self._key_positions,
            notes=[*self._notes, *self._calls.notes()],
        )


def describe_turn(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What a layer does to each token, from the hidden states around it, `(S, hidden_size)` each, float32.

    Returns:
        `(5, S)`: norm before and after, their cosine, norm of the residual update over that before, and its cosine.
    """
    update = after - before
    norms_before = token_norms(before)
    norms_after = token_norms(after)
    update_norms = token_norms(update)

    cosines = (before * after).sum(dim=-1) / (norms_before * norms_after).clamp(min=TINY)
    update_ratios = update_norms / norms_before.clamp(min=TINY)
    update_cosines = (before * update).sum(dim=-1) / (norms_before * update_norms).clamp(min=TINY)
    return torch.stack([norms_before, norms_after, cosines, update_ratios, update_cosines])


def choose_queries(tokens: Tokens) -> torch.Tensor:
    """The last ordinary text tokens after the last picture, and the position that the answer begins from, `(n,)`."""
    attended = (~tokens.excluded["padding"]).nonzero()[:, 0]
    last_image_token = tokens.visual.nonzero()[-1, 0]
    is_question = (attended > last_image_token) & tokens.text[attended]

    of_question = attended[is_question][-(MAX_QUERIES - 1) :]
    answer_begins_from = attended[-1:]
    return torch.unique(torch.cat([of_question, answer_begins_from]))
