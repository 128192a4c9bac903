"""The recipes that `training/compose.py` writes beside a model."""

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from transformers import FalconH1Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config, SiglipVisionConfig

from modeling_normllava import NormLlavaConfig
from script_runs import ROOT, read_steps
from training import compose, sft
from training.composing.recipes import Composition, describe_recipe, recipe_fields, size_lines
from training.modules.stages import Stage


SIGLIP = SiglipVisionConfig(
    hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, num_attention_heads=16,
    image_size=384, patch_size=14, vision_use_head=False,
)  # fmt: skip
SIGLIP2 = SiglipVisionConfig(
    hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
    image_size=512, patch_size=16, vision_use_head=False,
)  # fmt: skip
QWEN25 = Qwen2Config(
    vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
    num_key_value_heads=4, tie_word_embeddings=False,
)  # fmt: skip
LLAMA32 = LlamaConfig(
    vocab_size=128256, hidden_size=3072, intermediate_size=8192, num_hidden_layers=28, num_attention_heads=24,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
QWEN3 = Qwen3Config(
    vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
)  # fmt: skip
SIGLIP_OPTION = "--vision_model google/siglip-so400m-patch14-384"


def composition(
    name: str,
    options: str,
    vision: PreTrainedConfig,
    text: PreTrainedConfig,
    text_weights: int,
    image_tokens: int,
    max_tiles: int = 1,
    **fields: Any,
) -> Composition:
    """A model of these parts, as `compose.py` describes it to its recipes."""
    config = NormLlavaConfig(
        vision_config=vision,
        text_config=text,
        image_seq_length=image_tokens,
        vision_feature_select_strategy="full",
        projector_norm="gwc",
        projector_norm_target=1.0,
        **fields,
    )
    folder = Path("runs", name)
    command = shlex.split(f"{options} --projector_norm gwc --output_dir {folder}")
    return Composition(
        folder,
        command,
        projector_scaled=False,
        projector_aligned=False,
        config=config,
        text_weights=text_weights,
        max_tiles=max_tiles,
        captions=None,
        data=None,
        image_folder=None,
    )


# The models whose recipes are in the repository, with the numbers of weights that their cards on the Hub give.
QWEN25_7B = composition(
    "Qwen2.5-7B-Instruct", f"{SIGLIP_OPTION} --text_model Qwen/Qwen2.5-7B-Instruct",
    SIGLIP, QWEN25, 7_615_616_512, image_tokens=729,
)  # fmt: skip
LLAMA32_3B = composition(
    "Llama-3.2-3B-Instruct", f"{SIGLIP_OPTION} --text_model meta-llama/Llama-3.2-3B-Instruct",
    SIGLIP, LLAMA32, 3_212_749_824, image_tokens=729,
)  # fmt: skip
QWEN3_06B = composition(
    "Qwen3-0.6B",
    "--vision_model google/siglip2-base-patch16-512 --text_model Qwen/Qwen3-0.6B --spatial_merge_size 2 --max_tiles 6",
    SIGLIP2, QWEN3, 596_049_920, image_tokens=256, max_tiles=6, spatial_merge_size=2,
)  # fmt: skip
MODELS = (QWEN25_7B, LLAMA32_3B, QWEN3_06B)


def committed(composed: Composition, stage: Stage) -> str:
    """The text of the recipe that the repository has for a model."""
    return (ROOT / "training" / "recipes" / composed.folder.name / f"{stage}.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("stage", [Stage.ALIGN, Stage.INSTRUCT])
@pytest.mark.parametrize("composed", MODELS, ids=lambda composed: composed.folder.name)
def test_the_repositorys_recipes_have_the_fields_that_compose_writes(composed: Composition, stage: Stage) -> None:
    assert committed(composed, stage).endswith(f"\n{recipe_fields(composed, stage)}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [Stage.ALIGN, Stage.INSTRUCT])
@pytest.mark.parametrize("composed", MODELS, ids=lambda composed: composed.folder.name)
def test_the_repositorys_recipes_are_what_compose_writes(composed: Composition, stage: Stage) -> None:
    """With the plans of memory and time, which take half a minute for 7B."""
    assert committed(composed, stage) == describe_recipe(composed, stage) + recipe_fields(composed, stage)


def test_rates_and_batches_are_the_papers() -> None:
    """arXiv 2512.08374, App. E.1."""
    align = yaml.safe_load(recipe_fields(QWEN25_7B, Stage.ALIGN))
    assert (align["learning_rate"], align["global_batch_size"], align["num_train_epochs"]) == (1e-3, 256, 1)
    instruct = yaml.safe_load(recipe_fields(QWEN25_7B, Stage.INSTRUCT))
    assert (instruct["learning_rate"], instruct["vision_learning_rate"]) == (1e-5, 2e-6)
    assert (instruct["global_batch_size"], instruct["num_train_epochs"]) == (128, 1)
    for recipe in (align, instruct):
        schedule = (recipe["lr_scheduler_type"], recipe["warmup_steps"], recipe["weight_decay"], recipe["seed"])
        assert schedule == ("cosine", 0.03, 0.0, 42)


def test_stage_1_of_a_scaled_projector_has_a_rate_at_which_it_stays_nearer_to_the_texts_norm() -> None:
    scaled = replace(QWEN25_7B, projector_scaled=True)
    text = recipe_fields(scaled, Stage.ALIGN)
    assert yaml.safe_load(text)["learning_rate"] == 2e-4
    assert "3.8 times at 2e-4" in text
    assert recipe_fields(scaled, Stage.INSTRUCT) == recipe_fields(QWEN25_7B, Stage.INSTRUCT)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_aligned_projector_keeps_a_rate_at_which_it_does_not_forget(scaled: bool) -> None:
    aligned = replace(QWEN25_7B, projector_aligned=True, projector_scaled=scaled)
    align = yaml.safe_load(recipe_fields(aligned, Stage.ALIGN))
    adapt = yaml.safe_load(recipe_fields(aligned, Stage.ADAPT))
    instruct = yaml.safe_load(recipe_fields(aligned, Stage.INSTRUCT))
    assert (align["learning_rate"], adapt["projector_learning_rate"], instruct["learning_rate"]) == (5e-5, 5e-5, 1e-5)


def test_a_recipe_says_if_the_paper_has_no_model_of_its_size() -> None:
    text = " ".join(size_lines(4_000_000_000))
    assert "This one has 4 billion:" in text
    assert "those of Llama-3.2-3B" in text
    assert size_lines(QWEN25_7B.text_weights) == size_lines(LLAMA32_3B.text_weights) == []


def test_a_packed_row_holds_a_picture_of_many_tiles() -> None:
    """SigLIP's 729 tokens for each of six tiles and a thumbnail, and the text."""
    tiled = replace(QWEN25_7B, max_tiles=6)
    assert yaml.safe_load(recipe_fields(tiled, Stage.ADAPT))["packed_length"] == 8192
    assert yaml.safe_load(recipe_fields(QWEN25_7B, Stage.ADAPT))["packed_length"] == 4096


def test_a_decoder_that_would_mix_packed_samples_gets_padded_rows() -> None:
    mixing = replace(QWEN25_7B, config=NormLlavaConfig(text_config=FalconH1Config()))
    recipe = yaml.safe_load(recipe_fields(mixing, Stage.INSTRUCT))
    assert "packed_length" not in recipe
    assert recipe["per_device_train_batch_size"] == 4


# Pairs of parts that no recipe of the repository has, with the options that change their recipes.
PAIRS: dict[str, tuple[str, str, list[str]]] = {
    "norm": ("siglip2", "gemma3", ["--projector_norm=gwc"]),
    "scaled, with tiles": ("clip", "qwen3", ["--projector_norm=none", "--scale_projector", "--max_tiles=4"]),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_each_stage_trains_by_the_recipe_that_compose_wrote(
    pair: str, backbones: Callable[[str], Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vision, text, options = PAIRS[pair]
    turns = [{"role": "user", "content": "What?"}, {"role": "assistant", "content": "red"}]
    Image.new("RGB", (60, 30), "red").save(tmp_path / "red.png")
    data = tmp_path / "a name with spaces: rows.json"
    data.write_text(json.dumps([{"image": "red.png", "messages": turns}] * 4))
    folder = tmp_path / "mine"

    parts = [f"--vision_model={backbones(vision)}", f"--text_model={backbones(text)}"]
    compose.main([*parts, *options, f"--captions={data}", f"--data={data}", f"--output_dir={folder}"])
    printed = [line.strip() for line in caplog.text.splitlines() if "accelerate launch" in line]
    assert f"accelerate launch -q --num_processes 1 training/sft.py --config {folder}/align.yaml" in printed

    for stage in ("align", "instruct", "adapt"):
        sft.main([f"--config={folder}/{stage}.yaml", "--max_steps=2", "--logging_steps=1", "--dataset_num_proc=1"])
        assert len(read_steps(folder / stage)) == 2
        start = yaml.safe_load((folder / f"{stage}.yaml").read_text())["model_name_or_path"]
        assert start == str(folder if stage == "align" else folder / "align")
