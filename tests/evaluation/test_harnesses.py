"""The harnesses themselves, in an environment of their own, on rows that the tests make up."""

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
from common.records import read_record
from evaluation.record import Evaluation
from modeling_normllava import NormLlavaForConditionalGeneration


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parents[2]
NUM_ANSWERS = 100
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def run(harness_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Runs a module of the harnesses' environment, offline, in a folder."""
    home = tmp_path_factory.mktemp("home")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(home), "OPENAI_API_KEY": "none"}

    def run_module(folder: Path, *command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **offline, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
        return subprocess.run(
            [harness_python, "-m", *map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
        )

    return run_module


def mmlu_subjects(python: Path) -> list[str]:
    code = "import importlib.util; print(importlib.util.find_spec('lm_eval').submodule_search_locations[0])"
    package = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    files = (Path(package) / "tasks/mmlu/default").glob("mmlu_*.yaml")
    return sorted(yaml.safe_load(path.read_text())["dataset_name"] for path in files)


def error_of_share(share: float, count: int) -> float:
    """Standard error of a share, as the mean of zeros and ones."""
    return sqrt(share * (1 - share) / (count - 1))


def read_rows(folder: Path) -> dict[str, Evaluation]:
    rows = read_record(list[Evaluation], folder / "evaluation.json")
    return {row.task: row for row in rows}


def test_the_nine_tasks_give_what_is_known_on_paper(
    run: Run, always_a: Callable[..., Path], harness_python: Path, tmp_path: Path
) -> None:
    benchmark_rows.write_all(tmp_path, mmlu_subjects(harness_python))
    model = Path(shutil.copytree(always_a(), tmp_path / "model"))
    done = run(tmp_path, "evaluation", model)
    assert done.returncode == 0, done.stderr[-5000:]
    rows = read_rows(model)
    expected = {
        # A question is two rows, which are scored together.
        "mmbench_en_dev_static": (2 / 6, 12, error_of_share(2 / 6, 6)),
        # Two groups, of 8 and 4 rows, with 6 and 1 right.
        "mmstar": ((6 / 8 + 1 / 4) / 2, 12, sqrt(error_of_share(6 / 8, 8) ** 2 + error_of_share(1 / 4, 4) ** 2) / 2),
        "pope": (0.0, 12, None),  # all rows alike
        "seedbench_2_plus": (3 / 12, 12, error_of_share(3 / 12, 12)),
        "ocrbench": (1 / 1000, 12, None),  # of rows that are not 1000, the harness's figure is no mean
        "scienceqa_img": (4 / 12, 12, error_of_share(4 / 12, 12)),
        "ai2d": (3 / 12, 12, error_of_share(3 / 12, 12)),
        "mmlu": (1 / 2, 114, None),
    }
    for task, (value, count, error) in expected.items():
        assert rows[task].value == pytest.approx(value), task
        assert rows[task].n == count, task
        if task != "mmlu":  # whose error is lm-eval's own, pooled over subjects of two rows each
            assert rows[task].standard_error == (error if error is None else pytest.approx(error)), task
    assert (rows["hellaswag"].n, rows["hellaswag"].metric) == (12, "acc_norm")
    assert rows["mmlu"].standard_error > 0
    assert f"| mean of the 9 | {100 * sum(row.value for row in rows.values()) / 9:.1f} |" in done.stdout


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the quickstart's held-out questions where its task looks for them."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "digits"))
        scenes = importlib.import_module("scenes")
        patch.setattr(scenes, "SCENES", {"train": 10, "test": NUM_ANSWERS // scenes.QUESTIONS_PER_TEST_SCENE})
        patch.setattr(scenes, "TEXT_ROWS", 1)
        scenes.write_data(folder / "runs/digits/data")
    return folder


def logged_answers(folder: Path) -> list[str]:
    """The answers that a harness logged below a folder, in the order of the questions."""
    (path,) = folder.rglob("*samples_*.jsonl")
    samples = sorted(map(json.loads, path.read_text().split("\n")[:-1]), key=lambda sample: sample["doc_id"])
    given = [sample["filtered_resps"] for sample in samples]
    return [(answer if isinstance(answer, str) else answer[0]).strip() for answer in given]


def own_answers(model: Path, data: Path) -> list[str]:
    """Those of the quickstart's report, cut where the task ends an answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "examples" / "digits"))
        report = importlib.import_module("report")
    questions = report.load_scene_questions(data)
    loaded = NormLlavaForConditionalGeneration.from_pretrained(model).eval()
    processor = AutoProcessor.from_pretrained(model)
    prompts = [report.with_image(question) for question in questions]
    return [text.split("\n")[0].strip() for text in report.answer(loaded, processor, prompts, "answering")]


def test_both_harnesses_and_the_report_read_the_same_answers(
    run: Run, composed: Callable[..., Path], digits: Path, tmp_path: Path
) -> None:
    model = composed()
    for processes in (1, 2):  # 100 rows in batches of 7: neither goes round
        folder = shutil.copytree(model, tmp_path / f"{processes}/model")
        options = ["--tasks", "digits", "digits_lm_eval", "--batch_size", "7", "--num_processes", str(processes)]
        done = run(digits, "evaluation", folder, *options)
        assert done.returncode == 0, done.stderr[-5000:]
    expected = own_answers(model, digits / "runs/digits/data")
    assert len(expected) == NUM_ANSWERS
    assert len(set(expected)) > 1
    for processes in (1, 2):
        for task in ("digits", "digits_lm_eval"):
            assert logged_answers(tmp_path / f"{processes}/model/evaluation" / task) == expected, (processes, task)
    assert read_rows(tmp_path / "1/model") == read_rows(tmp_path / "2/model")
