"""What is staged and what stays behind; what the card says, and what it does not make up."""

import ast
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from PIL import Image

from hub_cards.build import MANIFEST, ROOT, build, sha256
from hub_cards.card import read_prose
from hub_cards.check import check
from hub_cards.facts import HUB_ID, collect_facts
from modeling_normllava import NormLlavaForConditionalGeneration


OWN = {"own_licence": "apache-2.0"}


def copy(trained: Path, folder: Path) -> Path:
    shutil.copytree(trained, folder)
    return folder


def rename_parts(run: Path, text: str | None, vision: str | None) -> Path:
    config = json.loads((run / "config.json").read_text())
    for part, name in (("text_config", text), ("vision_config", vision)):
        config[part].pop("_name_or_path", None)
        if name is not None:
            config[part]["_name_or_path"] = name
    (run / "config.json").write_text(json.dumps(config))
    return run


def test_what_is_not_on_the_list_stays_behind(staged: Path) -> None:
    names = {path.relative_to(staged).as_posix() for path in staged.rglob("*") if path.is_file()}
    assert {"model.safetensors", "config.json", "handler.py", "README.md", "LICENSE", MANIFEST} <= names
    for forbidden in ("training_args.bin", "optimizer.pt", "trainer_state.json", "metrics.jsonl", "run.json"):
        assert forbidden not in names
    manifest = json.loads((staged / MANIFEST).read_text())
    assert set(manifest["files"]) == names - {MANIFEST}
    assert all(entry["sha256"] == sha256(staged / name) for name, entry in manifest["files"].items())


def test_names_of_the_machine_are_taken_out(trained: Path, staged: Path) -> None:
    text = json.loads((trained / "config.json").read_text())["text_config"]
    assert Path(text["_name_or_path"]).is_absolute()
    config = json.loads((staged / "config.json").read_text())
    assert "_name_or_path" not in config["text_config"]
    text.pop("_name_or_path")
    assert config["text_config"] == text  # and nothing else


def test_a_folder_of_the_machine_is_no_hub_id(
    trained: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own" / "text").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    run = rename_parts(copy(trained, tmp_path / "run"), "own/text", None)
    stage = build(run, tmp_path / "stage", "me/Mine", prose, **OWN)
    assert "_name_or_path" not in json.loads((stage / "config.json").read_text())["text_config"]
    assert "base_model" not in ModelCard.load(stage / "README.md").data.to_dict()


def test_the_card_says_what_the_artefacts_say(staged: Path, trained: Path) -> None:
    card = ModelCard.load(staged / "README.md")
    model = NormLlavaForConditionalGeneration.from_pretrained(trained)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert f"{count:,} weights" in card.text
    assert f"| norm behind it | trained here | {2 * 32} |" in card.text
    assert "| steps | 8 |" in card.text
    assert "| tokens | 200 |" in card.text
    assert "| loss, first and last logged | 2.5, 1.5 |" in card.text
    assert "| time | 30 s |" in card.text
    assert "| `learning_rate` | 1e-05 |" in card.text
    assert "| code | commit " + "0" * 40 in card.text
    assert "0.5 ± 0.035 | 200 | 0.1 (guessing)" in card.text
    data = card.data.to_dict()
    assert (data["pipeline_tag"], data["library_name"], data["license"]) == (
        "image-text-to-text",
        "transformers",
        "apache-2.0",
    )
    assert {"custom_code", "conversational"} <= set(data["tags"])
    assert data["datasets"] == ["owner/rows"]
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("exact_match", 0.5, "test")
    assert [widget["output"].keys() for widget in data["widget"]] == [{"text"}] * 2


def test_what_is_not_there_is_not_made_up(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    for name in ("trainer_state.json", "metrics.jsonl", "run.json", "evaluation.json"):
        (run / name).unlink()
    text = (build(run, tmp_path / "stage", "me/Bare", prose, **OWN) / "README.md").read_text()
    assert "Procedure: not recorded." in text
    assert "## Evaluation\n\nNot recorded." in text
    assert "What it does in this model: not recorded." in text
    assert "Training time: not recorded." in text
    assert "| vision encoder | not recorded |" in text
    assert check(tmp_path / "stage") == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "visual tokens are as long as text tokens are in the mean, T = "),
        ({"projector_norm_target": None}, "gain starts at 1, which makes visual tokens 5.66 long"),
        ({"projector_norm": "none", "projector_norm_target": None}, "This model has nothing against it."),
    ],
)
def test_the_card_says_where_the_norm_started(
    settings: dict[str, Any], sentence: str, trained: Path, prose: Path, tmp_path: Path
) -> None:
    run = copy(trained, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | settings))
    text = (build(run, tmp_path / "stage", "me/Bare", prose, **OWN) / "README.md").read_text()
    assert sentence in text


def test_a_question_may_hold_quotes(trained: Path, prose: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png")
    turns = [{"from": "human", "value": '<image>\nwhat does "A\\B"\nsay?'}]
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": turns}]))
    run = copy(trained, tmp_path / "run")
    stage = build(run, tmp_path / "stage", "me/Bare", prose, widget_data=tmp_path / "rows.json", **OWN)
    assert check(stage) == []
    (code,) = re.findall(r"```python\n(.*?)```", (stage / "README.md").read_text(), re.DOTALL)
    texts = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert 'what does "A\\B"\nsay?' in texts


def test_a_run_that_did_not_say_where_it_ran(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "run.json").unlink()
    text = (build(run, tmp_path / "stage", "me/Bare", prose, **OWN) / "README.md").read_text()
    assert "| steps | 8 |" in text
    assert "| hardware | not recorded x not recorded |" in text
    assert "| code | commit not recorded |" in text


def test_earlier_stages_are_found(trained: Path, tmp_path: Path) -> None:
    first, second = copy(trained, tmp_path / "stage1"), copy(trained, tmp_path / "stage2")
    run = json.loads((second / "run.json").read_text())
    (second / "run.json").write_text(json.dumps({**run, "model_name_or_path": str(first)}))
    (first / "run.json").write_text(json.dumps({**run, "stage": "align"}))
    assert [stage.stage for stage in collect_facts(second, None).stages] == ["align", "instruct"]


def test_a_tied_head_and_no_norm(composed: Callable[..., Path], prose: Path, tmp_path: Path) -> None:
    tied = build(composed(text="gemma3"), tmp_path / "tied", "me/Tied", prose, **OWN)
    assert check(tied) == []
    plain = build(composed(projector_norm="none"), tmp_path / "plain", "me/Plain", prose, **OWN)
    assert "stands no norm: this is the baseline of the method" in (plain / "README.md").read_text()


def test_the_recipes_bring_their_prose() -> None:
    files = sorted((ROOT / "training" / "recipes").glob("*/card.yaml"))
    assert len(files) == 3
    for path in files:
        assert all(isinstance(name, str) and HUB_ID.fullmatch(name) for name in read_prose(path)["datasets"])


@pytest.mark.parametrize(
    ("text", "vision", "message"),
    [
        ("mystery/model-7B", "google/siglip-so400m-patch14-384", "base model mystery/model-7B is not known"),
        ("Qwen/Qwen2.5-3B-Instruct", None, "base model Qwen/Qwen2.5-3B-Instruct is not known"),  # another licence
        (None, None, "No base model is recorded"),
        ("meta-llama/Llama-3.2-3B-Instruct", None, "name begin with 'Llama': not 'Mine', but for example Llama-Mine"),
    ],
)
def test_a_licence_that_does_not_follow_is_a_stop(
    text: str | None, vision: str | None, message: str, trained: Path, prose: Path, tmp_path: Path
) -> None:
    run = rename_parts(copy(trained, tmp_path / "run"), text, vision)
    with pytest.raises(ValueError, match=message):
        build(run, tmp_path / "stage", "me/Mine", prose)
    assert not (tmp_path / "stage").exists()


def test_llama_brings_its_agreement_its_notice_and_its_name(trained: Path, prose: Path, tmp_path: Path) -> None:
    bases = ("meta-llama/Llama-3.2-3B-Instruct", "google/siglip-so400m-patch14-384")
    run = rename_parts(copy(trained, tmp_path / "run"), *bases)
    with pytest.raises(ValueError, match="asks for a copy of the agreement: give --base_licence_file"):
        build(run, tmp_path / "without", "me/Llama-Mine", prose)
    licence = tmp_path / "LICENSE.txt"
    licence.write_text("Apache License")
    with pytest.raises(ValueError, match=r"does not read like the Llama 3\.2 Community License"):
        build(run, tmp_path / "wrong", "me/Llama-Mine", prose, base_licence_file=licence)
    assert not (tmp_path / "wrong").exists()
    licence.write_text("LLAMA 3.2 COMMUNITY LICENSE AGREEMENT\nand so on\n")
    stage = build(run, tmp_path / "stage", "me/Llama-Mine", prose, base_licence_file=licence)
    assert check(stage) == []
    assert (stage / "LICENSE").read_text() == licence.read_text()
    assert "Llama 3.2 Community License, Copyright © Meta Platforms" in (stage / "NOTICE").read_text()
    card = ModelCard.load(stage / "README.md")
    assert "**Built with Llama**" in card.text
    assert card.data.license == "llama3.2"
    assert card.data.base_model == list(bases)


def test_qwen_is_apache(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = rename_parts(copy(trained, tmp_path / "run"), "Qwen/Qwen2.5-7B-Instruct", "google/siglip-so400m-patch14-384")
    stage = build(run, tmp_path / "stage", "me/Mine", prose)
    assert check(stage) == []
    assert ModelCard.load(stage / "README.md").data.license == "apache-2.0"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda run, prose: (run / "config.json").unlink(), "holds no config.json"),
        (lambda run, prose: (run / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda run, prose: (run / "evaluation.json").write_text('[{"task": "a"}]'), "row 0: no dataset, split"),
        (lambda run, prose: prose.write_text(yaml.safe_dump({"summary": "x"})), "no intended_use, out_of_scope"),
    ],
)
def test_what_is_needed_and_missing_is_named(
    spoil: Callable[[Path, Path], object], message: str, trained: Path, prose: Path, tmp_path: Path
) -> None:
    run, own_prose = copy(trained, tmp_path / "run"), tmp_path / "card.yaml"
    shutil.copy(prose, own_prose)
    spoil(run, own_prose)
    with pytest.raises(ValueError, match=message):
        build(run, tmp_path / "stage", "me/Mine", own_prose, **OWN)
    with pytest.raises(ValueError, match="is not owner/name"):
        build(run, tmp_path / "stage", "mine", own_prose, **OWN)
