"""Results in the form in which the Hub collects them for benchmarks' leaderboards: the files `.eval_results/*.yaml`.

The Hub reads them for datasets that are registered as benchmarks. Each of these names its tasks in its file eval.yaml.
For other datasets, results stand in the card's metadata only.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from evaluation.record import Evaluation


RESULTS_FOLDER = ".eval_results"

# Benchmarks that the Hub's documentation names as registered, with their task there. `card.yaml` can name others.
# Sources: huggingface.co/docs/hub/eval-results, and model repositories that report these tasks.
KNOWN_BENCHMARKS = {
    "Idavidrein/gpqa": "gpqa_diamond",
    "TIGER-Lab/MMLU-Pro": "mmlu_pro",
    "openai/gsm8k": "gsm8k",
}


def write_eval_results(folder: Path, evaluations: Sequence[Evaluation], benchmarks: Mapping[str, str]) -> None:
    """Write a file for each registered benchmark that a model was evaluated on.

    Args:
        folder: The release folder.
        evaluations: The model's results.
        benchmarks: Tasks of registered benchmarks, by Hub id, in addition to `KNOWN_BENCHMARKS`.
    """
    entries_by_file: dict[str, list[EvalResultEntry]] = {}
    for evaluation in evaluations:
        hub_id = evaluation.dataset.split(",")[0]  # the rest names a configuration of the dataset
        task = {**KNOWN_BENCHMARKS, **benchmarks}.get(hub_id)
        if task is None:
            continue
        _, name = hub_id.split("/")
        entry = EvalResultEntry(
            dataset_id=hub_id,
            task_id=task,
            value=leaderboard_value(evaluation),
            notes=describe_method(evaluation),
        )
        entries_by_file.setdefault(f"{name}.yaml", []).append(entry)

    for file_name, entries in entries_by_file.items():
        path = folder / RESULTS_FOLDER / file_name
        path.parent.mkdir(exist_ok=True)
        text = yaml.safe_dump(eval_result_entries_to_yaml(entries), sort_keys=False, allow_unicode=True)
        path.write_text(text, encoding="utf-8")


def leaderboard_value(evaluation: Evaluation) -> float:
    """A result as leaderboards list it: a harness's score, which is stored as a fraction, in percent."""
    if evaluation.harness is None:
        return evaluation.value
    return round(100 * evaluation.value, 4)


def describe_method(evaluation: Evaluation) -> str:
    """How a result was measured, in a few words."""
    facts = [evaluation.metric, evaluation.split, evaluation.choice, evaluation.harness]
    return "; ".join(fact for fact in facts if fact)
