"""One forward pass of a vision-language model, watched by hooks: what every other measure here is computed from.

The path is the same for every model of transformers with `config.image_token_id`, `get_encoder(modality="image")` and
`get_decoder().layers`. Logits stay what they are, to the bit. Per-token numbers are reduced inside the hooks, in
float32, so that no hidden states are kept; of the attention only the rows of chosen queries are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diagnostics.attraction import compare_updates
from diagnostics.hooks import InterfaceHooks
from diagnostics.norms import token_norms
from diagnostics.parts import DiagnosticsError, NoVisualTokensError, decoder_layers, image_token_id, merge_size
from diagnostics.tokens import Inputs, Tokens, find_grid, find_newlines, find_sinks
from diagnostics.turning import Turn, turn


# Rows of the attention that are kept of one sample, at most.
MAX_QUERIES = 16


@dataclass
class Record:
    """What one forward pass over one sample showed. `S` is its length, `L` the number of the decoder's layers.

    Attributes:
        input_ids: `(S,)`.
        tokens: Which position is what, sinks excluded too.
        with_sinks: The same before sinks were excluded.
        interface: `(norms, width)` of the tokens at each place of [`InterfaceHooks`] before the decoder that the model
            has, norms of shape `(num_tokens,)`.
        layer_norms: Norm of what enters each layer, and of what leaves the last one: `(L + 1, S)`. That is before the
            decoder's final norm.
        cosines: Between what enters a layer and what leaves it, `(L, S)`.
        update_ratios: Norm of the layer's residual update over that of what enters, `(L, S)`.
        update_cosines: Between what enters a layer and the layer's residual update, `(L, S)`.
        angles: By which equation 8 says that the update turns the token, in radians, `(L, S)`.
        attractions: What [`compare_updates`] returns by layer, `(L, 3)`.
        attention: By layer, the attention probabilities of the queries, `(num_heads, num_queries, S)`.
        visible: By layer, which keys the mask lets each query see, `(num_queries, S)`.
        queries: Positions of the queries, `(num_queries,)`.
        keys: By layer, keys before rotary embedding, `(num_key_value_heads, num_kept, head_dim)`.
        key_positions: Positions of the keys, `(num_kept,)`.
        grid: Height and width of the picture in visual tokens, or `None` where they can't be told.
        notes: What could not be recorded, and why.
    """

    input_ids: torch.Tensor
    tokens: Tokens
    with_sinks: Tokens
    interface: dict[str, tuple[torch.Tensor, int]]
    layer_norms: torch.Tensor
    cosines: torch.Tensor
    update_ratios: torch.Tensor
    update_cosines: torch.Tensor
    angles: torch.Tensor
    attractions: torch.Tensor
    attention: dict[int, torch.Tensor]
    visible: dict[int, torch.Tensor]
    queries: torch.Tensor
    keys: dict[int, torch.Tensor]
    key_positions: torch.Tensor
    grid: tuple[int, int] | None
    notes: list[str]


class Probe:
    """Watches a model's forward pass over one sample. Use as a context manager; hooks are gone after it.

        with Probe(model, inputs, tokens) as probe:
            model(**inputs)
        record = probe.record()

    Args:
        model: The model. Attention is watched if its decoder runs with `attn_implementation="sdpa"`.
        inputs: What its processor returns for one sample, `input_ids` of shape `(1, S)`.
        tokens: Which position is what, as far as the inputs tell: see [`~diagnostics.tokens.classify_sample`].
        layers: Layers whose attention rows and keys are kept; all by default.
        key_positions: Positions whose keys are kept, of the sample; all by default.
        num_images: Pictures in the sample; only a single one has a grid.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: Inputs,
        tokens: Tokens,
        layers: Iterable[int] | None = None,
        key_positions: torch.Tensor | None = None,
        num_images: int = 1,
    ) -> None:
        self._model, self._inputs, self._tokens, self._num_images = model, inputs, tokens, num_images
        self._decoder_layers = decoder_layers(model)
        self._layers = set(range(len(self._decoder_layers)) if layers is None else layers)
        self._queries = choose_queries(tokens)
        self._key_positions = torch.arange(len(tokens.text)) if key_positions is None else key_positions
        self._hooks: list[RemovableHandle | InterfaceHooks] = []
        self._interface: dict[str, tuple[torch.Tensor, int]] = {}
        self._turns: dict[int, torch.Tensor] = {}
        self._attractions: dict[int, torch.Tensor] = {}
        self._attention: dict[int, torch.Tensor] = {}
        self._visible: dict[int, torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}
        self._attention_before: Any = None
        self._notes: list[str] = []

    def __enter__(self) -> Self:
        try:
            self._watch()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _watch(self) -> None:
        self._attention_before = ALL_ATTENTION_FUNCTIONS._local_mapping.get("sdpa")
        interface = InterfaceHooks(self._model, self._see_interface)
        self._hooks.append(interface)
        self._notes += interface.notes
        for number, layer in enumerate(self._decoder_layers):
            self._hooks.append(layer.register_forward_hook(self._see_layer(number), with_kwargs=True))
            if number in self._layers:
                self._watch_keys(number, layer)
        self._watch_attention()

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
        if self._attention_before is not None:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attention_before

    @torch.no_grad()
    def _see_interface(self, place: str, features: torch.Tensor) -> None:
        if place == "decoder":
            self._check_entrance(features[0])
            self._tokens = find_newlines(self._model, features[0], self._tokens)
        elif place not in self._interface:
            self._interface[place] = (token_norms(features).flatten().cpu(), features.shape[-1])

    def _check_entrance(self, embeddings: torch.Tensor) -> None:
        """Is what enters the decoder, `(S, hidden_size)`, visual at all?"""
        token = torch.tensor([[image_token_id(self._model)]], device=embeddings.device)
        placeholder = self._model.get_input_embeddings()(token)[0].to(embeddings)
        visual = embeddings[self._tokens.visual]
        if torch.equal(visual, placeholder.expand(len(visual), -1)):
            raise NoVisualTokensError(
                f"{type(self._model).__name__} has no visual tokens: what enters its decoder in a picture's place is "
                "the embedding of a placeholder, so pictures reach it on another way, such as cross-attention."
            )

    def _see_layer(self, number: int) -> Callable[..., None]:
        @torch.no_grad()
        def see(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            after = output if isinstance(output, torch.Tensor) else output[0]
            before = args[0] if args else kwargs["hidden_states"]
            before, after = before[0].to(after.device, torch.float32), after[0].float()  # [S, hidden_size]
            self._turns[number] = torch.stack(turn(before, after)).cpu()  # one transfer for all
            self._attractions[number] = compare_updates(before, after, self._tokens.visual, self._tokens.text).cpu()

        return see

    def _watch_keys(self, number: int, layer: nn.Module) -> None:
        modules = {name.split(".")[-1]: module for name, module in layer.named_modules()}
        config = self._model.config.get_text_config()
        for name in ("k_norm", "k_proj", "kv_b_proj"):
            if name in modules:
                break
        else:
            self._notes.append(f"keys of layer {number}: not recorded, its attention has no k_proj")
            return
        is_latent = name == "kv_b_proj"
        num_heads = config.num_attention_heads if is_latent else config.num_key_value_heads
        length = len(self._tokens.text)

        def see(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            keys = output.detach()
            if keys.ndim == 4 and keys.shape[1] != length:  # [1, num_heads, S, head_dim], or latents [1, 1, S, size]
                keys = keys.transpose(1, 2)
            keys = keys.reshape(length, num_heads, -1)
            if is_latent:  # of multi-head latent attention, the part of the key that is never rotated
                keys = keys[..., : config.qk_nope_head_dim]
            kept = keys[self._key_positions.to(keys.device)]
            self._keys[number] = kept.transpose(0, 1).float().cpu()  # [num_heads, num_kept, head_dim]

        self._hooks.append(modules[name].register_forward_hook(see))

    def _watch_attention(self) -> None:
        implementation = self._model.get_decoder().config._attn_implementation
        if implementation != "sdpa":
            self._notes.append(f"attention: not recorded, the decoder runs with {implementation}, not with sdpa")
            return
        numbers = {
            id(module): number
            for number, layer in enumerate(self._decoder_layers)
            if number in self._layers
            for module in layer.modules()
        }
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

        def attend(
            module: nn.Module,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            **kwargs: Any,
        ) -> Any:
            number = numbers.get(id(module))
            if number is not None:
                rows, visible = attention_rows(query, key, attention_mask, self._queries, module, **kwargs)
                self._attention[number], self._visible[number] = rows.cpu(), visible.cpu()
            return sdpa(module, query, key, value, attention_mask, **kwargs)

        # Under its own name: transformers chooses masks, and torch kernels, by it.
        ALL_ATTENTION_FUNCTIONS["sdpa"] = attend

    def record(self) -> Record:
        """What was seen.

        Raises:
            RuntimeError: if the forward pass was not run, or not through all layers.
            DiagnosticsError: if the hidden states overflowed.
        """
        count = len(self._decoder_layers)
        if len(self._turns) != count:
            raise RuntimeError(f"{len(self._turns)} of {count} decoder layers were run; run the model inside.")
        turns = Turn(*torch.stack([self._turns[number] for number in range(count)], dim=1))  # each [L, S]
        layer_norms = torch.cat([turns.norms, turns.norms_after[-1:]])
        tokens = self._tokens
        if not layer_norms[:, tokens.visual | tokens.text].isfinite().all():
            raise DiagnosticsError(
                f"Hidden states overflow in {self._model.dtype}: load the model with --dtype bfloat16 or float32."
            )
        self._note_added_features(turns.norms, turns.norms_after)
        return Record(
            input_ids=self._inputs["input_ids"][0].cpu(),
            tokens=tokens.without("sink", find_sinks(layer_norms, tokens)),
            with_sinks=tokens,
            interface=self._interface,
            layer_norms=layer_norms,
            cosines=turns.cosines,
            update_ratios=turns.update_ratios,
            update_cosines=turns.update_cosines,
            angles=turns.angles,
            attractions=torch.stack([self._attractions[number] for number in range(count)]),
            attention=self._attention,
            visible=self._visible,
            queries=self._queries,
            keys=self._keys,
            key_positions=self._key_positions,
            grid=find_grid(self._inputs, tokens.visual, merge_size(self._model)) if self._num_images == 1 else None,
            notes=self._notes,
        )

    def _note_added_features(self, entering: torch.Tensor, leaving: torch.Tensor) -> None:
        visual = self._tokens.visual
        changed = [
            str(number)
            for number in range(len(entering) - 1)
            if not torch.equal(entering[number + 1, visual], leaving[number, visual])
        ]
        if changed:
            self._notes.append(f"visual features are added after layer {', '.join(changed)}, outside of the layers")


def choose_queries(tokens: Tokens) -> torch.Tensor:
    """The last ordinary text tokens past the last picture, and the position that the answer begins from, `(n,)`."""
    attended = (~tokens.excluded["padding"]).nonzero()[:, 0]
    past = attended > tokens.visual.nonzero()[-1, 0]
    queries = attended[past & tokens.text[attended]][-MAX_QUERIES + 1 :]
    return torch.unique(torch.cat([queries, attended[-1:]]))


@torch.no_grad()
def attention_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    mask: torch.Tensor | None,
    rows: torch.Tensor,
    module: nn.Module,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention probabilities of some queries in float32, by the rules of transformers' sdpa, and what they may see.

    Args:
        query: `(1, num_heads, S, head_dim)`, `key` with `num_key_value_heads`.
        mask: `None`, or a boolean or additive mask `(1, 1 or num_heads, S, S)`.
        rows: Positions of the queries, `(num_queries,)`.
        module: The attention module, which says whether it is causal where nothing else does.

    Returns:
        Probabilities `(num_heads, num_queries, S)`, and which keys the mask leaves, `(num_queries, S)`.
    """
    rows = rows.to(query.device)
    chosen, keys = query[0][:, rows].float(), key[0].float()
    keys = keys.repeat_interleave(chosen.shape[0] // keys.shape[0], dim=0)
    scores = chosen @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        scores = scores + position_bias[0][:, rows].float()
    visible = torch.ones(len(rows), keys.shape[1], dtype=torch.bool, device=rows.device)
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal:
            visible = torch.arange(keys.shape[1], device=rows.device)[None] <= rows[:, None]
            scores = scores.masked_fill(~visible, -torch.inf)
    elif mask.dtype == torch.bool:
        visible = mask[0, 0, rows]
        scores = scores.masked_fill(~mask[0][:, rows], -torch.inf)
    else:
        visible = mask[0, 0, rows] > torch.finfo(mask.dtype).min / 2
        scores = scores + mask[0][:, rows].float()
    return scores.softmax(-1), visible
