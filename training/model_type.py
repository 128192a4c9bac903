"""What a folder or a Hub repository holds, read from its config before anything is loaded."""

from pathlib import Path

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


ADAPTER = "adapter"
LANGUAGE_MODEL = "language model"
# What to do with a model of another type than the one wanted.
WAY_OUT = {
    "normllava": "It already has a norm, which may be trained; converting would reset it. Train it as it is: "
    "training/sft.py --model_name_or_path {name}",
    "llava": "Convert it first: python training/compose.py --llava_model {name} --output_dir <folder>",
    ADAPTER: "Merge it into its base first: python training/merge.py --adapter {name} --output_dir <folder>",
    LANGUAGE_MODEL: "Give it a vision encoder first: python training/compose.py --vision_model <folder or Hub id> "
    "--text_model {name} --output_dir <folder>",
}
OTHER = (
    "Use a Llava checkpoint (model_type 'llava'), or a vision encoder and a language model: python "
    "training/compose.py --help"
)


def require_model_type(name: str, wanted: str, revision: str | None = None) -> None:
    """Refuse anything but a model of the wanted type.

    Args:
        name: Folder or Hub id.
        wanted: The `model_type` in its config.json: `"normllava"` or `"llava"`.
        revision: Of a Hub repository.

    Raises:
        ValueError: if it is missing or of another type; the message says what to do.
    """
    if Path(name, "adapter_config.json").exists():
        raise ValueError(f"{name} is an adapter, not a whole model. {WAY_OUT[ADAPTER].format(name=name)}")
    try:
        fields, _ = PreTrainedConfig.get_config_dict(name, revision=revision)
    except OSError as error:
        raise ValueError(f"{name} is no folder or Hub repository whose config.json can be read: {error}") from error
    found = fields.get("model_type")
    if found == wanted:
        return
    if found is None:
        raise ValueError(f"{name} holds no model: there is no config.json with a model_type.")
    is_text = found in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and "vision_config" not in fields
    way_out = WAY_OUT.get(LANGUAGE_MODEL if is_text else found, OTHER)
    raise ValueError(f"{name} has model_type {found!r}, {wanted!r} is needed. {way_out.format(name=name)}")
