"""Held-out rows while training: figures that a plain computation gives too, and a training that does not notice."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from accelerate import Accelerator
from test_distributed import TWO, launch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoProcessor

from conversations.chat_template import plain_template
from conversations.loading import load_rows
from conversations.pictures import open_images
from conversations.tokens import IGNORED, RowTokenizer
from modeling_normllava import NormLlavaForConditionalGeneration
from script_runs import INSTRUCT, PACKED, logged, moved, run
from training import sft
from training.collator import VisionLanguageCollator
from training.held_out import HeldOutQuestions, normalise


EVERY_TWO = {"eval_strategy": "steps", "eval_steps": 2, "per_device_eval_batch_size": 3}
ADAPT = {"stage": "adapt", "lora_r": 4, "lora_dropout": 0.3}
SLOW_KINDS = ("packed", "adapt", "stream", "workers", "4 bits")


@pytest.fixture(scope="session")
def held_out(data: Path) -> Path:
    """11 rows of one to three answers of very different lengths, two without pictures; two stand at the start."""
    rows = json.loads(data.read_text())[2:13]
    for number, row in enumerate(rows):
        row["conversations"][-1]["value"] += " and so on" * (number % 4) ** 2
        row["conversations"] += [{"from": "human", "value": "More?"}, {"from": "gpt", "value": "No."}] * (number % 3)
    (data.parent / "held_out.json").write_text(json.dumps(rows))
    return data.parent / "held_out.json"


@pytest.fixture
def fields(composed: Callable[..., Path], data: Path, held_out: Path) -> dict[str, Any]:
    return {"model_name_or_path": str(composed()), "dataset_name": str(data), "eval_dataset_name": str(held_out)}


def evaluated(folder: Path) -> list[dict[str, float]]:
    """What every evaluation found, but how long it took."""
    names = ("step", "eval/loss", "eval/loss_blank", "eval/exact_match", "eval/exact_match_stderr")
    lines = [line for line in logged(folder) if "eval/loss" in line]
    return [{name: line[name] for name in names if name in line} for line in lines]


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]


def plain_figures(folder: Path, held_out: Path, align: bool) -> tuple[float, float, list[str]]:
    """Loss, loss with blank pictures and answers, row by row, by the model and torch alone."""
    processor = AutoProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    template = plain_template(tokenizer, processor.image_token) if align else processor.chat_template
    tokenize = RowTokenizer(processor, template)
    model = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    sums, num_tokens, said = torch.zeros(2, dtype=torch.float64), 0, []
    for row in load_rows(str(held_out)):
        row = tokenize(row)
        tokens, labels = row["input_ids"], tokenize.expand_pictures(row["input_ids"], row["labels"])
        input_ids, labels = torch.tensor([tokenize.expand_pictures(tokens)]), torch.tensor([labels])
        images = open_images(row)
        num_tokens += int((labels != IGNORED).sum())
        for kind in range(2):
            images = [image.point(lambda value: 0) for image in images] if kind else images
            pixels = {"pixel_values": processor.image_processor(images, return_tensors="pt")["pixel_values"]}
            with torch.no_grad():
                logits = model(input_ids=input_ids, **(pixels if images else {})).logits
            sums[kind] += nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum").double()
        prompt = input_ids[:, : int((labels[0] != IGNORED).nonzero()[0])]
        images = open_images(row)
        pixels = {"pixel_values": processor.image_processor(images, return_tensors="pt")["pixel_values"]}
        with torch.no_grad():
            out = model.generate(prompt, **(pixels if images else {}), max_new_tokens=120, do_sample=False)
        said.append(tokenizer.decode(out[0, prompt.shape[1] :], skip_special_tokens=True))
    return (sums / num_tokens)[0].item(), (sums / num_tokens)[1].item(), said


@pytest.mark.parametrize(
    ("stage", "packing"),
    [
        pytest.param({"stage": "align"}, {}, id="align-padded"),
        pytest.param(INSTRUCT, PACKED, id="instruct-packed"),
        pytest.param({"stage": "align"}, PACKED, id="align-packed", marks=pytest.mark.slow),
        pytest.param(INSTRUCT, {}, id="instruct-padded", marks=pytest.mark.slow),
    ],
)
def test_the_figures_are_those_of_a_plain_computation(
    fields: dict[str, Any],
    held_out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: dict[str, Any],
    packing: dict[str, Any],
) -> None:
    if stage is not INSTRUCT:  # which takes no conversations
        rows = [{**row, "conversations": row["conversations"][:2]} for row in json.loads(held_out.read_text())]
        held_out = held_out.with_name("captions.json")
        held_out.write_text(json.dumps(rows))
        fields["eval_dataset_name"] = str(held_out)
    longer = {"packed_length": 260} if packing else {}
    settings = {"max_steps": 3, "eval_samples": 9, "global_batch_size": 10, "gradient_checkpointing": True}
    if not packing:
        settings["per_device_train_batch_size"] = 5
    out = tmp_path / "out"
    run(monkeypatch, tmp_path, **fields, **stage, **EVERY_TWO, **settings, **packing | longer, output_dir=str(out))
    last = evaluated(out)[-1]
    assert [line["step"] for line in evaluated(out)] == [2, 3]
    loss, loss_blank, said = plain_figures(out, held_out, align=stage is not INSTRUCT)
    assert last["eval/loss"] == pytest.approx(loss, rel=1e-5)
    assert last["eval/loss_blank"] == pytest.approx(loss_blank, rel=1e-5)
    assert abs(loss - loss_blank) > 1e-4
    given = [line for line in answers(out) if line["step"] == 3]
    assert [line["source"] for line in given] == [f"{held_out}, row {number}" for number in range(9)]
    for line, expected in zip(given, said, strict=False):
        expected = expected.split("\n")[0] if stage is not INSTRUCT else expected
        assert expected.strip().startswith(line["answer"])  # which ends where the longest truth does
        assert line["right"] == (normalise(line["answer"]) == normalise(line["truth"]))
    rows = json.loads(held_out.read_text())[:9]
    # A caption without a picture is prompted by its own first token.
    starts = [int(stage is not INSTRUCT and "image" not in row) for row in rows]
    truths = [row["conversations"][1]["value"][start:] for row, start in zip(rows, starts, strict=True)]
    assert [line["truth"] for line in given] == truths
    assert {line["question"] for line in given} == {"Say.", "What?"}


def test_a_model_that_has_learned_answers_right(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "one.json").write_text(json.dumps(json.loads(Path(fields["dataset_name"]).read_text())[:1]))
    settings = {**fields, **INSTRUCT, "eval_strategy": "epoch", "num_train_epochs": 40, "global_batch_size": 2}
    settings |= {name: str(tmp_path / "one.json") for name in ("dataset_name", "eval_dataset_name")}
    settings |= {
        "learning_rate": 0.01,
        "eval_delay": 40,
        "eval_on_start": True,
        "disable_tqdm": True,
        "save_strategy": "no",
    }
    run(monkeypatch, tmp_path, **settings, output_dir=str(tmp_path / "out"))
    lines = evaluated(tmp_path / "out")
    assert [line["step"] for line in lines] == [0, 40]
    assert [lines[0]["eval/exact_match"], lines[-1]["eval/exact_match"]] == [0, 1]
    assert "eval/loss_blank" not in lines[0]  # the row has no picture
    assert answers(tmp_path / "out")[-1] == {
        "step": 40, "source": f"{tmp_path / 'one.json'}, row 0", "question": "Say.", "answer": "text 0",
        "truth": "text 0", "right": True,
    }  # fmt: skip
    printed = capsys.readouterr().err
    assert f"held out: loss {lines[-1]['eval/loss']:.4f}, 1 of 1 answers right" in printed
    assert "Say. | said: text 0 | truth: text 0" in printed


def test_answers_are_compared_as_squad_does() -> None:
    assert normalise(" The  answer,\nan  U.S. one!") == "answer us one"
    assert normalise("Athens") != normalise("thens")
    assert normalise("4") != normalise("4 2")
    assert normalise("A.") == "a" != normalise("the")
    assert normalise("+") != normalise("-")


@pytest.mark.parametrize(
    "kind",
    ["instruct", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW_KINDS)],
)
def test_training_does_not_notice(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    streaming = {
        "dataset_streaming": True,
        "max_steps": 6,
        "global_batch_size": None,
        "gradient_accumulation_steps": 2,
    }
    settings = {
        "instruct": INSTRUCT,
        "packed": {**INSTRUCT, **PACKED, "packed_length": 260},
        "adapt": ADAPT,
        "workers": {**ADAPT, "dataloader_num_workers": 1},
        "stream": {**INSTRUCT, **streaming},
        "4 bits": {**ADAPT, "load_in_4bit": True, "bf16": True},
    }[kind]
    if kind in ("adapt", "workers", "4 bits"):
        pytest.importorskip("peft")
    if kind == "4 bits":
        pytest.importorskip("bitsandbytes")
    settings = {**fields, **settings, "save_steps": 3}
    file = "adapter_model.safetensors" if settings["stage"] == "adapt" else "model.safetensors"
    without, measured, broken = tmp_path / "without", tmp_path / "measured", tmp_path / "broken"
    run(monkeypatch, tmp_path, **{**settings, "eval_dataset_name": None}, output_dir=str(without))
    run(monkeypatch, tmp_path, **settings, **EVERY_TWO, eval_on_start=True, output_dir=str(measured))
    assert moved(without, measured, file) == set()
    lines, expected = ([line for line in logged(folder) if "loss" in line] for folder in (measured, without))
    assert lines == expected

    # Killed in step 5 and gone on with from step 3: what was measured since is measured again, to the bit.
    shutil.copytree(measured / "checkpoint-3", broken / "checkpoint-3")
    for name in ("metrics.jsonl", "answers.jsonl"):
        kept = [line for line in (measured / name).read_text().splitlines(True) if json.loads(line)["step"] <= 4]
        (broken / name).write_text("".join(kept))
    settings |= {"resume_from_checkpoint": True, "eval_on_start": True}
    run(monkeypatch, tmp_path, **settings, **EVERY_TWO, output_dir=str(broken))
    assert moved(without, broken, file) == set()
    assert evaluated(broken) == evaluated(measured)
    assert answers(broken) == answers(measured)
    assert not any("num_tokens" in name and "eval" in name for line in logged(broken) for name in line)


def test_the_rows_are_checked_as_those_of_training(
    fields: dict[str, Any], held_out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = json.loads(held_out.read_text())
    rows[3]["image"] = "gone.png"
    (tmp_path / "bad.json").write_text(json.dumps(rows))
    settings = {**fields, **INSTRUCT, **EVERY_TWO, "max_steps": 2, "output_dir": str(tmp_path / "out")}
    settings |= {"eval_dataset_name": str(tmp_path / "bad.json"), "image_folder": str(held_out.parent)}
    monkeypatch.setattr(sft, "load_base", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match=r"bad.json, row 3: image file .*gone.png is missing"):
        run(monkeypatch, tmp_path, **settings)
    monkeypatch.undo()
    run(monkeypatch, tmp_path, **settings, bad_rows="skip")
    listed = [json.loads(line) for line in (tmp_path / "out" / "bad_rows.jsonl").read_text().splitlines()]
    assert [line["source"] for line in listed] == [f"{tmp_path / 'bad.json'}, row 3"]
    assert len(answers(tmp_path / "out")) == 10


def write_questions(path: Path, picture: str, truths: list[str]) -> None:
    rows = [
        {
            "image": picture,
            "conversations": [{"from": "human", "value": "<image>\nWhich?"}, {"from": "gpt", "value": text}],
        }
        for text in truths
    ]
    path.write_text(json.dumps(rows))


@pytest.mark.parametrize("ends", [True, False])
def test_the_share_of_right_answers_is_that_of_answers_that_end(
    fields: dict[str, Any], always_a: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    data = Path(fields["dataset_name"])
    picture = next(row["image"] for row in json.loads(data.read_text()) if isinstance(row.get("image"), str))
    # "a." and "(A)" are "A" after normalising; what does not end says "A,,," and is cut behind one of these.
    truths = ["A", "B", "a.", "A B", "(A)", "no", "AA", "b", "c"]
    write_questions(data.parent / "letters.json", picture, truths)
    settings = {**fields, **INSTRUCT, **EVERY_TWO, "eval_dataset_name": str(data.parent / "letters.json")}
    settings |= {"model_name_or_path": str(always_a(ends)), "eval_on_start": True, "max_steps": 1}
    run(monkeypatch, tmp_path, **settings, output_dir=str(tmp_path / "out"))
    start = evaluated(tmp_path / "out")[0]
    share = 3 / 9 if ends else 0.0
    assert (start["step"], start["eval/exact_match"]) == (0, pytest.approx(share))
    assert start["eval/exact_match_stderr"] == pytest.approx((share * (1 - share) / 9) ** 0.5)
    said = answers(tmp_path / "out")[:9]
    assert [line["right"] for line in said] == [ends and truth in ("A", "a.", "(A)") for truth in truths]


def test_a_checkpoints_own_way_of_generating_changes_no_answer(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(fields["model_name_or_path"], tmp_path / "model"))
    settings = {**fields, **INSTRUCT, **EVERY_TWO, "eval_on_start": True, "max_steps": 1}
    run(monkeypatch, tmp_path, **settings, output_dir=str(tmp_path / "plain"))
    path = folder / "generation_config.json"
    own = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "num_beams": 2, "do_sample": True, "temperature": 0.7}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    settings["model_name_or_path"] = str(folder)
    run(monkeypatch, tmp_path, **settings, output_dir=str(tmp_path / "other"))
    assert answers(tmp_path / "other") == answers(tmp_path / "plain")


# A rate at which the loss falls at first, and then rises.
RISING = {**INSTRUCT, "num_train_epochs": 2, "learning_rate": 0.05, "lr_scheduler_type": "constant"}


def test_one_checkpoint_is_kept_where_none_is_chosen(
    fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**fields, **RISING, **EVERY_TWO, "save_steps": 1, "save_total_limit": 1, "eval_samples": 0}
    run(monkeypatch, tmp_path, **settings, output_dir=str(tmp_path / "out"))
    assert len(list((tmp_path / "out").glob("checkpoint-*"))) == 1


def test_only_the_best_is_saved(fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**fields, **RISING, **EVERY_TWO, "save_strategy": "best", "metric_for_best_model": "loss"}
    out = tmp_path / "out"
    run(monkeypatch, tmp_path, **settings, eval_samples=0, output_dir=str(out))
    best, expected = float("inf"), set()
    for line in evaluated(out):
        if line["eval/loss"] < best:
            best = line["eval/loss"]
            expected.add(f"checkpoint-{line['step']}")
    assert {path.name for path in out.glob("checkpoint-*")} == expected
    newest = max(expected, key=lambda name: int(name.split("-")[1]))
    assert moved(out / newest, out) != set()  # the result is the last step's


@pytest.mark.slow
@pytest.mark.parametrize("packing", [{}, {**PACKED, "packed_length": 260}], ids=["padded", "packed"])
def test_two_processes_find_what_one_does(fields: dict[str, Any], tmp_path: Path, packing: dict[str, Any]) -> None:
    # 11 rows in batches of 3, and 5 questions in batches of 1: neither goes round, and one batch has no picture.
    settings = {**fields, **INSTRUCT, **EVERY_TWO, **packing, "eval_samples": 5, "global_batch_size": 10}
    settings |= {} if packing else {"per_device_train_batch_size": 5}
    one, two = tmp_path / "one", tmp_path / "two"
    launch(tmp_path, "--cpu", **settings, output_dir=str(one))
    settings["per_device_eval_batch_size"] = 1 if not packing else 3
    launch(tmp_path, *TWO, **settings, output_dir=str(two))
    assert len(evaluated(two)) == 2
    for line, expected in zip(evaluated(two), evaluated(one), strict=True):
        assert line == {name: pytest.approx(value, rel=2e-4) for name, value in expected.items()}
    assert answers(two) == answers(one)
    settings |= {"eval_dataset_name": None, "eval_samples": 64, "per_device_eval_batch_size": 8, "eval_strategy": "no"}
    settings.pop("eval_steps")
    launch(tmp_path, *TWO, **settings, output_dir=str(tmp_path / "without"))
    assert moved(tmp_path / "without", two) == set()


def answer_sharded(rank: int, folder: str, held_out: str, store: str) -> None:
    """Answer with a whole model and with a sharded one, with adapters and without. All of it on two processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    os.environ["MASTER_PORT"] = "0"  # accelerate asks for one, though the file is where they meet
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    from training.adapters import add_adapters

    accelerator, processor = Accelerator(cpu=True), AutoProcessor.from_pretrained(folder)
    assert accelerator.num_processes == 2
    tokenize = RowTokenizer(processor, processor.chat_template)
    collate, rows = VisionLanguageCollator(tokenize), [tokenize(row) for row in load_rows(held_out).select(range(5))]
    questions = HeldOutQuestions(rows, collate, 2, one_line=False)
    for adapted in (False, True):
        base = NormLlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
        model = add_adapters(base, rank=2, alpha=4).eval() if adapted else base.eval()
        expected = questions.answer(model, accelerator)
        for layer in [*base.model.language_model.layers, *base.model.vision_tower.encoder.layers, model]:
            fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), reshard_after_forward=True)
        for _ in range(2):
            with torch.no_grad():
                model(**{name: tensor for name, tensor in collate([rows[3]]).items() if name != "labels"})
            assert questions.answer(model, accelerator) == expected
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
def test_a_sharded_model_answers(composed: Callable[..., Path], held_out: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    mp.spawn(answer_sharded, (str(composed()), str(held_out), str(tmp_path / "store")), nprocs=2)
