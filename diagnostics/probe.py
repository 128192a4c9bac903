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


def turn(before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    """What a layer does to each token, from the hidden states around it, `(S, hidden_size)` each, float32.

    Returns:
        `(5, S)`: norm before and after, their cosine, norm of the residual update over that before, and its cosine.
    """
    update = after - before
    norms, update_norms, norms_after = (torch.linalg.vector_norm(x, dim=-1) for x in (before, update, after))
    cosines = (before * after).sum(-1) / (norms * norms_after).clamp(min=1e-30)
    update_cosines = (before * update).sum(-1) / (norms * update_norms).clamp(min=1e-30)
    return torch.stack([norms, norms_after, cosines, update_norms / norms.clamp(min=1e-30), update_cosines])


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
        self._model, self._inputs, self._tokens = model, inputs, tokens
        self._layers, self._queries = layers, choose_queries(tokens)
        self._key_positions = torch.arange(len(tokens.text)) if key_positions is None else key_positions
        self._hooks = ExitStack()
        self._interface: dict[str, torch.Tensor] = {}
        self._turns: dict[int, torch.Tensor] = {}

    def __enter__(self) -> Self:
        decoder = find_decoder(self._model)
        self._notes = self._hooks.enter_context(InterfaceHooks(self._model, self._see_interface)).notes
        for number, layer in enumerate(decoder.layers):
            handle = layer.register_forward_hook(partial(self._see_layer, number), with_kwargs=True)
            self._hooks.callback(handle.remove)
        watched = {n: layer for n, layer in enumerate(decoder.layers) if self._layers is None or n in self._layers}
        length = len(self._tokens.text)
        calls = AttentionCalls(decoder, watched, self._queries, self._key_positions, length)
        self._calls = self._hooks.enter_context(calls)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.close()

    @torch.no_grad()
    def _see_interface(self, place: str, features: torch.Tensor) -> None:
        if place == "decoder":
            self._check_entrance(features)
            self._tokens = find_newlines(self._model, features[0], self._tokens)
        elif not place.endswith("_mlp"):
            real = self._inputs.get("pixel_attention_mask")
            if place == "encoder_output" and real is not None and real.shape == features.shape[:-1]:
                features = features[real.bool().to(features.device)]  # without the patches that pad a tile (LFM2-VL)
            # Several calls where tiles or views pass one by one.
            before = self._interface.get(place, torch.empty(0))
            self._interface[place] = torch.cat([before, token_norms(features).flatten().cpu()])

    def _check_entrance(self, embeddings: torch.Tensor) -> None:
        """Check that the decoder's input has one hidden state per token, `(1, S, hidden_size)`, and visual ones."""
        if embeddings.shape[:-1] != (1, len(self._tokens.text)):
            raise DiagnosticsError(
                f"{type(self._model).__name__} can't be measured: the input of its decoder's first layer has shape "
                f"{tuple(embeddings.shape)}, not one hidden state for each of {len(self._tokens.text)} tokens."
            )
        token = torch.tensor([[image_token_id(self._model)]], device=embeddings.device)
        placeholder = self._model.get_input_embeddings()(token)[0].to(embeddings)
        visual = embeddings[0, self._tokens.visual]
        if torch.equal(visual, placeholder.expand(len(visual), -1)):
            raise DiagnosticsError(
                f"{type(self._model).__name__} has no visual tokens: at a picture's positions its decoder gets "
                "the embedding of a placeholder, so pictures reach it another way, such as cross-attention."
            )

    @torch.no_grad()
    def _see_layer(self, number: int, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        after = output if isinstance(output, torch.Tensor) else output[0]
        before = args[0] if args else kwargs["hidden_states"]
        before, after = before[0].to(after.device, torch.float32), after[0].float()  # [S, hidden_size]
        self._turns[number] = turn(before, after).cpu()  # a single transfer

    def record(self) -> Record:
        """The record of the forward pass. Raises `DiagnosticsError` if the hidden states overflowed."""
        turns = torch.stack([self._turns[number] for number in sorted(self._turns)], dim=1)  # [5, L, S]
        entering, leaving, cosines, update_ratios, update_cosines = turns
        layer_norms, tokens = torch.cat([entering, leaving[-1:]]), self._tokens
        if not layer_norms[:, tokens.visual | tokens.text].isfinite().all():
            raise DiagnosticsError(
                f"Hidden states overflow in {self._model.dtype}: load the model with --dtype bfloat16 or float32."
            )
        return Record(
            input_ids=self._inputs["input_ids"][0].cpu(),
            tokens=tokens.without("sink", find_sinks(layer_norms, tokens)),
            with_sinks=tokens,
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


def choose_queries(tokens: Tokens) -> torch.Tensor:
    """The last ordinary text tokens after the last picture, and the position that the answer begins from, `(n,)`."""
    attended = (~tokens.excluded["padding"]).nonzero()[:, 0]
    past = attended > tokens.visual.nonzero()[-1, 0]
    queries = attended[past & tokens.text[attended]][-MAX_QUERIES + 1 :]
    return torch.unique(torch.cat([queries, attended[-1:]]))
