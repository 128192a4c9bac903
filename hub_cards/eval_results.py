"""The files `.eval_results/*.yaml`, from which the Hub collects results for its leaderboards.

A dataset has a leaderboard if it is registered as a benchmark. The dataset's file eval.yaml then names the tasks.
Results on other datasets are only in the card's metadata.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from evaluation.record import Evaluation


RESULTS_FOLDER = ".eval_results"

# Datasets that the Hub's documentation names as registered, with the task of each. `card.yaml` can name others.
# Sources: huggingface.co/docs/hub/eval-results, and model repositories that report these tasks.
KNOWN_BENCHMARKS = {
    "Idavidrein/gpqa": "gpqa_diamond",
    "TIGER-Lab/MMLU-Pro": "mmlu_pro",
    "openai/gsm8k": "gsm8k",
}


def write_eval_results(folder: Path, evaluations: Sequence[Evaluation], benchmarks: Mapping[str, str]) -> None:
    """Write the file of each registered benchmark that a model was evaluated on.

    Args:
        folder: The release folder.
        evaluations: The model's results.
        benchmarks: Tasks of registered benchmarks, by Hub id, in addition to `KNOWN_BENCHMARKS`.
    """
    tasks = {**KNOWN_BENCHMARKS, **benchmarks}
    entries_by_file: dict[str, list[EvalResultEntry]] = {}
    for evaluation in evaluations:
        hub_id = evaluation.dataset.split(",")[0]  # without the configuration, as in "openai/gsm8k, main"
        task = tasks.get(hub_id)
        if task is None:  # the dataset is not registered
            continue
        entry = EvalResultEntry(
            dataset_id=hub_id,
            task_id=task,
            value=leaderboard_value(evaluation),
            notes=describe_method(evaluation),
        )
        _, dataset_name = hub_id.split("/")
        entries_by_file.setdefault(f"{dataset_name}.yaml", []).append(entry)

    for file_name, entries in entries_by_file.items():
        path = folder / RESULTS_FOLDER / file_name
        path.parent.mkdir(exist_ok=True)
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")


def leaderboard_value(evaluation: Evaluation) -> float:
    """A result's value for a leaderboard, which shows percent."""
    # A harness's value is a fraction. Of a script's value the unit isn't known, so it stays as it is.
    measured_by_script = evaluation.harness is None
    if measured_by_script:
        return evaluation.value
    return round(100 * evaluation.value, 4)


def describe_method(evaluation: Evaluation) -> str:
    """How a result was measured, in a few words."""
    facts = [evaluation.metric, evaluation.split, evaluation.choice, evaluation.harness]
    return "; ".join(fact for fact in facts if fact)
