"""One forward pass of a vision-language model, watched by hooks: what every other measure here is computed from.

The path is the same for every model of transformers with `config.image_token_id`, `get_encoder(modality="image")` and
`get_decoder().layers`. Logits stay what they are, to the bit. Per-token numbers are reduced inside the hooks, in
float32, so that no hidden states are kept; of the attention only the rows of chosen queries are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diagnostics.attraction import compare_updates
from diagnostics.norms import SINK_FACTOR, token_norms
from diagnostics.theory import turning_angle


# What families call the module that takes the vision encoder's features to the decoder's width.
PROJECTORS = ("multi_modal_projector", "mm_projector", "connector", "merger", "visual_embeddings_table")
# Rows of the attention that are kept of one sample, at most.
MAX_QUERIES = 16


class DiagnosticsError(ValueError):
    """What was asked for can't be measured on this model with this data; the message says why and what to do."""


class NoVisualTokensError(DiagnosticsError):
    """The model or the data has no visual tokens."""


@dataclass(frozen=True)
class Tokens:
    """What each position of one sample is; every mask is `(sequence_length,)`.

    Attributes:
        visual: Positions that hold a feature of a picture.
        text: Ordinary text tokens.
        excluded: The positions that are neither, by reason: `"padding"`, `"special"` (BOS, delimiters of chat and of
            pictures, other modalities), `"newline"` (row ends that a model puts among a picture's features), `"sink"`.
    """

    visual: torch.Tensor
    text: torch.Tensor
    excluded: dict[str, torch.Tensor]

    def without(self, reason: str, positions: torch.Tensor) -> "Tokens":
        """The same with more positions excluded."""
        return Tokens(self.visual & ~positions, self.text & ~positions, self.excluded | {reason: positions})


@dataclass
class Record:
    """What one forward pass over one sample showed. `S` is its length, `L` the number of the decoder's layers.

    Attributes:
        input_ids: `(S,)`.
        tokens: Which position is what, sinks excluded too.
        with_sinks: The same before sinks were excluded.
        interface: `(norms, width)` of the tokens at `"encoder"`, `"projector_input"` and `"projector_output"`, where
            the model has these, norms of shape `(num_tokens,)`.
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
    notes: list[str] = field(default_factory=list)


def find_projector(model: PreTrainedModel) -> nn.Module | None:
    """The module that takes vision features to the decoder, found by its name; `None` where none has a known one."""
    found = [(name.count("."), module) for name, module in model.named_modules() if name.split(".")[-1] in PROJECTORS]
    return min(found, key=lambda entry: entry[0])[1] if found else None


def find_encoder(model: PreTrainedModel) -> nn.Module | None:
    """The vision encoder, or `None` where the model names none."""
    encoder = model.get_encoder(modality="image")
    return None if encoder is model or encoder is model.base_model else encoder


def image_token_id(model: PreTrainedModel) -> int:
    """The id that stands for a picture's features in `input_ids`.

    Raises:
        NoVisualTokensError: if the model's config names none.
    """
    token = getattr(model.config, "image_token_id", None)
    if token is None:
        raise NoVisualTokensError(
            f"{type(model).__name__} has no visual tokens: its config names no image_token_id. The diagnostics are "
            "for models that put a picture's features among the decoder's input tokens."
        )
    return token


def named_token_ids(config: Any) -> set[int]:
    """Ids of the tokens that a config gives a role (BOS, delimiters of pictures, other media), but the image's."""
    ids: set[int] = set()
    for part in (config, config.get_text_config()):
        for name, value in part.to_dict().items():
            if name.endswith(("_token_id", "_token_ids", "_token_index")):
                ids |= {
                    token for token in (value if isinstance(value, list | tuple) else [value]) if token is not None
                }
    return ids - {config.image_token_id}


def classify(model: PreTrainedModel, inputs: dict[str, Any], special_ids: Iterable[int] = ()) -> Tokens:
    """Sort the positions of one sample by what they hold; newline features and sinks are not known yet.

    Args:
        model: The model, whose config names the image token and others that are no ordinary text.
        inputs: What its processor returns for one sample, `input_ids` of shape `(1, S)`.
        special_ids: Further ids that are no ordinary text: the tokenizer's special tokens.

    Raises:
        NoVisualTokensError: if there is nothing visual.
        DiagnosticsError: if there is no ordinary text.
    """
    image_token = image_token_id(model)
    special_ids = {*special_ids, *named_token_ids(model.config)} - {image_token}
    input_ids = inputs["input_ids"][0].cpu()
    mask = inputs.get("attention_mask")
    attended = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask[0].bool().cpu()
    special = torch.isin(input_ids, torch.tensor(sorted(special_ids), dtype=input_ids.dtype)) & attended
    visual = (input_ids == image_token) & attended
    if not visual.any():
        raise NoVisualTokensError(
            f"A sample holds no visual tokens (image_token_id {image_token} is not among its {len(input_ids)} input "
            "ids): every sample needs a picture."
        )
    text = attended & ~visual & ~special
    if not text.any():
        raise DiagnosticsError("A sample holds no ordinary text tokens to compare the picture's with: ask a question.")
    return Tokens(visual, text, {"padding": ~attended, "special": special})


def find_grid(inputs: dict[str, Any], visual: torch.Tensor, merge_size: int) -> tuple[int, int] | None:
    """Height and width of a sample's only picture in visual tokens.

    Known from `image_grid_thw`, or where the tokens stand in a run whose length is a square, or in runs of equal
    length with one token between them (rows). Other layouts, such as tiles, give `None`.
    """
    count = int(visual.sum())
    grids = inputs.get("image_grid_thw")
    if grids is not None:
        if len(grids) != 1 or int(grids[0, 0]) != 1:
            return None
        height, width = (int(size) // merge_size for size in grids[0, 1:])
        return (height, width) if height * width == count else None
    positions = visual.nonzero()[:, 0]
    starts = torch.cat([positions[:1], positions[1:][positions.diff() > 1]])
    gaps = positions.diff()[positions.diff() > 1]
    side = round(count**0.5)
    if len(starts) == 1:
        return (side, side) if side * side == count else None
    height = len(starts)
    if count % height == 0 and (gaps == 2).all() and (starts.diff() == count // height + 1).all():
        return height, count // height
    return None


def _first_tensor(values: Iterable[Any]) -> torch.Tensor | None:
    return next((value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()), None)


class Probe:
    """Watches a model's forward pass over one sample. Use as a context manager; hooks are gone after it.

        with Probe(model) as probe:
            model(**inputs)
        record = probe.record()

    Args:
        model: The model. Attention is watched if its decoder runs with `attn_implementation="sdpa"`.
        inputs: What its processor returns for one sample, `input_ids` of shape `(1, S)`.
        special_ids: As in [`classify`].
        layers: Layers whose attention rows and keys are kept; all by default.
        key_positions: Positions whose keys are kept, of the sample; all by default.
        num_images: Pictures in the sample; only a single one has a grid.

    Attributes:
        tokens: Which position is what, as far as the inputs alone tell; newline features only once the model ran.

    Raises:
        NoVisualTokensError: if there is nothing visual to measure; that pictures reach the decoder on another way
            than as tokens shows only when the model runs.
        DiagnosticsError: if there is more than one sample, or no ordinary text.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        special_ids: Iterable[int] = (),
        layers: Iterable[int] | None = None,
        key_positions: torch.Tensor | None = None,
        num_images: int = 1,
    ) -> None:
        if inputs["input_ids"].shape[0] != 1:
            raise DiagnosticsError(f"A probe watches one sample at a time, got {inputs['input_ids'].shape[0]}.")
        self._model, self._inputs, self._num_images = model, inputs, num_images
        self.tokens = classify(model, inputs, special_ids)
        self._decoder_layers: nn.ModuleList = model.get_decoder().layers
        self._layers = set(range(len(self._decoder_layers)) if layers is None else layers)
        self._queries = self._choose_queries()
        length = inputs["input_ids"].shape[1]
        self._key_positions = torch.arange(length) if key_positions is None else key_positions
        self._hooks: list[Any] = []
        self._interface: dict[str, tuple[torch.Tensor, int]] = {}
        self._layer_values: dict[str, dict[int, torch.Tensor]] = {
            name: {}
            for name in ("input_norms", "output_norms", "cosines", "ratios", "update_cosines", "angles", "attractions")
        }
        self._attention: dict[int, torch.Tensor] = {}
        self._visible: dict[int, torch.Tensor] = {}
        self._keys: dict[int, torch.Tensor] = {}
        self._attention_before: Any = None
        self._notes: list[str] = []

    def _choose_queries(self) -> torch.Tensor:
        """The last ordinary text tokens past the last picture, and the position that the answer begins from."""
        attended = (~self.tokens.excluded["padding"]).nonzero()[:, 0]
        past = attended > self.tokens.visual.nonzero()[-1, 0]
        queries = attended[past & self.tokens.text[attended]][-MAX_QUERIES + 1 :]
        return torch.unique(torch.cat([queries, attended[-1:]]))

    def __enter__(self) -> Self:
        try:
            self._watch()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _watch(self) -> None:
        encoder, projector = find_encoder(self._model), find_projector(self._model)
        self._attention_before = ALL_ATTENTION_FUNCTIONS._local_mapping.get("sdpa")
        if encoder is None:
            self._notes.append("vision encoder: not recorded, the model names none")
        else:
            self._hooks.append(encoder.register_forward_hook(self._see_encoder))
        if projector is None:
            self._notes.append(f"projector: not recorded, no module is called {', '.join(PROJECTORS)}")
        else:
            self._hooks.append(projector.register_forward_hook(self._see_projector, with_kwargs=True))
        self._hooks.append(self._decoder_layers[0].register_forward_pre_hook(self._see_entrance, with_kwargs=True))
        for number, layer in enumerate(self._decoder_layers):
            self._hooks.append(layer.register_forward_hook(self._see_layer(number), with_kwargs=True))
            if number in self._layers:
                self._watch_keys(number, layer)
        self._watch_attention()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        ALL_ATTENTION_FUNCTIONS._local_mapping.pop("sdpa", None)
        if self._attention_before is not None:
            ALL_ATTENTION_FUNCTIONS["sdpa"] = self._attention_before

    def _see_encoder(self, module: nn.Module, args: Any, output: Any) -> None:
        features = output if isinstance(output, torch.Tensor) else output.last_hidden_state
        self._interface["encoder"] = (token_norms(features).flatten().cpu(), features.shape[-1])

    def _see_projector(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        before = _first_tensor((*args, *kwargs.values()))
        if before is None or "projector_input" in self._interface:
            return  # Ovis2 looks its indicator tokens up in the same table
        after = output if isinstance(output, torch.Tensor) else _first_tensor(output)
        assert after is not None
        for name, features in (("projector_input", before), ("projector_output", after)):
            self._interface[name] = (token_norms(features).flatten().cpu(), features.shape[-1])

    def _see_layer(self, number: int) -> Callable[..., None]:
        @torch.no_grad()
        def see(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            after = output if isinstance(output, torch.Tensor) else output[0]
            before = args[0] if args else kwargs["hidden_states"]
            h, after = before[0].to(after.device, torch.float32), after[0].float()  # [S, hidden_size]
            update = after - h
            norms, update_norms, output_norms = (torch.linalg.vector_norm(x, dim=-1) for x in (h, update, after))
            update_cosines = (h * update).sum(-1) / (norms * update_norms).clamp(min=1e-30)
            ratios = update_norms / norms.clamp(min=1e-30)
            values = {
                "input_norms": norms,
                "output_norms": output_norms,
                "cosines": (h * after).sum(-1) / (norms * output_norms).clamp(min=1e-30),
                "ratios": ratios,
                "update_cosines": update_cosines,
                "angles": turning_angle(torch.ones_like(ratios), ratios, update_cosines.clamp(-1, 1).acos()),
            }
            stacked = torch.stack(list(values.values())).cpu()  # one transfer for all
            for name, value in zip(values, stacked, strict=True):
                self._layer_values[name][number] = value
            attraction = compare_updates(h, after, self.tokens.visual, self.tokens.text)
            self._layer_values["attractions"][number] = attraction.cpu()

        return see

    @torch.no_grad()
    def _see_entrance(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Look at what enters the decoder: is it visual, and which of it never saw the projector?"""
        embeddings = (args[0] if args else kwargs["hidden_states"])[0]  # [S, hidden_size]
        token = torch.tensor([[image_token_id(self._model)]], device=embeddings.device)
        placeholder = self._model.get_input_embeddings()(token)[0].to(embeddings)
        if torch.equal(embeddings[self.tokens.visual], placeholder.expand(int(self.tokens.visual.sum()), -1)):
            raise NoVisualTokensError(
                f"{type(self._model).__name__} has no visual tokens: what enters its decoder in a picture's place is "
                "the embedding of a placeholder, so pictures reach it on another way, such as cross-attention."
            )
        # LLaVA-NeXT ends each row of a picture with a learned feature.
        for name, parameter in self._model.named_parameters():
            if name.split(".")[-1] == "image_newline":
                newline = (embeddings == parameter.to(embeddings)).all(-1).cpu() & self.tokens.visual
                self.tokens = self.tokens.without("newline", newline)

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
        length = self._inputs["input_ids"].shape[1]

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
        values = self._layer_values
        count = len(self._decoder_layers)
        if len(values["cosines"]) != count:
            raise RuntimeError(f"{len(values['cosines'])} of {count} decoder layers were run; run the model inside.")
        stacked = {name: torch.stack([rows[number] for number in range(count)]) for name, rows in values.items()}
        layer_norms = torch.cat([stacked["input_norms"], stacked["output_norms"][-1:]])
        tokens = self.tokens
        if not layer_norms[:, tokens.visual | tokens.text].isfinite().all():
            raise DiagnosticsError(
                f"Hidden states overflow in {self._model.dtype}: load the model with --dtype bfloat16 or float32."
            )
        self._note_added_features(stacked["input_norms"], stacked["output_norms"], tokens)
        vision_config = getattr(self._model.config, "vision_config", None)
        merge_size = getattr(vision_config, "spatial_merge_size", None)
        if merge_size is None:
            merge_size = getattr(vision_config, "merge_kernel_size", [1])[0]
        return Record(
            input_ids=self._inputs["input_ids"][0].cpu(),
            tokens=tokens.without("sink", find_sinks(layer_norms, tokens)),
            with_sinks=tokens,
            interface=self._interface,
            layer_norms=layer_norms,
            cosines=stacked["cosines"],
            update_ratios=stacked["ratios"],
            update_cosines=stacked["update_cosines"],
            angles=stacked["angles"],
            attractions=stacked["attractions"],
            attention=self._attention,
            visible=self._visible,
            queries=self._queries,
            keys=self._keys,
            key_positions=self._key_positions,
            grid=find_grid(self._inputs, tokens.visual, merge_size) if self._num_images == 1 else None,
            notes=self._notes,
        )

    def _note_added_features(self, entering: torch.Tensor, leaving: torch.Tensor, tokens: Tokens) -> None:
        changed = [
            str(number)
            for number in range(len(entering) - 1)
            if not torch.equal(entering[number + 1, tokens.visual], leaving[number, tokens.visual])
        ]
        if changed:
            self._notes.append(f"visual features are added after layer {', '.join(changed)}, outside of the layers")


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


def find_sinks(layer_norms: torch.Tensor, tokens: Tokens) -> torch.Tensor:
    """Tokens with massive norms past the first layer, which attract attention whatever they hold.

    A token is one if, at some layer, its norm is over `SINK_FACTOR` times the median of its modality in its sample
    (compare the massive activations of arXiv 2402.17762). What enters the first layer doesn't count.

    Args:
        layer_norms: `(L + 1, S)`.
        tokens: Which position is what.
    """
    sinks = torch.zeros_like(tokens.visual)
    for mask in (tokens.visual, tokens.text):
        if mask.any():
            median = layer_norms[1:, mask].median(dim=1, keepdim=True).values
            sinks |= (layer_norms[1:] > SINK_FACTOR * median).any(0) & mask
    return sinks
