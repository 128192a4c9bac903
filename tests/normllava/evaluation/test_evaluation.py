"""Tests of reading a harness's files, of keeping results, and of the table. No harness runs here."""

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

from normllava.errors import UserError
from normllava.evaluation import command as command_line
from normllava.evaluation import harness
from normllava.evaluation.benchmarks import PAPER, Benchmark, read_own_benchmarks
from normllava.evaluation.harness import Model, Settings, build_command, open_model
from normllava.evaluation.record import Evaluation
from normllava.evaluation.results import TaskResult, read_result
from normllava.evaluation.row_scores import read_row_scores
from normllava.evaluation.table import render


# The folder of the examples' tasks, and the first task in it.
TASKS = Path(__file__).parents[3] / "examples" / "tasks"
DIGITS = read_own_benchmarks(TASKS)[0]
BENCHMARKS = {benchmark.task: benchmark for benchmark in [*PAPER, DIGITS]}
OWN_TASKS = ["--include_path", str(TASKS)]
SETTINGS = Settings(batch_size=8, num_processes=1, dtype="auto", limit=None)


def make_row_scores(scores: Sequence[float], groups: str | None = None) -> pd.Series:
    """Scores of rows, indexed as by `read_row_scores`. Each letter of `groups` is the name of a row's group."""
    group_index = [""] * len(scores) if groups is None else list(groups)
    row_index = [str(number) for number in range(len(scores))]
    return pd.Series(scores, [group_index, row_index], dtype=float).rename_axis(["group", "row"])


def make_result(score: float, row_scores: pd.Series | None = None) -> TaskResult:
    """A result of the digits with this score."""
    evaluation = Evaluation(
        task="digits",
        dataset="d",
        split="test",
        metric="exact_match",
        value=score,
        n=100,
        standard_error=0.01,
        command="c",
        harness="lmms-eval 1",
        choice="0-shot",
    )
    return TaskResult(evaluation, row_scores)


def make_model(folder: Path, fingerprint: str = "fingerprint") -> Model:
    """A model in this folder, which may be empty."""
    return Model(name="runs/mine", path=folder, fingerprint=fingerprint, weights="weights")


@pytest.fixture(autouse=True)
def harness_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both harnesses appear to be installed, as version 1."""
    monkeypatch.setattr(harness, "version", lambda module: "1")


def make_sample(number: int, **fields: Any) -> dict[str, Any]:
    """An entry of a harness's row log, with these fields added or replaced."""
    sample = {"doc_id": number, "target": "A", "input": f"question {number}"}
    return {**sample, **fields}


def make_samples(task: str, metric_inputs: list[Any]) -> list[dict[str, Any]]:
    """The entries of a task's row log, one for each of these inputs of the task's metric."""
    metric = BENCHMARKS[task].metric
    return [make_sample(number, **{metric: metric_input}) for number, metric_input in enumerate(metric_inputs)]


# What MMBench's metric is given. The answer "A" is right for question 0 in both orders of the options, and for
# question 1 only in the first order.
MMBENCH_INPUTS = [
    {"index": 0, "prediction": " a.", "answer": "A"},
    {"index": 1_000_000, "prediction": " a.", "answer": "A"},
    {"index": 1, "prediction": " a.", "answer": "A"},
    {"index": 1_000_001, "prediction": " a.", "answer": "B"},
]
# What MM-Star's metric is given for rows of two categories, whose means are 1 and 0.
MMSTAR_INPUTS = [
    {"score": 1.0, "l2_category": "a"},
    {"score": 1.0, "l2_category": "a"},
    {"score": 0.0, "l2_category": "b"},
]
# What SEED-Bench-2-Plus's metric is given for a right answer and for a wrong one.
SEEDBENCH_INPUTS = [{"pred": "a ", "answer": "A"}, {"pred": "A and B", "answer": "A"}]


@pytest.mark.parametrize(
    ("task", "metric_inputs", "expected"),
    [
        pytest.param("digits", [1.0, 0.0], [1, 0], id="number"),
        pytest.param("pope", [{"score": 1.0}, {"score": 0.0}], [1, 0], id="score"),
        pytest.param("mmstar", MMSTAR_INPUTS, [1, 1, 0], id="score and category"),
        pytest.param("seedbench_2_plus", SEEDBENCH_INPUTS, [1, 0], id="answer"),
        pytest.param("mmbench_en_dev_static", MMBENCH_INPUTS, [1, 0], id="answer in each order"),
    ],
)
def test_scores_of_rows_are_read_where_the_tasks_score_is_their_mean(
    task: str, metric_inputs: list[Any], expected: list[float]
) -> None:
    # The task's score is always 0.5: the mean of rows, of categories ("mmstar"), or of questions (MMBench).
    samples = make_samples(task, metric_inputs)
    scores = read_row_scores(BENCHMARKS[task], score=0.5, samples=samples)
    assert scores is not None
    assert list(scores) == expected


def test_scores_of_rows_are_unknown_where_the_tasks_score_is_not_their_mean() -> None:
    # The mean of these rows is 0.5, and a score of 0.67 could be their F1.
    samples = make_samples("pope", [{"score": 1.0}, {"score": 1.0}, {"score": 0.0}, {"score": 0.0}])
    assert read_row_scores(BENCHMARKS["pope"], score=0.67, samples=samples) is None


@pytest.mark.parametrize(
    ("task", "metric_inputs"),
    [
        pytest.param("pope", [{"score": 1.0}, {"hit": 1.0}], id="no score"),
        pytest.param("seedbench_2_plus", [{"score": 1.0}], id="no answer"),
        pytest.param("mmbench_en_dev_static", [{"score": 1.0}], id="no index"),
    ],
)
def test_scores_of_rows_are_unknown_where_a_log_has_an_unknown_form(task: str, metric_inputs: list[Any]) -> None:
    samples = make_samples(task, metric_inputs)
    assert read_row_scores(BENCHMARKS[task], score=1.0, samples=samples) is None


def read_row_index(**fields: Any) -> tuple[str, str]:
    """The index, `(group, row)`, of a row whose log entry has these fields."""
    sample = make_sample(0, exact_match=1.0, **fields)
    scores = read_row_scores(DIGITS, score=1.0, samples=[sample])
    assert scores is not None
    return scores.index[0]


def test_a_row_has_the_same_index_for_every_model() -> None:
    """lmms-eval's hash of a row, `doc_hash`, depends on an address in memory, so it must not be part of the index."""
    assert read_row_index(doc_hash=str(object())) == read_row_index()


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"doc_id": 1}, id="number"),
        pytest.param({"input": "another"}, id="question"),
        pytest.param({"target": "B"}, id="right answer"),
        pytest.param({"input": None, "prompt_hash": "p"}, id="hash of the question"),
    ],
)
def test_another_question_has_another_index(fields: dict[str, Any]) -> None:
    assert read_row_index(**fields) != read_row_index()


def test_scores_of_rows_are_unknown_where_a_row_was_logged_twice() -> None:
    sample = make_sample(0, exact_match=1.0)
    assert read_row_scores(DIGITS, score=1.0, samples=[sample, sample]) is None


def write_report(
    folder: Path, benchmark: Benchmark, scores: dict[str, Any], row_counts: dict[str, int], omit: str | None = None
) -> None:
    """Write a harness's report about a task.

    Args:
        folder: The folder that the harness was given.
        benchmark: The task.
        scores: The task's scores by metric and filter.
        row_counts: Number of rows of each subtask; of the task itself if it has no subtasks.
        omit: A field that the report shall not have.
    """
    config = {"dataset_path": "owner/rows", "dataset_name": "en", "validation_split": "val"}
    report: dict[str, Any] = {"results": {benchmark.task: scores}, "configs": {}, "n-shot": {}, "n-samples": {}}
    for subtask, count in row_counts.items():
        report["configs"][subtask] = config
        report["n-shot"][subtask] = 0
        report["n-samples"][subtask] = {"original": 99, "effective": count}  # 99 is without the limit, and is not read
    if omit is not None:
        del report[omit]

    file_names = {"lmms-eval": "2026_results.json", "lm-eval": "results_2026-01-01T00-00-00.0.json"}
    (folder / "model").mkdir()
    (folder / "model" / file_names[benchmark.harness]).write_text(json.dumps(report))


def test_the_benchmarks_metric_is_taken_from_all_metrics(tmp_path: Path) -> None:
    scores = {"acc,none": 0.1, "acc_norm,none": 0.4, "acc_norm_stderr,none": 0.02}
    benchmark = BENCHMARKS["hellaswag"]
    write_report(tmp_path, benchmark, scores, {"hellaswag": 7})
    evaluation = read_result(tmp_path, benchmark, SETTINGS, make_model(tmp_path)).evaluation
    assert evaluation.value == 0.4
    assert evaluation.standard_error == 0.02
    assert evaluation.n == 7
    assert evaluation.dataset == "owner/rows, en"


def test_a_score_in_percent_becomes_a_fraction(tmp_path: Path) -> None:
    scores = {"submission,none": None, "gpt_eval_score,none": 60.0, "gpt_eval_score_stderr,none": 3.0}
    benchmark = BENCHMARKS["mmbench_en_dev_static"]
    write_report(tmp_path, benchmark, scores, {"mmbench_en_dev_static": 5})
    evaluation = read_result(tmp_path, benchmark, SETTINGS, make_model(tmp_path)).evaluation
    assert evaluation.value == 0.6
    assert evaluation.standard_error == 0.03


def test_the_rows_of_mmlus_subjects_are_added_up(tmp_path: Path) -> None:
    scores = {"acc,none": 0.6, "acc_stderr,none": "N/A"}
    benchmark = BENCHMARKS["mmlu"]
    write_report(tmp_path, benchmark, scores, {"mmlu_anatomy": 2, "mmlu_law": 3})
    evaluation = read_result(tmp_path, benchmark, SETTINGS, make_model(tmp_path)).evaluation
    assert evaluation.value == 0.6
    assert evaluation.standard_error is None
    assert evaluation.n == 5
    # Each subject is a configuration of MMLU's dataset, so no configuration is named.
    assert evaluation.dataset == "owner/rows"


def test_a_result_says_how_it_was_measured(tmp_path: Path) -> None:
    benchmark = BENCHMARKS["hellaswag"]
    write_report(tmp_path, benchmark, {"acc_norm,none": 0.4}, {"hellaswag": 3})
    settings = SETTINGS._replace(dtype="bfloat16", limit=3)
    evaluation = read_result(tmp_path, benchmark, settings, make_model(tmp_path / "stage2")).evaluation
    assert evaluation.split == "val[:3]"
    assert evaluation.choice == f"0-shot; bfloat16; {benchmark.choice}"
    # The command names the model's folder without the path that leads to it on this machine.
    assert evaluation.command == "normllava evaluate stage2 --tasks hellaswag --dtype bfloat16"


def test_a_report_without_a_score_is_named(tmp_path: Path) -> None:
    write_report(tmp_path, DIGITS, {"exact_match,none": "N/A"}, {"digits": 2})
    with pytest.raises(UserError, match=r"gave no exact_match; see the report in"):
        read_result(tmp_path, DIGITS, SETTINGS, make_model(tmp_path))


def test_a_report_in_another_form_is_named(tmp_path: Path) -> None:
    write_report(tmp_path, DIGITS, {"exact_match,none": 0.5}, {"digits": 2}, omit="n-samples")
    with pytest.raises(UserError, match=r"2026_results\.json: n-samples: Field required"):
        read_result(tmp_path, DIGITS, SETTINGS, make_model(tmp_path))


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, make_model_folder: Callable[..., Path]) -> None:
    monkeypatch.undo()  # without the fixture `harness_versions`, versions are looked up for real
    monkeypatch.setitem(harness.MODULES, "lmms-eval", "no_such_harness")
    with pytest.raises(SystemExit, match=r"^error: no_such_harness missing: install the extra .evaluate. in an"):
        command_line.main([str(make_model_folder()), "--tasks", "pope", "--limit", "1"])


@pytest.mark.parametrize(
    "name",
    [
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "processor_config.json",
        "modeling_normllava.py",
    ],
)
def test_files_that_answers_depend_on_change_the_fingerprint(
    name: str, make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / "model"))
    fingerprint = open_model(str(folder)).fingerprint
    with (folder / name).open("ab") as file:
        file.write(b" ")
    assert open_model(str(folder)).fingerprint != fingerprint


def test_other_files_do_not_change_the_fingerprint(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / "model"))
    fingerprint = open_model(str(folder)).fingerprint
    (folder / "evaluation.json").write_text("[]")
    assert open_model(str(folder)).fingerprint == fingerprint


def test_a_folder_without_weights_is_named() -> None:
    """An id on the Hub is such a folder, so the error says how to download a model."""
    with pytest.raises(ValueError, match=r"me/model: no folder with model\*.safetensors.*hf download <id>"):
        open_model("me/model")


@pytest.mark.parametrize("name", ["lr=1e-3,wd=0", "Bob's", '"best"', "stage2[1]", "{stage2}"])
def test_a_path_that_harnesses_would_split_is_refused_before_anything_runs(
    name: str, make_model_folder: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / name))
    monkeypatch.setattr(command_line, "run_task", lambda *_: pytest.fail("a task was run"))
    with pytest.raises(SystemExit, match=r"^error: .*can't take a path with . in it: rename the folder"):
        command_line.main([str(make_model_folder()), str(folder)])


def test_a_link_to_a_folder_with_a_refused_path_is_taken(
    make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """The error for a refused path advises to make such a link."""
    folder = shutil.copytree(make_model_folder(), tmp_path / "stage2[1]")
    (tmp_path / "link").symlink_to(folder)
    assert open_model(str(tmp_path / "link")).path == tmp_path / "link"


def test_an_equals_sign_in_a_path_is_taken(make_model_folder: Callable[..., Path], tmp_path: Path) -> None:
    """Both harnesses split `pretrained=<folder>` at the first equals sign only."""
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / "lr=1e-3"))
    assert open_model(str(folder)).path == folder


def test_a_missing_picture_of_the_examples_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TASKS))
    monkeypatch.chdir(tmp_path)
    pictures = importlib.import_module("llava_rows").pictures
    with pytest.raises(FileNotFoundError, match=r"^1\.png is not in .*runs/digits/data or .*run the evaluation from"):
        pictures({"image": "1.png"})


def test_a_picture_of_the_emoji_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TASKS))
    monkeypatch.chdir(tmp_path)
    pictures = importlib.import_module("llava_rows").pictures
    (tmp_path / "runs/emoji/pictures").mkdir(parents=True)
    Image.new("RGB", (3, 2)).save(tmp_path / "runs/emoji/pictures/1.png")
    (picture,) = pictures({"image": "1.png"})
    assert picture.size == (3, 2)


def build_mmlu_command(settings: Settings) -> str:
    """The command line that runs MMLU."""
    command = build_command(BENCHMARKS["mmlu"], Path("/model"), settings, Path("/output"))
    return " ".join(command)


def test_lm_eval_does_not_take_the_penalties_of_the_models_generation_config() -> None:
    command = build_mmlu_command(SETTINGS)
    assert "--gen_kwargs num_beams=1 repetition_penalty=1.0 no_repeat_ngram_size=0 --tasks mmlu" in command


def test_the_harness_gets_the_number_of_processes_and_the_limit() -> None:
    command = build_mmlu_command(SETTINGS._replace(num_processes=2, limit=9))
    assert "--nproc_per_node 2 -m lm_eval run --model hf-multimodal" in command
    assert command.endswith("--limit 9")


def test_the_token_reaches_the_harness_and_no_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_thisIsNoToken")
    # The program that runs in place of a harness prints its whole environment, and the first 7 characters of the token
    # that the Hub's client finds.
    program = "import os; from huggingface_hub import get_token; print(sorted(os.environ.items()), get_token()[:7])"
    harness.run_harness([sys.executable, "-c", program], tmp_path)
    log = (tmp_path / "log.txt").read_text()
    assert "('PYTHONSAFEPATH', '1')" in log  # the environment was printed
    assert "hf_thisIsNoToken" not in log
    assert log.endswith("hf_this\n")


# In the tests below, this program runs in place of a harness. It writes what lmms-eval writes for the digits: a
# report, and a row log in which every second of ten answers is right.
DIGITS_PROGRAM = """
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
with open(folder / "2026_samples_digits.jsonl", "w") as file:
    for number in range(10):
        sample = {"doc_id": number, "target": "x", "input": str(number), "exact_match": float(number % 2)}
        file.write(json.dumps(sample) + "\\n")
print("answering")
"""
FAILING_PROGRAM = "raise SystemExit(1)"


@pytest.fixture
def started_tasks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tasks that have been started so far.

    With this fixture `DIGITS_PROGRAM` runs in place of the digits' harness, and all other tasks fail.
    """
    tasks: list[str] = []

    def build_test_command(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
        tasks.append(benchmark.task)
        program = DIGITS_PROGRAM if benchmark.task == DIGITS.task else FAILING_PROGRAM
        return [sys.executable, "-c", program, str(output)]

    monkeypatch.setattr(command_line, "build_command", build_test_command)
    return tasks


def run_digits(folder: Path, fingerprint: str = "fingerprint", settings: Settings = SETTINGS) -> TaskResult:
    """Run the digits on a model in this folder, unless the folder already holds the result."""
    return command_line.run_task(DIGITS, make_model(folder, fingerprint), settings)


def test_a_result_holds_what_the_harness_wrote(started_tasks: list[str], tmp_path: Path) -> None:
    evaluation = run_digits(tmp_path).evaluation
    assert evaluation.dataset == "digits"
    assert evaluation.split == "test"
    assert evaluation.choice == "0-shot"
    assert evaluation.value == 0.5
    assert evaluation.n == 10
    # The report gives no error, so the error comes from the rows: five zeros and five ones.
    variance = 10 * 0.5**2 / (10 - 1)
    assert evaluation.standard_error == pytest.approx(np.sqrt(variance / 10))
    assert (tmp_path / "evaluation/digits/log.txt").read_text() == "answering\n"


def test_a_result_is_used_again_with_another_batch_size_and_number_of_processes(
    started_tasks: list[str], tmp_path: Path
) -> None:
    first = run_digits(tmp_path)
    second = run_digits(tmp_path, settings=SETTINGS._replace(batch_size=2, num_processes=4))
    assert second.evaluation == first.evaluation
    assert started_tasks == ["digits"]


def test_a_task_runs_again_for_another_model(started_tasks: list[str], tmp_path: Path) -> None:
    run_digits(tmp_path)
    run_digits(tmp_path, fingerprint="trained further")
    assert len(started_tasks) == 2


def test_a_task_runs_again_with_another_dtype(started_tasks: list[str], tmp_path: Path) -> None:
    run_digits(tmp_path)
    run_digits(tmp_path, settings=SETTINGS._replace(dtype="bfloat16"))
    assert len(started_tasks) == 2


def test_a_task_runs_again_with_another_harness(
    started_tasks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_digits(tmp_path)
    monkeypatch.setattr(harness, "version", lambda module: "2")
    run_digits(tmp_path)
    assert len(started_tasks) == 2


def test_a_task_runs_again_with_another_task_file(
    started_tasks: list[str], make_model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    model = shutil.copytree(make_model_folder(), tmp_path / "model")
    task_files = Path(shutil.copytree(TASKS, tmp_path / "tasks"))
    arguments = [str(model), "--tasks", "digits", "--include_path", str(task_files)]
    command_line.main(arguments)
    command_line.main(arguments)
    assert len(started_tasks) == 1

    (task_files / "digits.yaml").write_text("")
    command_line.main(arguments)
    assert len(started_tasks) == 2


def test_without_tasks_all_of_ones_own_or_the_papers_nine_are_run() -> None:
    assert [benchmark.task for benchmark in command_line.choose_benchmarks(None, TASKS)] == [
        "digits",
        "digits_lm_eval",
        "emoji",
    ]
    assert command_line.choose_benchmarks(None, None) == PAPER


def test_a_folder_without_a_list_of_tasks_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"benchmarks.json can't be read"):
        read_own_benchmarks(tmp_path)


def test_a_result_is_kept_if_the_next_run_fails(
    started_tasks: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = run_digits(tmp_path)
    monkeypatch.setattr(command_line, "build_command", lambda *_: [sys.executable, "-c", FAILING_PROGRAM])
    with pytest.raises(UserError, match=r"exited with 1; see .*digits.unfinished/log.txt"):
        run_digits(tmp_path, fingerprint="trained further")

    # The first model's result is still there, so the failing program isn't run again.
    assert run_digits(tmp_path).evaluation == first.evaluation


def test_a_failed_task_fails_the_command_and_not_the_other_tasks(
    started_tasks: list[str],
    make_model_folder: Callable[..., Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = str(shutil.copytree(make_model_folder(), tmp_path / "first"))
    second = str(shutil.copytree(make_model_folder(), tmp_path / "second"))
    with pytest.raises(SystemExit, match=rf"^Failed: {first}: pope, {second}: pope\."):
        command_line.main([first, second, *OWN_TASKS, "--tasks", "digits", "pope", "digits"])

    header, _alignment, digits_row, pope_row = capsys.readouterr().out.splitlines()
    assert header == f"| benchmark | {first} | {second} | {second} − {first} (95% interval) | how |"
    # Half of the digits' ten rows are right, with a standard error of 1/6.
    assert "| 50.0 ± 16.7 | 50.0 ± 16.7 | +0.0 (too few rows that differ) | lmms-eval 1 digits;" in digits_row
    assert "| POPE | no result | no result | no result |" in pope_row
    # Each task ran once for each model, though the digits were named twice.
    assert started_tasks == ["digits", "pope", "digits", "pope"]


# Rows that a user added to evaluation.json. They name no weights.
USER_ROWS = [{"task": "own", "value": 0.5, "seed": 42}, {"task": "other", "value": 0.1, "harness": "VLMEvalKit 0.2"}]


@pytest.fixture
def model_folder(make_model_folder: Callable[..., Path], tmp_path: Path) -> Path:
    """A model's folder, with the user's rows in its evaluation.json."""
    folder = Path(shutil.copytree(make_model_folder(), tmp_path / "model"))
    (folder / "evaluation.json").write_text(json.dumps(USER_ROWS))
    return folder


def test_a_result_is_added_to_the_users_rows(started_tasks: list[str], model_folder: Path) -> None:
    command_line.main([str(model_folder), *OWN_TASKS, "--tasks", "digits"])
    *user_rows, row = json.loads((model_folder / "evaluation.json").read_text())
    assert user_rows == USER_ROWS
    assert row["command"] == f"normllava evaluate model --tasks digits --include_path {TASKS}"
    assert row["weights"] == open_model(str(model_folder)).weights


def test_a_run_with_a_limit_does_not_change_evaluation_json(started_tasks: list[str], model_folder: Path) -> None:
    command_line.main([str(model_folder), *OWN_TASKS, "--tasks", "digits", "--limit", "3"])
    assert json.loads((model_folder / "evaluation.json").read_text()) == USER_ROWS


def test_results_of_other_weights_or_of_the_same_task_are_replaced(
    started_tasks: list[str], model_folder: Path
) -> None:
    results_file = model_folder / "evaluation.json"
    command_line.main([str(model_folder), *OWN_TASKS, "--tasks", "digits"])
    *_, row = json.loads(results_file.read_text())

    row_of_other_weights = {**row, "task": "pope", "weights": "before further training"}
    earlier_row = {**row, "value": 0.1}
    results_file.write_text(json.dumps([*USER_ROWS, row_of_other_weights, earlier_row]))
    command_line.main([str(model_folder), *OWN_TASKS, "--tasks", "digits"])
    assert json.loads(results_file.read_text()) == [*USER_ROWS, row]


def render_difference(first: pd.Series, second: pd.Series) -> str:
    """The table's cell for the difference of two models that have these scores of rows."""
    results = {
        "a": {"digits": make_result(first.mean(), first)},
        "b": {"digits": make_result(second.mean(), second)},
    }
    _header, _alignment, row = render([DIGITS], results).splitlines()
    _title, _first_score, _second_score, difference, _how = row.split(" | ")
    return difference


def test_a_differences_interval_is_that_of_a_paired_t_test() -> None:
    # Of 40 rows, the first model is right in about 60%. In about 20%, the second model's score differs.
    rng = np.random.default_rng(1)
    first = (rng.random(40) < 0.6).astype(float)
    differs = rng.random(40) >= 0.8
    second = np.where(differs, 1 - first, first)

    interval = ttest_rel(second, first).confidence_interval(0.95)
    change = second.mean() - first.mean()
    expected = f"{100 * change:+.1f} ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"
    # Rows are paired by their index and not by their order, so the second model's rows may be in reversed order.
    second_reversed = make_row_scores(second)[::-1]
    assert render_difference(make_row_scores(first), second_reversed) == expected


def test_a_difference_has_no_interval_if_one_model_has_more_rows() -> None:
    two_rows = make_row_scores([1.0, 0.0])
    three_rows = make_row_scores([1.0, 0.0, 1.0])
    assert "they answered other questions" in render_difference(two_rows, three_rows)


def test_a_difference_has_no_interval_if_a_group_has_a_single_row() -> None:
    first = make_row_scores([1.0, 0.0], "ab")
    second = make_row_scores([0.0, 1.0], "ab")
    assert "too few rows that differ" in render_difference(first, second)


def test_a_differences_interval_weighs_all_groups_alike() -> None:
    """Group "a" has four rows and group "b" two; both count the same."""
    first = make_row_scores([0.0] * 6, "aaaabb")
    second = make_row_scores([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], "aaaabb")

    # The row differences are 1, 0, 0, 0 in group "a", with mean 1/4 and variance 1/4, and 1, 0 in group "b", with mean
    # 1/2 and variance 1/2.
    mean = (1 / 4 + 1 / 2) / 2
    standard_error = np.sqrt((1 / 4) / 4 + (1 / 2) / 2) / 2
    degrees_of_freedom = 6 - 2  # six rows less two groups
    half_width = t.ppf(0.975, degrees_of_freedom) * standard_error
    interval = f"({100 * (mean - half_width):+.1f} to {100 * (mean + half_width):+.1f})"
    assert render_difference(first, second).endswith(interval)


def test_the_mean_is_shown_only_if_all_nine_results_are_there() -> None:
    # The scores are 0, 10, ..., 80%.
    results = {benchmark.task: make_result(number / 10) for number, benchmark in enumerate(PAPER)}
    assert "| mean of the 9 | 40.0 |" in render(PAPER, {"model": results})

    del results[PAPER[0].task]
    assert "mean of the 9" not in render(PAPER, {"model": results})
