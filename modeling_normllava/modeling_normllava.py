"""NormLlava: Llava with a LayerNorm after the projector, which at first gives image tokens the L2 norm of text tokens.

"The Unseen Bias" (arXiv 2512.08374) describes the method; the equations named below are that paper's. Saving a model
copies this file and `configuration_normllava.py` into the checkpoint folder, so these two files import no other file
of this repository.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, GenerationMixin, LlavaForConditionalGeneration, LlavaModel, LlavaPreTrainedModel
from transformers import initialization as init
from transformers.models.llava.modeling_llava import LlavaMultiModalProjector
from transformers.utils.versions import require_version

from .configuration_normllava import NormLlavaConfig


# Older versions name the vision encoder's weights differently, so they would leave the encoder at random values, with
# only a warning.
require_version("transformers>=5.18", "NormLlava needs it: pip install -U transformers")

# Lower bound of the mean gain that the gradient is divided by (δ in eq. 25).
MIN_MEAN_GAIN = 1e-3
# Weights of a checkpoint that may stay unused: the LM head's, when the model without an LM head is loaded, and the
# norm's, when a model is loaded with `projector_norm="none"`. If they were listed in transformers' attribute
# `_keys_to_ignore_on_load_unexpected`, vLLM would drop these weights from every checkpoint.
MAY_STAY_UNUSED = re.compile(r"^lm_head\.weight$|multi_modal_projector\.norm\.(weight|bias)$")
# Names of the weights that a PEFT adapter's folder must have. An adapter's loading report calls other weights missing
# too, though no adapter's folder has them: the base model's, and the states of quantized weights.
ADAPTER_WEIGHT = re.compile(r"\.lora_|\.modules_to_save\..*\.(weight|bias)$")
# A part of the model, such as the vision tower. For `None`, the model builds the part from its config.
OptionalPart = nn.Module | None


class _CompensatedLayerNormFunction(torch.autograd.Function):
    """LayerNorm whose input gradient is computed with the gain `g / max(mean|g|, δ)` in place of `g`.

    LayerNorm's input gradient is linear in the gain. Dividing the gain therefore gives the same result as dividing
    the gradient at the normalised input x̂, as eq. 26 does, and needs no extra pass over the data. The gradients of
    gain and bias don't depend on the gain.
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
        needed_gradients = ctx.needs_input_grad[:3]  # those of hidden_states, weight and bias
        mean_gain = weight.abs().mean().clamp(min=MIN_MEAN_GAIN)
        compensated_weight = weight / mean_gain
        grad_input, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            grad_output, hidden_states, weight.shape, mean, rstd, compensated_weight, bias, needed_gradients
        )
        return grad_input, grad_weight, grad_bias, None  # `eps` has no gradient


class Float32LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` (eq. 22, 23) that computes in float32, with float32 parameters in a model of any dtype.

    In bfloat16 a small gain, such as 0.0134, could change only by multiples of 6e-5, so training's smaller updates
    would be rounded away.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The parameters have torch's default dtype, which during `from_pretrained` is the checkpoint's.
        self.to(torch.promote_types(self.weight.dtype, torch.float32))

    def _apply(self, fn: Any, recurse: bool = True) -> "Float32LayerNorm":
        """Follow `to`, `half` and the like to another device, but not to a 16-bit dtype."""

        def keep_float32(tensor: torch.Tensor) -> torch.Tensor:
            converted = fn(tensor)
            if converted.dtype in (torch.float16, torch.bfloat16):
                return tensor.to(converted.device)
            return converted

        return super()._apply(keep_float32, recurse)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise `hidden_states`. The output has the same shape and dtype."""
        # Compute in at least float32, and in float64 where the input or the parameters are float64. The parameters are
        # cast too, because sharded training may have cast them to 16 bits.
        common_dtype = torch.promote_types(hidden_states.dtype, self.weight.dtype)
        dtype = torch.promote_types(common_dtype, torch.float32)
        weight = self.weight.to(dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        output = self._normalize(hidden_states.to(dtype), weight, bias)
        return output.to(hidden_states.dtype)

    def _normalize(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return nn.functional.layer_norm(hidden_states, self.normalized_shape, weight, bias, self.eps)


class GlobalWeightCompensatedLayerNorm(Float32LayerNorm):
    """LayerNorm whose input gradient is divided by `max(mean|gain|, 1e-3)` (eq. 12, 24-26, and App. D).

    The gain that gives image tokens their L2 norm is small. It would shrink every gradient that reaches the projector
    and the vision encoder by the same factor; the division removes the factor. Adam's update doesn't depend on a
    constant factor on the gradient, so under Adam the division matters little: it changes gradient clipping, and how
    much Adam's epsilon weighs.
    """

    def _normalize(self, hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _CompensatedLayerNormFunction.apply(hidden_states, weight, bias, self.eps)


class NormLlavaMultiModalProjector(LlavaMultiModalProjector):
    """Llava's two-layer MLP over merged patches, followed by the norm that `config.projector_norm` names."""

    linear_1: nn.Linear

    def __init__(self, config: NormLlavaConfig) -> None:
        super().__init__(config)
        self.spatial_merge_size = config.spatial_merge_size
        if self.spatial_merge_size > 1:
            # Llava's first layer takes the features of one patch; the new layer takes those of a square of patches.
            merged_size = self.linear_1.in_features * self.spatial_merge_size**2
            self.linear_1 = nn.Linear(merged_size, self.linear_1.out_features, bias=config.multimodal_projector_bias)

        norms = {"gwc": GlobalWeightCompensatedLayerNorm, "layernorm": Float32LayerNorm}
        if config.projector_norm == "none":
            self.norm: nn.Module = nn.Identity()
        else:
            self.norm = norms[config.projector_norm](config.text_config.hidden_size, eps=config.projector_norm_eps)

    def forward(self, image_features: torch.Tensor) -> torch.Tensor:
        """Turn the vision tower's features of patches into image tokens.

        Args:
            image_features: `(num_images, num_patches, vision_hidden_size)`.

        Returns:
            `(num_images, num_image_tokens, text_hidden_size)`.
        """
        if self.spatial_merge_size > 1:
            image_features = merge_patches(image_features, self.spatial_merge_size)
        projected = super().forward(image_features)
        return self.norm(projected)


def merge_patches(image_features: torch.Tensor, merge_size: int) -> torch.Tensor:
    """Join each square of `merge_size` x `merge_size` neighbouring patches into one vector.

    Args:
        image_features: `(num_images, num_patches, hidden_size)`. The patches come from a square picture, row by row.
        merge_size: The side of a square, in patches.

    Returns:
        `(num_images, num_patches / merge_size**2, merge_size**2 * hidden_size)`, with the squares row by row. Each
        vector holds the features of its square's patches, row by row.

    Raises:
        ValueError: if the patches don't form a square grid, or `merge_size` doesn't divide the grid's side.
    """
    num_images, num_patches, hidden_size = image_features.shape
    side = math.isqrt(num_patches)
    if side**2 != num_patches or side % merge_size != 0:
        raise ValueError(
            f"{num_patches} patches can't be merged by spatial_merge_size {merge_size}: they must be a square grid "
            "whose side it divides, without a class token (vision_feature_select_strategy 'default' drops it)."
        )

    squares_per_side = side // merge_size
    # [num_images, row of squares, row in the square, column of squares, column in the square, hidden_size]
    grid = image_features.unflatten(1, (squares_per_side, merge_size, squares_per_side, merge_size))
    # [num_images, row of squares, column of squares, row in the square, column in the square, hidden_size]
    squares = grid.transpose(2, 3)
    return squares.reshape(num_images, squares_per_side**2, merge_size**2 * hidden_size)


class NormLlavaPreTrainedModel(LlavaPreTrainedModel):
    """The base of the models with and without the LM head: initialises the norm, and checks that a checkpoint fits."""

    config: NormLlavaConfig
    # Device maps and sharding keep the projector whole. In sharded training the norm's weights therefore get the dtype
    # of the projector's other weights.
    _no_split_modules = ["NormLlavaMultiModalProjector"]  # noqa: RUF012 - as transformers has it
    # A bare "norm" would keep every norm of the language model in float32 too.
    _keep_in_fp32_modules_strict = {"multi_modal_projector.norm"}  # noqa: RUF012 - as transformers has it

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        # The target is in the config, because on the meta device and during loading there are no text embeddings to
        # measure.
        if isinstance(module, Float32LayerNorm) and self.config.projector_norm_target is not None:
            (hidden_size,) = module.normalized_shape
            # With a gain of 1, a normalised token has the L2 norm sqrt(hidden_size).
            gain = self.config.projector_norm_target / hidden_size**0.5
            init.constant_(module.weight, gain)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return `False`, so that transformers treats this class as one of its own when it loads a checkpoint.

        With custom code, transformers leaves the buffers of modules without weights unfilled. Falcon-H1 has such
        modules.
        """
        return False

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any
    ) -> Any:
        """`PreTrainedModel.from_pretrained`, except that it refuses a checkpoint that doesn't fit the class.

        Raises:
            ValueError: if the checkpoint lacks weights of the model, or has weights that the model wouldn't use.
        """
        load = super().from_pretrained
        model, report = load(pretrained_model_name_or_path, *args, output_loading_info=True, **kwargs)

        if hasattr(model, "peft_config"):
            # The folder holds a PEFT adapter, and the report is about the adapter alone. So the base model is loaded
            # once more, for a report about the base model.
            options = base_options(model, kwargs)
            _, base_report = load(model.name_or_path, *args, output_loading_info=True, **options)
        else:
            base_report = report

        misfit = describe_misfit(base_report)
        if misfit is not None:
            raise ValueError(
                f"The checkpoint {model.name_or_path!r} does not fit {cls.__name__}. {misfit}. Load what was composed "
                "or trained; convert a Llava first: python training/compose.py --llava_model <folder> "
                "--projector_norm gwc --output_dir <folder>"
            )
        return (model, report) if output_loading_info else model

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """`PreTrainedModel.load_adapter`, except that it refuses an adapter that doesn't fit the model.

        Raises:
            ValueError: if a weight of the adapter is missing.
        """
        report = super().load_adapter(*args, **kwargs)
        missing = [key for key in report.missing_keys if ADAPTER_WEIGHT.search(key)]
        if missing:
            raise ValueError(f"The adapter does not fit. Weights missing: {len(missing)}, first {min(missing)!r}.")
        return report


def base_options(adapted_model: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options of `from_pretrained` that load an adapted model's base once more, for its loading report alone.

    Where possible, the weights' names are loaded without their data.

    Args:
        adapted_model: A model that was loaded from an adapter's folder.
        options: The options that the adapted model was loaded with.
    """
    # transformers looks for an adapter in the base's folder too. No subfolder is named "none", so none is found.
    no_adapter = {"adapter_kwargs": {"subfolder": "none"}}
    quantizer = getattr(adapted_model, "hf_quantizer", None)
    if quantizer is not None and quantizer.pre_quantized:
        # A checkpoint that was saved quantized can't be loaded without its data.
        return options | no_adapter

    # Any other checkpoint has the same names of weights with and without quantization.
    unquantized = {name: value for name, value in options.items() if name != "quantization_config"}
    return unquantized | no_adapter | {"device_map": "meta"}


def describe_misfit(report: dict[str, Any]) -> str | None:
    """Say, from a loading report, which weights are missing or would be dropped.

    Returns:
        `None` if the checkpoint fits the model.
    """
    missing = report["missing_keys"]
    if missing:
        return f"Weights missing: {describe_keys(missing)}"

    unexpected = [key for key in report["unexpected_keys"] if not MAY_STAY_UNUSED.search(key)]
    if unexpected:
        return f"Weights unexpected: {describe_keys(unexpected)}"
    return None


def describe_keys(keys: Collection[str]) -> str:
    """How many weights there are, the model's parts that they belong to, and the first weight's name."""
    # The part of "model.vision_tower.encoder.layers.0.mlp.fc1.bias" is "vision_tower".
    parts = {key.removeprefix("model.").partition(".")[0] for key in keys}
    return f"{len(keys)} of {', '.join(sorted(parts))}, first {min(keys)!r}"


class NormLlavaModel(NormLlavaPreTrainedModel, LlavaModel):
    """Vision tower, projector with norm, and language model without its LM head."""

    def __init__(
        self, config: NormLlavaConfig, vision_tower: OptionalPart = None, language_model: OptionalPart = None
    ) -> None:
        super(LlavaModel, self).__init__(config)  # skips LlavaModel.__init__, which builds the parts itself
        self.vision_tower = vision_tower or AutoModel.from_config(config.vision_config)
        self.multi_modal_projector = NormLlavaMultiModalProjector(config)
        self.language_model = language_model or AutoModel.from_config(config.text_config)
        self.post_init()


class NormLlavaForConditionalGeneration(NormLlavaPreTrainedModel, LlavaForConditionalGeneration, GenerationMixin):
    """NormLlava with the language-modelling head (LM head). Its forward pass and its generation are Llava's."""

    # The class of `self.model`, the model without the LM head.
    _model_class: type[NormLlavaModel] = NormLlavaModel

    def __init__(
        self,
        config: NormLlavaConfig,
        vision_tower: OptionalPart = None,
        language_model: OptionalPart = None,
        lm_head: Any = None,
    ) -> None:
        # Skips LlavaForConditionalGeneration.__init__, which builds the parts itself.
        super(LlavaForConditionalGeneration, self).__init__(config)
        self.model = self._model_class(config, vision_tower, language_model)
        self.lm_head = lm_head or nn.Linear(config.text_config.hidden_size, config.text_config.vocab_size, bias=False)
        self.post_init()


# `save_pretrained` copies a class's file into the checkpoint only if the class is registered.
NormLlavaModel.register_for_auto_class("AutoModel")
NormLlavaForConditionalGeneration.register_for_auto_class("AutoModelForImageTextToText")
