"""What stands around the harnesses: choices, checks, errors of figures, results that are kept, tables."""

import dataclasses
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
from scipy.stats import t, ttest_rel

from diagnostics.results import from_json, to_json
from evaluation import __main__ as command_line
from evaluation import harness, results
from evaluation.__main__ import run_task
from evaluation.benchmarks import OURS, PAPER, TEXT, Benchmark, find_benchmark
from evaluation.harness import Settings, TaskError
from evaluation.models import Model, open_model
from evaluation.record import Evaluation, write_evaluations
from evaluation.reports import name_rows, read_all_figures
from evaluation.results import Figure, Result, fixed_settings, read_result
from evaluation.scores import Row, interval_of_difference, mean, read_rows, standard_error
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
    figure = Figure(task, "exact_match", value, 0.01, 100, rows)
    settings = {"harness": "lmms-eval 1", "limit": limit, "dtype": "auto"}
    return Result(model, settings, task, "owner/rows", "test", 0, 1.0, [figure])


# Figures


def test_the_error_of_a_mean_of_groups_is_that_of_its_groups() -> None:
    rng = np.random.default_rng(0)
    # Simulated: 2000 draws of 60 and 20 rows with shares of 0.9 and 0.3.
    means, errors = [], []
    for _ in range(2000):
        scores = [*(rng.random(60) < 0.9), *(rng.random(20) < 0.3)]
        rows = rows_of([float(score) for score in scores], ["a"] * 60 + ["b"] * 20)
        means.append(mean(rows))
        errors.append(standard_error(rows))
    assert np.mean(means) == pytest.approx(0.6, abs=0.005)
    assert np.mean(errors) == pytest.approx(np.std(means), rel=0.05)
    # sqrt(p (1 - p) / n) of all rows is another number.
    assert np.sqrt(0.75 * 0.25 / 80) < 0.9 * np.mean(errors)


@pytest.mark.parametrize(("scores", "groups"), [([1.0, 0.0, 1.0], "aab"), ([0.0, 0.0, 0.0], "aaa")])
def test_one_row_or_rows_that_are_alike_have_no_error(scores: list[float], groups: str) -> None:
    assert standard_error(rows_of(scores, list(groups))) is None


def test_differences_are_students_over_pairs() -> None:
    rng = np.random.default_rng(1)
    first = (rng.random(40) < 0.6).astype(float)
    second = np.where(rng.random(40) < 0.8, first, 1 - first)
    found = interval_of_difference(rows_of(list(first)), rows_of(list(second))[::-1])  # in any order
    reference = ttest_rel(second, first).confidence_interval(0.95)
    assert found == pytest.approx((reference.low, reference.high))
    for other in (rows_of([1.0, 0.0, 1.0]), rows_of([1.0]), [Row("0", 1.0), Row("9", 0.0)]):
        with pytest.raises(ValueError, match="other questions"):
            interval_of_difference(rows_of([1.0, 0.0]), other)


def test_differences_of_groups_take_each_group_alike() -> None:
    groups = ["a"] * 4 + ["b"] * 2
    first, second = rows_of([0.0] * 6, groups), rows_of([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], groups)
    # Means 1/4 and 1/2; variances 1/4 of 4 rows and 1/2 of 2; six rows less two groups leave 4 degrees of freedom.
    half = t.ppf(0.975, 4) * np.sqrt(0.25 / 4 + 0.5 / 2) / 2
    assert interval_of_difference(first, second) == pytest.approx((0.375 - half, 0.375 + half))


def sample(number: int, **logged: Any) -> dict[str, Any]:
    return {"doc_id": number, "target": "A", "input": f"question {number}", **logged}


OTHER = Benchmark("lmms-eval", "any", "any")


@pytest.mark.parametrize(
    ("items", "value", "expected"),
    [
        ([1.0, 0.0, 0.0, 1.0], 0.5, 0.5),
        ([{"score": 1.0, "l2_category": "a"}, {"score": 0.0, "l2_category": "b"}] * 2, 0.5, 0.5),
        ([{"pred": " a", "answer": "A"}, {"pred": "B", "answer": "A"}], 0.5, 0.5),
        # F1 of these is 0.67: it is no mean of what was logged, and so has neither error nor pairs here.
        ([{"score": 1.0}, {"score": 1.0}, {"score": 0.0}, {"score": 0.0}], 0.67, None),
        ([{"prediction": "A"}], 1.0, None),
        ([{"pred": "a", "answer": ["a", "b"]}], 1.0, None),  # captions
        ([0.500002, 0.500002], 0.5, None),
        ([], 0.0, None),
    ],
)
def test_rows_are_known_where_the_figure_is_their_mean(items: list[Any], value: float, expected: float | None) -> None:
    rows = read_rows(OTHER, "metric", value, [sample(number, metric=item) for number, item in enumerate(items)])
    assert (None if rows is None else mean(rows)) == expected


def row_id(benchmark: Benchmark, **logged: Any) -> str:
    rows = read_rows(benchmark, "metric", 1.0, [sample(0, metric=1.0, **logged)])
    assert rows is not None
    return rows[0].id


def test_a_row_is_the_same_for_every_model_and_another_where_its_question_is() -> None:
    assert row_id(OTHER, doc_hash=str(object())) == row_id(OTHER)  # a hash of an address in memory
    for other in ({"doc_id": 1}, {"input": "another"}, {"target": "B"}):
        assert row_id(OTHER, **other) != row_id(OTHER)
    text, chat = find_benchmark("mmlu"), find_benchmark("digits_lm_eval")
    logged = {"input": None, "prompt_hash": "p", "doc_hash": "d"}
    assert row_id(text, **logged) != row_id(text, **{**logged, "prompt_hash": "q"})
    assert row_id(chat, **logged) == row_id(chat, **{**logged, "prompt_hash": "q"})  # of another chat format
    assert row_id(chat, **logged) != row_id(chat, **{**logged, "doc_hash": "e"})


def test_a_row_that_is_there_twice_is_no_row() -> None:
    assert read_rows(OTHER, "metric", 1.0, [sample(0, metric=1.0), sample(0, metric=1.0)]) is None


# Choices


def test_tasks_go_to_their_harness() -> None:
    assert [benchmark.title for benchmark in PAPER] == [
        "MMBench-EN", "MM-Star", "POPE", "SEED-Bench-2-Plus", "OCRBench", "ScienceQA", "AI2D", "HellaSwag", "MMLU",
    ]  # fmt: skip
    assert find_benchmark("pope").harness == "lmms-eval"
    assert find_benchmark("mmlu").harness == "lm-eval"
    assert find_benchmark("lm-eval:gsm8k") == Benchmark("lm-eval", "gsm8k", "gsm8k")
    assert find_benchmark("lmms-eval:gsm8k").name == "lmms-eval:gsm8k" != find_benchmark("lm-eval:gsm8k").name
    assert find_benchmark("lmms-eval:ocrbench") is find_benchmark("ocrbench")  # with all that is known of it
    assert find_benchmark("lmms-eval:hellaswag").metric is None  # the other harness's own copy
    for name in ("gsm8k", "other:gsm8k", "lm-eval:", "", "lm-eval:a,b", "lm-eval:mmlu_*"):
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
        (["a", "b", "--names", "one"], "--names: give each model a different name"),
        (["a", "a/"], "--names: give each model a different name"),
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
    with pytest.raises(ValueError, match=r"\(pope, lmms-eval:mme\): hf auth login, or set HF_TOKEN"):
        command_line.check_data([find_benchmark(name) for name in ("pope", "mmlu", "digits", "lmms-eval:mme")])
    command_line.check_data([*TEXT, *OURS])
    monkeypatch.setattr(command_line, "HF_DATASETS_OFFLINE", True)
    command_line.check_data([find_benchmark("pope")])


def test_a_folder_with_a_tasks_name_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mmlu").mkdir()
    with pytest.raises(ValueError, match="mmlu is in the working directory"):
        command_line.check_data([find_benchmark("mmlu")])


# Models


def test_a_model_is_told_apart_by_what_its_answers_depend_on(composed: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(composed(), tmp_path / "model"))
    before = open_model(str(folder), None, None, None).fingerprint
    (folder / "evaluation.json").write_text("[]")
    (folder / "trainer_state.json").write_text("{}")
    assert open_model(str(folder), None, None, None).fingerprint == before
    code = "modeling_normllava.py"
    for name in (
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "processor_config.json",
        code,
    ):
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert open_model(str(folder), None, None, None).fingerprint != before, name
        (folder / name).write_bytes(content)


def test_what_is_no_model_is_named(composed: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"me/model is not a folder.*--output_dir"):
        open_model("me/model", "m", None, None)
    with pytest.raises(ValueError, match=r"has no model\*.safetensors"):
        open_model(str(tmp_path), "m", None, None)
    with pytest.raises(ValueError, match="no revisions"):
        open_model(str(composed()), "m", "v1", None)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"Merge it first: python training/merge.py --adapter"):
        open_model(str(tmp_path), "m", None, None)


def test_paths_that_the_harnesses_would_split_are_refused(composed: Callable[..., Path], tmp_path: Path) -> None:
    for name in ("a,b", "lr=1"):
        folder = shutil.copytree(composed(), tmp_path / name)
        with pytest.raises(ValueError, match="a path with a comma"):
            open_model(str(folder), None, None, None)
        with pytest.raises(ValueError, match="a path with a comma"):
            open_model(str(composed()), name, None, tmp_path / "out")


def test_names_keep_this_machines_folders_to_themselves(
    composed: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    absolute = open_model(str(composed()), None, None, None)
    assert absolute.name == absolute.source == composed().name
    monkeypatch.chdir(composed().parent)
    assert open_model(f"./{composed().name}/", None, None, None).source == f"./{composed().name}"
    assert open_model(composed().name, "a/b", None, tmp_path).results == tmp_path / "a--b"


def test_commands_say_what_was_asked_for() -> None:
    pictures = harness.build_command(find_benchmark("pope"), Path("/m"), Settings(4, 1, "bfloat16", 9), Path("/out"))
    line = " ".join(pictures[1:])
    assert line.startswith(
        "-m lmms_eval --model image_text_to_text --model_args pretrained=/m,dtype=bfloat16 --tasks pope"
    )
    assert "--batch_size 4 --output_path /out --log_samples --limit 9" in line
    text = " ".join(
        harness.build_command(find_benchmark("mmlu"), Path("/m"), Settings(4, 2, "auto", None), Path("/out"))
    )
    assert "-m torch.distributed.run --standalone --nproc_per_node 2 -m lm_eval run --model hf-multimodal" in text
    assert "pretrained=/m,dtype=auto,trust_remote_code=True" in text
    assert (
        "--gen_kwargs num_beams=1 repetition_penalty=1.0 no_repeat_ngram_size=0 --tasks" in text
    )  # lm-eval would take the model's
    assert "--apply_chat_template" not in text
    assert "--limit" not in text
    assert "--apply_chat_template" in harness.build_command(OURS[1], Path("/m"), SETTINGS, Path("/out"))


# Reports


def report_of(results: dict[str, Any], **tasks: int) -> dict[str, Any]:
    return {"results": results, "n-samples": {task: {"original": 99, "effective": n} for task, n in tasks.items()}}


def test_the_figure_that_counts_is_taken_and_scaled() -> None:
    given = {
        "hellaswag": {"acc,none": 0.1, "acc_stderr,none": 0.01, "acc_norm,none": 0.4, "acc_norm_stderr,none": 0.02}
    }
    (figure,) = read_all_figures(find_benchmark("hellaswag"), report_of(given, hellaswag=7), {})
    assert (figure.metric, figure.value, figure.standard_error, figure.n) == ("acc_norm", 0.4, 0.02, 7)
    given = {"mmbench_en_dev_static": {"gpt_eval_score,none": 60.0, "gpt_eval_score_stderr,none": 3.0,
                                       "submission,none": None}}  # fmt: skip
    (figure,) = read_all_figures(PAPER[0], report_of(given, mmbench_en_dev_static=5), {})
    assert (figure.value, figure.standard_error) == (0.6, 0.03)
    given = {"pope": {f"pope_{name},none": value for name, value in (("f1_score", 0.8), ("accuracy", 0.7))}}
    (figure,) = read_all_figures(find_benchmark("pope"), report_of(given, pope=5), {})
    assert figure.value == 0.7


@pytest.mark.parametrize("name", ["lm-eval", "lmms-eval"])
def test_filters_of_one_figure_are_told_apart(name: str) -> None:
    results = {"gsm8k": {"exact_match,strict": 0.5, "exact_match,flexible": 1.0, "exact_match_stderr,strict": "N/A"}}
    logged = [
        {**sample(number, exact_match=score), **({"filter": kind} if name == "lm-eval" else {})}
        for kind, scores in (("strict", [1.0, 0.0]), ("flexible", [1.0, 1.0]))
        for number, score in enumerate(scores)
    ]
    benchmark = find_benchmark(f"{name}:gsm8k")
    figures = read_all_figures(benchmark, report_of(results, gsm8k=2), {"gsm8k": logged})
    assert [(figure.metric, figure.value, figure.n) for figure in figures] == [
        ("exact_match, strict", 0.5, 2), ("exact_match, flexible", 1.0, 2),
    ]  # fmt: skip
    # lmms-eval doesn't say which filter a line is of.
    assert [figure.rows is not None for figure in figures] == [name == "lm-eval"] * 2


def test_a_group_without_a_figure_gives_those_of_its_tasks() -> None:
    results = {"pope_full": {" ": " "}, "pope_adv": {"acc,none": 0.5}, "pope_pop": {"acc,none": 1.0}}
    samples = {"pope_adv": [sample(0, acc=1.0), sample(1, acc=0.0)], "pope_pop": [sample(0, acc=1.0)]}
    benchmark = find_benchmark("lmms-eval:pope_full")
    figures = read_all_figures(benchmark, report_of(results, pope_adv=2, pope_pop=1), samples)
    assert [(figure.task, figure.value, figure.n) for figure in figures] == [
        ("pope_adv", 0.5, 2),
        ("pope_pop", 1.0, 1),
    ]
    assert read_all_figures(find_benchmark("pope"), report_of(results, pope_adv=2), samples) == []
    # One that has a figure of its own gives that, of the rows of all its tasks.
    results["mmlu"] = {"acc,none": 0.6, "acc_stderr,none": 0.1}
    (figure,) = read_all_figures(find_benchmark("mmlu"), report_of(results, a=2, b=3), {})
    assert (figure.value, figure.n) == (0.6, 5)


def test_errors_of_clusters_go_before_those_of_rows() -> None:
    results = {"v": {"acc,none": 0.5, "acc_stderr,none": "N/A", "acc_stderr_clustered,none": 0.2}}
    samples = {"v": [sample(number, acc=float(number % 2)) for number in range(4)]}
    (figure,) = read_all_figures(find_benchmark("lmms-eval:v"), report_of(results, v=4), samples)
    assert (figure.standard_error, figure.rows) == (0.2, None)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dataset_path": "a/b", "dataset_name": "en", "validation_split": "val"}, ("a/b, en", "val[:3]")),
        ({"dataset_path": "json", "dataset_kwargs": {"data_files": ["x.json"]}, "test_split": "test",
          "validation_split": "val"}, ("x.json", "test[:3]")),
        ({"dataset_kwargs": {"data_files": {"test": ["/a/x.json", "b/y.json"], "dev": "https://a.b/z.parquet"}}},
         ("x.json, y.json, https://a.b/z.parquet", "all[:3]")),
        ({}, ("made by the task", "all[:3]")),
    ],
)  # fmt: skip
def test_the_rows_are_named(config: dict[str, Any], expected: tuple[str, str]) -> None:
    assert name_rows({"configs": {"task": config}}, Settings(1, 1, "auto", 3)) == expected


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
    "n-samples": {"digits": {"original": 10, "effective": 10}},
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

    monkeypatch.setattr(command_line, "build_command", build)
    monkeypatch.setattr(results, "harness_name", lambda benchmark: f"{benchmark.harness} 1")
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
    # Not of another model or another dtype.
    run_task(DIGITS, tmp_path, "trained further", SETTINGS, folder)
    run_task(DIGITS, tmp_path, "trained further", Settings(8, 1, "bfloat16", None), folder)
    assert len(started) == 3
    # Batch size and processes change no figure.
    run_task(DIGITS, tmp_path, "trained further", Settings(2, 4, "bfloat16", None), folder)
    assert len(started) == 3
    for other in ({"harness": "lmms-eval 2"}, {"limit": 5}, {"scale": None}, {"code": "another"}):
        assert fixed_settings(DIGITS, SETTINGS) != fixed_settings(DIGITS, SETTINGS) | other


def test_a_result_of_another_text_of_its_task_is_not_used(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tasks = shutil.copytree(harness.TASKS, tmp_path / "tasks")
    monkeypatch.setattr(results, "TASKS", tasks)
    run_task(DIGITS, tmp_path, "model", SETTINGS, tmp_path / "digits")
    pope = fixed_settings(PAPER[2], SETTINGS)
    (tasks / "digits_common").write_text((tasks / "digits_common").read_text() + "# another\n")
    run_task(DIGITS, tmp_path, "model", SETTINGS, tmp_path / "digits")
    assert len(started) == 2
    assert fixed_settings(PAPER[2], SETTINGS) == pope  # the harness's own


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", r"the harness exited with 3; see .*log.txt"),
        ("print('lmms-eval ends with 0 all the same')", r"wrote no result; see .*log.txt"),
        (PROGRAM.replace("exact_match,none", "other,none"), "gave no exact_match"),
        (PROGRAM.replace('"n-shot"', '"shots"'), r"results.json can't be parsed \(KeyError: 'n-shot'\)"),
    ],
)
def test_a_failed_task_leaves_what_was_there(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, message: str
) -> None:
    before = run_task(DIGITS, tmp_path, "model", SETTINGS, tmp_path / "digits")
    monkeypatch.setattr(command_line, "build_command", lambda *args: [sys.executable, "-c", program, str(args[-1])])
    with pytest.raises(TaskError, match=message):
        run_task(DIGITS, tmp_path, "trained further", SETTINGS, tmp_path / "digits")
    assert read_result(tmp_path / "digits") == before
    assert (tmp_path / "digits.unfinished" / "log.txt").exists()
    (tmp_path / "digits" / "result.json").write_text("")
    with pytest.raises(ValueError, match=r"result.json can't be read .* remove it"):
        read_result(tmp_path / "digits")


def test_the_token_reaches_the_harness_and_no_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_thisIsNoToken")
    program = "import os; from huggingface_hub import get_token; print(sorted(os.environ.items()), get_token()[:7])"
    harness.run_harness([sys.executable, "-c", program], tmp_path / "log.txt")
    log = (tmp_path / "log.txt").read_text()
    assert "hf_thisIsNoToken" not in log
    assert log.endswith("hf_this\n")
    assert "('PYTHONSAFEPATH', '1')" in log


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
    folder = model.task_folder(find_benchmark(found.task), found.settings["limit"])
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps(to_json(found)))


def test_evaluation_json_holds_the_whole_results_of_this_model(tmp_path: Path) -> None:
    model = Model("mine", "runs/mine", tmp_path, tmp_path, "m", "weights")
    path = tmp_path / "evaluation.json"
    own = [{"task": "own", "value": 0.5, "seed": 42}, {"task": "other", "value": 0.1, "harness": "VLMEvalKit 0.2"}]
    path.write_text(json.dumps(own))
    keep(model, result("pope", 0.8))
    keep(model, result("mmstar", 0.4, limit=50))  # a trial
    keep(model, result("ai2d", 0.7, model="before it was trained further"))
    keep(model, result("lm-eval:gsm8k", 0.2))
    keep(model, result("lmms-eval:gsm8k", 0.9))
    model.write_evaluations(model.read_results())
    rows = json.loads(path.read_text())
    assert rows[:2] == own
    assert {row["command"]: row["value"] for row in rows[2:]} == {
        "python -m evaluation runs/mine --tasks pope": 0.8,
        "python -m evaluation runs/mine --tasks lm-eval:gsm8k": 0.2,
        "python -m evaluation runs/mine --tasks lmms-eval:gsm8k": 0.9,
    }  # fmt: skip
    assert from_json(Evaluation, next(row for row in rows if row["task"] == "pope"), path).choice == (
        "0-shot; accuracy, not F1"
    )
    trained = Model("mine", "runs/mine", tmp_path, tmp_path, "trained further", "other weights")
    trained.write_evaluations(trained.read_results())
    assert json.loads(path.read_text()) == own
    for text, message in (("{", "is not valid JSON"), ("{}", "is not a list")):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"evaluation.json {message}"):
            model.write_evaluations(model.read_results())


def test_a_script_replaces_its_own_rows_alone(tmp_path: Path) -> None:
    row = Evaluation(
        task="t", dataset="d", split="s", metric="m", value=0.5, n=3, standard_error=None, command="own", weights="w"
    )
    for _ in range(2):
        write_evaluations(tmp_path, [row], lambda other: other["command"] == "own")
    write_evaluations(tmp_path, [row], lambda other: False)
    assert len(json.loads((tmp_path / "evaluation.json").read_text())) == 2


def test_a_failed_task_fails_the_command_and_leaves_the_others(
    started: list[list[str]],
    composed: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = command_line.build_command

    def build(benchmark: Benchmark, *args: Any) -> list[str]:
        return [sys.executable, "-c", "raise SystemExit(1)"] if benchmark.task == "mme" else fake(benchmark, *args)

    monkeypatch.setattr(command_line, "build_command", build)
    monkeypatch.setattr(command_line, "check_installed", lambda benchmarks: None)
    monkeypatch.setattr(command_line, "HF_HUB_OFFLINE", True)
    models = [shutil.copytree(composed(), tmp_path / name) for name in ("first", "second")]
    options = ["--tasks", "digits", "lmms-eval:mme", "digits"]
    message = run_main(*models, *options)
    assert message.startswith("Failed: first: lmms-eval:mme, second: lmms-eval:mme.")
    table = capsys.readouterr().out
    assert table.splitlines()[0] == "| benchmark | first | second | second − first (95% interval) | how |"
    assert "| digits | 50.0 ± 16.7 | 50.0 ± 16.7 | +0.0 (too few rows that differ) | lmms-eval 1 digits;" in table
    assert "| mme | no result | no result | no result |" in table
    assert len(started) == 2
    for folder in models:
        assert len(json.loads((folder / "evaluation.json").read_text())) == 1
        assert "| digits | 50.0 ± 16.7 |" in (folder / "evaluation.md").read_text()
    # Trained further in its place: what was measured before goes, even where nothing is measured now; not for a trial.
    (models[0] / "config.json").write_text((models[0] / "config.json").read_text() + " ")
    run_main(models[0], "--tasks", "lmms-eval:mme", "--limit", "3")
    assert len(json.loads((models[0] / "evaluation.json").read_text())) == 1
    assert (models[0] / "evaluation.md").exists()
    run_main(models[0], "--tasks", "lmms-eval:mme")
    assert json.loads((models[0] / "evaluation.json").read_text()) == []
    assert not (models[0] / "evaluation.md").exists()
    run_main(models[1], "--tasks", "lmms-eval:mme", "--output_dir", tmp_path / "out")
    assert (tmp_path / "out/second/evaluation/lmms-eval--mme.unfinished/log.txt").exists()


def test_the_table_sets_models_side_by_side() -> None:
    first, second = rows_of([1.0, 0.0] * 50), rows_of([1.0, 1.0, 1.0, 0.0] * 25)
    results = {"none": {"digits": result("digits", 0.5, first)}, "gwc": {"digits": result("digits", 0.75, second)}}
    header, _, line = render([DIGITS], results).splitlines()
    assert header == "| benchmark | none | gwc | gwc − none (95% interval) | how |"
    low, high = interval_of_difference(first, second)
    assert f"| 50.0 ± 1.0 | 75.0 ± 1.0 | +25.0 ({100 * low:+.1f} to {100 * high:+.1f}) |" in line
    assert "lmms-eval 1 digits; exact_match; test, n = 100; 0-shot" in line
    results["gwc"] = {}
    assert "| 50.0 ± 1.0 | no result | no result |" in render([DIGITS], results)


def test_figures_without_a_known_scale_stay_as_they_are() -> None:
    settings = {"harness": "lmms-eval 1", "limit": None, "dtype": "auto"}
    figures = [Figure("mme", "perception", 1500.25, None, 9, None), Figure("mme", "cognition", 300.0, 2.5, 9, None)]
    found = Result("m", settings, "lmms-eval:mme", "d", "test", 0, 1.0, figures)
    lines = render([find_benchmark("lmms-eval:mme")], {"a|b": {"lmms-eval:mme": found}}).splitlines()
    assert lines[0] == r"| benchmark | a\|b | how |"
    assert lines[2].startswith("| mme, perception | 1500 | lmms-eval 1 mme; perception; test, n = 9")
    assert lines[3].startswith("| mme, cognition | 300 ± 2.5 |")


def test_the_mean_is_of_all_nine_and_whole_rows() -> None:
    results = {benchmark.task: result(benchmark.task, number / 10) for number, benchmark in enumerate(PAPER)}
    benchmarks = [Benchmark(of.harness, of.task, of.title, "exact_match") for of in PAPER]
    assert "| mean of the 9 | 40.0 ± 0.3 |" in render(benchmarks, {"m": results})
    for broken in (
        {**results, "pope": result("pope", 0.1, limit=5)},
        {k: v for k, v in results.items() if k != "pope"},
    ):
        assert "mean of the 9" not in render(benchmarks, {"m": broken})
    for settings in ({"harness": "lmms-eval 2"}, {"dtype": "bfloat16"}):
        changed = dataclasses.replace(results["pope"], settings=results["pope"].settings | settings)
        table = render(PAPER, {"m": {**results, "pope": changed}})
        assert "mean of the 9" not in table
        assert f"{changed.harness} pope; exact_match; test, n = 100; 0-shot" in table
        assert ("; bfloat16" in table) == (changed.dtype == "bfloat16")
    figure = Figure("pope", "exact_match", 0.2, None, 100, None)
    unknown = {**results, "pope": dataclasses.replace(results["pope"], figures=[figure])}
    assert "| mean of the 9 | 40.0 |" in render(benchmarks, {"m": unknown})
