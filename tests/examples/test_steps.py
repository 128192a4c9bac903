"""The steps of an example: steps that are done are skipped, and results of later steps are never outdated."""

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


def line_step(name: str, has_last_file: bool = True) -> Step:
    """A step that adds a line to the file of this name."""
    program = f"import pathlib; pathlib.Path('{name}').open('a').write('run\\n')"
    last_files = (Path(name),) if has_last_file else ()
    return Step(name, ["-c", program], last_files)


def test_done_steps_are_skipped_and_those_without_files_always_run(root: Path) -> None:
    plan = [line_step("first"), line_step("second"), line_step("report", has_last_file=False)]
    run_steps(plan)
    run_steps(plan)
    assert (root / "first").read_text() == "run\n"
    assert (root / "second").read_text() == "run\n"
    assert (root / "report").read_text() == "run\nrun\n"


def test_a_step_is_not_run_if_its_result_is_gone_but_that_of_a_later_step_is_there(root: Path) -> None:
    plan = [line_step("first"), line_step("second")]
    run_steps(plan)
    (root / "first").unlink()
    with pytest.raises(SystemExit, match=r"^Its result is missing, but \. was made from it: remove that too"):
        run_steps(plan)


def test_a_step_that_fails_ends_the_example(root: Path) -> None:
    with pytest.raises(SystemExit, match="This step failed"):
        run_steps([Step("fails", ["-c", "raise SystemExit(3)"]), line_step("later")])
    assert not (root / "later").exists()


def test_the_examples_name_files_of_their_own_run() -> None:
    emoji_plan = [step for step, _ in run.plan_steps()]
    for plan, folder in ((quickstart.plan_steps(), quickstart.RUN), (emoji_plan, run.RUN)):
        # Only the last step, which reports, is always run.
        *earlier_steps, report = plan
        assert report.last_files == ()
        for step in earlier_steps:
            assert step.last_files
            assert all(path.is_relative_to(folder) for path in step.last_files)
