"""What is staged and what stays behind; what the card says, and what it does not make up."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor, LlavaForConditionalGeneration, XGLMConfig

from conversations.files import sha256
from diagnostics.report import Report, with_interval
from diagnostics.results import from_json
from hub_cards.__main__ import main
from hub_cards.build import build
from hub_cards.card import NORMS, read_prose
from hub_cards.check import check
from hub_cards.facts import HUB_ID, collect_facts
from hub_cards.fresh_load import ask, fixed_picture
from hub_cards.licences import APACHE
from hub_cards.manifest import MANIFEST
from modeling_normllava import NormLlavaForConditionalGeneration
from plants import WEIGHTS, put, shard, tensors
from training.run import Progress, Run, Source


ROOT = Path(__file__).parents[2]
OWN = {"own_licence": "apache-2.0"}
LLAMA, SIGLIP = "meta-llama/Llama-3.2-3B-Instruct", "google/siglip-so400m-patch14-384"


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
    assert f"| norm after it | trained here | {2 * 32} |" in card.text
    assert "| steps | 8 |" in card.text
    assert "| tokens | 200 |" in card.text
    assert "| loss, first and last logged | 2.5, 1.5 |" in card.text
    assert "| time | 30 s |" in card.text
    assert "| `learning_rate` | 1e-05 |" in card.text
    assert "author = {Li, Bozhou and " in card.text
    assert "| code | commit " + "0" * 40 in card.text
    assert "0.5 ± 0.035 | 200 | a script | 0.1 (guessing)" in card.text
    data = card.data.to_dict()
    assert (data["pipeline_tag"], data["library_name"], data["license"]) == (
        "image-text-to-text",
        "transformers",
        "apache-2.0",
    )
    assert {"custom_code", "conversational"} <= set(data["tags"])
    assert (data["language"], data["datasets"]) == (["en", "de"], ["owner/rows"])
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value, result.dataset_split) == ("exact_match", 0.5, "test")
    assert result.metric_name == "exact_match, Visual question answering"
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
    assert "| vision encoder | trained from scratch |" in text  # which is what --license says
    assert "| norm after it | not recorded |" in text
    assert check(tmp_path / "stage") == []


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "gives visual tokens the mean norm of text tokens, T = "),
        ({"projector_norm_target": None}, "gain starts at 1, which gives visual tokens a norm of 5.66"),
        ({"projector_norm": "none", "projector_norm_target": None}, "This model has no norm to prevent this. Whether"),
        (
            {"projector_norm": "none", "projector_norm_target": None, "projector_scaled": True},
            "This model has no norm to prevent this. Its projector was scaled before training",
        ),
        ({"projector_aligned": True}, "Before training, the projector learned to point visual tokens at"),
    ],
)
def test_the_card_says_where_the_norm_started(
    settings: dict[str, Any], sentence: str, trained: Path, prose: Path, tmp_path: Path
) -> None:
    run = copy(trained, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | settings))
    if settings.get("projector_norm") == "none":
        tensors(lambda weights: [weights.pop(name) for name in [*weights] if "projector.norm" in name])(run)
        (run / "evaluation.json").unlink()  # of other weights now
    text = (build(run, tmp_path / "stage", "me/Bare", prose, **OWN) / "README.md").read_text()
    assert sentence in " ".join(text.split())
    assert ("which is not part of the paper" in text) == bool(settings.get("projector_aligned"))


def test_parts_that_are_neither_on_the_hub_nor_from_scratch(trained: Path, prose: Path, tmp_path: Path) -> None:
    own_prose = tmp_path / "card.yaml"
    own_prose.write_text(prose.read_text() + "language_model: Small-LM, from a 4-bit file\n")
    stage = build(trained, tmp_path / "stage", "me/Mine", own_prose, **OWN)
    assert check(stage) == []
    text = (stage / "README.md").read_text()
    assert "| vision encoder | trained from scratch |" in text
    assert "| language model | Small-LM, from a 4-bit file |" in text
    assert "The language model: Small-LM, from a 4-bit file. The vision encoder was trained from scratch." in text
    run = rename_parts(copy(trained, tmp_path / "run"), "Qwen/Qwen2.5-7B-Instruct", None)
    with pytest.raises(ValueError, match=r"language_model of the card's prose is 'Small-LM.*, but it is Qwen/"):
        build(run, tmp_path / "other", "me/Mine", own_prose, **OWN)


def test_an_arm_that_the_card_has_no_words_for_is_named(
    trained: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(NORMS, "gwc")
    text = (build(trained, tmp_path / "stage", "me/Bare", prose, **OWN) / "README.md").read_text()
    assert "is followed by a norm (`projector_norm: gwc`) ([The Unseen Bias]" in text


def test_the_first_question_is_asked_and_may_hold_quotes(trained: Path, prose: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x013B] = "me"
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png", exif=exif, icc_profile=b"0" * 200)
    turns = [{"from": "system", "value": "Be brief."}, {"from": "human", "value": '<image>\nwhat does "A\\B"\nsay?'}]
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": turns}]))
    run = copy(trained, tmp_path / "run")
    stage = build(run, tmp_path / "stage", "me/Bare", prose, widget_data=tmp_path / "rows.json", **OWN)
    assert check(stage) == []
    (code,) = re.findall(r"```python\n(.*?)```", (stage / "README.md").read_text(), re.DOTALL)
    texts = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert 'what does "A\\B"\nsay?' in texts
    assert "Be brief." not in (stage / "README.md").read_text()
    with Image.open(stage / "images" / "example1.png") as picture:
        assert (picture.info, picture.size) == ({}, (30, 20))


def test_rows_that_ask_nothing_make_no_example(trained: Path, prose: Path, tmp_path: Path) -> None:
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png")
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "label": 3}]))
    with pytest.raises(ValueError, match=r"rows.json has no row with one picture and a question"):
        build(trained, tmp_path / "stage", "me/Bare", prose, widget_data=tmp_path / "rows.json", **OWN)
    (tmp_path / "rows.json").write_text(json.dumps([{"image": "0.png", "conversations": [{"value": "What?"}]}]))
    with pytest.raises(ValueError, match=r"rows.json, row 0: turn 0 is not .*from.*What"):
        build(trained, tmp_path / "stage", "me/Bare", prose, widget_data=tmp_path / "rows.json", **OWN)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_cast_is_loaded_and_its_difference_said(dtype: str, trained: Path, prose: Path, tmp_path: Path) -> None:
    stage = build(trained, tmp_path / "stage", "me/Mine", prose, dtype=dtype, **OWN)
    assert check(stage) == []
    before, after = load_file(trained / WEIGHTS), load_file(stage / WEIGHTS)
    norms = {name for name in after if "projector.norm" in name}
    assert {str(after[name].dtype) for name in after.keys() - norms} == {f"torch.{dtype}"}
    assert all(torch.equal(after[name], before[name].to(after[name].dtype)) for name in before)
    assert {after[name].dtype for name in norms} == {torch.float32}
    assert json.loads((stage / "config.json").read_text())["dtype"] == dtype
    # The card's figures, computed apart from what wrote them.
    pair = [AutoModelForImageTextToText.from_pretrained(folder, dtype="auto").eval() for folder in (trained, stage)]
    inputs = ask(AutoProcessor.from_pretrained(trained), fixed_picture(), "What is in the picture?")
    with torch.no_grad():
        ours, theirs = (model(**inputs).logits.float() for model in pair)
    card = (stage / "README.md").read_text()
    assert "They were cast from F32; the norm stays in float32." in card
    assert (
        "± is one standard error, where it is known. Measured before the cast. Commands: `python evaluate.py`." in card
    )
    assert (
        f"at most {(ours - theirs).abs().max():.3g}, where their standard deviation is {ours.std():.3g}, and" in card
    )
    assert re.search(r"^\d+ of 16 greedy tokens are the same", card, re.MULTILINE)


def test_a_dtype_that_weights_have_already_is_no_cast(trained: Path, prose: Path, tmp_path: Path) -> None:
    stage = build(trained, tmp_path / "stage", "me/Mine", prose, dtype="float32", **OWN)
    card = (stage / "README.md").read_text()
    assert "cast" not in card
    before, after = load_file(trained / WEIGHTS), load_file(stage / WEIGHTS)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_shards_are_cast_without_their_index(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    shard(run)
    (run / "evaluation.json").unlink()  # of other files
    stage = build(run, tmp_path / "stage", "me/Mine", prose, dtype="bfloat16", **OWN)
    assert [path.name for path in stage.glob("*.safetensors*")] == [WEIGHTS]
    assert check(stage) == []


def test_the_card_warns_of_llavas_own_class(trained: Path, staged: Path) -> None:
    loaded = LlavaForConditionalGeneration.from_pretrained(trained)
    assert not any("projector.norm" in name for name, _ in loaded.named_parameters())
    assert "**Not with `LlavaForConditionalGeneration`.**" in (staged / "README.md").read_text()


def test_a_cast_that_overflows_is_refused(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "evaluation.json").unlink()  # of other weights
    tensors(lambda weights: weights["lm_head.weight"].fill_(1e5))(run)
    with pytest.raises(ValueError, match=r"lm_head.weight with NaN or infinite values"):
        build(run, tmp_path / "stage", "me/Mine", prose, dtype="float16", **OWN)
    assert not (tmp_path / "stage").exists()
    build(run, tmp_path / "stage", "me/Mine", prose, dtype="bfloat16", **OWN)  # what was left half-made goes
    tensors(lambda weights: weights["lm_head.weight"].fill_(6e4))(run)
    with pytest.raises(ValueError, match=r"Logits before or after the cast to float16 are NaN or infinite"):
        build(run, tmp_path / "other", "me/Mine", prose, dtype="float16", **OWN)


def test_results_are_read_as_they_stand(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (result,) = json.loads((run / "evaluation.json").read_text())
    row = {**result, "metric": "acc|any", "task": "a\nb <i>", "command": "a\n\n```py\nb"}
    (run / "evaluation.json").write_text(json.dumps([row]))
    card = (build(run, tmp_path / "stage", "me/Mine", prose, **OWN) / "README.md").read_text()
    assert r"| a b &lt;i> | owner/rows (test) | acc\|any | 0.5 ± 0.035 |" in card
    assert "\n```py\n" not in card
    assert "| 200 | a script | 0.1 (" in card
    row = {**result, "value": 1488.6, "standard_error": None, "harness": "lm-eval 1"}
    (run / "evaluation.json").write_text(json.dumps([row]))
    card = (build(run, tmp_path / "second", "me/Mine", prose, **OWN) / "README.md").read_text()
    assert "| 1,489 | 200 | lm-eval 1 |" in card
    for rows, message in (
        ([{**result, "value": None}], ", row 0: value is null, NaN or infinite"),
        (result, " is not a list of results"),
    ):
        (run / "evaluation.json").write_text(json.dumps(rows))
        with pytest.raises(ValueError, match=f"evaluation.json{message}"):
            build(run, tmp_path / "other", "me/Mine", prose, **OWN)


def test_a_run_that_names_itself_ends(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    put("run.json", arguments__model_name_or_path=str(run))(run)
    facts = collect_facts(run, None)
    assert (len(facts.stages), facts.earlier_is_recorded) == (1, False)


def test_fields_that_no_card_has_are_refused(prose: Path, tmp_path: Path) -> None:
    path = tmp_path / "card.yaml"
    path.write_text(prose.read_text() + "dataset: [owner/rows]\n")
    with pytest.raises(ValueError, match=r"card.yaml: dataset is not a field of a card"):
        read_prose(path)
    for language, read in (("[no]", r"\[False\]"), ("en", "'en'")):
        path.write_text(re.sub("language:\n(- .*\n)+", f"language: {language}\n", prose.read_text()))
        with pytest.raises(ValueError, match=f'card.yaml: language is {read}, not a list of texts.* write "no"'):
            read_prose(path)


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ("main", "a branch or commit"), ("HEAD", "a branch or commit"), ("0" * 40, "a branch or commit"),
        ("v1 0", "not a valid tag"), ("v1..0", "not a valid tag"), ("-v1", "not a valid tag"), ("", "not a valid tag"),
        ("v1.lock", "not a valid tag"), ("v1~1", "not a valid tag"), ("refs/pr/1", "not a valid tag"),
    ],
)  # fmt: skip
def test_a_revision_that_pins_nothing_is_refused(
    revision: str, message: str, trained: Path, prose: Path, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=f"--revision '{re.escape(revision)}' is {message}"):
        build(trained, tmp_path / "stage", "me/Mine", prose, revision=revision, **OWN)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wheel_holds_what_build_needs(trained: Path, prose: Path, tmp_path: Path) -> None:
    python = [sys.executable, "-m", "pip"]
    left_out = shutil.ignore_patterns(".git", ".venv*", "runs", "build", "*.egg-info", ".*_cache")
    source = shutil.copytree(ROOT, tmp_path / "source", symlinks=True, ignore=left_out)  # building writes into it
    subprocess.run([*python, "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([*python, "install", "-q", "--no-deps", "--target", str(tmp_path / "site"), str(wheel)], check=True)
    command = [sys.executable, "-m", "hub_cards", "build", str(trained), "--repo_id", "me/Mine", "--prose", str(prose)]
    command += ["--license", "apache-2.0", "--output_dir", str(tmp_path / "stage")]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")})
    assert (tmp_path / "stage" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    tasks = {path.name for path in (ROOT / "evaluation" / "tasks").glob("*.*")} | {"digits_common"}
    assert tasks <= {path.name for path in (tmp_path / "site" / "evaluation" / "tasks").iterdir()}


def test_a_run_that_did_not_say_where_it_ran(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    (run / "run.json").unlink()
    text = (build(run, tmp_path / "stage", "me/Bare", prose, **OWN) / "README.md").read_text()
    assert "| steps | 8 |" in text
    assert "| hardware | not recorded x not recorded |" in text
    assert "| code | commit not recorded |" in text


def test_the_card_is_about_the_checkpoint_that_was_chosen(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    state = json.loads((run / "trainer_state.json").read_text())
    (run / "trainer_state.json").write_text(json.dumps({**state, "best_global_step": 4}))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    loss = next(line["loss"] for line in reversed(lines) if "loss" in line and line["step"] <= 4)
    record(run, load_best_model_at_end=True)
    checkpoint = copy(run, tmp_path / "checkpoint-6")
    run_record = Run.read(run)
    run_record.write(checkpoint, Progress(num_tokens=1, loss_sum=1.0))
    last = json.loads((run / "trainer_state.json").read_text())["global_step"]
    assert collect_facts(checkpoint, None).steps == last > 4
    text = (build(run, tmp_path / "stage", "me/Best", prose, **OWN) / "README.md").read_text()
    assert "| steps | 4 |" in text
    assert f"{loss:.3g}" in text


def record(run: Path, environment: dict[str, Any] | None = None, recipe: Path | None = None, **arguments: Any) -> Path:
    """Change what a run recorded of itself."""
    before = Run.read(run)
    changed = replace(before.environment, **(environment or {}))
    recorded = {**before.arguments, **arguments}
    replace(before, environment=changed, arguments=recorded, recipe=recipe and str(recipe)).write(run)
    return run


def log(run: Path, lines: list[dict[str, float]]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_earlier_stages_are_found(trained: Path, prose: Path, tmp_path: Path) -> None:
    first, second = copy(trained, tmp_path / "stage1"), copy(trained, tmp_path / "stage2")
    record(first, stage="align", environment={"commit_is_clean": False})
    record(second, model_name_or_path=str(first))
    assert [stage.stage for stage in collect_facts(second, None).stages] == ["align", "instruct"]
    stage = build(second, tmp_path / "stage", "me/Mine", prose, **OWN)
    text = (stage / "README.md").read_text()
    assert text.index("### Stage: align") < text.index("### Stage: instruct")
    assert "Training took 60 s in total" in text
    assert "Training before" not in text
    assert [finding.reason for finding in check(stage)] == ["the run was made with uncommitted changes"]


def test_stages_that_are_not_here_are_not_passed_over(staged: Path) -> None:
    text = (staged / "README.md").read_text()
    assert "Training before the stage that follows: not recorded." in text
    assert "### Stage: instruct" in text
    assert "| time | 30 s |" in text
    assert "Training time: not recorded." in text


def test_a_composed_model_is_where_training_begins(trained: Path, prose: Path, tmp_path: Path) -> None:
    (tmp_path / "composed").mkdir()
    run = record(copy(trained, tmp_path / "run"), model_name_or_path=str(tmp_path / "composed"))
    text = (build(run, tmp_path / "stage", "me/Mine", prose, **OWN) / "README.md").read_text()
    assert "Training took 30 s in total" in text
    assert "Training before" not in text
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(config | {"projector_aligned": True}))  # which was training too
    text = (build(run, tmp_path / "aligned", "me/Mine", prose, **OWN) / "README.md").read_text()
    assert "Training before the stage that follows: not recorded." in text
    assert "Training took" not in text


def test_the_card_says_what_was_drawn_of_which_data(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    sources = (
        Source("/home/someone/rows.json", None, "train", True, 1000, 1000, 1.0, 1000, "a" * 64),
        Source("owner/rows", "large", "dev", False, 1000, 990, 2.5, 2475, "b" * 64),
    )
    replace(Run.read(run), sources=sources).write(run)
    stage = build(run, tmp_path / "stage", "me/Mine", prose, **OWN)
    assert check(stage) == []
    text = (stage / "README.md").read_text()
    assert f"| data | rows.json: 1,000 rows; content {'a' * 12} |\n" in text
    link = "[owner/rows](https://huggingface.co/datasets/owner/rows)"
    drawn = "990 rows (of 1,000; the rest are bad), weight 2.5, 2,475 per epoch"
    assert f"| data | {link}, large, dev: {drawn}; content {'b' * 12} |\n" in text
    assert "someone" not in text


def test_a_resumed_run_counts_all_tokens_and_times_none(trained: Path, tmp_path: Path) -> None:
    run = record(copy(trained, tmp_path / "run"), environment={"resumed": True})
    log(run, [{"num_tokens": count} for count in (100, 200, 290)] + [{"train_runtime": 5.0}])
    (stage,) = collect_facts(run, None).stages
    assert (stage.tokens, stage.seconds) == (290, None)
    log(run, [{"loss": 1.0}])
    assert collect_facts(run, None).stages[0].tokens is None


def test_arguments_that_did_nothing_are_not_listed(trained: Path, tmp_path: Path) -> None:
    fields = {
        "max_steps": -1, "load_in_4bit": False, "clip_by_module": False, "bf16": False, "lora_r": 16, "lora_alpha": 32,
        "gradient_accumulation_steps": 4, "dataset_name": "/data/rows.json", "adam_beta2": 0.999, "optim_args": None,
        "train_sampling_strategy": "random", "norm_learning_rate": None, "num_train_epochs": 3.0,
        "projector_learning_rate": 5e-5,
    }  # fmt: skip
    run = record(copy(trained, tmp_path / "run"), **fields)
    listed = {"learning_rate": 1e-5, "bf16": False, "gradient_accumulation_steps": 4, "projector_learning_rate": 5e-5}
    assert collect_facts(run, None).stages[0].arguments == listed | {"num_train_epochs": 3.0}
    unusual = {"load_in_4bit": True, "max_steps": 8, "adam_beta2": 0.95, "optim_args": "rank=1", "loss_type": "dft"}
    record(run, stage="adapt", **unusual)
    assert collect_facts(run, None).stages[0].arguments == listed | unusual | {"lora_r": 16, "lora_alpha": 32}


def test_sizes_are_read_by_the_familys_own_names(trained: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["text_config"] = XGLMConfig(d_model=48, num_layers=5, attention_heads=2).to_dict()
    (run / "config.json").write_text(json.dumps(config))
    facts = collect_facts(run, None)
    assert (facts.hidden_size, facts.layers) == (48, 5)
    (run / "config.json").write_text(json.dumps(config | {"projector_norm": "rms"}))
    with pytest.raises(ValueError, match=r"config.json: .*projector_norm"):
        collect_facts(run, None)


def change_report(report: Path, folder: Path, **changes: Any) -> Path:
    """A copy of the diagnostics' report with other fields of its model."""
    shutil.copytree(report, folder)
    content = json.loads((folder / "report.json").read_text())
    content["models"][0] |= changes
    (folder / "report.json").write_text(json.dumps(content))
    return folder


def test_the_diagnostics_are_shown(trained: Path, report: Path, prose: Path, tmp_path: Path) -> None:
    stage = build(trained, tmp_path / "stage", "me/Mine", prose, diagnostics=report, **OWN)
    assert check(stage) == []
    (model,) = from_json(Report, json.loads((report / "report.json").read_text()), report).models
    text = (stage / "README.md").read_text()
    assert "| measured on 2 pictures | |" in text
    assert f"| norm of visual over text tokens at the decoder | {with_interval(model.summary.look('ratio'))} |" in text
    for name in model.thirds:
        gap = with_interval(model.summary.look(f"gap, {name}"))
        assert f"visual minus text, {name} of the layers | {gap} |\n" in text
    assert "![Norm of visual and text tokens by layer, how far each layer turns them, attention" in text
    # Drawn anew: the report's own plot names the folder that was measured.
    assert (stage / "diagnostics" / "layers.png").stat().st_size > 10_000
    assert (stage / "diagnostics" / "layers.png").read_bytes() != (report / "figures" / "overview.png").read_bytes()


def test_diagnostics_of_quantized_weights_are_refused(
    trained: Path, report: Path, prose: Path, tmp_path: Path
) -> None:
    quantized = copy(report, tmp_path / "report")
    figures = json.loads((quantized / "report.json").read_text())
    figures["models"][0]["dtype"] += ", quantized"
    (quantized / "report.json").write_text(json.dumps(figures))
    with pytest.raises(ValueError, match="are of quantized weights"):
        build(trained, tmp_path / "stage", "me/Mine", prose, diagnostics=quantized, **OWN)


def test_figures_of_other_weights_are_refused(trained: Path, report: Path, prose: Path, tmp_path: Path) -> None:
    run = copy(trained, tmp_path / "run")
    tensors(lambda weights: weights["lm_head.weight"].mul_(0.5))(run)  # trained further
    with pytest.raises(ValueError, match="can't be published") as refused:
        build(run, tmp_path / "stage", "me/Mine", prose, diagnostics=report, **OWN)
    first, second = str(refused.value).splitlines()[1:]
    assert first == (
        "  evaluation.json: row 0, Visual question answering, is of other weights. Measure again: python evaluate.py"
    )
    assert second.startswith("  report.json: the diagnostics of ")
    assert second.endswith(" are of other weights. Run python -m diagnostics again.")
    rows = json.loads((run / "evaluation.json").read_text())
    del rows[0]["weights"]  # as earlier versions wrote it
    (run / "evaluation.json").write_text(json.dumps(rows))
    with pytest.raises(ValueError, match=r"row 0, Visual question answering, is of weights that are not named"):
        build(run, tmp_path / "stage", "me/Mine", prose, **OWN)
    in_memory = change_report(report, tmp_path / "in_memory", weights=None)
    with pytest.raises(ValueError, match=r"are of weights that are not named"):
        build(trained, tmp_path / "stage", "me/Mine", prose, diagnostics=in_memory, **OWN)


def test_diagnostics_that_lack_something_are_refused(trained: Path, report: Path, prose: Path, tmp_path: Path) -> None:
    diagnostics = change_report(report, tmp_path / "diagnostics", summary={})
    with pytest.raises(ValueError, match=r"report\.json: no models\.0\.summary\.rows"):
        build(trained, tmp_path / "stage", "me/Mine", prose, diagnostics=diagnostics, **OWN)


def test_build_finds_what_training_left(
    trained: Path, report: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(trained, tmp_path / "run")
    command = ["hub_cards", "build", str(run), "--repo_id", "me/Mine", "--license", "apache-2.0"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit, match=r"No run.json names a recipe: give .* --prose. training"):
        main()
    record(run, recipe=tmp_path / "recipes" / "stage2.yaml")
    with pytest.raises(SystemExit, match=r"recipes/card.yaml is missing: give .* --prose. training/recipes/\*/card"):
        main()
    (tmp_path / "recipes").mkdir()
    shutil.copy(prose, tmp_path / "recipes")
    shutil.copytree(report, run / "diagnostics")
    main()
    assert check(run / "release") == []
    assert (run / "release" / "diagnostics" / "layers.png").exists()


def test_a_tied_head_and_no_norm(composed: Callable[..., Path], prose: Path, tmp_path: Path) -> None:
    tied = build(composed(text="gemma3"), tmp_path / "tied", "me/Tied", prose, **OWN)
    assert check(tied) == []
    plain = build(composed(projector_norm="none"), tmp_path / "plain", "me/Plain", prose, **OWN)
    assert "is followed by no norm (" in (plain / "README.md").read_text()


def test_the_recipes_bring_their_prose() -> None:
    files = sorted((ROOT / "training" / "recipes").glob("*/card.yaml"))
    assert len(files) == 4
    for path in files:
        assert all(isinstance(name, str) and HUB_ID.fullmatch(name) for name in read_prose(path).datasets)


@pytest.mark.parametrize(
    ("text", "vision", "message"),
    [
        ("mystery/model-7B", "google/siglip-so400m-patch14-384", "base model mystery/model-7B is not known"),
        ("Qwen/Qwen2.5-3B-Instruct", None, "base model Qwen/Qwen2.5-3B-Instruct is not known"),  # another licence
        (None, None, "name it: --text_model owner/name --vision_model owner/name; .* --license apache-2.0"),
        (None, SIGLIP, "No Hub id of the text_model is recorded.* --text_model owner/name;"),
        (LLAMA, None, "No Hub id of the vision_model is recorded.* --vision_model owner/name;"),
        (LLAMA, SIGLIP, "name that begins with 'Llama': not 'Mine', but for example Llama-Mine"),
    ],
)
def test_a_licence_that_does_not_follow_is_a_stop(
    text: str | None, vision: str | None, message: str, trained: Path, prose: Path, tmp_path: Path
) -> None:
    run = rename_parts(copy(trained, tmp_path / "run"), text, vision)
    with pytest.raises(ValueError, match=message):
        build(run, tmp_path / "stage", "me/Mine", prose)
    assert not (tmp_path / "stage").exists()


def test_a_part_that_was_loaded_from_a_folder_is_named(trained: Path, prose: Path, tmp_path: Path) -> None:
    run = rename_parts(copy(trained, tmp_path / "run"), "/data/models/Llama-3.2-3B-Instruct", SIGLIP)
    with pytest.raises(ValueError, match="name that begins with 'Llama'"):
        build(run, tmp_path / "stage", "me/Mine", prose, text_model=LLAMA)
    with pytest.raises(ValueError, match=f"--vision_model is google/siglip2-x, but .*config.json records {SIGLIP}"):
        build(run, tmp_path / "stage", "me/Mine", prose, text_model=LLAMA, vision_model="google/siglip2-x")
    with pytest.raises(ValueError, match="--text_model '/data/llama' is not owner/name"):
        build(run, tmp_path / "stage", "me/Mine", prose, text_model="/data/llama")
    with pytest.raises(ValueError, match="--license is for parts without a Hub id"):
        build(run, tmp_path / "stage", "me/Mine", prose, text_model="Qwen/Qwen2.5-7B", **OWN)
    stage = build(run, tmp_path / "stage", "me/Mine", prose, text_model="Qwen/Qwen2.5-7B")
    assert check(stage) == []
    assert ModelCard.load(stage / "README.md").data.base_model == ["Qwen/Qwen2.5-7B", SIGLIP]
    manifest = json.loads((stage / MANIFEST).read_text())
    assert (manifest["text_model"], manifest["vision_model"]) == ("Qwen/Qwen2.5-7B", SIGLIP)


def test_a_converted_llava_names_its_source(
    trained: Path, prose: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, source = copy(trained, tmp_path / "run"), "llava-hf/llava-1.5-7b-hf"
    put("config.json", llava_name_or_path=source)(run)
    with pytest.raises(ValueError, match=f"licence of the base model {source} is not known"):
        build(run, tmp_path / "stage", "me/Mine", prose, **OWN)
    monkeypatch.setattr("hub_cards.licences.KNOWN", [(source, APACHE)])
    stage = build(run, tmp_path / "stage", "me/Mine", prose)
    assert check(stage) == []
    card = ModelCard.load(stage / "README.md")
    assert card.data.base_model == [source]
    assert f"Converted from a Llava checkpoint. Made from {source}.\n" in card.text
    assert "| projector | a Llava checkpoint |" in card.text
    assert "Training before the stage that follows: not recorded." in card.text

    put("config.json", llava_name_or_path="/data/llava")(run)  # a folder, and parts that are not on the Hub either
    stage = build(run, tmp_path / "local", "me/Mine", prose, **OWN)
    assert check(stage) == []
    assert "/data/llava" not in (stage / "config.json").read_text()
    text = (stage / "README.md").read_text()
    assert "Converted from a Llava checkpoint. All parts were trained from scratch." in text
    assert "Training before the stage that follows: not recorded." in text


def test_the_licence_is_the_strictest_of_what_is_known_and_ones_own(
    trained: Path, prose: Path, tmp_path: Path
) -> None:
    run = rename_parts(copy(trained, tmp_path / "run"), LLAMA, None)
    with pytest.raises(ValueError, match="name that begins with 'Llama'"):
        build(run, tmp_path / "stage", "me/Mine", prose, **OWN)
    run = rename_parts(copy(trained, tmp_path / "other"), None, SIGLIP)
    card = ModelCard.load(build(run, tmp_path / "stage", "me/Mine", prose, **OWN) / "README.md")
    assert card.data.license == "apache-2.0"
    assert f"The language model was trained from scratch. Made from {SIGLIP}." in card.text
    assert check(tmp_path / "stage") == []


def test_llama_brings_its_agreement_its_notice_and_its_name(trained: Path, prose: Path, tmp_path: Path) -> None:
    bases = (LLAMA, SIGLIP)
    run = rename_parts(copy(trained, tmp_path / "run"), *bases)
    with pytest.raises(ValueError, match="requires a copy of the agreement: give --base_licence_file"):
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
    assert (stage / "LICENSE-APACHE").read_text() == (ROOT / "LICENSE").read_text()
    card = ModelCard.load(stage / "README.md")
    assert "**Built with Llama**" in card.text
    assert f"in `LICENSE-APACHE`; it covers these files and the weights that come from {SIGLIP}." in card.text
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
        (lambda run, prose: (run / "config.json").write_text("{"), "config.json is not valid JSON"),
        (lambda run, prose: put("config.json", text_config=None)(run), "config.json: no text_config"),
        (lambda run, prose: (run / "run.json").write_text("{"), "run.json can't be read"),
        (lambda run, prose: (run / "run.json").write_text('{"data": ""}'), "run.json: no num_processes, arguments"),
        (lambda run, prose: (run / "metrics.jsonl").write_text("3"), "metrics.jsonl are not those of a run"),
        (
            lambda run, prose: (run / "trainer_state.json").write_text("[]"),
            "trainer_state.json and metrics.jsonl are no",
        ),
        (lambda run, prose: (run / "metrics.jsonl").write_text("{"), "metrics.jsonl: a line is not valid JSON"),
        (lambda run, prose: (run / "adapter_config.json").write_text("{}"), "training/merge.py --adapter"),
        (lambda run, prose: prose.write_text("a: [b"), "card.yaml is not valid YAML"),
        (lambda run, prose: prose.write_text("- a"), "card.yaml is not a mapping"),
        (lambda run, prose: (run / "model.safetensors").unlink(), "model.safetensors is missing"),
        (
            lambda run, prose: (run / "metrics.jsonl").write_text('{"loss": NaN}'),
            "a line is not valid JSON .NaN is not a JSON value",
        ),
        (
            lambda run, prose: (run / "evaluation.json").write_text('[{"value": NaN}]'),
            "evaluation.json is not valid JSON",
        ),
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


@pytest.mark.parametrize(("repo_id", "message"), [("mine", "is not owner/name"), ("me/a--b", "Cannot have --")])
def test_a_name_that_the_hub_refuses(repo_id: str, message: str, trained: Path, prose: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"--repo_id '{repo_id}'.*{message}"):
        build(trained, tmp_path / "stage", repo_id, prose, **OWN)
