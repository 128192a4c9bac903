"""What stands around the harnesses: scores and their errors, results that are kept, tables."""

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from scipy.stats import t, ttest_rel

from common.errors import UserError
from evaluation import __main__ as command_line
from evaluation import harness
from evaluation.benchmarks import OURS, PAPER, Benchmark
from evaluation.harness import Model, Settings, build_command, open_model
from evaluation.record import Evaluation
from evaluation.results import TaskResult, read_result
from evaluation.row_scores import read_row_scores
from evaluation.table import render


DIGITS = OURS[0]
SETTINGS = Settings(batch_size=8, num_processes=1, dtype="auto", limit=None)


def scores_of(values: Sequence[float], groups: Sequence[str] = "") -> pd.Series:
    index = [list(groups) or [""] * len(values), [str(number) for number in range(len(values))]]
    return pd.Series(values, index, dtype=float).rename_axis(["group", "row"])


def result(value: float, row_scores: pd.Series | None = None, **changed: Any) -> TaskResult:
    fields = {"task": "digits", "dataset": "d", "split": "test", "metric": "exact_match", "command": "c"}
    fields |= {"harness": "lmms-eval 1", "choice": "0-shot", "n": 100, "standard_error": 0.01}
    return TaskResult(Evaluation(**{**fields, **changed}, value=value), row_scores)


def model_at(folder: Path, fingerprint: str = "m") -> Model:
    return Model("runs/mine", folder, fingerprint, "weights")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "version", lambda module: "1")


def sample(number: int, **logged: Any) -> dict[str, Any]:
    return {"doc_id": number, "target": "A", "input": f"question {number}", **logged}


def orders(*answers: str, given: str = " a.") -> list[dict[str, Any]]:
    """MMBench's log of questions that are asked twice, the second time with their options in another order."""
    logged = []
    for number, answer in enumerate(answers):
        index = number // 2 + 1_000_000 * (number % 2)
        logged.append({"index": index, "prediction": given, "answer": answer})
    return logged


@pytest.mark.parametrize(
    ("task", "logged", "score", "expected"),
    [
        ("digits", [1.0, 0.0, 0.0, 1.0], 0.5, [1, 0, 0, 1]),
        ("pope", [{"score": 1.0}, {"score": 0.0}], 0.5, [1, 0]),
        ("mmstar", [{"score": 1.0, "l2_category": "a"}] * 2 + [{"score": 0.0, "l2_category": "b"}], 0.5, [1, 1, 0]),
        ("seedbench_2_plus", [{"pred": "a ", "answer": "A"}, {"pred": "A and B", "answer": "A"}], 0.5, [1, 0]),
        # The second question is not right with its options turned.
        ("mmbench_en_dev_static", orders("A", "A", "A", "B"), 0.5, [1, 0]),
        # F1 of these is 0.67: it is no mean of what was logged, and so has neither error nor pairs here.
        ("pope", [{"score": 1.0}, {"score": 1.0}, {"score": 0.0}, {"score": 0.0}], 0.67, None),
        # A log in a form that is not known.
        ("pope", [{"score": 1.0}, {"hit": 1.0}], 1.0, None),
        ("seedbench_2_plus", [{"score": 1.0}], 1.0, None),
        ("mmbench_en_dev_static", [{"score": 1.0}], 1.0, None),
    ],
)
def test_scores_of_rows_are_known_where_the_tasks_score_is_their_mean(
    task: str, logged: list[Any], score: float, expected: list[float] | None
) -> None:
    benchmark = command_line.BENCHMARKS[task]
    samples = [sample(number, **{benchmark.metric: value}) for number, value in enumerate(logged)]
    scores = read_row_scores(benchmark, score, samples)
    assert (None if scores is None else list(scores)) == expected


def test_a_row_is_the_same_for_every_model_and_another_where_its_question_is() -> None:
    def index(**logged: Any) -> tuple[str, str]:
        scores = read_row_scores(DIGITS, 1.0, [sample(0, exact_match=1.0, **logged)])
        assert scores is not None
        return scores.index[0]

    assert index(doc_hash=str(object())) == index()  # a hash of an address in memory
    for other in ({"doc_id": 1}, {"input": "another"}, {"target": "B"}, {"input": None, "prompt_hash": "p"}):
        assert index(**other) != index()
    # A row that is there twice is no row.
    assert read_row_scores(DIGITS, 1.0, [sample(0, exact_match=1.0)] * 2) is None


@pytest.mark.parametrize(
    ("task", "entry", "counts", "expected"),
    [
        ("hellaswag", {"acc,none": 0.1, "acc_norm,none": 0.4, "acc_norm_stderr,none": 0.02}, [7], (0.4, 0.02, 7)),
        ("mmbench_en_dev_static", {"submission,none": None, "gpt_eval_score,none": 60.0,
                                   "gpt_eval_score_stderr,none": 3.0}, [5], (0.6, 0.03, 5)),
        ("mmlu", {"acc,none": 0.6, "acc_stderr,none": "N/A"}, [2, 3], (0.6, None, 5)),
    ],
)  # fmt: skip
def test_the_score_that_counts_is_taken_and_scaled(
    task: str, entry: dict[str, Any], counts: list[int], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    benchmark = command_line.BENCHMARKS[task]
    tasks = [f"{task} {number}" for number in range(len(counts))]
    write_report(tmp_path, benchmark, entry, dict(zip(tasks, counts, strict=True)))

    settings = SETTINGS._replace(dtype="bfloat16", limit=3)
    row = read_result(tmp_path, benchmark, settings, model_at(tmp_path / "secret")).evaluation
    assert (row.value, row.standard_error, row.n) == expected
    assert (row.dataset, row.split) == ("owner/rows, en" if len(counts) == 1 else "owner/rows", "val[:3]")
    assert row.choice is not None
    assert row.choice.startswith("0-shot; bfloat16; ")
    assert row.command == f"python -m evaluation secret --tasks {task} --dtype bfloat16"  # no path of this machine


def write_report(
    folder: Path, benchmark: Benchmark, entry: dict[str, Any], counts: dict[str, int], without: str = ""
) -> None:
    """Write a harness's report of a task, whose subtasks have so many rows; a field may be left out."""
    config = {"dataset_path": "owner/rows", "dataset_name": "en", "validation_split": "val"}
    report = {
        "results": {benchmark.task: entry},
        "configs": dict.fromkeys(counts, config),
        "n-shot": dict.fromkeys(counts, 0),
        "n-samples": {task: {"original": 99, "effective": count} for task, count in counts.items()},
    }
    report.pop(without, None)
    (folder / "m").mkdir()
    is_lmms = benchmark.harness == "lmms-eval"
    name = "2026_results.json" if is_lmms else "results_2026-01-01T00-00-00.0.json"
    (folder / "m" / name).write_text(json.dumps(report))


@pytest.mark.parametrize(
    ("entry", "without", "message"),
    [
        ({"exact_match,none": "N/A"}, "", r"gave no exact_match; see the report in"),
        ({"exact_match,none": 0.5}, "n-samples", r"2026_results\.json: n-samples: Field required"),
    ],
)
def test_a_report_without_a_score_or_in_another_form_is_named(
    entry: dict[str, Any], without: str, message: str, tmp_path: Path
) -> None:
    write_report(tmp_path, DIGITS, entry, {"digits": 2}, without)
    with pytest.raises(UserError, match=message):
        read_result(tmp_path, DIGITS, SETTINGS, model_at(tmp_path))


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, composed: Callable[..., Path]) -> None:
    monkeypatch.undo()
    monkeypatch.setitem(harness.MODULES, "lmms-eval", "no_such_harness")
    with pytest.raises(SystemExit, match=r"^error: no_such_harness missing: pip install -e '.\[evaluation\]'"):
        command_line.main([str(composed()), "--tasks", "digits", "--limit", "1"])


def test_a_model_is_told_apart_by_what_its_answers_depend_on(composed: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(composed(), tmp_path / "model"))
    before = open_model(str(folder)).fingerprint
    (folder / "evaluation.json").write_text("[]")
    assert open_model(str(folder)).fingerprint == before
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "processor_config.json",
                 "modeling_normllava.py"):  # fmt: skip
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert open_model(str(folder)).fingerprint != before, name
        (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=r"me/model: no folder with model\*.safetensors.*hf download <id>"):
        open_model("me/model")


@pytest.mark.parametrize("name", ["lr=1e-3,wd=0", "Bob's", '"best"', "stage2[1]", "{stage2}"])
def test_a_path_that_harnesses_would_split_is_refused_before_anything_runs(
    name: str, composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(composed(), tmp_path / name))
    monkeypatch.setattr(command_line, "run_task", lambda *_: pytest.fail("a task was run"))
    with pytest.raises(SystemExit, match=r"^error: .*can't take a path with . in it: rename the folder"):
        command_line.main([str(composed()), str(folder)])
    (tmp_path / "link").symlink_to(folder)
    assert open_model(str(tmp_path / "link")).path == tmp_path / "link"


def test_an_equals_sign_in_a_path_is_taken(composed: Callable[..., Path], tmp_path: Path) -> None:
    """Both harnesses split each argument at its first one."""
    folder = Path(shutil.copytree(composed(), tmp_path / "lr=1e-3"))
    assert open_model(str(folder)).path == folder


def test_a_missing_picture_of_the_examples_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(harness.TASKS))
    monkeypatch.chdir(tmp_path)
    pictures = importlib.import_module("llava_rows").pictures
    with pytest.raises(FileNotFoundError, match=r"^1\.png is not in .*runs/digits/data or .*run the evaluation from"):
        pictures({"image": "1.png"})
    (tmp_path / "runs/emoji/pictures").mkdir(parents=True)
    Image.new("RGB", (3, 2)).save(tmp_path / "runs/emoji/pictures/1.png")
    assert pictures({"image": "1.png"})[0].size == (3, 2)


def test_lm_eval_does_not_take_the_models_penalties() -> None:
    command = build_command(command_line.BENCHMARKS["mmlu"], Path("/m"), Settings(4, 2, "auto", 9), Path("/out"))
    text = " ".join(command)
    assert "--nproc_per_node 2 -m lm_eval run --model hf-multimodal" in text
    assert "--gen_kwargs num_beams=1 repetition_penalty=1.0 no_repeat_ngram_size=0 --tasks mmlu" in text
    assert "--limit 9" in text


def test_the_token_reaches_the_harness_and_no_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_thisIsNoToken")
    program = "import os; from huggingface_hub import get_token; print(sorted(os.environ.items()), get_token()[:7])"
    harness.run_harness([sys.executable, "-c", program], tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "hf_thisIsNoToken" not in log
    assert log.endswith("hf_this\n")
    assert "('PYTHONSAFEPATH', '1')" in log


# Runs: a program in place of the harness, which writes what lmms-eval does

PROGRAM = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1], "model")
folder.mkdir()
report = {
    "results": {"digits": {"alias": "digits", "exact_match,none": 0.5, "exact_match_stderr,none": "N/A"}},
    "configs": {"digits": {"dataset_path": "json", "test_split": "test"}},
    "n-shot": {"digits": 0},
    "n-samples": {"digits": {"original": 10, "effective": 10}},
}
(folder / "2026_results.json").write_text(json.dumps(report))
lines = [json.dumps({"doc_id": n, "target": "x", "input": str(n), "exact_match": float(n % 2)}) for n in range(10)]
(folder / "2026_samples_digits.jsonl").write_text("\\n".join(lines) + "\\n")
print("answering")
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were started, in place of which a program of ours runs; all but "digits" fail."""
    tasks: list[str] = []

    def build(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
        tasks.append(benchmark.task)
        return [sys.executable, "-c", PROGRAM if benchmark == DIGITS else "raise SystemExit(1)", str(output)]

    monkeypatch.setattr(command_line, "build_command", build)
    return tasks


def test_a_result_is_used_again_and_kept_until_there_is_a_new_one(
    started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(model: Model = model_at(tmp_path), settings: Settings = SETTINGS) -> TaskResult:  # noqa: B008
        return command_line.run_task(DIGITS, model, settings)

    first = run()
    again = run(settings=SETTINGS._replace(batch_size=2, num_processes=4))  # which change no score
    assert (len(started), again.evaluation) == (1, first.evaluation)
    row = first.evaluation
    assert (row.dataset, row.split, row.choice, row.value, row.n) == ("digits", "test", "0-shot", 0.5, 10)
    assert row.standard_error == pytest.approx(np.sqrt(0.25 / 9))
    assert (tmp_path / "evaluation/digits/log.txt").read_text() == "answering\n"
    run(model_at(tmp_path, "trained further"))
    run(settings=SETTINGS._replace(dtype="bfloat16"))
    monkeypatch.setattr(harness, "version", lambda module: "2")
    run(settings=SETTINGS._replace(dtype="bfloat16"))
    tasks = Path(shutil.copytree(harness.TASKS, tmp_path / "tasks"))
    monkeypatch.setattr(harness, "TASKS", tasks)
    (tasks / "digits.yaml").write_text("")
    run(settings=SETTINGS._replace(dtype="bfloat16"))
    assert len(started) == 5
    monkeypatch.setattr(command_line, "build_command", lambda *_: [sys.executable, "-c", "raise SystemExit(1)"])
    with pytest.raises(UserError, match=r"exited with 1; see .*digits.unfinished/log.txt"):
        run()
    run(settings=SETTINGS._replace(dtype="bfloat16"))  # the earlier result, without a run


def test_a_failed_task_fails_the_command_and_leaves_the_others(
    started: list[str], composed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [str(shutil.copytree(composed(), tmp_path / name)) for name in ("first", "second")]
    own = [{"task": "own", "value": 0.5, "seed": 42}, {"task": "other", "value": 0.1, "harness": "VLMEvalKit 0.2"}]
    kept = Path(models[0]) / "evaluation.json"
    kept.write_text(json.dumps(own))
    with pytest.raises(SystemExit, match=rf"^Failed: {models[0]}: pope, {models[1]}: pope\."):
        command_line.main([*models, "--tasks", "digits", "pope", "digits"])
    head, _, digits, pope = capsys.readouterr().out.splitlines()
    assert head == "| benchmark | {0} | {1} | {1} − {0} (95% interval) | how |".format(*models)
    assert "| 50.0 ± 16.7 | 50.0 ± 16.7 | +0.0 (too few rows that differ) | lmms-eval 1 digits;" in digits
    assert "| POPE | no result | no result | no result |" in pope
    assert len(started) == 4
    *others, row = json.loads(kept.read_text())
    assert others == own
    assert row["command"] == "python -m evaluation first --tasks digits"
    assert row["weights"] == open_model(models[0]).weights
    # A trial leaves it; results of other weights, or of the same task before, are replaced.
    command_line.main([models[0], "--tasks", "digits", "--limit", "3"])
    assert len(json.loads(kept.read_text())) == 3
    kept.write_text(json.dumps([*own, row | {"task": "pope", "weights": "before further training"}, row]))
    command_line.main([models[0], "--tasks", "digits"])
    assert json.loads(kept.read_text()) == [*own, row]


def difference(first: pd.Series, second: pd.Series) -> str:
    results = {"a": {"digits": result(first.mean(), first)}, "b": {"digits": result(second.mean(), second)}}
    return render([DIGITS], results).splitlines()[2].split(" | ")[3]


def test_differences_are_students_over_pairs() -> None:
    rng = np.random.default_rng(1)
    first = (rng.random(40) < 0.6).astype(float)
    second = np.where(rng.random(40) < 0.8, first, 1 - first)
    low, high = 100 * np.array(ttest_rel(second, first).confidence_interval(0.95))
    change = 100 * (second.mean() - first.mean())
    assert difference(scores_of(first), scores_of(second)[::-1]) == f"{change:+.1f} ({low:+.1f} to {high:+.1f})"
    assert "they answered other questions" in difference(scores_of([1.0, 0.0]), scores_of([1.0, 0.0, 1.0]))
    assert "too few rows that differ" in difference(scores_of([1.0, 0.0], "ab"), scores_of([0.0, 1.0], "ab"))


def test_differences_of_groups_take_each_group_alike() -> None:
    first, second = scores_of([0.0] * 6, "aaaabb"), scores_of([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], "aaaabb")
    # Means 1/4 and 1/2; variances 1/4 of 4 rows and 1/2 of 2; six rows less two groups leave 4 degrees of freedom.
    half = t.ppf(0.975, 4) * np.sqrt(0.25 / 4 + 0.5 / 2) / 2
    assert difference(first, second).endswith(f"({100 * (0.375 - half):+.1f} to {100 * (0.375 + half):+.1f})")


def test_the_mean_is_of_all_nine() -> None:
    results = {benchmark.task: result(number / 10) for number, benchmark in enumerate(PAPER)}
    assert "| mean of the 9 | 40.0 |" in render(PAPER, {"m": results})
    assert "mean of the 9" not in render(PAPER, {"m": {task: results[task] for task in list(results)[1:]}})
