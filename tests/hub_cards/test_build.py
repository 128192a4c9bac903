"""What is staged and what stays behind; what the card says, and what it does not make up."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from diagnostics.report import with_interval
from diagnostics.table import Summary
from hub_cards.__main__ import main
from hub_cards.build import build
from hub_cards.card import Prose
from hub_cards.check import check
from hub_cards.facts import HUB_ID, collect_facts
from hub_cards.licences import KNOWN, Licence
from modeling_normllava import NormLlavaForConditionalGeneration
from plants import WEIGHTS, put, shard, tensors


ROOT = Path(__file__).parents[2]
OWN = {"license": "apache-2.0"}
LLAMA, SIGLIP = "meta-llama/Llama-3.2-3B-Instruct", "google/siglip-so400m-patch14-384"
QWEN = "Qwen/Qwen2.5-7B-Instruct"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run's folder, to change."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def card_of(prose: Path, tmp_path: Path) -> Callable[..., str]:
    """Builds from a folder and returns the card's text; the stage folder, `tmp_path / "stage"`, has no findings."""

    def card(run: Path, repo_id: str = "me/Mine", **options: Any) -> str:
        shutil.rmtree(tmp_path / "stage", ignore_errors=True)
        stage = build(run, repo_id, tmp_path / "stage", options.pop("prose", prose), **options)
        assert check(stage) == []
        return (stage / "README.md").read_text()

    return card


def rename_parts(run: Path, text: str | None, vision: str | None) -> Path:
    put("config.json", text_config___name_or_path=text, vision_config___name_or_path=vision)(run)
    return run


def test_a_build_deletes_nothing_beside_the_release(trained: Path, prose: Path, tmp_path: Path) -> None:
    for name in ("space", "release-space"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine.txt").write_text("mine")
    build(trained, "me/Tiny-NormLlava", tmp_path / "release", prose, license="apache-2.0")
    assert (tmp_path / "space" / "mine.txt").exists()
    assert {"mine.txt", "app.py", "pixels.py"} <= {path.name for path in (tmp_path / "release-space").iterdir()}


def test_what_is_not_on_the_list_stays_behind(staged: Path, trained: Path) -> None:
    names = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert names == {
        "README.md", "LICENSE", "handler.py", "pixels.py", "requirements.txt", "config.json", "generation_config.json",
        "processor_config.json", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja", "evaluation.json",
        "configuration_normllava.py", "modeling_normllava.py", WEIGHTS, "images/example1.png", "images/example2.png",
    }  # fmt: skip
    assert check(staged) == []
    text = json.loads((trained / "config.json").read_text())["text_config"]
    assert Path(text.pop("_name_or_path")).is_absolute()
    assert json.loads((staged / "config.json").read_text())["text_config"] == text  # the machine's names are out


def test_the_card_says_what_the_run_recorded(staged: Path, trained: Path) -> None:
    card = ModelCard.load(staged / "README.md")
    model = NormLlavaForConditionalGeneration.from_pretrained(trained)
    for text in (
        f"{sum(parameter.numel() for parameter in model.parameters()):,} weights",
        f"| norm after it | trained here | {2 * 32} |", "| steps | 8 |", "| tokens | 200 |",
        "| loss, first and last logged | 2.5, 1.5 |", "| time | 0:00:30 |", "| `learning_rate` | 1e-05 |",
        "| hardware | 1 x x86_64 |", "| code | commit " + "0" * 40 + " |", "0.5 ± 0.035 | 200 | a script | 0.1 (guess",
        "**Not with `LlavaForConditionalGeneration`.**", "author = {Li, Bozhou and ",
        f"a norm of T = {model.config.projector_norm_target:.4g}: the mean norm of text tokens",
        "Training before the stage that follows: not recorded.", "Training time: not recorded.",
        "What it does in this model: not recorded.", "All parts were trained from scratch.",
    ):  # fmt: skip
        assert text in card.text
    data = card.data.to_dict()
    kind = (data["pipeline_tag"], data["library_name"], data["license"], data["language"], data["datasets"])
    assert kind == ("image-text-to-text", "transformers", "apache-2.0", ["en", "de"], ["owner/rows"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("exact_match", 0.5, "test")
    assert [widget["output"].keys() for widget in data["widget"]] == [{"text"}] * 2


def test_what_is_not_there_is_not_made_up(run: Path, card_of: Callable[..., str]) -> None:
    (run / "run.json").unlink()
    text = card_of(run, **OWN)
    assert "| steps | 8 |" in text
    assert "| hardware | not recorded |\n| code | not recorded |" in text
    for name in ("trainer_state.json", "metrics.jsonl", "evaluation.json"):
        (run / name).unlink()
    text = card_of(run, **OWN)
    for said in ("Procedure: not recorded.", "## Evaluation\n\nNot recorded.", "| norm after it | not recorded |"):
        assert said in text


def test_the_card_of_a_model_without_a_norm(run: Path, card_of: Callable[..., str]) -> None:
    put("config.json", projector_norm="none", projector_norm_target=None, projector_scaled=True)(run)
    tensors(lambda weights: [weights.pop(name) for name in [*weights] if "projector.norm" in name])(run)
    (run / "evaluation.json").unlink()  # of other weights now
    text = " ".join(card_of(run, **OWN).split())
    for said in ("no norm to prevent this. Its projector was scaled before training", "| norm after it | none | 0 |"):
        assert said in text


def test_the_first_question_is_asked_and_pictures_lose_their_metadata(
    trained: Path, card_of: Callable[..., str], tmp_path: Path
) -> None:
    exif = Image.Exif()
    exif[0x013B] = "me"
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png", exif=exif, icc_profile=b"0" * 200)
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": "<image>\nwhat does it say?"}]
    rows = [{"image": "0.png", "label": 3}, {"image": "0.png", "conversations": turns}]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    text = card_of(trained, widget_data=tmp_path / "rows.json", **OWN)
    assert "what does it say?" in text
    assert "Be brief." not in text
    with Image.open(tmp_path / "stage" / "images" / "example1.png") as picture:
        assert (picture.info, picture.size) == ({}, (30, 20))


def test_shards_are_staged_with_their_index(run: Path, card_of: Callable[..., str], tmp_path: Path) -> None:
    shard(run)
    (run / "evaluation.json").unlink()  # of other files
    card_of(run, **OWN)
    assert len([*(tmp_path / "stage").glob("*.safetensors*")]) == 3


def test_figures_are_of_these_weights(run: Path, report: Path, card_of: Callable[..., str], tmp_path: Path) -> None:
    shutil.copytree(report, run / "diagnostics")
    text = card_of(run, **OWN)
    assert re.search(r"\| norm of visual over text tokens at the decoder \| [\d.]+ \([\d.]+ to [\d.]+\) \|", text)
    assert "](diagnostics/overview.png)" in text
    assert (tmp_path / "stage" / "diagnostics" / "overview.png").stat().st_size > 10_000
    (model,) = json.loads((report / "report.json").read_text())["models"]
    for row, modality in (("visual tokens per layer, 1 − cosine", "visual"), ("text tokens per layer", "text")):
        turning = with_interval(Summary(model["summary"]["rows"]).look("turning", modality))
        assert f"| turning of {row} | {turning} |" in text
    for models in ([model | {"weights": "other"}], [model, model]):
        put("diagnostics/report.json", models=models)(run)
        with pytest.raises(ValueError, match=r"report.json .* Run python -m diagnostics on this model alone"):
            collect_facts(run)
    (result,) = json.loads((run / "evaluation.json").read_text())
    for change, message in (
        ({"value": math.nan}, "value is NaN or infinite"),
        ({"weights": None}, "Visual .* of other weights. Measure again: python evaluate.py"),
    ):
        (run / "evaluation.json").write_text(json.dumps([result | change]))
        with pytest.raises(ValueError, match=f"evaluation.json, row 0.*{message}"):
            collect_facts(run)


def test_earlier_stages_and_their_data_are_found(run: Path, card_of: Callable[..., str], tmp_path: Path) -> None:
    first = shutil.copytree(run, tmp_path / "stage1")
    source = {"path": "/home/someone/rows.json", "name": None, "split": "train", "is_local": True, "rows": 1000,
              "good_rows": 1000, "weight": 1.0, "drawn": 1000, "fingerprint": "a" * 64}  # fmt: skip
    other = {"path": "owner/rows", "name": "large", "split": "dev", "is_local": False, "good_rows": 990, "weight": 2.5}
    put("run.json", arguments__stage="align")(first)
    put("run.json", arguments__model_name_or_path=str(first), sources=[source, source | other])(run)
    text = card_of(run, **OWN)
    assert text.index("### Stage: align") < text.index("### Stage: instruct")
    assert "Training took 0:01:00 in total" in text
    assert "Training before" not in text
    assert f"commit {'0' * 40} |" in text
    assert f"| data | rows.json: 1,000 rows; content {'a' * 12} |\n" in text
    link = "[owner/rows](https://huggingface.co/datasets/owner/rows), large, dev"
    assert f"| data | {link}: 990 rows (of 1,000; the rest are bad), weight 2.5, 1,000 per epoch; content a" in text
    assert "someone" not in text
    put("config.json", projector_aligned=True)(run)  # which was training too
    assert not collect_facts(run).earlier_is_recorded


def test_a_stage_lists_what_had_an_effect(run: Path) -> None:
    unused = {"load_in_4bit": False, "bnb_4bit_quant_type": "nf4", "lora_r": 16, "data_seed": None, "max_steps": 9}
    unused |= {"norm_learning_rate": 1e-4}  # the log has no rate of a norm
    put("run.json", arguments={"stage": "instruct", "learning_rate": 1e-5, **unused}, environment__resumed=True)(run)
    (stage,) = collect_facts(run).stages
    assert (stage["arguments"], stage["seconds"]) == ({"learning_rate": 1e-5}, None)  # the time of a part of it


def test_build_finds_what_training_left(
    run: Path, report: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["hub_cards", "build", str(run), "--repo_id", "me/Mine", "--license", "apache-2.0"]
    monkeypatch.setattr(sys, "argv", command)
    put("run.json", recipe=str(tmp_path / "recipes" / "stage2.yaml"))(run)
    with pytest.raises(SystemExit, match=r"recipes/card.yaml is missing: give .* --prose. training/recipes/\*/card"):
        main()
    (tmp_path / "recipes").mkdir()
    shutil.copy(prose, tmp_path / "recipes")
    shutil.copytree(report, run / "diagnostics")
    main()
    assert check(run / "release") == []
    assert (run / "release" / "diagnostics" / "overview.png").exists()


def test_the_recipes_bring_their_prose() -> None:
    files = sorted((ROOT / "training" / "recipes").glob("*/card.yaml"))
    assert len(files) == 4
    for path in files:
        said = Prose(**yaml.safe_load(path.read_text()))
        assert all(HUB_ID.fullmatch(name) for name in said.datasets)


@pytest.mark.parametrize(
    ("text", "vision", "options", "message"),
    [
        ("Qwen/Qwen2.5-3B-Instruct", None, OWN, "base model Qwen/Qwen2.5-3B-Instruct is not known"),  # another licence
        (None, None, {}, "name it: --text_model owner/name --vision_model owner/name; .* --license apache-2.0"),
        (QWEN, SIGLIP, OWN, "--license apache-2.0 is for parts without a Hub id, and all have one"),
        (LLAMA, SIGLIP, {}, "asks for another name than Mine: Llama-Mine"),
        (LLAMA, SIGLIP, {"repo_id": "me/Llama-Mine"}, "requires a copy of it: --base_licence_file"),
    ],
)
def test_a_licence_that_does_not_follow_is_a_stop(
    text: str | None, vision: str | None, options: dict[str, str], message: str, run: Path, card_of: Callable[..., str]
) -> None:
    with pytest.raises(ValueError, match=message):
        card_of(rename_parts(run, text, vision), **options)


def test_parts_from_folders_and_converted_llavas_are_named(run: Path, card_of: Callable[..., str]) -> None:
    text = card_of(rename_parts(run, "/data/models/Qwen", SIGLIP), text_model=QWEN)
    assert f"Made from {QWEN}. Made from {SIGLIP}." in text
    put("config.json", llava_name_or_path="llava-hf/llava-1.5-7b-hf")(run)
    facts = collect_facts(run)
    assert (facts.base_models, facts.earlier_is_recorded) == (["llava-hf/llava-1.5-7b-hf"], False)


def test_llama_brings_its_agreement_its_notice_and_its_name(
    run: Path, card_of: Callable[..., str], tmp_path: Path
) -> None:
    rename_parts(run, LLAMA, SIGLIP)
    licence, stage = tmp_path / "LICENSE.txt", tmp_path / "stage"
    licence.write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nand so on\n")
    text = card_of(run, "me/Llama-Mine", base_licence_file=licence)
    assert (stage / "LICENSE").read_text() == licence.read_text()
    assert "Llama 3.2 Community License, Copyright © Meta Platforms" in (stage / "NOTICE").read_text()
    assert (stage / "LICENSE-APACHE").read_text() == (ROOT / "LICENSE").read_text()
    assert "**Built with Llama**" in text
    assert f"in `LICENSE-APACHE`; it covers these files and the weights that come from {SIGLIP}." in text
    assert "license: llama3.2\n" in text


def test_a_licence_that_was_added_is_kept(
    run: Path, card_of: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KNOWN, "google/gemma-2b", Licence("gemma", "Gemma Terms of Use", "https://ai.google.dev"))
    (terms := tmp_path / "terms.txt").write_text("Gemma Terms of Use: and so on\n")
    text = card_of(rename_parts(run, "google/gemma-2b", SIGLIP), base_licence_file=terms)
    assert "license: gemma\n" in text
    assert f"in `LICENSE-APACHE`; it covers these files and the weights that come from {SIGLIP}." in text
    assert [(tmp_path / "stage" / name).exists() for name in ("LICENSE-APACHE", "NOTICE")] == [True, False]
    with pytest.raises(ValueError, match=r"under the Gemma Terms of Use and the Llama 3\.2 Community"):
        card_of(rename_parts(run, "google/gemma-2b", LLAMA))


def test_what_is_wrong_is_named(run: Path, prose: Path, card_of: Callable[..., str], tmp_path: Path) -> None:
    for revision in ("main", "0" * 40):
        with pytest.raises(ValueError, match=f"--revision '{revision}' is not a tag that pins code"):
            card_of(run, revision=revision, **OWN)
    (tmp_path / "card.yaml").write_text(prose.read_text() + "dataset: [a/b]\n")
    with pytest.raises(ValueError, match=r"card.yaml.*unexpected keyword argument 'dataset'"):
        card_of(run, prose=tmp_path / "card.yaml", **OWN)
    (run / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"training/merge.py --adapter"):
        card_of(run, **OWN)
