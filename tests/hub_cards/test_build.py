"""Building a release folder: the files that it holds, and what its card says."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from hub_cards.build import BuildOptions, build_release
from hub_cards.card import Prose
from hub_cards.check import find_faults
from hub_cards.contents import list_release
from hub_cards.facts import HUB_ID_PATTERN, collect_facts
from hub_cards.licences import KNOWN_LICENCES, Licence
from hub_server import REPO_ID, run_command
from normllava.files import weights_fingerprint
from plants import WEIGHTS, change_weights, set_fields, split_weights, write_file
from training.folders.run import Composed


ROOT = Path(__file__).parents[2]
# The parts of the tests' model are not from the Hub, so a build needs this option.
OWN_LICENCE = {"license": "apache-2.0"}
# Hub ids of parts whose licences are known.
LLAMA = "meta-llama/Llama-3.2-3B-Instruct"
QWEN = "Qwen/Qwen2.5-7B-Instruct"
SIGLIP = "google/siglip-so400m-patch14-384"


@pytest.fixture
def run(trained_run: Path, tmp_path: Path) -> Path:
    """A copy of the folder `trained_run` that a test may change."""
    return shutil.copytree(trained_run, tmp_path / "run")


@pytest.fixture
def build_card(prose: Path, tmp_path: Path) -> Callable[..., str]:
    """A function that builds a release from a run, asserts that it has no faults, and returns the text of its card.

    The release folder is `tmp_path / "release"`, and is built anew at each call.
    """

    def build(run: Path, repo_id: str = "me/Mine", **options: Any) -> str:
        folder = tmp_path / "release"
        shutil.rmtree(folder, ignore_errors=True)
        options.setdefault("prose", prose)
        build_release(run, folder, BuildOptions(repo_id=repo_id, **options))
        assert find_faults(folder) == []
        return (folder / "README.md").read_text()

    return build


def name_parts(run: Path, text: str | None, vision: str | None) -> None:
    """Record in the run's config by which names the language model and the vision encoder were loaded.

    A name is a Hub id or a folder; `None` removes the record.
    """
    # `text_config___name_or_path` is the field `_name_or_path` of `text_config`.
    set_fields("config.json", text_config___name_or_path=text, vision_config___name_or_path=vision)(run)


def test_a_build_keeps_other_files_beside_the_release(
    trained_run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    # The build writes the Space's files into `release-space`, and does not touch `space`.
    for folder in ("space", "release-space"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.txt").write_text("mine")
    build_card(trained_run, **OWN_LICENCE)
    assert [path.name for path in (tmp_path / "space").iterdir()] == ["mine.txt"]

    names = [path.name for path in (tmp_path / "release-space").iterdir()]
    for name in ("mine.txt", "app.py", "pixels.py"):
        assert name in names


def test_a_release_holds_these_files_and_no_others(release: Path) -> None:
    names = {path.relative_to(release).as_posix() for path in list_release(release) if path.is_file()}
    assert names == {
        "LICENSE",
        "README.md",
        "chat_template.jinja",
        "config.json",
        "configuration_normllava.py",
        "evaluation.json",
        "generation_config.json",
        "handler.py",
        "images/example1.png",
        "images/example2.png",
        "model.safetensors",
        "modeling_normllava.py",
        "pixels.py",
        "processor_config.json",
        "release.json",
        "requirements.txt",
        "tokenizer.json",
        "tokenizer_config.json",
    }


def test_the_name_of_the_language_models_folder_is_taken_out(release: Path, trained_run: Path) -> None:
    text_config = json.loads((trained_run / "config.json").read_text())["text_config"]
    folder = text_config.pop("_name_or_path")
    assert Path(folder).is_absolute()

    released_config = json.loads((release / "config.json").read_text())
    assert released_config["text_config"] == text_config


def test_a_release_records_what_it_was_built_for_and_from(release: Path, trained_run: Path) -> None:
    record = json.loads((release / "release.json").read_text())
    (evaluation,) = json.loads((trained_run / "evaluation.json").read_text())
    assert record == {"repo_id": REPO_ID, "revision": "v1.0", "weights": evaluation["weights"]}


# What the card has to contain. Most values are those that `trained_run` in conftest.py records.
RECORDED_TEXTS = (
    "# Tiny-NormLlava\n",
    "Answers questions.",
    "followed by a LayerNorm with global weight compensation (GWC)",
    "| norm after it | new in this model | 64 |",  # gain and bias of a LayerNorm of width 32
    "| vision encoder | origin not recorded |",
    "### Stage: instruct",
    "| steps | 8 |",
    "| tokens | 200 |",
    "| loss, first and last logged | 2.5, 1.5 |",
    "| time | 0:00:30 |",
    "| hardware | 1 x x86_64 |",
    f"| code | commit {'0' * 40} |",
    "| `learning_rate` | 1e-05 |",
    "| Visual question answering | owner/rows (test) | exact_match | 0.5 ± 0.035 | 200 | a script | 0.1 (guessing) |",
    "Commands: `python evaluate.py`.",
    "Training before the stage that follows: not recorded.",
    "What it does in this model: not recorded.",
    "**Not with `LlavaForConditionalGeneration`.**",
    'repository, revision = "me/Tiny-NormLlava", "v1.0"',
    '{"type": "text", "text": "what is it?"}',
)


def test_the_card_says_what_the_run_recorded(release: Path) -> None:
    card = (release / "README.md").read_text()
    missing = [text for text in RECORDED_TEXTS if text not in card]
    assert missing == []


def test_the_card_counts_weights(release: Path, trained_run: Path) -> None:
    num_weights = 0
    num_vision_weights = 0
    for name, tensor in load_file(trained_run / WEIGHTS).items():
        num_weights += tensor.numel()
        if name.startswith("model.vision_tower."):
            num_vision_weights += tensor.numel()

    card = (release / "README.md").read_text()
    assert f"model of {num_weights:,} weights" in card
    assert f"| vision encoder | origin not recorded | {num_vision_weights:,} |" in card


def test_the_card_names_the_l2_norm_with_which_image_tokens_start(release: Path, trained_run: Path) -> None:
    card = (release / "README.md").read_text()
    target_l2_norm = json.loads((trained_run / "config.json").read_text())["projector_norm_target"]
    assert f"an L2 norm of {target_l2_norm:.4g}. That is the mean L2 norm of text tokens" in card


def test_the_hubs_client_reads_the_metadata(release: Path) -> None:
    data = ModelCard.load(release / "README.md").data
    assert data.pipeline_tag == "image-text-to-text"
    assert data.library_name == "transformers"
    assert data.license == "apache-2.0"
    assert data.language == ["en", "de"]
    assert data.datasets == ["owner/rows"]
    assert data.base_model is None

    # The one row of evaluation.json.
    (result,) = data.eval_results
    assert result.metric_type == "exact_match"
    assert result.metric_value == 0.5
    assert result.dataset_split == "test"

    # An example for each row of `widget_data`.
    assert len(data.widget) == 2
    for widget in data.widget:
        assert list(widget["output"]) == ["text"]


def test_the_card_shows_what_no_file_holds_as_not_recorded(run: Path, build_card: Callable[..., str]) -> None:
    # Without run.json, the hardware and the commit are not known. The number of steps is in trainer_state.json.
    (run / "run.json").unlink()
    card = build_card(run, **OWN_LICENCE)
    assert "| steps | 8 |" in card
    assert "| hardware | not recorded |\n| code | not recorded |" in card

    # Without the other records too, there is no stage and no result.
    for name in ("trainer_state.json", "evaluation.json"):
        (run / name).unlink()
    card = build_card(run, **OWN_LICENCE)
    assert "Procedure: not recorded." in card
    assert "## Evaluation\n\nNot recorded." in card


def remove_norm_layer(weights: dict[str, torch.Tensor]) -> None:
    """Remove the weights of the norm layer after the projector."""
    for name in list(weights):
        if "projector.norm" in name:
            del weights[name]


def test_the_card_of_a_model_without_a_norm(run: Path, build_card: Callable[..., str]) -> None:
    set_fields("config.json", projector_norm="none", projector_norm_target=None)(run)
    set_fields("run.json", composed__projector_scaled=True)(run)
    change_weights(remove_norm_layer)(run)
    (run / "evaluation.json").unlink()  # a build refuses results that were measured with other weights

    card = build_card(run, **OWN_LICENCE)
    card = " ".join(card.split())  # on one line
    assert "no norm after the projector. Its projector was scaled before training" in card
    assert "| norm after it | none | 0 |" in card
    assert "Not with `LlavaForConditionalGeneration`" not in card
    assert "is followed by" not in card
    assert "## The norm of image tokens" in card
    assert "Whether another norm raises accuracy" in card


def test_rows_without_a_question_become_no_examples(
    trained_run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png")
    row_without_turns = {"image": "0.png", "label": 3}
    row_without_question = {"image": "0.png", "conversations": [{"from": "human", "value": "<image>"}]}
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>\nwhat does it say?"},
    ]
    row_with_question = {"image": "0.png", "conversations": turns}
    rows = [row_without_turns, row_without_question, row_with_question]
    (tmp_path / "rows.json").write_text(json.dumps(rows))

    card = build_card(trained_run, widget_data=tmp_path / "rows.json", **OWN_LICENCE)
    assert "what does it say?" in card
    assert "Be brief." not in card
    assert [path.name for path in (tmp_path / "release" / "images").iterdir()] == ["example1.png"]


def test_the_picture_of_an_example_loses_its_metadata(
    trained_run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    artist = 0x013B  # the number of an EXIF field
    exif = Image.Exif()
    exif[artist] = "me"
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png", exif=exif, icc_profile=b"0" * 200)
    row = {"image": "0.png", "conversations": [{"from": "human", "value": "<image>\nwhat is it?"}]}
    (tmp_path / "rows.json").write_text(json.dumps([row]))

    build_card(trained_run, widget_data=tmp_path / "rows.json", **OWN_LICENCE)
    with Image.open(tmp_path / "release" / "images" / "example1.png") as picture:
        assert picture.info == {}
        assert picture.size == (30, 20)


def test_commands_on_the_card_are_not_escaped(run: Path, build_card: Callable[..., str]) -> None:
    evaluations = json.loads((run / "evaluation.json").read_text())
    evaluations[0]["command"] = "python evaluate.py < rows.json | tee log"
    (run / "evaluation.json").write_text(json.dumps(evaluations))
    assert "Commands: `python evaluate.py < rows.json | tee log`." in build_card(run, **OWN_LICENCE)


def test_shards_are_copied_with_their_index(run: Path, build_card: Callable[..., str], tmp_path: Path) -> None:
    split_weights(run)
    (run / "evaluation.json").unlink()  # a build refuses results that were measured with other weight files
    build_card(run, **OWN_LICENCE)
    names = sorted(path.name for path in (tmp_path / "release").glob("*.safetensors*"))
    assert names == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_build_says_what_the_card_lacks_and_what_would_record_it(
    run: Path, build_card: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    (run / "evaluation.json").unlink()
    build_card(run, **OWN_LICENCE)
    assert f"norms: normllava diagnose --model {run} --data ... --output_dir {run}/diagnostics" in caplog.text
    assert f"benchmarks: normllava evaluate {run}" in caplog.text
    assert "origin of the parts: --text_model and --vision_model" in caplog.text


def test_a_release_gets_this_versions_class_files(
    run: Path, build_card: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_file("modeling_normllava.py", "# before an upgrade\n")(run)
    build_card(run, **OWN_LICENCE)
    assert "modeling_normllava.py is another version's" in caplog.text
    this_version = ROOT / "modeling_normllava" / "modeling_normllava.py"
    assert (tmp_path / "release" / "modeling_normllava.py").read_bytes() == this_version.read_bytes()


def summary_row(measure: str, modality: str, mean: float, low: float, high: float) -> dict[str, Any]:
    """A row of the diagnostics' summary: a mean over four pictures, and the ends of the mean's interval."""
    return {"measure": measure, "modality": modality, "layer": None, "mean": mean, "low": low, "high": high, "n": 4}


@pytest.fixture
def measured_run(run: Path) -> Path:
    """The run with a made-up report of the diagnostics, which is about the run's weights."""
    (evaluation,) = json.loads((run / "evaluation.json").read_text())
    rows = [
        summary_row("ratio", modality="", mean=1.5, low=1.25, high=1.75),
        summary_row("turning", modality="image", mean=0.25, low=0.2, high=0.3),
        summary_row("turning", modality="text", mean=0.5, low=0.4, high=0.6),
    ]
    model = {
        "weights": evaluation["weights"],
        "dtype": "float32",
        "num_pictures": 4,
        "summary": {"rows": rows},
    }

    (run / "diagnostics" / "figures").mkdir(parents=True)
    (run / "diagnostics" / "report.json").write_text(json.dumps({"models": [model]}))
    Image.new("RGB", (40, 30), "red").save(run / "diagnostics" / "figures" / "overview.png")
    return run


def read_model_entry(run: Path) -> dict[str, Any]:
    """The entry of the run's one model in the report of the diagnostics."""
    (entry,) = json.loads((run / "diagnostics" / "report.json").read_text())["models"]
    return entry


def test_the_card_shows_the_diagnostics_report(
    measured_run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    card = build_card(measured_run, **OWN_LICENCE)
    assert "| pictures | 4 |" in card
    assert "| L2 norm of image tokens over that of text tokens, at the decoder | 1.50 (1.25 to 1.75) |" in card
    assert "| turning of image tokens per layer, 1 − cosine | 0.25 (0.20 to 0.30) |" in card
    assert "| turning of text tokens per layer | 0.50 (0.40 to 0.60) |" in card
    assert "](diagnostics/overview.png)" in card
    with Image.open(tmp_path / "release" / "diagnostics" / "overview.png") as picture:
        assert picture.size == (40, 30)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"weights": "other"}, id="other weights"),
        pytest.param({"weights": None}, id="unknown weights"),
        pytest.param({"dtype": "float32, quantized"}, id="quantized weights"),
    ],
)
def test_a_report_of_other_weights_is_refused(change: dict[str, Any], measured_run: Path) -> None:
    model = read_model_entry(measured_run)
    set_fields("diagnostics/report.json", models=[model | change])(measured_run)
    with pytest.raises(ValueError, match=r"report.json is of other weights. Run normllava diagnose on this model"):
        collect_facts(measured_run)


def test_a_report_of_two_models_is_refused(measured_run: Path) -> None:
    model = read_model_entry(measured_run)
    set_fields("diagnostics/report.json", models=[model, model])(measured_run)
    with pytest.raises(ValueError, match="Run normllava diagnose on this model alone"):
        collect_facts(measured_run)


def test_a_report_of_another_version_is_refused(measured_run: Path) -> None:
    model = read_model_entry(measured_run)
    del model["summary"]
    set_fields("diagnostics/report.json", models=[model])(measured_run)
    with pytest.raises(ValueError, match=r"report.json can't be read .* Run normllava diagnose"):
        collect_facts(measured_run)


def test_a_result_that_is_not_finite_is_refused(run: Path) -> None:
    (result,) = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").write_text(json.dumps([result | {"value": math.nan}]))
    with pytest.raises(ValueError, match=r"evaluation.json, row 0: value is NaN or infinite"):
        collect_facts(run)


def test_a_result_that_names_no_weights_is_refused(run: Path) -> None:
    (result,) = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").write_text(json.dumps([result | {"weights": None}]))
    message = f'row 0, Visual .* doesn\'t say which weights .* add "weights": "{weights_fingerprint(run)}"'
    with pytest.raises(ValueError, match=message):
        collect_facts(run)


@pytest.fixture
def run_after_align(run: Path, tmp_path: Path) -> Path:
    """The run of the stage "instruct", which started from a run of the stage "align"."""
    stage1 = shutil.copytree(run, tmp_path / "stage1")
    set_fields("run.json", arguments__stage="align")(stage1)
    set_fields("run.json", arguments__model_name_or_path=str(stage1))(run)
    return run


def test_the_card_lists_the_stages_in_their_order(run_after_align: Path, build_card: Callable[..., str]) -> None:
    card = build_card(run_after_align, **OWN_LICENCE)
    assert card.index("### Stage: align") < card.index("### Stage: instruct")
    assert "Training before the stage that follows" not in card


def test_the_parent_of_a_model_is_named_and_its_licence_is_asked_for(
    run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    """The run trained somebody's published model. What its parts allow says nothing of what the parent allows."""
    parts = {"text_model": "Qwen/Qwen2.5-0.5B-Instruct", "vision_model": "google/siglip2-base-patch16-512"}
    set_fields("run.json", arguments__model_name_or_path="someone/NC-NormLlava")(run)
    with pytest.raises(ValueError, match="The licence of someone/NC-NormLlava is not known here"):
        build_card(run, **parts)

    terms = tmp_path / "terms.txt"
    terms.write_text("The parent's terms.")
    card = build_card(run, **parts, license="cc-by-nc-4.0", base_licence_file=terms)
    data = ModelCard(card).data
    assert data.base_model == ["someone/NC-NormLlava"]
    assert data.license == "cc-by-nc-4.0"
    assert "Trained further from someone/NC-NormLlava. Made from Qwen/Qwen2.5-0.5B-Instruct." in card


def test_a_stage_that_was_run_again_since_is_not_told(run_after_align: Path, build_card: Callable[..., str]) -> None:
    stage1 = Path(json.loads((run_after_align / "run.json").read_text())["arguments"]["model_name_or_path"])
    set_fields("run.json", start_weights=weights_fingerprint(stage1))(run_after_align)
    assert "### Stage: align" in build_card(run_after_align, **OWN_LICENCE)

    set_fields("run.json", start_weights="those of an earlier run")(run_after_align)
    card = build_card(run_after_align, **OWN_LICENCE)
    assert "### Stage: align" not in card
    assert "Training before the stage that follows: not recorded" in card


def test_the_card_says_that_the_training_of_an_aligned_projector_is_not_recorded(
    run_after_align: Path, build_card: Callable[..., str]
) -> None:
    """`training/composing/align.py` aligns a projector before the first stage, and no run records how."""
    set_fields("run.json", composed__projector_aligned=True)(run_after_align)
    assert "Training before the stage that follows: not recorded." in build_card(run_after_align, **OWN_LICENCE)


def test_the_card_names_a_local_source_of_data_without_its_folder(run: Path, build_card: Callable[..., str]) -> None:
    source = {
        "path": "/home/someone/rows.json",
        "name": None,
        "split": "train",
        "is_local": True,
        "rows": 1000,
        "good_rows": 1000,
        "weight": 1.0,
        "drawn": 1000,
        "fingerprint": "a" * 64,
    }
    set_fields("run.json", sources=[source])(run)

    card = build_card(run, **OWN_LICENCE)
    assert f"| data | rows.json: 1,000 rows; content {'a' * 12} |\n" in card
    assert "someone" not in card


def test_the_card_links_a_source_of_data_on_the_hub(run: Path, build_card: Callable[..., str]) -> None:
    source = {
        "path": "other/rows",
        "name": "large",
        "split": "dev",
        "is_local": False,
        "rows": 1000,
        "good_rows": 990,
        "weight": 0.5,
        "drawn": 495,  # 0.5 × 990
        "fingerprint": "b" * 64,
    }
    set_fields("run.json", sources=[source])(run)

    card = build_card(run, **OWN_LICENCE)
    link = "[other/rows](https://huggingface.co/datasets/other/rows), large, dev"
    num_rows = "990 rows (of 1,000; the rest are bad), weight 0.5, 495 per epoch"
    assert f"| data | {link}: {num_rows}; content {'b' * 12} |\n" in card
    # And its metadata name it, with those that card.yaml names.
    assert ModelCard(card).data.datasets == ["other/rows", "owner/rows"]


def test_the_card_names_the_source_of_a_stream(run: Path, build_card: Callable[..., str]) -> None:
    counts = {"rows": None, "good_rows": None, "drawn": None}  # nobody counts a stream's rows
    source = {"path": "other/rows", "name": None, "split": "train", "is_local": False, "weight": 1.0, **counts}
    set_fields("run.json", sources=[{**source, "fingerprint": "c" * 64}])(run)

    card = build_card(run, **OWN_LICENCE)
    link = "[other/rows](https://huggingface.co/datasets/other/rows)"
    assert f"| data | {link}: a stream; content {'c' * 12} |\n" in card
    assert "other/rows" in ModelCard(card).data.datasets


def test_a_stage_lists_only_arguments_that_had_an_effect(run: Path) -> None:
    arguments_without_effect = {
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "nf4",  # would say how `load_in_4bit` quantizes
        "lora_r": 16,  # only the stage "adapt" uses LoRA
        "key_mmd_weight": 0.0,
        "data_seed": None,
        "norm_learning_rate": 1e-4,  # the run's log has no learning rate of a norm
        "num_train_epochs": 3.0,  # `max_steps` ends the run
        "max_steps": 8,
    }
    arguments = {"stage": "instruct", "learning_rate": 1e-5, **arguments_without_effect}
    set_fields("run.json", arguments=arguments)(run)
    (stage,) = collect_facts(run).stages
    assert stage.arguments == {"learning_rate": 1e-5}


def test_an_adapt_stage_lists_arguments_of_lora_of_key_losses_and_of_the_norm(run: Path) -> None:
    arguments = {"lora_r": 16, "key_mmd_weight": 0.1, "key_gram_weight": 0.0, "norm_learning_rate": 1e-4}
    set_fields("run.json", arguments={"stage": "adapt", **arguments})(run)
    logs = [{"learning_rate/multi_modal_projector.norm": 0.0001}]
    set_fields("trainer_state.json", log_history=logs)(run)
    (stage,) = collect_facts(run).stages
    assert stage.arguments == arguments


def test_a_resumed_stage_has_no_time(run: Path) -> None:
    """A resumed run logs only the time since it was resumed."""
    set_fields("run.json", environment__resumed=True)(run)
    (stage,) = collect_facts(run).stages
    assert stage.seconds is None


def test_a_push_finds_the_recipes_prose_and_the_report_of_the_diagnostics(
    run: Path, report: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub_cards.__main__.get_token", lambda: None)  # so the Hub is not asked
    dry_run = ["push", run, "--repo_id", "me/Mine", "--license", "apache-2.0", "--dry_run"]

    (tmp_path / "recipes").mkdir()
    set_fields("run.json", recipe=str(tmp_path / "recipes" / "stage2.yaml"))(run)
    shutil.copy(prose, tmp_path / "recipes" / "card.yaml")
    shutil.copytree(report, run / "diagnostics")
    run_command(*dry_run)
    # The fixture `report` is about the two pictures of `widget_data`.
    assert "| pictures | 2 |" in (run / "release" / "README.md").read_text()
    # A picture of a few bytes would be no plot.
    assert (run / "release" / "diagnostics" / "overview.png").stat().st_size > 10_000


@pytest.mark.parametrize("names_recipe", [True, False])
def test_a_card_yaml_is_written_in_which_one_sentence_is_filled_in(
    run: Path, names_recipe: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub_cards.__main__.get_token", lambda: None)  # so the Hub is not asked
    dry_run = ["push", run, "--repo_id", "me/Mine", "--license", "apache-2.0", "--dry_run"]
    folder = run
    if names_recipe:
        folder = tmp_path / "mine"
        folder.mkdir()
        set_fields("run.json", recipe=str(folder / "adapt.yaml"))(run)

    with pytest.raises(SystemExit, match=rf"The card needs a sentence: {folder}/card.yaml was written for it"):
        run_command(*dry_run)
    with pytest.raises(SystemExit, match=r"card.yaml: summary is missing. Say in a sentence what the model is for"):
        run_command(*dry_run)

    form = (folder / "card.yaml").read_text()
    (folder / "card.yaml").write_text(form.replace("summary:", "summary: Reads the labels of our parts.", 1))
    run_command(*dry_run)
    card = ModelCard.load(run / "release" / "README.md")
    assert "Reads the labels of our parts." in card.text
    assert f"**Intended.** {Prose.intended_use}" in card.text


def test_a_model_of_unknown_origin_needs_a_licence(run: Path, build_card: Callable[..., str]) -> None:
    """Its config may name the parts, but not that they came from a Llava with a licence of its own."""
    name_parts(run, QWEN, SIGLIP)
    build_card(run)
    set_fields("run.json", composed=None)(run)
    with pytest.raises(ValueError, match=r"doesn't record what the model was made from.*--license"):
        build_card(run)


def test_no_earlier_training_is_missing_where_there_was_none(run: Path, build_card: Callable[..., str]) -> None:
    """The run began with stage "instruct", from a model that `training/compose.py` had just made."""
    composed = run.parent / "gone"
    missing = "Training before the stage that follows: not recorded"
    assert missing in build_card(run, **OWN_LICENCE)
    composed.mkdir()
    Composed(projector_scaled=False, projector_aligned=False, llava_name_or_path=None).write(composed)
    set_fields("run.json", arguments__model_name_or_path=str(composed))(run)
    assert missing not in build_card(run, **OWN_LICENCE)


def test_the_prose_of_every_recipe_can_be_read() -> None:
    recipe_folders = [path for path in (ROOT / "training" / "recipes").iterdir() if path.is_dir()]
    assert recipe_folders
    for folder in recipe_folders:
        path = folder / "card.yaml"
        recipe_prose = Prose(**yaml.safe_load(path.read_text()))
        for dataset in recipe_prose.datasets:
            assert HUB_ID_PATTERN.fullmatch(dataset)


@pytest.mark.parametrize(
    ("text_model", "message"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", "licence of Qwen/Qwen2.5-3B-Instruct is not known here"),
        (None, "name it: --text_model owner/name. Otherwise choose a licence: --license apache-2.0"),
    ],
    ids=["model with an unknown licence", "unknown model"],
)
def test_a_build_stops_if_the_licence_of_a_part_is_neither_known_nor_given(
    text_model: str | None, message: str, run: Path, build_card: Callable[..., str]
) -> None:
    name_parts(run, text_model, vision=None)
    with pytest.raises(ValueError, match=message):
        build_card(run)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "asks for another name than Mine: Llama-Mine"),
        ({"repo_id": "me/Llama-Mine"}, "A copy of the licence .* is needed: .* --base_licence_file"),
        ({"license": "gemma"}, "under the gemma and the Llama 3.2 Community License, and a release"),
    ],
    ids=["name without Llama", "no text of the licence", "another licence is given"],
)
def test_a_build_stops_if_it_does_not_do_what_llamas_licence_asks_for(
    options: dict[str, str], message: str, run: Path, build_card: Callable[..., str]
) -> None:
    name_parts(run, LLAMA, SIGLIP)
    with pytest.raises(ValueError, match=message):
        build_card(run, **options)


def test_the_hub_id_of_a_part_is_given_or_recorded(run: Path, build_card: Callable[..., str]) -> None:
    # The language model was loaded from a folder, so the build is told its id.
    name_parts(run, "/data/models/Qwen", SIGLIP)
    card = build_card(run, text_model=QWEN)
    assert f"Made from {QWEN}. Made from {SIGLIP}." in card
    assert ModelCard(card).data.base_model == [QWEN, SIGLIP]


def test_a_converted_llava_is_the_base_model(run: Path) -> None:
    set_fields("run.json", composed__llava_name_or_path="llava-hf/llava-1.5-7b-hf")(run)
    facts = collect_facts(run)
    assert facts.base_models == ["llava-hf/llava-1.5-7b-hf"]
    assert not facts.has_whole_history


def test_another_id_than_the_recorded_one_is_refused(run: Path) -> None:
    name_parts(run, QWEN, SIGLIP)
    with pytest.raises(ValueError, match=f"--text_model is {LLAMA}, but {QWEN} is recorded"):
        collect_facts(run, text_model=LLAMA)


def test_a_model_with_llama_gets_what_llamas_licence_asks_for(
    run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    name_parts(run, LLAMA, SIGLIP)
    agreement = tmp_path / "LICENSE.txt"
    agreement.write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nand so on\n")

    card = build_card(run, "me/Llama-Mine", base_licence_file=agreement)
    release = tmp_path / "release"
    assert (release / "LICENSE").read_text() == agreement.read_text()
    assert "Llama 3.2 Community License, Copyright © Meta Platforms" in (release / "NOTICE").read_text()
    assert (release / "LICENSE-APACHE").read_text() == (ROOT / "LICENSE").read_text()
    assert "**Built with Llama**" in card
    assert "Apache-2.0. The text of\nthat licence is in `LICENSE-APACHE`." in card
    assert "license: llama3.2\n" in card


def test_a_licence_that_is_not_known_can_be_given(run: Path, build_card: Callable[..., str], tmp_path: Path) -> None:
    name_parts(run, "google/gemma-2b", SIGLIP)
    terms = tmp_path / "terms.txt"
    terms.write_text("Gemma Terms of Use: and so on\n")

    card = build_card(run, license="gemma", base_licence_file=terms)
    assert "license: gemma\n" in card
    assert "[gemma](LICENSE); the text is in `LICENSE`." in card
    assert (tmp_path / "release" / "LICENSE").read_text() == terms.read_text()
    assert (tmp_path / "release" / "LICENSE-APACHE").exists()
    assert not (tmp_path / "release" / "NOTICE").exists()


def test_two_licences_other_than_apaches_are_refused(
    run: Path, build_card: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    gemma = Licence(identifier="gemma", title="Gemma Terms of Use", link="https://ai.google.dev")
    monkeypatch.setitem(KNOWN_LICENCES, "google/gemma-2b", gemma)
    name_parts(run, "google/gemma-2b", LLAMA)
    with pytest.raises(ValueError, match=r"under the Gemma Terms of Use and the Llama 3\.2 Community"):
        build_card(run)


@pytest.mark.parametrize("revision", ["main", "0" * 40, "a b"], ids=["branch", "commit", "space in it"])
def test_a_revision_that_pins_no_code_is_refused(revision: str, run: Path, build_card: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=f"--revision '{revision}' is not a tag that pins code"):
        build_card(run, revision=revision, **OWN_LICENCE)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dataset: [a/b]", "card.yaml is not a card's prose .*unexpected keyword argument 'dataset'"),
        ("summary:", "card.yaml: summary is missing. Say in a sentence what the model is for"),
        ("language: [no]", r"card.yaml: language is \[False\], not text"),
    ],
    ids=["unknown field", "no summary", "value that is not text"],
)
def test_a_field_of_the_prose_that_can_not_be_read_is_named(
    line: str, message: str, run: Path, prose: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "card.yaml").write_text(f"{prose.read_text()}{line}\n")
    with pytest.raises(ValueError, match=message):
        build_card(run, prose=tmp_path / "card.yaml", **OWN_LICENCE)


def test_an_adapter_that_is_not_merged_is_refused(run: Path, build_card: Callable[..., str]) -> None:
    (run / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"training/merge.py --adapter"):
        build_card(run, **OWN_LICENCE)


def test_a_folder_without_a_model_is_named(tmp_path: Path, prose: Path) -> None:
    with pytest.raises(ValueError, match=r"gone holds no config.json: give the output folder of a finished"):
        build_release(tmp_path / "gone", tmp_path / "release", BuildOptions(repo_id="me/Mine", prose=prose))
