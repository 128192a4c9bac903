"""Slow tests that run the harnesses, which have an environment of their own, on made-up rows."""

import importlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from math import sqrt
from pathlib import Path

import pytest
import yaml
from transformers import AutoProcessor

import benchmark_rows
from modeling_normllava import NormLlavaForConditionalGeneration
from normllava.evaluation.json_records import read_record
from normllava.evaluation.record import Evaluation


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[3]
NUM_QUESTIONS = 100  # of the tasks "digits" and "digits_lm_eval"
RunModule = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run_module(harness_python: Path, tmp_path_factory: pytest.TempPathFactory) -> RunModule:
    """A function that runs a Python module in a folder, offline, with the Python that has the harnesses."""
    offline = {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(tmp_path_factory.mktemp("home")),
        "OPENAI_API_KEY": "none",  # no scorer may use the user's own key
    }
    environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}

    def run(folder: Path, module: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [harness_python, "-m", module, *arguments]
        return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)

    return run


def list_mmlu_subjects(python: Path) -> list[str]:
    """The names of MMLU's subjects, from the task files of the lm-eval that is installed."""
    code = "import importlib.util; print(importlib.util.find_spec('lm_eval').submodule_search_locations[0])"
    completed = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    package_folder = Path(completed.stdout.strip())
    task_files = (package_folder / "tasks/mmlu/default").glob("mmlu_*.yaml")
    return sorted(yaml.safe_load(path.read_text())["dataset_name"] for path in task_files)


def share_error(share: float, count: int) -> float:
    """The standard error of a mean of `count` scores, of which the share `share` are 1 and the others 0."""
    return sqrt(share * (1 - share) / (count - 1))


def read_evaluations(folder: Path) -> dict[str, Evaluation]:
    """The results in a model's evaluation.json, by task."""
    evaluations = read_record(list[Evaluation], folder / "evaluation.json")
    return {evaluation.task: evaluation for evaluation in evaluations}


def test_answers_are_cut_where_a_tasks_file_says_so(harness_python: Path, always_a: Callable[..., Path]) -> None:
    command = [harness_python, Path(__file__).with_name("plugin_script.py"), always_a()]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stderr[-5000:]
    answers = json.loads(completed.stdout.splitlines()[-1])
    whole = "A sign.\n\nIt reads: HELLO; or not"
    assert answers == {
        "none": whole,
        "without until": whole,
        "an empty line": "A sign.",
        "a semicolon": "A sign.\n\nIt reads: HELLO",
        "video": "made-up asks about videos or sounds; only pictures are shown to the model.",
    }


def test_scores_are_those_worked_out_by_hand(
    run_module: RunModule, always_a: Callable[..., Path], harness_python: Path, tmp_path: Path
) -> None:
    benchmark_rows.write_all(tmp_path, list_mmlu_subjects(harness_python))
    model = Path(shutil.copytree(always_a(), tmp_path / "model"))  # a model that answers "A" to every question
    completed = run_module(tmp_path, "normllava", "evaluate", model)
    assert completed.returncode == 0, completed.stderr[-5000:]
    evaluations = read_evaluations(model)

    # The docstrings in benchmark_rows.py say in which rows "A" is right. In MM-Star, these are 6 of the 8 rows of the
    # first category, and 1 of the 4 rows of the second. The score is the mean of the two categories' means.
    first_error = share_error(6 / 8, 8)
    second_error = share_error(1 / 4, 4)
    mmstar_error = sqrt(first_error**2 + second_error**2) / 2
    # By task: score, number of rows, standard error.
    expected = {
        # 12 rows ask 6 questions, each of which counts once.
        "mmbench_en_dev_static": (2 / 6, 12, share_error(2 / 6, 6)),
        "mmstar": ((6 / 8 + 1 / 4) / 2, 12, mmstar_error),
        # "A" is never right. Rows that all score 0 give no standard error.
        "pope": (0.0, 12, None),
        "seedbench_2_plus": (3 / 12, 12, share_error(3 / 12, 12)),
        # The harness divides by 1000 whatever the number of rows, so the score is not the rows' mean.
        "ocrbench": (1 / 1000, 12, None),
        "scienceqa_img": (4 / 12, 12, share_error(4 / 12, 12)),
        "ai2d": (3 / 12, 12, share_error(3 / 12, 12)),
    }
    for task, (score, count, error) in expected.items():
        assert evaluations[task].value == pytest.approx(score), task
        assert evaluations[task].n == count, task
        if error is None:
            assert evaluations[task].standard_error is None, task
        else:
            assert evaluations[task].standard_error == pytest.approx(error), task

    # MMLU has 57 subjects of two rows each. Its standard error is lm-eval's own.
    assert evaluations["mmlu"].value == pytest.approx(1 / 2)
    assert evaluations["mmlu"].n == 114
    assert evaluations["mmlu"].standard_error > 0
    # HellaSwag is scored by likelihood, which can't be worked out by hand.
    assert evaluations["hellaswag"].n == 12
    assert evaluations["hellaswag"].metric == "acc_norm"

    mean = sum(evaluation.value for evaluation in evaluations.values()) / 9
    assert f"| mean of the 9 | {100 * mean:.1f} |" in completed.stdout


@pytest.fixture(scope="module")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to run the digits' tasks in. It holds `NUM_QUESTIONS` questions like the quickstart's."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "digits"))
        scenes = importlib.import_module("scenes")
        num_test_scenes = NUM_QUESTIONS // scenes.QUESTIONS_PER_TEST_SCENE
        # The task reads only the test scenes, so there are few other rows.
        patch.setattr(scenes, "SCENES", {"train": 10, "test": num_test_scenes})
        patch.setattr(scenes, "TEXT_ROWS", 1)
        scenes.write_data(folder / "runs/digits/data")
    return folder


def read_logged_answers(folder: Path) -> list[str]:
    """The answers that a harness logged below a folder, in the order of the questions."""
    (path,) = folder.rglob("*samples_*.jsonl")
    with path.open() as file:
        samples = [json.loads(line) for line in file]
    samples.sort(key=lambda sample: sample["doc_id"])

    answers = []
    for sample in samples:
        answer = sample["filtered_resps"]
        if isinstance(answer, list):  # one harness logs a string, the other a list of one answer
            (answer,) = answer
        answers.append(answer.strip())
    return answers


def ask_as_the_report_does(model_folder: Path, data: Path) -> list[str]:
    """A model's answers by the code of the quickstart's report. Only the first line of each counts, as in the task."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "digits"))
        report = importlib.import_module("report")
    questions = report.load_scene_questions(data)
    model = NormLlavaForConditionalGeneration.from_pretrained(model_folder).eval()
    processor = AutoProcessor.from_pretrained(model_folder)
    prompts = [report.make_image_prompt(question) for question in questions]
    texts = report.answer_prompts(model, processor, prompts, "answering")
    first_lines = [text.split("\n")[0] for text in texts]
    return [line.strip() for line in first_lines]


def test_both_harnesses_and_the_report_get_the_same_answers(
    run_module: RunModule, make_model_folder: Callable[..., Path], digits_folder: Path, tmp_path: Path
) -> None:
    # The questions can't be split evenly into batches of 7, neither all 100 nor the 50 of each of two processes.
    options = ["--tasks", "digits", "digits_lm_eval", "--include_path", ROOT / "examples/tasks", "--batch_size", "7"]
    for num_processes in ("1", "2"):
        folder = shutil.copytree(make_model_folder(), tmp_path / num_processes / "model")
        completed = run_module(
            digits_folder, "normllava", "evaluate", folder, *options, "--num_processes", num_processes
        )
        assert completed.returncode == 0, completed.stderr[-5000:]

    expected = ask_as_the_report_does(make_model_folder(), digits_folder / "runs/digits/data")
    assert len(expected) == NUM_QUESTIONS
    assert len(set(expected)) > 1  # otherwise answers in a wrong order would pass too

    for num_processes in ("1", "2"):
        results = tmp_path / num_processes / "model" / "evaluation"
        assert read_logged_answers(results / "digits") == expected, num_processes
        assert read_logged_answers(results / "digits_lm_eval") == expected, num_processes
    assert read_evaluations(tmp_path / "1/model") == read_evaluations(tmp_path / "2/model")
