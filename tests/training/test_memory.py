"""What a run says of memory before its first step."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoProcessor

from conversations.measured import row_lengths
from conversations.tokens import RowTokenizer
from script_runs import FAST, INSTRUCT, PACKED, ROOT
from training.arguments import RunArguments, TrainingConfig, parse_arguments
from training.batches import deal_rows
from training.data import read_rows
from training.memory import describe_plan, finish_plan, largest_batch, start_plan
from training.plan import GIB, Sample


def parse(folder: Path, **fields: Any) -> tuple[RunArguments, TrainingConfig]:
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump({**FAST, **INSTRUCT, **fields, "output_dir": str(folder / "out")}))
    return parse_arguments(["--config", str(recipe)])


@pytest.mark.parametrize(
    "packing", [pytest.param({}, id="padded", marks=pytest.mark.slow), pytest.param(PACKED, id="packed")]
)
def test_the_largest_batch_is_planned(
    composed: Callable[..., Path], data: Path, tmp_path: Path, packing: dict[str, Any]
) -> None:
    run_args, args = parse(tmp_path, model_name_or_path=str(composed()), dataset_name=str(data), **packing)
    processor = AutoProcessor.from_pretrained(composed())
    tokenize = RowTokenizer(processor, processor.chat_template)
    rows, *_ = read_rows(run_args, args, tokenize)
    sampler, args.gradient_accumulation_steps = deal_rows(run_args, args, rows, tokenize.tokens_per_image)
    samples = largest_batch(rows, sampler, packed=bool(packing))
    lengths = row_lengths(rows)
    tokens = [[sample.tokens for sample in row] for row in samples]
    if packing:
        assert sum(tokens[0]) == max(lengths[batch].sum() for batch in sampler)
    else:
        assert len(tokens) * max(map(max, tokens)) == max(len(batch) * lengths[batch].max() for batch in sampler)
    peak = finish_plan(start_plan(run_args, args, samples))
    line = describe_plan(peak, 10 * GIB)
    found = re.fullmatch(r"memory a device: (.*) GiB by plan \(weights .*\), of 10\.0 GiB", line)
    assert found is not None, line
    assert "IT WILL HARDLY FIT" in describe_plan(peak, 1000)


def test_what_libraries_print_is_no_part_of_the_plan() -> None:
    code = (
        "import pickle, sys; from training.memory import RESULT; print('Welcome!', flush=True);"
        "sys.stdout.buffer.write(RESULT + pickle.dumps({'weights': 5})); print('Goodbye.')"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert finish_plan(process) == {"weights": 5}


def test_a_plan_that_fails_stops_no_run(composed: Callable[..., Path], data: Path, tmp_path: Path) -> None:
    run_args, args = parse(tmp_path, model_name_or_path=str(composed()), dataset_name=str(data), optim="adafactor")
    line = describe_plan(finish_plan(start_plan(run_args, args, [[Sample(20, 1, 5)]])), GIB)
    assert line.startswith("memory a device: not planned (ValueError: optim 'adafactor': its memory is not known")
