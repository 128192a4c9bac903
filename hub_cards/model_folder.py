"""What a folder with a model holds: its config, its processor, its weights, and the code that it needs."""

from functools import cached_property
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlavaConfig
from transformers.dynamic_module_utils import get_relative_import_files

from hub_cards.contents import CLASS_FOLDER, read_json
from hub_cards.weights import Weights, read_weights
from modeling_normllava import NormLlavaConfig, NormLlavaProcessor
from normllava.errors import UserError


# The settings files that need an `auto_map` if the processor's class is this project's own.
PROCESSOR_FILES = ("processor_config.json", "tokenizer_config.json")


class ModelFolder:
    """A folder with a NormLlava or a Llava: a run's output, or a release.

    A file is read when it is first asked for, and only once, since the weights of a large model take long to read. So
    hand the object on, and make no second one for the same folder. Reading raises `UserError` if a file is missing or
    can't be used.

    Args:
        path: The folder.
        weights: What the folder's weight files hold, if that is known already.
    """

    def __init__(self, path: Path, weights: Weights | None = None) -> None:
        self.path = path
        self._known_weights = weights

    @cached_property
    def weights(self) -> Weights:
        """What the weight files hold."""
        if self._known_weights is not None:
            return self._known_weights
        return read_weights(self.path)

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The content of config.json."""
        return read_json(self.path / "config.json")

    @cached_property
    def processor(self) -> dict[str, Any]:
        """The content of processor_config.json; empty if there is no such file."""
        path = self.path / "processor_config.json"
        return read_json(path) if path.exists() else {}

    @cached_property
    def config(self) -> LlavaConfig:
        """The model's config, read by this version's class or transformers' own.

        Raises:
            UserError: if there is no valid config, or if the folder holds an adapter or another kind of model.
        """
        if (self.path / "adapter_config.json").exists():
            raise UserError(
                f"{self.path} holds an adapter. Merge it first: python training/merge.py --adapter {self.path} "
                "--output_dir <folder>"
            )
        path = self.path / "config.json"
        if not path.exists():
            raise UserError(f"{self.path} holds no config.json: give the output folder of a finished training run.")

        try:
            config = AutoConfig.from_pretrained(self.path, trust_remote_code=False)
        except (OSError, ValueError, StrictDataclassError) as error:
            raise UserError(f"{path} can't be read: {error}") from error
        if not isinstance(config, LlavaConfig):
            raise UserError(
                f"{path}: model_type is {config.model_type!r}, and only a NormLlava or a Llava can be published."
            )
        return config

    @property
    def cuts_tiles(self) -> bool:
        """Whether the processor is of this project's own class, which cuts pictures into tiles."""
        return self.processor.get("processor_class") == NormLlavaProcessor.__name__

    @property
    def is_plain_llava(self) -> bool:
        """Whether the model is transformers' own Llava, which needs no code."""
        return not isinstance(self.config, NormLlavaConfig)

    @property
    def auto_maps(self) -> dict[str, dict[str, str]]:
        """The `auto_map` that each settings file needs, by the file's name.

        Files that need no `auto_map` are left out, so the result is empty for a model of transformers' own classes.
        """
        if self.is_plain_llava:
            return {}

        # The folder's config may name another version's class files. A new config names this version's.
        new_config: Any = type(self.config)()
        auto_maps = {"config.json": new_config.auto_map}
        if self.cuts_tiles:
            reference = f"processing_normllava.{NormLlavaProcessor.__name__}"
            for name in PROCESSOR_FILES:
                auto_maps[name] = {"AutoProcessor": reference}
        return auto_maps

    @property
    def class_files(self) -> list[Path]:
        """This version's class files for the model: the files that `auto_maps` name, and all files that those import.

        The list is empty for a model of transformers' own classes.
        """
        files = set()
        for auto_map in self.auto_maps.values():
            for reference in auto_map.values():
                # A reference names a file and a class in it, such as "modeling_normllava.NormLlavaModel".
                module = reference.split(".")[0]
                file = CLASS_FOLDER / f"{module}.py"
                files.add(file)
                imported_files = get_relative_import_files(file)
                files.update(Path(path) for path in imported_files)
        return sorted(files)
