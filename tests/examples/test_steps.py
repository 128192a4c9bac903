"""The steps of an example: what is done is skipped, and nothing is made anew below results of the old."""

from pathlib import Path

import pytest

from examples import steps
from examples.digits import quickstart
from examples.emoji import run
from examples.steps import Step, run_steps


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    return tmp_path


def writing(name: str, always: bool = False) -> Step:
    """A step that adds a line to a file."""
    program = f"import pathlib; pathlib.Path('{name}').open('a').write('run\\n')"
    return Step(name, ["-c", program], () if always else (Path(name),))


def test_done_steps_are_skipped_and_those_without_files_always_run(root: Path) -> None:
    plan = [writing("first"), writing("second"), writing("report", always=True)]
    run_steps(plan)
    run_steps(plan)
    assert [len((root / name).read_text().splitlines()) for name in ("first", "second", "report")] == [1, 1, 2]


def test_a_step_is_not_run_where_its_result_is_gone_and_a_later_one_is_there(root: Path) -> None:
    plan = [writing("first"), writing("second")]
    run_steps(plan)
    (root / "first").unlink()
    with pytest.raises(SystemExit, match=r"^Its result is missing, but \. was made from it: remove that too"):
        run_steps(plan)


def test_a_step_that_fails_ends_the_example(root: Path) -> None:
    with pytest.raises(SystemExit, match="This step failed"):
        run_steps([Step("fails", ["-c", "raise SystemExit(3)"]), writing("later")])
    assert not (root / "later").exists()


def test_the_examples_name_files_of_their_own_run() -> None:
    emoji = [step for step, _ in run.plan_steps()]
    for plan, folder in ((quickstart.plan_steps(), quickstart.RUN), (emoji, run.RUN)):
        assert [step.title for step in plan if not step.last_files] == [plan[-1].title]  # the report
        for step in plan:
            assert all(path.is_relative_to(folder) for path in step.last_files)
