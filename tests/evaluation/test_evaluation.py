"""What stands around the harnesses: choices, checks, figures and their errors, results that are kept, tables."""

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
import pandas as pd
import pytest
from scipy.stats import t, ttest_rel

from conversations.records import from_json
from evaluation import __main__ as command_line
from evaluation import harness
from evaluation.benchmarks import OURS, PAPER, Benchmark, find_benchmark
from evaluation.figures import Figure, mean_and_error, name_rows, read_figures, read_scores
from evaluation.harness import Settings, TaskError, build_command, fixed_settings
from evaluation.models import Model, open_model
from evaluation.record import Evaluation, write_evaluations
from evaluation.table import render


ROOT = Path(__file__).parents[2]
DIGITS, OTHER = OURS[0], Benchmark("lmms-eval", "any", "any")
SETTINGS = Settings(batch_size=8, num_processes=1, dtype="auto", limit=None)
FIXED: dict[str, Any] = {"harness": "lmms-eval 1", "limit": None, "dtype": "auto"}


def scores_of(values: Sequence[float], groups: Sequence[str] = "") -> pd.Series:
    index = [list(groups) or [""] * len(values), [str(number) for number in range(len(values))]]
    return pd.Series(values, index, dtype=float).rename_axis(["group", "row"])


def figure(value: float, scores: pd.Series | None = None, error: float | None = 0.01, **changed: Any) -> Figure:
    fields = {"task": "digits", "dataset": "d", "split": "test", "metric": "exact_match", "command": "c"}
    evaluation = Evaluation(**{**fields, **changed}, value=value, n=100, standard_error=error, harness="lmms-eval 1",
                            choice="0-shot")  # fmt: skip
    return Figure(evaluation, scores)


def model_at(folder: Path, fingerprint: str = "m") -> Model:
    return Model("mine", "runs/mine", folder, folder, fingerprint, "weights")


# Figures


@pytest.mark.parametrize(("scores", "groups"), [([1.0, 0.0, 1.0], "aab"), ([0.0, 0.0, 0.0], "aaa")])
def test_one_row_or_rows_that_are_alike_have_no_error(scores: list[float], groups: str) -> None:
    assert mean_and_error(scores_of(scores, groups))[1] is None


def sample(number: int, **logged: Any) -> dict[str, Any]:
    return {"doc_id": number, "target": "A", "input": f"question {number}", **logged}


@pytest.mark.parametrize(
    ("items", "value", "is_known"),
    [
        ([1.0, 0.0, 0.0, 1.0], 0.5, True),
        ([{"score": 1.0, "l2_category": "a"}, {"score": 0.0, "l2_category": "b"}] * 2, 0.5, True),
        ([{"score": 1.0, "l2_category": "a"}] * 2 + [{"score": 0.0, "l2_category": "b"}], 0.5, True),
        ([{"pred": " a", "answer": "A"}, {"pred": "B", "answer": "A"}], 0.5, True),
        # F1 of these is 0.67: it is no mean of what was logged, and so has neither error nor pairs here.
        ([{"score": 1.0}, {"score": 1.0}, {"score": 0.0}, {"score": 0.0}], 0.67, False),
        ([{"prediction": "A"}], 1.0, False),
        ([{"pred": "a", "answer": ["a", "b"]}], 1.0, False),  # captions
        # MMBench's two questions: the second is not right with its options turned.
        ([{"index": index, "prediction": " a.", "answer": answer}
          for index, answer in ((0, "A"), (1_000_000, "A"), (2, "A"), (1_000_002, "B"))], 0.5, True),
        ([0.500002, 0.500002], 0.5, False),
        ([], 0.0, False),
    ],
)  # fmt: skip
def test_scores_are_known_where_the_figure_is_their_mean(items: list[Any], value: float, is_known: bool) -> None:
    scores = read_scores("metric", value, [sample(number, metric=item) for number, item in enumerate(items)])
    assert (scores is not None) == is_known


def test_a_row_is_the_same_for_every_model_and_another_where_its_question_is() -> None:
    def row(**logged: Any) -> str:
        return read_scores("metric", 1.0, [sample(0, metric=1.0, **logged)]).index[0]

    assert row(doc_hash=str(object())) == row()  # a hash of an address in memory
    for other in ({"doc_id": 1}, {"input": "another"}, {"target": "B"}, {"input": None, "prompt_hash": "p"}):
        assert row(**other) != row()
    assert read_scores("metric", 1.0, [sample(0, metric=1.0)] * 2) is None  # a row that is there twice is no row


def write_report(folder: Path, benchmark: Benchmark, report: dict[str, Any], samples: Sequence[Any] = ()) -> Path:
    """What a harness writes, with one file of samples."""
    is_lmms = benchmark.harness == "lmms-eval"
    (folder / "model").mkdir(parents=True)
    name = "2026_results.json" if is_lmms else "results_2026-01-01T00-00-00.0.json"
    (folder / "model" / name).write_text(json.dumps(report))
    name = "2026_samples_x.jsonl" if is_lmms else "samples_x_2026-01-01T00-00-00.0.jsonl"
    (folder / "model" / name).write_text("".join(json.dumps(line) + "\n" for line in samples))
    return folder


def report_of(results: dict[str, Any], **tasks: int) -> dict[str, Any]:
    counts = {task: {"original": 99, "effective": n} for task, n in tasks.items()}
    config = {"dataset_path": "owner/rows", "test_split": "test"}
    return {"results": results, "n-samples": counts, "configs": {"task": config}, "n-shot": dict.fromkeys(tasks, 0)}


POPE_FULL = {"pope_full": {" ": " "}, "pope_adv": {"acc,none": 0.5}, "pope_pop": {"acc,none": 1.0}}


@pytest.mark.parametrize(
    ("name", "results", "tasks", "expected"),
    [
        ("hellaswag", {"hellaswag": {"acc,none": 0.1, "acc_stderr,none": 0.01, "acc_norm,none": 0.4,
                                     "acc_norm_stderr,none": 0.02}},
         {"hellaswag": 7}, [("hellaswag", "acc_norm", 0.4, 0.02, 7)]),
        ("mmbench_en_dev_static", {"mmbench_en_dev_static": {"gpt_eval_score,none": 60.0, "submission,none": None,
                                                             "gpt_eval_score_stderr,none": 3.0}},
         {"mmbench_en_dev_static": 5}, [("mmbench_en_dev_static", "gpt_eval_score", 0.6, 0.03, 5)]),
        # A group without a figure gives those of its tasks, one with a figure that, of the rows of all its tasks.
        ("lmms-eval:pope_full", POPE_FULL, {"pope_adv": 2, "pope_pop": 1},
         [("pope_adv", "acc", 0.5, None, 2), ("pope_pop", "acc", 1.0, None, 1)]),
        # Rows of one video are not independent.
        ("lmms-eval:v", {"v": {"acc,none": 0.5, "acc_stderr,none": 0.1, "acc_stderr_clustered,none": 0.2}}, {"v": 4},
         [("v", "acc", 0.5, 0.2, 4)]),
        ("mmlu", {"mmlu": {"acc,none": 0.6, "acc_stderr,none": 0.1}}, {"a": 2, "b": 3},
         [("mmlu", "acc", 0.6, 0.1, 5)]),
    ],
)  # fmt: skip
def test_the_figures_that_count_are_taken_and_scaled(
    name: str, results: dict[str, Any], tasks: dict[str, int], expected: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    benchmark = find_benchmark(name)
    figures = read_figures(
        write_report(tmp_path / "out", benchmark, report_of(results, **tasks)), benchmark, FIXED, model_at(tmp_path)
    )
    rows = [figure.evaluation for figure in figures]
    assert [(row.task, row.metric, row.value, row.standard_error, row.n) for row in rows] == expected
    assert rows[0].choice.startswith("0-shot")
    assert rows[0].command == f"python -m evaluation runs/mine --tasks {name}"


@pytest.mark.parametrize("name", ["lm-eval", "lmms-eval"])
def test_filters_of_one_figure_are_told_apart(name: str, tmp_path: Path) -> None:
    results = {"gsm8k": {"exact_match,strict": 0.5, "exact_match,flexible": 1.0, "exact_match_stderr,strict": "N/A"}}
    logged = [
        {**sample(number, exact_match=score), **({"filter": kind} if name == "lm-eval" else {})}
        for kind, scores in (("strict", [1.0, 0.0]), ("flexible", [1.0, 1.0]))
        for number, score in enumerate(scores)
    ]
    benchmark = find_benchmark(f"{name}:gsm8k")
    folder = write_report(tmp_path / "out", benchmark, report_of(results, gsm8k=2), logged)
    figures = read_figures(folder, benchmark, FIXED, model_at(tmp_path))
    found = {figure.evaluation.metric: figure.evaluation.value for figure in figures}
    assert found == {"exact_match, strict": 0.5, "exact_match, flexible": 1.0}
    # lmms-eval doesn't say which filter a line is of.
    assert [figure.scores is not None for figure in figures] == [name == "lm-eval"] * 2


@pytest.mark.parametrize(
    ("config", "dataset", "split"),
    [
        ({"dataset_path": "a/b", "dataset_name": "en", "validation_split": "val"}, "a/b, en", "val[:3]"),
        ({"dataset_path": "json", "dataset_kwargs": {"data_files": ["x.json"]}, "test_split": "test",
          "validation_split": "val"}, "x.json", "test[:3]"),
        ({"dataset_kwargs": {"data_files": {"test": ["/a/x.json", "b/y.json"], "dev": "https://a.b/z.parquet"}}},
         "x.json, y.json, z.parquet", "all[:3]"),
        ({}, "made by the task", "all[:3]"),
    ],
)  # fmt: skip
def test_the_rows_are_named(config: dict[str, Any], dataset: str, split: str) -> None:
    assert name_rows({"configs": {"task": config}}, 3) == {"dataset": dataset, "split": split}


# Choices


def test_tasks_go_to_their_harness() -> None:
    assert (find_benchmark("pope").harness, find_benchmark("mmlu").harness) == ("lmms-eval", "lm-eval")
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
    ("argv", "processes", "message"),
    [
        (["a", "b", "--names", "one"], 1, "--names: give each model a name"),
        (["m", "--tasks", "gsm8k"], 1, "--tasks gsm8k: there are mmbench_en_dev_static, "),
        (["m"], 2, "Start this once, without a launcher: --num_processes launches"),
    ],
)
def test_wrong_options_are_named(
    argv: list[str], processes: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    assert run_main(*argv).startswith(message)


def test_ocrbench_is_left_out_under_a_limit(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(command_line, "HF_HUB_OFFLINE", True)
    assert command_line.choose_benchmarks(None, None) == list(PAPER)
    assert caplog.text == ""
    assert len(command_line.choose_benchmarks(None, 9)) == 8
    assert "ocrbench is left out under --limit: its score is divided by 1000" in caplog.text


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch, composed: Callable[..., Path]) -> None:
    monkeypatch.setitem(harness.MODULES, "lmms-eval", "no_such_harness")
    message = run_main(composed(), "--tasks", "digits", "--limit", "1")
    assert message.startswith("no_such_harness missing: pip install -e '.[evaluation]'")


def test_a_token_is_asked_for_before_the_download(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(*tasks: str) -> list[Benchmark]:
        return command_line.choose_benchmarks(tasks, None)

    monkeypatch.setattr(command_line, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(command_line, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr(command_line, "get_token", lambda: None)
    with pytest.raises(ValueError, match=r"\(pope, lmms-eval:mme\): hf auth login, or set HF_TOKEN"):
        choose("pope", "mmlu", "digits", "lmms-eval:mme")
    assert len(choose("mmlu", "digits", "emoji")) == 3
    monkeypatch.setattr(command_line, "HF_DATASETS_OFFLINE", True)
    assert len(choose("pope")) == 1


# Models


def test_a_model_is_told_apart_by_what_its_answers_depend_on(composed: Callable[..., Path], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(composed(), tmp_path / "model"))
    before = open_model(str(folder), None, None, None).fingerprint
    (folder / "evaluation.json").write_text("[]")
    (folder / "trainer_state.json").write_text("{}")
    assert open_model(str(folder), None, None, None).fingerprint == before
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "processor_config.json",
                 "modeling_normllava.py"):  # fmt: skip
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content + b" ")
        assert open_model(str(folder), None, None, None).fingerprint != before, name
        (folder / name).write_bytes(content)


def test_what_is_no_model_is_named(composed: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"me/model is not a folder.*--output_dir"):
        open_model("me/model", "m", None, None)
    with pytest.raises(ValueError, match=r"has no model\*.safetensors"):
        open_model(str(tmp_path), "m", None, None)
    with pytest.raises(ValueError, match="paths with a comma"):
        open_model(str(composed()), "a,b", None, tmp_path / "out")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"Merge it first: python training/merge.py --adapter"):
        open_model(str(tmp_path), "m", None, None)


def test_names_keep_this_machines_folders_to_themselves(composed: Callable[..., Path], tmp_path: Path) -> None:
    model = open_model(str(composed()), None, None, None)
    assert model.name == model.source == composed().name
    assert open_model(str(composed()), "a/b", None, tmp_path).results == tmp_path / "a--b"


# Runs: a program in place of the harness, which writes what lmms-eval does


def test_commands_say_what_was_asked_for() -> None:
    line = " ".join(build_command(find_benchmark("pope"), Path("/m"), Settings(4, 1, "bfloat16", 9), Path("/out")))
    assert "-m evaluation.lmms_eval_model --model image_text_to_text --model_args pretrained=/m,dtype=bfloat16" in line
    assert "--batch_size 4 --output_path /out --log_samples --limit 9" in line
    text = " ".join(build_command(find_benchmark("mmlu"), Path("/m"), Settings(4, 2, "auto", None), Path("/out")))
    assert "-m torch.distributed.run --standalone --nproc_per_node 2 -m lm_eval run --model hf-multimodal" in text
    # lm-eval would take the model's.
    assert "--gen_kwargs num_beams=1 repetition_penalty=1.0 no_repeat_ngram_size=0 --tasks mmlu" in text
    assert "--apply_chat_template" in build_command(OURS[1], Path("/m"), SETTINGS, Path("/out"))


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
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were started, in place of which a program of ours runs; all but "digits" fail."""
    tasks: list[str] = []

    def build(benchmark: Benchmark, model: Path, settings: Settings, output: Path) -> list[str]:
        tasks.append(benchmark.task)
        return [sys.executable, "-c", PROGRAM if benchmark == DIGITS else "raise SystemExit(1)", str(output)]

    monkeypatch.setattr(command_line, "build_command", build)
    monkeypatch.setattr(harness, "version", lambda module: "1")
    monkeypatch.setattr(command_line, "HF_HUB_OFFLINE", True)
    return tasks


def run_task(model: Model, settings: Settings = SETTINGS) -> list[Figure]:
    return command_line.run_task(DIGITS, model, settings)


def test_a_result_is_kept_and_used_again(started: list[str], tmp_path: Path) -> None:
    model = model_at(tmp_path)
    first = run_task(model)
    again = run_task(model, SETTINGS._replace(batch_size=2, num_processes=4))  # which change no figure
    assert (len(started), again[0].evaluation) == (1, first[0].evaluation)
    ((row, _),) = first
    assert (row.dataset, row.split, row.choice, row.value, row.n) == ("rows.json", "test", "0-shot", 0.5, 10)
    assert row.standard_error == pytest.approx(np.sqrt(0.25 / 9))
    assert (tmp_path / "evaluation/digits/log.txt").read_text() == "answering\n"
    for other in (model_at(tmp_path, "trained further"), model):
        run_task(other)
    run_task(model, SETTINGS._replace(dtype="bfloat16"))
    assert len(started) == 4


def test_what_makes_a_result_another_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A text of ours that no figure depends on, such as a docstring, is not among it."""
    monkeypatch.setattr(harness, "version", lambda module: "1")
    pope = find_benchmark("pope")
    assert fixed_settings(pope, SETTINGS) == {
        **FIXED, "metric": "pope_accuracy", "scale": 1.0, "in_chat": False, "revision": harness.REVISION,
    }  # fmt: skip
    before = [fixed_settings(benchmark, SETTINGS) for benchmark in (DIGITS, pope)]
    tasks = shutil.copytree(harness.TASKS, tmp_path / "tasks")
    monkeypatch.setattr(harness, "TASKS", tasks)
    (tasks / "digits_common").write_text((tasks / "digits_common").read_text() + "# another\n")
    after = [fixed_settings(benchmark, SETTINGS) for benchmark in (DIGITS, pope)]
    assert [first == second for first, second in zip(before, after, strict=True)] == [False, True]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import sys; sys.exit(3)", r"the harness exited with 3; see .*log.txt"),
        ("print('lmms-eval ends with 0 all the same')", r"wrote no result; see .*log.txt"),
        (PROGRAM.replace("exact_match,none", "other,none"), "gave no exact_match"),
    ],
)
def test_a_failed_task_leaves_what_was_there(
    started: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, message: str
) -> None:
    run_task(model_at(tmp_path))
    monkeypatch.setattr(command_line, "build_command", lambda *args: [sys.executable, "-c", program, str(args[-1])])
    with pytest.raises(TaskError, match=message):
        run_task(model_at(tmp_path, "trained further"))
    assert (tmp_path / "evaluation/digits.unfinished/log.txt").exists()
    assert len(run_task(model_at(tmp_path))) == 1  # the earlier result, without a run


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


def test_a_failed_task_fails_the_command_and_leaves_the_others(
    started: list[str], composed: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [Path(shutil.copytree(composed(), tmp_path / name)) for name in ("first", "second")]
    own = [{"task": "own", "value": 0.5, "seed": 42}, {"task": "other", "value": 0.1, "harness": "VLMEvalKit 0.2"}]
    kept = models[0] / "evaluation.json"
    kept.write_text(json.dumps(own))
    message = run_main(*models, "--tasks", "digits", "lmms-eval:mme", "digits")
    assert message.startswith("Failed: first: lmms-eval:mme, second: lmms-eval:mme.")
    table = capsys.readouterr().out
    assert table.splitlines()[0] == "| benchmark | first | second | second − first (95% interval) | how |"
    assert "| digits | 50.0 ± 16.7 | 50.0 ± 16.7 | +0.0 (too few rows that differ) | lmms-eval 1 digits;" in table
    assert "| mme | no result | no result | no result |" in table
    assert len(started) == 4
    *others, row = json.loads(kept.read_text())
    assert others == own
    read = from_json(Evaluation, row, kept)
    assert (read.command, read.weights) == ("python -m evaluation first --tasks digits",
                                            open_model(str(models[0]), None, None, None).weights)  # fmt: skip
    # A trial leaves it; figures of other weights, or of the same task before, are replaced.
    command_line.main([str(models[0]), "--tasks", "digits", "--limit", "3"])
    assert len(json.loads(kept.read_text())) == 3
    kept.write_text(json.dumps([*own, row | {"task": "pope", "weights": "before further training"}, row]))
    command_line.main([str(models[0]), "--tasks", "digits"])
    assert json.loads(kept.read_text()) == [*own, row]
    run_main(models[1], "--tasks", "lmms-eval:mme", "--output_dir", tmp_path / "out")
    assert (tmp_path / "out/second/evaluation/lmms-eval--mme.unfinished/log.txt").exists()
    assert run_main(*models, models[0]) == "--names: give each model a different name."


def test_a_script_replaces_its_own_rows_alone(tmp_path: Path) -> None:
    row = figure(0.5, command="own").evaluation
    for _ in range(2):
        write_evaluations(tmp_path, [row], lambda other: other["command"] == "own")
    write_evaluations(tmp_path, [row], lambda other: False)
    assert len(json.loads((tmp_path / "evaluation.json").read_text())) == 2


def difference(first: pd.Series, second: pd.Series) -> str:
    figures = {"a": {"digits": [figure(first.mean(), first)]}, "b": {"digits": [figure(second.mean(), second)]}}
    return render([DIGITS], figures).splitlines()[2].split(" | ")[3]


def test_differences_are_students_over_pairs() -> None:
    rng = np.random.default_rng(1)
    first = (rng.random(40) < 0.6).astype(float)
    second = np.where(rng.random(40) < 0.8, first, 1 - first)
    low, high = 100 * np.array(ttest_rel(second, first).confidence_interval(0.95))
    change = 100 * (second.mean() - first.mean())
    assert difference(scores_of(first), scores_of(second)[::-1]) == f"{change:+.1f} ({low:+.1f} to {high:+.1f})"
    for other in (scores_of([1.0, 0.0, 1.0]), scores_of([1.0])):
        assert "they answered other questions" in difference(scores_of([1.0, 0.0]), other)


def test_differences_of_groups_take_each_group_alike() -> None:
    first, second = scores_of([0.0] * 6, "aaaabb"), scores_of([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], "aaaabb")
    # Means 1/4 and 1/2; variances 1/4 of 4 rows and 1/2 of 2; six rows less two groups leave 4 degrees of freedom.
    half = t.ppf(0.975, 4) * np.sqrt(0.25 / 4 + 0.5 / 2) / 2
    assert difference(first, second).endswith(f"({100 * (0.375 - half):+.1f} to {100 * (0.375 + half):+.1f})")


def test_the_table_says_how_and_what_is_missing() -> None:
    table = render([DIGITS], {"none": {"digits": [figure(0.5)]}, "g|wc": {}}).splitlines()
    assert table[0] == r"| benchmark | none | g\|wc | g\|wc − none (95% interval) | how |"
    how = "lmms-eval 1 digits; exact_match; test, n = 100; 0-shot"
    assert table[2] == f"| digits | 50.0 ± 1.0 | no result | no result | {how} |"
    unscaled = [figure(1500.25, None, None, task="mme", metric="perception"), figure(300.0, None, 2.5, task="mme")]
    lines = render([find_benchmark("lmms-eval:mme")], {"a": {"lmms-eval:mme": unscaled}}).splitlines()
    assert lines[2].startswith("| mme, perception | 1500 | lmms-eval 1 mme; perception; test, n = 100")
    assert lines[3].startswith("| mme, exact_match | 300 ± 2.5 |")


def test_the_mean_is_of_all_nine() -> None:
    results = {of.task: [figure(number / 10)] for number, of in enumerate(PAPER)}
    assert "| mean of the 9 | 40.0 |" in render(PAPER, {"m": results})
    assert "mean of the 9" not in render(PAPER, {"m": {task: results[task] for task in list(results)[1:]}})
