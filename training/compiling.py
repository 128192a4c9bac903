"""Compiling a model's decoder layers one by one: as a whole it breaks into dozens of graphs."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from typing_extensions import override

from diagnostics.parts import decoder_layers
from modeling_normllava import NormLlavaForConditionalGeneration


def compile_plugin(args: TrainingArguments) -> TorchDynamoPlugin | None:
    """How to compile, by the arguments or by accelerate's launch options; `None` where neither asks for it."""
    plugin = TorchDynamoPlugin(backend=args.torch_compile_backend, mode=args.torch_compile_mode)
    return None if plugin.backend == DynamoBackend.NO else plugin


def eagerly(args: TrainingArguments) -> AbstractContextManager:
    """Runs compiled layers as they were: what runs seldom would not make up for its compiling, and hooks that came
    after it would not be called."""
    return nullcontext() if compile_plugin(args) is None else torch.compiler.set_stance("force_eager")


def compile_layers(layers: Iterable[Any], **options: Any) -> None:
    """Compile each decoder layer. Layers share their graphs, and rows of any length do.

    Args:
        layers: The decoder's, already sharded if they are to be: FSDP2 replaces the classes of layers, at which
            gradient checkpointing looks.
        options: As for `torch.compile`.
    """
    for layer in layers:
        # Not layer.compile(), which would compile the layer's hooks too.
        layer.forward = torch.compile(layer.forward, dynamic=True, **options)


class LayerCompiler(TrainerCallback):
    """Compiles the decoder layers when training begins, where this is asked for."""

    def __init__(self, model: NormLlavaForConditionalGeneration) -> None:
        self._model = model

    @override
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Compile."""
        plugin = compile_plugin(args)
        if plugin is not None:
            compile_layers(
                decoder_layers(self._model),
                backend=plugin.backend.value.lower(),
                mode=plugin.mode,
                fullgraph=plugin.fullgraph,
            )
