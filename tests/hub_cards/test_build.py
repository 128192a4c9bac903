"""A release folder and its card: what they hold is compared with what the run's files say."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file

from hub_cards.build import BuildOptions, build_release
from hub_cards.card import Prose
from hub_cards.check import find_faults
from hub_cards.facts import HUB_ID, collect_facts
from hub_cards.licences import KNOWN, Licence
from hub_server import NAME, run_command
from plants import WEIGHTS, change_weights, set_fields, split_weights, write_file


ROOT = Path(__file__).parents[2]
OWN = {"license": "apache-2.0"}
LLAMA = "meta-llama/Llama-3.2-3B-Instruct"
QWEN = "Qwen/Qwen2.5-7B-Instruct"
SIGLIP = "google/siglip-so400m-patch14-384"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to change."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def build_card(prose: Path, tmp_path: Path) -> Callable[..., str]:
    """Builds `tmp_path / "release"` from a run, which has no faults, and returns its card."""

    def build(run: Path, repo_id: str = "me/Mine", **options: Any) -> str:
        folder = tmp_path / "release"
        shutil.rmtree(folder, ignore_errors=True)
        options.setdefault("prose", prose)
        build_release(run, folder, BuildOptions(repo_id=repo_id, **options))
        assert find_faults(folder) == []
        return (folder / "README.md").read_text()

    return build


def name_parts(run: Path, text: str | None, vision: str | None) -> None:
    set_fields("config.json", text_config___name_or_path=text, vision_config___name_or_path=vision)(run)


def test_a_build_deletes_nothing_beside_the_release(
    trained: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    for name in ("space", "release-space"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    build_card(trained, **OWN)
    assert (tmp_path / "space" / "mine.txt").exists()
    assert {"mine.txt", "app.py", "pixels.py"} <= {path.name for path in (tmp_path / "release-space").iterdir()}


def test_what_is_not_on_the_list_stays_behind(release: Path, trained: Path) -> None:
    names = {path.relative_to(release).as_posix() for path in release.rglob("*") if path.is_file()}
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

    # The names of this machine's folders are out.
    text_config = json.loads((trained / "config.json").read_text())["text_config"]
    assert Path(text_config.pop("_name_or_path")).is_absolute()
    assert json.loads((release / "config.json").read_text())["text_config"] == text_config


def test_it_says_what_it_was_built_for_and_from(release: Path, trained: Path) -> None:
    said = json.loads((release / "release.json").read_text())
    (evaluation,) = json.loads((trained / "evaluation.json").read_text())
    assert said == {"repo_id": NAME, "revision": "v1.0", "weights": evaluation["weights"]}


# What the run's files hold, see conftest.py, as the card should say it.
RECORDED = (
    f"# {NAME.split('/')[1]}\n",
    "Answers questions.",
    "followed by a LayerNorm with gradient compensation (GWC)",
    "| norm after it | new in this model | 64 |",
    "| vision encoder | trained from scratch |",
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


@pytest.mark.parametrize("text", RECORDED)
def test_the_card_says_what_the_run_recorded(text: str, release: Path) -> None:
    assert text in (release / "README.md").read_text()


def test_the_card_counts_weights_and_names_the_target(release: Path, trained: Path) -> None:
    card = (release / "README.md").read_text()
    sizes = {name: tensor.numel() for name, tensor in load_file(trained / WEIGHTS).items()}
    assert f"model of {sum(sizes.values()):,} weights" in card
    vision = sum(size for name, size in sizes.items() if name.startswith("model.vision_tower."))
    assert f"| vision encoder | trained from scratch | {vision:,} |" in card

    target = json.loads((trained / "config.json").read_text())["projector_norm_target"]
    assert f"a norm of T = {target:.4g}: the mean norm of text tokens" in card


def test_the_metadata_is_what_the_hub_reads(release: Path) -> None:
    data = ModelCard.load(release / "README.md").data
    assert data.pipeline_tag == "image-text-to-text"
    assert data.library_name == "transformers"
    assert data.license == "apache-2.0"
    assert data.language == ["en", "de"]
    assert data.datasets == ["owner/rows"]
    assert data.base_model is None
    (result,) = data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("exact_match", 0.5, "test")
    assert [widget["output"].keys() for widget in data.widget] == [{"text"}, {"text"}]


def test_what_is_not_there_is_not_made_up(run: Path, build_card: Callable[..., str]) -> None:
    (run / "run.json").unlink()
    text = build_card(run, **OWN)
    assert "| steps | 8 |" in text
    assert "| hardware | not recorded |\n| code | not recorded |" in text

    for name in ("trainer_state.json", "metrics.jsonl", "evaluation.json"):
        (run / name).unlink()
    text = build_card(run, **OWN)
    assert "Procedure: not recorded." in text
    assert "## Evaluation\n\nNot recorded." in text


def test_the_card_of_a_model_without_a_norm(run: Path, build_card: Callable[..., str]) -> None:
    set_fields("config.json", projector_norm="none", projector_norm_target=None, projector_scaled=True)(run)
    change_weights(lambda weights: [weights.pop(name) for name in [*weights] if "projector.norm" in name])(run)
    (run / "evaluation.json").unlink()  # of other weights now
    text = " ".join(build_card(run, **OWN).split())
    assert "no norm after the projector. Its projector was scaled before training" in text
    assert "| norm after it | none | 0 |" in text
    assert "Not with `LlavaForConditionalGeneration`" not in text


def test_the_first_question_is_asked_and_pictures_lose_their_metadata(
    trained: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x013B] = "me"
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png", exif=exif, icc_profile=b"0" * 200)
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "<image>\nwhat does it say?"}]
    rows = [{"image": "0.png", "label": 3}, {"image": "0.png", "conversations": turns}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    text = build_card(trained, widget_data=tmp_path / "rows.json", **OWN)
    assert "what does it say?" in text
    assert "Be brief." not in text
    with Image.open(tmp_path / "release" / "images" / "example1.png") as picture:
        assert picture.info == {}
        assert picture.size == (30, 20)


def test_shards_are_copied_with_their_index(run: Path, build_card: Callable[..., str], tmp_path: Path) -> None:
    split_weights(run)
    (run / "evaluation.json").unlink()  # of other files
    build_card(run, **OWN)
    assert len([*(tmp_path / "release").glob("*.safetensors*")]) == 3


def test_class_files_are_this_versions(
    run: Path, build_card: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    write_file("modeling_normllava.py", "# before an upgrade\n")(run)
    build_card(run, **OWN)
    assert "modeling_normllava.py is another version's" in caplog.text
    ours = ROOT / "modeling_normllava" / "modeling_normllava.py"
    assert (tmp_path / "release" / "modeling_normllava.py").read_bytes() == ours.read_bytes()


def summary_row(measure: str, modality: str, mean: float, low: float, high: float) -> dict[str, Any]:
    return {"measure": measure, "modality": modality, "layer": None, "mean": mean, "low": low, "high": high, "n": 4}


@pytest.fixture
def measured(run: Path) -> Path:
    """The run with a report of the diagnostics, whose numbers stand here."""
    (evaluation,) = json.loads((run / "evaluation.json").read_text())
    rows = [
        summary_row("ratio", "", 1.5, 1.25, 1.75),
        summary_row("turning", "visual", 0.25, 0.2, 0.3),
        summary_row("turning", "text", 0.5, 0.4, 0.6),
    ]
    model = {"weights": evaluation["weights"], "dtype": "float32", "num_pictures": 4, "summary": {"rows": rows}}
    (run / "diagnostics" / "figures").mkdir(parents=True)
    (run / "diagnostics" / "report.json").write_text(json.dumps({"models": [model]}))
    Image.new("RGB", (40, 30), "red").save(run / "diagnostics" / "figures" / "overview.png")
    return run


def test_the_card_shows_what_was_measured(measured: Path, build_card: Callable[..., str], tmp_path: Path) -> None:
    text = build_card(measured, **OWN)
    assert "| pictures | 4 |" in text
    assert "| L2 norm of image tokens over that of text tokens, at the decoder | 1.50 (1.25 to 1.75) |" in text
    assert "| turning of image tokens per layer, 1 − cosine | 0.25 (0.20 to 0.30) |" in text
    assert "| turning of text tokens per layer | 0.50 (0.40 to 0.60) |" in text
    assert "](diagnostics/overview.png)" in text
    with Image.open(tmp_path / "release" / "diagnostics" / "overview.png") as picture:
        assert picture.size == (40, 30)


@pytest.mark.parametrize("change", [{"weights": "other"}, {"weights": None}, {"dtype": "float32, quantized"}])
def test_a_report_is_of_these_weights(change: dict[str, Any], measured: Path) -> None:
    (model,) = json.loads((measured / "diagnostics" / "report.json").read_text())["models"]
    set_fields("diagnostics/report.json", models=[model | change])(measured)
    with pytest.raises(ValueError, match=r"report.json is of other weights. Run python -m diagnostics on this model"):
        collect_facts(measured)


def test_a_report_of_two_models_or_another_version_is_refused(measured: Path) -> None:
    (model,) = json.loads((measured / "diagnostics" / "report.json").read_text())["models"]
    set_fields("diagnostics/report.json", models=[model, model])(measured)
    with pytest.raises(ValueError, match="Run python -m diagnostics on this model alone"):
        collect_facts(measured)

    del model["summary"]
    set_fields("diagnostics/report.json", models=[model])(measured)
    with pytest.raises(ValueError, match=r"report.json: another version wrote it .* Run python -m diagnostics"):
        collect_facts(measured)


def test_results_are_of_these_weights(run: Path) -> None:
    (result,) = json.loads((run / "evaluation.json").read_text())
    (run / "evaluation.json").write_text(json.dumps([result | {"value": math.nan}]))
    with pytest.raises(ValueError, match=r"evaluation.json, row 0: value is NaN or infinite"):
        collect_facts(run)

    (run / "evaluation.json").write_text(json.dumps([result | {"weights": None}]))
    with pytest.raises(ValueError, match=r"row 0, Visual .* of other weights. Measure again: python evaluate.py"):
        collect_facts(run)


def test_earlier_stages_and_their_data_are_found(run: Path, build_card: Callable[..., str], tmp_path: Path) -> None:
    first = shutil.copytree(run, tmp_path / "stage1")
    local = {
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
    other = {"path": "owner/rows", "name": "large", "split": "dev", "is_local": False, "good_rows": 990, "weight": 2.5}
    set_fields("run.json", arguments__stage="align")(first)
    set_fields("run.json", arguments__model_name_or_path=str(first), sources=[local, local | other])(run)
    text = build_card(run, **OWN)
    assert text.index("### Stage: align") < text.index("### Stage: instruct")
    assert "Training before" not in text
    assert f"| data | rows.json: 1,000 rows; content {'a' * 12} |\n" in text
    link = "[owner/rows](https://huggingface.co/datasets/owner/rows), large, dev"
    assert f"| data | {link}: 990 rows (of 1,000; the rest are bad), weight 2.5, 1,000 per epoch; content a" in text
    assert "someone" not in text

    set_fields("config.json", projector_aligned=True)(run)  # which was training too
    assert "Training before the stage that follows: not recorded." in build_card(run, **OWN)


def test_a_stage_lists_what_had_an_effect(run: Path) -> None:
    unused = {
        "load_in_4bit": False,
        "bnb_4bit_quant_type": "nf4",
        "lora_r": 16,
        "key_mmd_weight": 0.0,
        "data_seed": None,
        "norm_learning_rate": 1e-4,  # the log has no rate of a norm
    }
    set_fields(
        "run.json", arguments={"stage": "instruct", "learning_rate": 1e-5, **unused}, environment__resumed=True
    )(run)
    (stage,) = collect_facts(run).stages
    assert stage.arguments == {"learning_rate": 1e-5}
    assert stage.seconds is None  # what is recorded is the time of a part of it

    set_fields("run.json", arguments={"stage": "adapt", "lora_r": 16, "key_mmd_weight": 0.1, "key_gram_weight": 0.0})(
        run
    )
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"learning_rate/multi_modal_projector.norm": 0.0001}\n')
    set_fields("run.json", arguments__norm_learning_rate=1e-4)(run)
    (stage,) = collect_facts(run).stages
    assert stage.arguments == {
        "lora_r": 16,
        "key_mmd_weight": 0.1,
        "key_gram_weight": 0.0,
        "norm_learning_rate": 1e-4,
    }


def test_a_torn_line_of_the_metrics_is_named(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"loss": 1')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 4, is not valid JSON"):
        collect_facts(run)


def test_a_push_finds_what_training_and_diagnostics_left(
    run: Path, report: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hub_cards.__main__.get_token", lambda: None)
    push = ["push", run, "--repo_id", "me/Mine", "--license", "apache-2.0", "--dry_run"]
    set_fields("run.json", recipe=str(tmp_path / "recipes" / "stage2.yaml"))(run)
    with pytest.raises(SystemExit, match=r"recipes/card.yaml is missing. Give .* --prose; training/recipes/\*/card"):
        run_command(*push)

    (tmp_path / "recipes").mkdir()
    shutil.copy(prose, tmp_path / "recipes" / "card.yaml")
    shutil.copytree(report, run / "diagnostics")
    run_command(*push)
    assert "| pictures | 2 |" in (run / "release" / "README.md").read_text()
    assert (run / "release" / "diagnostics" / "overview.png").stat().st_size > 10_000


def test_the_recipes_bring_their_prose() -> None:
    files = sorted((ROOT / "training" / "recipes").glob("*/card.yaml"))
    assert len(files) == 4
    for path in files:
        said = Prose(**yaml.safe_load(path.read_text()))
        assert all(HUB_ID.fullmatch(name) for name in said.datasets)


@pytest.mark.parametrize(
    ("text", "vision", "options", "message"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", None, {}, "licence of Qwen/Qwen2.5-3B-Instruct is not known here"),
        (None, None, {}, "name it: --text_model owner/name. Otherwise choose a licence: --license apache-2.0"),
        (LLAMA, SIGLIP, {}, "asks for another name than Mine: Llama-Mine"),
        (LLAMA, SIGLIP, {"repo_id": "me/Llama-Mine"}, "A copy of the licence .* is needed: .* --base_licence_file"),
        (LLAMA, SIGLIP, {"license": "gemma"}, "under the gemma and the Llama 3.2 Community License, and a release"),
    ],
)
def test_a_licence_that_is_not_clear_is_a_stop(
    text: str | None,
    vision: str | None,
    options: dict[str, str],
    message: str,
    run: Path,
    build_card: Callable[..., str],
) -> None:
    name_parts(run, text, vision)
    with pytest.raises(ValueError, match=message):
        build_card(run, **options)


def test_parts_from_folders_and_converted_llavas_are_named(run: Path, build_card: Callable[..., str]) -> None:
    name_parts(run, "/data/models/Qwen", SIGLIP)
    text = build_card(run, text_model=QWEN)
    assert f"Made from {QWEN}. Made from {SIGLIP}." in text
    assert ModelCard(text).data.base_model == [QWEN, SIGLIP]

    set_fields("config.json", llava_name_or_path="llava-hf/llava-1.5-7b-hf")(run)
    facts = collect_facts(run)
    assert facts.base_models == ["llava-hf/llava-1.5-7b-hf"]
    assert not facts.earlier_is_recorded


def test_another_id_than_the_recorded_one_is_refused(run: Path) -> None:
    name_parts(run, QWEN, SIGLIP)
    with pytest.raises(ValueError, match=f"--text_model is {LLAMA}, but config.json records {QWEN}"):
        collect_facts(run, text_model=LLAMA)


def test_llama_brings_its_agreement_its_notice_and_its_name(
    run: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    name_parts(run, LLAMA, SIGLIP)
    agreement = tmp_path / "LICENSE.txt"
    agreement.write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nand so on\n")
    text = build_card(run, "me/Llama-Mine", base_licence_file=agreement)
    release = tmp_path / "release"
    assert (release / "LICENSE").read_text() == agreement.read_text()
    assert "Llama 3.2 Community License, Copyright © Meta Platforms" in (release / "NOTICE").read_text()
    assert (release / "LICENSE-APACHE").read_text() == (ROOT / "LICENSE").read_text()
    assert "**Built with Llama**" in text
    assert "Apache-2.0. The text of\nthat licence is in `LICENSE-APACHE`." in text
    assert "license: llama3.2\n" in text


def test_a_licence_can_be_given(run: Path, build_card: Callable[..., str], tmp_path: Path) -> None:
    name_parts(run, "google/gemma-2b", SIGLIP)
    terms = tmp_path / "terms.txt"
    terms.write_text("Gemma Terms of Use: and so on\n")
    text = build_card(run, license="gemma", base_licence_file=terms)
    assert "license: gemma\n" in text
    assert "[gemma](LICENSE); the text is in `LICENSE`." in text
    assert (tmp_path / "release" / "LICENSE").read_text() == terms.read_text()
    assert (tmp_path / "release" / "LICENSE-APACHE").exists()
    assert not (tmp_path / "release" / "NOTICE").exists()


def test_two_licences_that_ask_more_than_apache_are_refused(
    run: Path, build_card: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "google/gemma-2b", Licence("gemma", "Gemma Terms of Use", "https://ai.google.dev"))
    name_parts(run, "google/gemma-2b", LLAMA)
    with pytest.raises(ValueError, match=r"under the Gemma Terms of Use and the Llama 3\.2 Community"):
        build_card(run)


@pytest.mark.parametrize("revision", ["main", "0" * 40, "a b"])
def test_a_tag_is_one_that_pins_code(revision: str, run: Path, build_card: Callable[..., str]) -> None:
    with pytest.raises(ValueError, match=f"--revision '{revision}' is not a tag that pins code"):
        build_card(run, revision=revision, **OWN)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dataset: [a/b]", "card.yaml is not a card's prose .*unexpected keyword argument 'dataset'"),
        ("language: [no]", r"card.yaml: language is \[False\], not text"),
    ],
)
def test_prose_that_does_not_fit_is_named(
    line: str, message: str, run: Path, prose: Path, build_card: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "card.yaml").write_text(f"{prose.read_text()}{line}\n")
    with pytest.raises(ValueError, match=message):
        build_card(run, prose=tmp_path / "card.yaml", **OWN)


def test_an_adapter_is_merged_first(run: Path, build_card: Callable[..., str]) -> None:
    (run / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"training/merge.py --adapter"):
        build_card(run, **OWN)


def test_a_folder_without_a_model_is_named(tmp_path: Path, prose: Path) -> None:
    with pytest.raises(ValueError, match=r"gone holds no config.json: give the output folder of a finished"):
        build_release(tmp_path / "gone", tmp_path / "release", BuildOptions(repo_id="me/Mine", prose=prose))
