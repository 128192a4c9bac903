"""Losses that bring visual and text keys together while adapters are trained, as in MaLoRA (arXiv 2510.26721).

Only the paper's abstract was available. It names a multi-kernel MMD (maximum mean discrepancy) and a Gram reference;
all further details are our choice. The losses are computed for each head, from keys before the rotary embedding, and
after the key norm in families that have one, such as Qwen3. Visual keys are the keys of image tokens, which are
distinguished from text tokens as in the diagnostics.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import LlavaForConditionalGeneration

from modeling_normllava import NormLlavaKeyAdapterForConditionalGeneration
from normllava.errors import UserError
from normllava.kernels import gaussian_kernel
from normllava.tokens import Inputs, Tokens, classify, find_sinks, token_ids


# The most tokens of each modality that the losses take from a forward pass.
MAX_TOKENS = 256


def mmd(visual: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Mean over heads of the MMD² between visual and text keys, the U-statistic of Gretton et al. (2012, eq. 3).

    If visual and text keys have the same distribution, the MMD² is about 0, and can be slightly negative.

    Args:
        visual, text: Keys of at least two tokens, each `(num_heads, num_tokens, head_dim)`.
    """
    num_visual = visual.shape[1]
    keys = torch.cat([visual, text], dim=1)  # [num_heads, num_visual + num_text, head_dim]
    kernel = gaussian_kernels(keys)  # [num_heads, num_visual + num_text, num_visual + num_text]
    within_visual = mean_over_pairs(kernel[:, :num_visual, :num_visual])
    within_text = mean_over_pairs(kernel[:, num_visual:, num_visual:])
    across = kernel[:, :num_visual, num_visual:].mean((1, 2))
    return (within_visual + within_text - 2 * across).mean()


def gaussian_kernels(keys: torch.Tensor) -> torch.Tensor:
    """The kernel `mean_j exp(-|x - y|² / (s_j σ²))` for all pairs of keys x and y of a head.

    The s_j are [`~normllava.kernels.BANDWIDTHS`]. σ² is the mean of |x - y|² over all pairs of different keys of the
    head. No gradient flows through σ².

    Args:
        keys: `(num_heads, num_tokens, head_dim)`.

    Returns:
        The kernel, `(num_heads, num_tokens, num_tokens)`.
    """
    num_tokens = keys.shape[1]
    centred = keys - keys.mean(dim=1, keepdim=True)  # this keeps distances, and lowers their rounding error
    # |x - y|² = |x|² + |y|² - 2 x·y, [num_heads, num_tokens, num_tokens]
    squares = centred.square().sum(-1)  # [num_heads, num_tokens]
    products = centred @ centred.mT
    squared_distances = squares[:, :, None] + squares[:, None, :] - 2 * products
    squared_distances = squared_distances.clamp(min=0)  # rounding can make them negative

    num_pairs = num_tokens * (num_tokens - 1)
    sigma_squared = squared_distances.detach().sum((1, 2), keepdim=True) / num_pairs  # [num_heads, 1, 1]
    # This avoids a division by 0 if all keys are equal.
    sigma_squared = sigma_squared.clamp(min=torch.finfo(keys.dtype).eps ** 2)
    return gaussian_kernel(squared_distances, sigma_squared)


def mean_over_pairs(kernel: torch.Tensor) -> torch.Tensor:
    """A kernel's mean over all pairs of different tokens.

    Args:
        kernel: `(num_heads, num_tokens, num_tokens)`.

    Returns:
        The mean for each head, `(num_heads,)`.
    """
    num_tokens = kernel.shape[1]
    num_pairs = num_tokens * (num_tokens - 1)
    is_pair = 1 - torch.eye(num_tokens, dtype=kernel.dtype, device=kernel.device)  # 0 on the diagonal, 1 elsewhere
    return (kernel * is_pair).sum((1, 2)) / num_pairs


def gram_distance(keys: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Mean over heads of `|G - G_ref|²_F / n²`, where G and G_ref are Gram matrices of keys and of reference keys.

    Adding the same vector to all keys of a modality doesn't change this distance. The MMD would change.

    Args:
        keys, reference: Keys of the same n tokens of a modality, each `(num_heads, n, head_dim)`.
    """
    return (gram_matrix(keys) - gram_matrix(reference)).square().mean()


def gram_matrix(keys: torch.Tensor) -> torch.Tensor:
    """The cosines between a head's keys after their mean has been subtracted.

    Args:
        keys: `(num_heads, num_tokens, head_dim)`.

    Returns:
        The cosines, `(num_heads, num_tokens, num_tokens)`.
    """
    centred = keys - keys.mean(dim=1, keepdim=True)
    directions = functional.normalize(centred, dim=-1)
    return directions @ directions.mT


def gradient_alone(loss: torch.Tensor) -> torch.Tensor:
    """Zero, with the gradient of `loss`. Added to another loss, it changes the gradient and not the value."""
    return loss - loss.detach()


class KeyAlignment:
    """Records the decoder's keys in training, and computes the penalty on them that is added to the loss.

    The penalty is the mean over decoder layers of `mmd_weight` times [`mmd`] plus `gram_weight` times
    [`gram_distance`]. The Gram distance is computed for visual and for text keys, and the two are averaged. Reference
    keys are the keys that the frozen `k_proj` computes from the same hidden states. The penalty is 0 for a forward
    pass with fewer than two tokens of a modality, such as a pass without pictures.

    The losses use up to `MAX_TOKENS` tokens of each modality, which are drawn at random in each pass. Attention sinks
    among them are left out. The drawn tokens of all samples are searched for sinks together, whereas the diagnostics
    search each sample by itself.

    Args:
        model: A model with key adapters and LoRA adapters, without the `PeftModel` around it.
        processor: The model's processor, from which the ids of special tokens are read.
        mmd_weight, gram_weight: The weights of the two losses.

    Raises:
        UserError: if the model has no key adapters.
    """

    def __init__(
        self, model: LlavaForConditionalGeneration, processor: Any, mmd_weight: float, gram_weight: float
    ) -> None:
        if not isinstance(model, NormLlavaKeyAdapterForConditionalGeneration):
            raise UserError(
                "key_mmd_weight and key_gram_weight need key adapters, and the model has none. Add them: "
                "python training/add_key_adapters.py --model <folder> --output_dir <folder>"
            )
        self._mmd_weight = mmd_weight
        self._gram_weight = gram_weight
        self._token_ids = token_ids(model, processor)
        # The sum of the MMD² over passes, the sum of the Gram distance over passes, and the number of passes.
        self._sums = torch.zeros(3, dtype=torch.float64)

        # The types of all tokens of the current forward pass; `None` while the hooks must record nothing.
        self._tokens: Tokens | None = None
        # The positions of the drawn tokens in the flattened batch, `(num_drawn,)`; image tokens come first.
        self._positions = torch.empty(0)
        # The number of image tokens among the drawn tokens.
        self._num_visual = 0
        # For each layer, the L2 norms of the drawn tokens in its output, `(num_drawn,)`.
        self._norms: list[torch.Tensor] = []
        # By the layer's number, the reference keys of the drawn tokens, `(num_heads, num_drawn, head_dim)`.
        self._references: dict[int, torch.Tensor] = {}
        # By the layer's number, the keys of all tokens, in the shape that the model gives them.
        self._keys: dict[int, torch.Tensor] = {}

        model.model.register_forward_pre_hook(self._begin_pass, with_kwargs=True)
        decoder_layers: Any = model.model.language_model.layers
        self._attentions: list[Any] = [layer.self_attn for layer in decoder_layers]
        for number, layer in enumerate(decoder_layers):
            layer.register_forward_hook(self._record_norms)
            self._hook_keys(number, layer.self_attn)

    def _begin_pass(self, module: nn.Module, args: Any, kwargs: Inputs) -> None:
        """Forget the last pass. In training, draw the tokens of the pass that begins."""
        self._tokens = None
        self._norms = []
        self._references = {}
        self._keys = {}
        if not module.training:
            return

        self._tokens = classify(kwargs, self._token_ids)
        visual = draw_tokens(self._tokens.image)
        text = draw_tokens(self._tokens.text)
        self._positions = torch.cat([visual, text])
        self._num_visual = len(visual)

    @torch.no_grad()
    def _record_norms(self, layer: nn.Module, args: Any, output: Any) -> None:
        # Nothing is recorded in eval mode, nor in the backward pass, after `penalty`, when gradient checkpointing runs
        # the layers once more.
        if self._tokens is None:
            return
        hidden_states = output if isinstance(output, torch.Tensor) else output[0]  # some layers return a tuple
        drawn_states = hidden_states.flatten(0, 1)[self._positions]  # [num_drawn, hidden_size]
        self._norms.append(drawn_states.float().norm(dim=-1))

    def _hook_keys(self, number: int, attention: Any) -> None:
        """Add hooks to the attention of layer `number` that record the layer's keys and reference keys."""
        key_norm = find_key_norm(attention)

        @torch.no_grad()
        def record_reference(projection: Any, args: tuple[torch.Tensor], output: torch.Tensor) -> None:
            if self._tokens is None or self._gram_weight == 0:
                return
            hidden_states = args[0].flatten(0, 1)[self._positions]  # [num_drawn, hidden_size]
            keys = projection.base(hidden_states)  # by the frozen k_proj, [num_drawn, num_heads * head_dim]
            if key_norm is not None:
                # The last dimensions must be those of the norm's weight, which is for one head or for all heads.
                keys = keys.unflatten(-1, (-1, *key_norm.weight.shape))
                # A call of `key_norm` itself would trigger the hook `record_keys`.
                keys = key_norm.forward(keys)
            self._references[number] = split_heads(keys, attention.head_dim)

        def record_keys(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            # A pass without gradients has no penalty, so its keys aren't kept. Other passes keep the keys of all
            # tokens, and `penalty` selects the drawn tokens. A selection in this hook would break gradient
            # checkpointing, which runs a layer again while hooks record nothing, and fails if the operations differ.
            if self._tokens is not None and torch.is_grad_enabled():
                self._keys[number] = output

        attention.k_proj.register_forward_hook(record_reference)
        key_module = attention.k_proj if key_norm is None else key_norm
        key_module.register_forward_hook(record_keys)

    def penalty(self) -> torch.Tensor:
        """The penalty of the last forward pass, a scalar. Afterwards, hooks record nothing until the next pass."""
        tokens = self._tokens
        self._tokens = None
        if tokens is None:
            return torch.zeros(())
        visual, text = self._indices_without_sinks()
        if len(visual) < 2 or len(text) < 2:
            return torch.zeros(())

        with torch.autocast(self._positions.device.type, enabled=False):
            losses = []
            for number, attention in enumerate(self._attentions):
                all_keys = self._keys.pop(number)
                # A projection or key norm gives [batch_size, sequence_length, ...], but some key norms come after the
                # heads have moved to the second dimension.
                if all_keys.shape[:2] != tokens.image.shape:
                    all_keys = all_keys.transpose(1, 2)  # [batch_size, sequence_length, num_heads, head_dim]
                drawn_keys = all_keys.flatten(0, 1)[self._positions]
                keys = split_heads(drawn_keys, attention.head_dim)  # [num_heads, num_drawn, head_dim]
                keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # at least float32
                reference = self._references.pop(number, None)
                # The backward pass computes the losses again, so that only one layer's matrices exist at a time.
                layer_losses = checkpoint(self._layer_losses, keys, reference, visual, text, use_reentrant=False)
                losses.append(layer_losses)
            mean_losses = torch.stack(losses).mean(0)  # [2]

        self._sums[:2] += mean_losses.detach().cpu().double()
        self._sums[2] += 1
        mean_mmd, mean_gram = mean_losses
        return mean_mmd * self._mmd_weight + mean_gram * self._gram_weight

    def _indices_without_sinks(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The indices of image tokens and of text tokens among the drawn tokens, without sinks."""
        is_visual = torch.arange(len(self._positions)) < self._num_visual
        drawn_tokens = Tokens(image=is_visual, text=~is_visual, excluded={})
        # `find_sinks` expects the norms of the decoder's input in the first row, and ignores this row. Here the
        # first layer's norms fill it.
        norms = torch.stack([self._norms[0], *self._norms]).cpu()  # [num_layers + 1, num_drawn]
        is_sink = find_sinks(norms, drawn_tokens)

        visual = (drawn_tokens.image & ~is_sink).nonzero()[:, 0]
        text = (drawn_tokens.text & ~is_sink).nonzero()[:, 0]
        return visual.to(self._positions.device), text.to(self._positions.device)

    def _layer_losses(
        self, keys: torch.Tensor, reference: torch.Tensor | None, visual: torch.Tensor, text: torch.Tensor
    ) -> torch.Tensor:
        """The MMD² and the Gram distance of a layer, `(2,)`. A loss whose weight is 0 isn't computed, and is 0 here.

        `visual` and `text` are the indices of image tokens and of text tokens in `keys` and `reference`.
        """
        mmd_loss = keys.new_zeros(())
        if self._mmd_weight != 0:
            mmd_loss = mmd(keys[:, visual], keys[:, text])

        gram_loss = keys.new_zeros(())
        if reference is not None:  # keys are recorded as references only if the Gram distance has a weight
            reference = reference.to(keys.dtype)
            visual_distance = gram_distance(keys[:, visual], reference[:, visual])
            text_distance = gram_distance(keys[:, text], reference[:, text])
            gram_loss = (visual_distance + text_distance) / 2
        return torch.stack([mmd_loss, gram_loss])

    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Both losses without their weights, as means over layers and over the passes since the last call.

        Passes whose penalty is 0 for lack of tokens don't count. Every process must call this.

        Args:
            reduce: Sums a tensor over all processes.
        """
        mmd_sum, gram_sum, num_passes = reduce(self._sums).tolist()
        self._sums = torch.zeros_like(self._sums)

        means = {}
        if num_passes > 0 and self._mmd_weight != 0:
            means["key_mmd"] = mmd_sum / num_passes
        if num_passes > 0 and self._gram_weight != 0:
            means["key_gram"] = gram_sum / num_passes
        return means


def find_key_norm(attention: Any) -> Any:
    """The norm layer that an attention layer applies to its keys; `None` if it has none."""
    for name in ("k_norm", "k_layernorm"):  # Qwen3's name and Phi's
        key_norm = getattr(attention, name, None)
        if key_norm is not None:
            return key_norm
    return None


def draw_tokens(mask: torch.Tensor) -> torch.Tensor:
    """Random positions at which a flattened mask is true, at most `MAX_TOKENS` of them."""
    positions = mask.flatten().nonzero()[:, 0]
    order = torch.randperm(len(positions), device=positions.device)
    return positions[order[:MAX_TOKENS]]


def split_heads(keys: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Split the keys of n tokens by head.

    Args:
        keys: `(n, num_heads * head_dim)` or `(n, num_heads, head_dim)`.
        head_dim: Width of a head.

    Returns:
        The same keys, `(num_heads, n, head_dim)`.
    """
    return keys.reshape(len(keys), -1, head_dim).transpose(0, 1)
