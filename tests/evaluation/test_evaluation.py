"""What stands around the harnesses: choices, checks, errors of figures, results that are kept, tables."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from diagnostics.results import from_json, to_json
from evaluation import __main__ as command_line
from evaluation import harness
from evaluation.benchmarks import OURS, PAPER, Benchmark, find_benchmark
from evaluation.harness import Figure, Result, Settings, TaskError, run_task
from evaluation.models import Model, open_model
from evaluation.record import Evaluation, write_evaluations
from evaluation.scores import Row, difference, estimate, read_rows
from evaluation.table import render


ROOT = Path(__file__).parents[2]
DIGITS = OURS[0]
SETTINGS = Settings(batch_size=8, num_processes=1, dtype="auto", limit=None)


def rows_of(scores: Sequence[float], groups: Sequence[str] | None = None) -> list[Row]:
    names = groups or [None] * len(scores)
    return [Row(str(number), score, group) for number, (score, group) in enumerate(zip(scores, names, strict=True))]


def result(
    task: str, value: float, rows: list[Row] | None = None, model: str = "m", limit: int | None = None
) -> Result:
    figure = Figure("exact_match", value, 0.01, 100, rows)
    settings = {"harness": "lmms-eval 1", "limit": limit, "dtype": "auto"}
    return Result(model, settings, task, "lmms-eval 1", "owner/rows", "test", 0, 1.0, [figure])


# Figures


def test_the_error_of_a_mean_of_groups_is_that_of_its_groups() -> None:
    rng = np.random.default_rng(0)
    # Simulated: 2000 draws of 60 and 20 rows with shares of 0.9 and 0.3.
    means, errors = [], []
    for _ in range(2000):
        scores = [*(rng.random(60) < 0.9), *(rng.random(20) < 0.3)]
        mean, error = estimate(rows_of([float(score) for score in scores], ["a"] * 60 + ["b"] * 20))
        means.append(mean)
        errors.append(error)
    assert np.mean(means) == pytest.approx(0.6, abs=0.005)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
    # sqrt(p (1 - p) / n) of all rows is another number.
    assert np.sqrt(0.75 * 0.25 / 80) < 0.9 * np.mean(errors)


def test_a_group_of_one_row_has_no_error() -> None:
    assert estimate(rows_of([1.0, 0.0, 1.0], ["a", "a", "b"])) == (0.75, None)


def test_differences_are_students_over_pairs() -> None:
    rng = np.random.default_rng(1)
    first = (rng.random(40) < 0.6).astype(float)
    second = np.where(rng.random(40) < 0.8, first, 1 - first)
    found = difference(rows_of(list(first)), rows_of(list(second))[::-1])  # in any order
    reference = ttest_rel(second, first).confidence_interval(0.95)
    assert found.interval == pytest.approx((reference.low, reference.high))
    assert (found.mean, found.n) == (pytest.approx(second.mean() - first.mean()), 40)
    with pytest.raises(ValueError, match="other questions"):
        difference(rows_of([1.0, 0.0]), rows_of([1.0, 0.0, 1.0]))


def sample(number: int, **logged: Any) -> dict[str, Any]:
    return {"doc_id": number, "target": "A", "input": f"question {number}", **logged}


@pytest.mark.parametrize(
    ("items", "value", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], 0.5, 0.5),
        ([{"score": 1.0, "l2_category": "a"}, {"score": 0.0, "l2_category": "b"}] * 2, 0.5, 0.5),
        ([{"pred": " a", "answer": "A"}, {"pred": "B", "answer": "A"}], 0.5, 0.5),
        # F1 of these is 0.67: it is no mean of what was logged, and so has neither error nor pairs here.
        ([{"score": 1.0}, {"score": 1.0}, {"score": 0.0}, {"score": 0.0}], 0.67, None),
        ([{"prediction": "A"}], 1.0, None),
        ([], 0.0, None),
    ],
)
def test_rows_are_known_where_the_figure_is_their_mean(items: list[Any], value: float, expected: float | None) -> None:
    rows = read_rows("any", "metric", value, [sample(number, metric=item) for number, item in enumerate(items)])
    assert (None if rows is None else estimate(rows)[0]) == expected


def test_a_row_is_the_same_for_every_model_and_another_where_its_question_is() -> None:
    logged = [sample(0, metric=1.0, doc_hash=str(object())) for _ in range(2)]  # a hash of an address in memory
    assert len({read_rows("any", "metric", 1.0, [entry])[0].id for entry in logged}) == 1
    other = {**logged[0], "input": "another question"}
    assert read_rows("any", "metric", 1.0, [other])[0].id != read_rows("any", "metric", 1.0, logged[:1])[0].id


# Choices


def test_tasks_go_to_their_harness() -> None:
    assert [benchmark.title for benchmark in PAPER] == [
        "MMBench-EN", "MM-Star", "POPE", "SEED-Bench-2-Plus", "OCRBench", "ScienceQA", "AI2D", "HellaSwag", "MMLU",
    ]  # fmt: skip
    assert find_benchmark("pope").harness == "lmms-eval"
    assert find_benchmark("mmlu").harness == "lm-eval"
    assert find_benchmark("lm-eval:gsm8k") == Benchmark("lm-eval", "gsm8k", "gsm8k")
    assert find_benchmark("lmms-eval:mme").harness == "lmms-eval"
    for name in ("gsm8k", "other:gsm8k", "lm-eval:", ""):
        with pytest.raises(ValueError, match="lm-eval:<task>"):
            find_benchmark(name)


def run_main(*argv: str | Path) -> str:
    with pytest.raises(SystemExit) as stopped:
        command_line.main([str(argument) for argument in argv])
    return str(stopped.value)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--limit", "0"], "--limit must be at least 1"),
        (["m", "--num_processes", "0"], "--num_processes must be at least 1"),
        (["a", "b", "--names", "one"], "--names: give each model one name"),
        (["a", "a"], "--names: give each model one name"),
        (["m", "--tasks", "gsm8k"], "--tasks gsm8k: there are mmbench_en_dev_static, "),
    ],
)
def test_wrong_options_are_named(argv: list[str], message: str) -> None:
    assert run_main(*argv).startswith(message)


def test_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "--num_processes launches" in run_main("m")


def test_ocrbench_is_left_out_of_a_part_of_its_rows(caplog: pytest.LogCaptureFixture) -> None:
    chosen = command_line.choose_benchmarks(command_line.parse_arguments(["m", "--images_only", "--limit", "9"]))
    assert len(chosen) == 6
    assert "ocrbench is left out under --limit: its score is divided by 1000" in caplog.text
    assert len(command_line.choose_benchmarks(command_line.parse_arguments(["m"]))) == 9
    assert len(command_line.choose_benchmarks(command_line.parse_arguments(["m", "--text_only"]))) == 2


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(command_line.MODULES, "lm-eval", "no_such_harness")
    with pytest.raises(ValueError, match=r"no_such_harness missing: pip install -e '.\[evaluation\]'"):
        command_line.check_installed([find_benchmark("mmlu")])


def test_a_torchvision_of_another_build_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.setitem(command_line.MODULES, "lm-eval", "json")
    with pytest.raises(ValueError, match="pip uninstall torchvision"):
        command_line.check_installed([find_benchmark("mmlu")])


def test_a_token_is_asked_for_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_line, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(command_line, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr(command_line, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"\(pope\): hf auth login, or set HF_TOKEN"):
        command_line.check_data([find_benchmark("pope"), find_benchmark("mmlu")])
    command_line.check_data([find_benchmark("mmlu")])
    monkeypatch.setattr(command_line, "HF_DATASETS_OFFLINE", True)
    command_line.check_data([find_benchmark("pope")])


def test_a_folder_with_a_tasks_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mmlu").mkdir()
    with pytest.raises(ValueError, match="mmlu lies in the working directory"):
        command_line.check_data([find_benchmark("mmlu")])


# Models


def test_a_model_is_told_apart_by_what_its_answers_depend_on(composed: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(composed(), tmp_path / "model"))
    before = open_model(str(folder), "m", None, None).fingerprint
    (folder / "evaluation.json").write_text("[]")
    (folder / "trainer_state.json").write_text("{}")
    assert open_model(str(folder), "m", None, None).fingerprint == before
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "processor_config.json"):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert open_model(str(folder), "m", None, None).fingerprint != before, name
        (folder / name).write_bytes(content)


def test_what_is_no_model_is_named(composed: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"me/model is no folder here.*--output_dir"):
        open_model("me/model", "m", None, None)
    with pytest.raises(ValueError, match=r"holds no \*.safetensors"):
        open_model(str(tmp_path), "m", None, None)
    with pytest.raises(ValueError, match="no revisions"):
        open_model(str(composed()), "m", "v1", None)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"Merge it first: python training/merge.py --adapter"):
        open_model(str(tmp_path), "m", None, None)


def test_paths_that_the_harnesses_would_split_are_refused() -> None:
    for path in (Path("/runs/a,b"), Path("/runs/lr=1")):
        with pytest.raises(ValueError, match="no path with a comma"):
            harness.build_command(DIGITS, path, SETTINGS, Path("/out"))


# Runs: a program in place of the harness, which writes what lmms-eval does


PROGRAM = """
import json, pathlib, sys
folder = pathlib.Path(sys.argv[1], "model")
folder.mkdir()
report = {
    "results": {"digits": {"alias": "digits", "exact_match,none": 0.5, "exact_match_stderr,none": "N/A"}},
    "configs": {"digits": {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": "rows.json"}},
                           "test_split": "test"}},
    "n-shot": {"digits": 0},
}
(folder / "2026_results.json").write_text(json.dumps(report))
lines = [json.dumps({"doc_id": n, "target": "x", "input": str(n), "exact_match": float(n % 2)}) for n in range(10)]
(folder / "2026_samples_digits.jsonl").write_text("\\n".join(lines) + "\\n")
print("answering")
"""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands that were started, in place of which a program of ours runs."""
    commands: list[list[str]] = []

    def build(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
        commands.append([sys.executable, "-c", PROGRAM, str(output)])
        return commands[-1]

    monkeypatch.setattr(harness, "build_command", build)
    monkeypatch.setattr(harness, "harness_name", lambda benchmark: f"{benchmark.harness} 1")
    return commands


def test_a_result_is_kept_and_used_again(started: list[list[str]], tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    first = run_task(DIGITS, tmp_path, "model", SETTINGS, folder)
    assert run_task(DIGITS, tmp_path, "model", SETTINGS, folder) == first
    assert len(started) == 1
    assert (first.dataset, first.split, first.shots) == ("rows.json", "test", 0)
    (figure,) = first.figures
    assert (figure.value, figure.n) == (0.5, 10)
    assert figure.standard_error == pytest.approx(np.sqrt(0.25 / 9))
    assert (folder / "log.txt").read_text() == "answering\n"
    # Not of another model, another dtype or another harness.
    run_task(DIGITS, tmp_path, "trained further", SETTINGS, folder)
    run_task(DIGITS, tmp_path, "trained further", Settings(8, 1, "bfloat16", None), folder)
    assert len(started) == 3
    # Batch size and processes change no figure.
    run_task(DIGITS, tmp_path, "trained further", Settings(2, 4, "bfloat16", None), folder)
    assert len(started) == 3


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", r"the harness ended with 3; see .*log.txt"),
        ("print('lmms-eval ends with 0 all the same')", r"wrote no result; see .*log.txt"),
        (PROGRAM.replace("exact_match,none", "other,none"), "gave no exact_match"),
    ],
)
def test_a_failed_task_leaves_no_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, message: str
) -> None:
    monkeypatch.setattr(harness, "build_command", lambda *args: [sys.executable, "-c", program, str(args[-1])])
    monkeypatch.setattr(harness, "harness_name", lambda benchmark: "lmms-eval 1")
    with pytest.raises(TaskError, match=message):
        run_task(DIGITS, tmp_path, "model", SETTINGS, tmp_path / "digits")
    assert not (tmp_path / "digits" / "result.json").exists()


def test_ctrl_c_ends_the_harness_too(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    code = (
        "import sys; from pathlib import Path; from evaluation.harness import run_harness\n"
        f"run_harness([sys.executable, '-c', {program!r}], Path({str(tmp_path / 'log')!r}))"
    )
    outer = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert outer.poll() is None
        time.sleep(0.1)
    outer.send_signal(signal.SIGINT)
    assert outer.wait(timeout=30) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# evaluation.json and tables


def keep(model: Model, found: Result) -> None:
    folder = model.task_folder(found.task, found.settings["limit"])
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(to_json(found)))


def test_evaluation_json_holds_the_whole_results_of_this_model(tmp_path: Path) -> None:
    model = Model("mine", "runs/mine", tmp_path, tmp_path, "m")
    own = Evaluation(
        task="own", dataset="d", split="s", metric="m", value=0.5, n=3, standard_error=None, command="python own.py"
    )
    write_evaluations(tmp_path, [own])
    keep(model, result("pope", 0.8))
    keep(model, result("pope", 0.1, limit=5))
    keep(model, result("mmstar", 0.3, limit=5))
    keep(model, result("mmstar", 0.4, limit=50))
    keep(model, result("ai2d", 0.7, model="before it was trained further"))
    model.write_evaluations()
    path = tmp_path / "evaluation.json"
    rows = from_json(list[Evaluation], json.loads(path.read_text()), path)
    assert {row.task: row.value for row in rows} == {"own": 0.5, "pope": 0.8, "mmstar": 0.4}
    assert [row.command for row in rows[1:]] == [
        "python -m evaluation runs/mine --tasks mmstar --limit 50", "python -m evaluation runs/mine --tasks pope",
    ]  # fmt: skip
    assert rows[0] == own
    write_evaluations(tmp_path, [own])  # the other way round
    assert len(json.loads(path.read_text())) == 3
    path.write_text("{")
    with pytest.raises(ValueError, match=r"evaluation.json is no JSON"):
        model.write_evaluations()


def test_the_table_sets_models_side_by_side() -> None:
    first, second = rows_of([1.0, 0.0] * 50), rows_of([1.0, 1.0, 1.0, 0.0] * 25)
    results = {"none": {"digits": result("digits", 0.5, first)}, "gwc": {"digits": result("digits", 0.75, second)}}
    header, _, line = render([DIGITS], results).splitlines()
    assert header == "| benchmark | none | gwc | gwc − none (95% interval) | how |"
    found = difference(first, second).interval
    assert f"| 50.0 ± 1.0 | 75.0 ± 1.0 | +25.0 ({100 * found[0]:+.1f} to {100 * found[1]:+.1f}) |" in line
    assert "lmms-eval 1 digits; exact_match; test, n = 100; 0-shot" in line
    results["gwc"] = {}
    assert "| 50.0 ± 1.0 | no result | no result |" in render([DIGITS], results)


def test_the_mean_is_of_all_nine_and_whole_rows() -> None:
    results = {benchmark.task: result(benchmark.task, number / 10) for number, benchmark in enumerate(PAPER)}
    benchmarks = [Benchmark(of.harness, of.task, of.title, "exact_match") for of in PAPER]
    assert "| mean of the 9 | 40.0 ± 0.3 |" in render(benchmarks, {"m": results})
    for broken in (
        {**results, "pope": result("pope", 0.1, limit=5)},
        {k: v for k, v in results.items() if k != "pope"},
    ):
        assert "mean of the 9" not in render(benchmarks, {"m": broken})
