"""NormLlava: Llava with one LayerNorm after the projector that starts image tokens at the norm of text tokens.

"The Unseen Bias" (arXiv 2512.08374) describes the method; equation numbers below are that paper's. Saving a model
copies this file and `configuration_normllava.py` into the checkpoint folder, so they import nothing else of ours.
"""

import math
import re
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, GenerationMixin, LlavaForConditionalGeneration, LlavaModel, LlavaPreTrainedModel
from transformers import initialization as init
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.utils.versions import require_version

from .configuration_normllava import NormLlavaConfig


# Older versions name the vision encoder's weights differently and would initialise it at random with only a warning.
require_version("transformers>=5.18", "NormLlava needs it: pip install -U transformers")

# Lower bound of the mean gain by which the gradient is divided (δ in eq. 25).
MIN_MEAN_GAIN = 1e-3
# Checkpoint weights that may stay unused: the head (by the base model) and the norm (where it is switched off).
# Not in the class's `_keys_to_ignore_on_load_unexpected`: vLLM drops such weights from every checkpoint.
MAY_STAY_UNUSED = re.compile(r"^lm_head\.weight$|multi_modal_projector\.norm\.(weight|bias)$")
# Weights that an adapter's folder must have. Others are the base's, or a quantized weight's state.
ADAPTER_WEIGHT = re.compile(r"\.lora_|\.modules_to_save\..*\.(weight|bias)$")
# A part that is built from the config where none is given.
Part = nn.Module | None


class _CompensatedLayerNormFunction(torch.autograd.Function):
    """LayerNorm whose input gradient is computed with the gain `g / max(mean|g|, δ)` in place of `g`.

    LayerNorm's input gradient is linear in the gain, so this equals dividing the gradient at the normalised input x̂
    (eq. 26), without an extra pass over the data. The gradients of gain and bias don't depend on the gain.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        output, mean, rstd = torch.native_layer_norm(hidden_states, weight.shape, weight, bias, eps)
        ctx.save_for_backward(hidden_states, weight, bias, mean, rstd)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_states, weight, bias, mean, rstd = ctx.saved_tensors
        compensated_weight = weight / weight.abs().mean().clamp(min=MIN_MEAN_GAIN)
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_output, hidden_states, weight.shape, mean, rstd, compensated_weight, bias, ctx.needs_input_grad[:3]
        )
        return grad_input, grad_weight, grad_bias, None


class Float32LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` (eq. 22, 23), computed in float32, whose parameters stay float32 whatever the model's dtype.

    A bfloat16 gain of 0.0134 moves in steps of 6e-5, so the updates of training would be rounded away.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # `from_pretrained` builds models with the checkpoint's dtype as torch's default dtype.
        self.to(torch.promote_types(self.weight.dtype, torch.float32))

    def _apply(self, fn: Any, recurse: bool = True) -> "Float32LayerNorm":
        def keep_float32(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            if applied.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(applied.device)
            return applied

        return super()._apply(keep_float32, recurse)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden_states`; same shape and dtype out."""
        # Sharded training may pass the parameters in its compute dtype, hence all three.
        dtype = torch.promote_types(torch.promote_types(hidden_states.dtype, self.weight.dtype), torch.float32)
        bias = None if self.bias is None else self.bias.to(dtype)
        output = self._normalize(hidden_states.to(dtype), self.weight.to(dtype), bias)
        return output.to(hidden_states.dtype)

    def _normalize(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.layer_norm(hidden_states, self.normalized_shape, weight, bias, self.eps)


class GlobalWeightCompensatedLayerNorm(Float32LayerNorm):
    """LayerNorm whose input gradient is divided by `max(mean|gain|, 1e-3)` (eq. 12, 24-26).

    The small gain that aligns norms would shrink every gradient that reaches the projector and the vision encoder by
    the same factor; this removes the factor. Under Adam a constant factor on a gradient cancels in the update, so
    there little is left: it changes gradient clipping and what Adam's epsilon weighs. Source: App. D.
    """

    def _normalize(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _CompensatedLayerNormFunction.apply(hidden_states, weight, bias, self.eps)


class NormLlavaMultiModalProjector(LlavaMultiModalProjector):
    """Llava's two-layer MLP over merged patches, followed by the norm that `config.projector_norm` names."""

    def __init__(self, config: NormLlavaConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        if self.spatial_merge_size > 1:
            first = self.linear_1
            merged_size = first.in_features * self.spatial_merge_size**2
            self.linear_1 = nn.Linear(merged_size, first.out_features, bias=first.bias is not None)

        norms = {"gwc": GlobalWeightCompensatedLayerNorm, "layernorm": Float32LayerNorm}
        if config.projector_norm == "none":
            self.norm: nn.Module = nn.Identity()
        else:
            self.norm = norms[config.projector_norm](config.text_config.hidden_size, eps=config.projector_norm_eps)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        """Project `image_features` of shape `(num_images, num_patches, vision_hidden_size)` to the decoder's width."""
        if self.spatial_merge_size > 1:
            image_features = merge_patches(image_features, self.spatial_merge_size)
        return self.norm(super().forward(image_features))  # [num_images, num_image_tokens, text_hidden_size]


def merge_patches(image_features: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Join each square of `merge_size` x `merge_size` neighbouring patches into one vector, row by row.

    Args:
        image_features: `(num_images, num_patches, hidden_size)`, the patches of a square picture row by row.
        merge_size: How many patches a side of such a square has.

    Returns:
        `(num_images, num_patches / merge_size**2, merge_size**2 * hidden_size)`, the squares row by row, and in each
        its patches row by row.

    Raises:
        ValueError: if the patches are no square grid that such squares divide.
    """
    num_images, num_patches, hidden_size = image_features.shape
    side = math.isqrt(num_patches)
    if side**2 != num_patches or side % merge_size != 0:
        raise ValueError(
            f"{num_patches} patches can't be merged by spatial_merge_size {merge_size}: they must be a square grid "
            "whose side it divides, without a class token (vision_feature_select_strategy 'default' drops it)."
        )

    grid = image_features.unflatten(1, (side // merge_size, merge_size, side // merge_size, merge_size))
    # [num_images, row of squares, row in the square, column of squares, column in the square, hidden_size]
    return grid.transpose(2, 3).reshape(num_images, -1, merge_size**2 * hidden_size)


class NormLlavaPreTrainedModel(LlavaPreTrainedModel):
    """What both models share: the config, the norm's initialisation, and the check that a checkpoint fits."""

    config: NormLlavaConfig
    # One unit in device maps and in sharding, where all weights of a unit have the same dtype.
    _no_split_modules = ["NormLlavaMultiModalProjector"]  # noqa: RUF012 - as transformers has it
    # The full name: a bare "norm" would keep every norm of the language model in float32.
    _keep_in_fp32_modules_strict = {"multi_modal_projector.norm"}  # noqa: RUF012 - as transformers has it

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # From the config alone: on the meta device and during loading there are no embeddings to measure.
        if isinstance(module, Float32LayerNorm) and self.config.projector_norm_target is not None:
            init.constant_(module.weight, self.config.projector_norm_target / module.normalized_shape[0] ** 0.5)

    @classmethod
    def is_custom_code(cls) -> bool:
        """`False`: on loading custom code transformers fills no buffers of modules without weights (Falcon-H1)."""
        return False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """`PreTrainedModel.from_pretrained`, but refuses a checkpoint that doesn't fit.

        Raises:
            ValueError: if weights are missing or would be dropped.
        """
        load = super().from_pretrained
        model, report = load(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)

        base_report = report
        if hasattr(model, "peft_config"):
            # The folder is an adapter's, and its report speaks of the adapter alone.
            _, base_report = load(model.name_or_path, *args, output_loading_info=True, **base_options(model, kwargs))

        misfit = describe_misfit(base_report)
        if misfit is not None:
            raise ValueError(
                f"The checkpoint {model.name_or_path!r} does not fit {cls.__name__}. {misfit}. Load what was composed "
                "or trained; convert a Llava first: python training/compose.py --llava_model <folder> --output_dir "
                "<folder>"
            )
        return (model, report) if output_loading_info else model

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """`PreTrainedModel.load_adapter`, but refuses an adapter that doesn't fit.

        Raises:
            ValueError: if a weight of the adapter is missing.
        """
        report = super().load_adapter(*args, **kwargs)
        missing = [key for key in report.missing_keys if ADAPTER_WEIGHT.search(key)]
        if missing:
            raise ValueError(f"The adapter does not fit. Weights missing: {len(missing)}, first {min(missing)!r}.")
        return report


def base_options(adapted_model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """With which `from_pretrained` loads an adapted model's base again, for its report and mostly without data.

    Args:
        adapted_model: A model whose adapter has been loaded.
        options: With which that was done.
    """
    no_adapter = {"adapter_kwargs": {"subfolder": "none"}}  # else the base is searched for one
    quantizer = getattr(adapted_model, "hf_quantizer", None)
    if quantizer is not None and quantizer.pre_quantized:
        # A checkpoint that was saved quantized can't be loaded without data.
        return options | no_adapter

    # Quantizing doesn't change which weights a checkpoint has.
    unquantized = {name: value for name, value in options.items() if name != "quantization_config"}
    return unquantized | no_adapter | {"device_map": "meta"}


def describe_misfit(report: dict[str, Any]) -> str | None:
    """Which weights of a checkpoint are missing or would be dropped, by a loading report; `None` if it fits."""
    missing = report["missing_keys"]
    unexpected = [key for key in report["unexpected_keys"] if not MAY_STAY_UNUSED.search(key)]
    for problem, keys in (("missing", missing), ("unexpected", unexpected)):
        if keys:
            parts = sorted({key.removeprefix("model.").partition(".")[0] for key in keys})
            return f"Weights {problem}: {len(keys)} of {', '.join(parts)}, first {min(keys)!r}"
    return None


class NormLlavaModel(NormLlavaPreTrainedModel, LlavaModel):
    """Vision tower, projector with norm, and language model without its head."""

    def __init__(self, config: NormLlavaConfig, vision_tower: Part = None, language_model: Part = None) -> None:
        super(LlavaModel, self).__init__(config)  # skips LlavaModel's, which builds the parts itself
        self.vision_tower = vision_tower or AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = NormLlavaMultiModalProjector(config)
        self.language_model = language_model or AutoModel.from_config(config.text_config)
        self.post_init()


class NormLlavaForConditionalGeneration(NormLlavaPreTrainedModel, LlavaForConditionalGeneration, GenerationMixin):
    """NormLlava with the language-modelling head; forward and generation are Llava's."""

    # Of `model`, the part without the head.
    _model_class: type[NormLlavaModel] = NormLlavaModel

    def __init__(
        self, config: NormLlavaConfig, vision_tower: Part = None, language_model: Part = None, lm_head: Any = None
    ) -> None:
        super(LlavaForConditionalGeneration, self).__init__(config)  # skips Llava's, which builds the parts itself
        self.model = self._model_class(config, vision_tower, language_model)
        self.lm_head = lm_head or nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


# Saving copies the class files of registered classes only.
NormLlavaModel.register_for_auto_class("AutoModel")
NormLlavaForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
