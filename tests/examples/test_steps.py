"""The steps of an example. Steps that are done are skipped, and no step runs while a later step's result exists."""

from pathlib import Path

import pytest

from examples import steps
from examples.digits import quickstart
from examples.emoji import run
from examples.steps import Step, run_steps


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which the steps run, in place of the repository's root."""
    monkeypatch.setattr(steps, "ROOT", tmp_path)
    return tmp_path


def make_step(name: str, has_last_file: bool = True) -> Step:
    """A step that adds the line "run" to the file of this name.

    The file also is the step's last file, by which `run_steps` knows that the step is done. With `has_last_file=False`
    the step has no last file, and so runs every time.
    """
    program = f"with open('{name}', 'a') as file: file.write('run\\n')"
    last_files = (Path(name),) if has_last_file else ()
    return Step(name, ["-c", program], last_files)


def test_done_steps_are_skipped_and_steps_without_files_always_run(root: Path) -> None:
    plan = [make_step("first"), make_step("second"), make_step("report", has_last_file=False)]
    run_steps(plan)
    run_steps(plan)
    assert (root / "first").read_text() == "run\n"
    assert (root / "second").read_text() == "run\n"
    assert (root / "report").read_text() == "run\nrun\n"


def test_a_step_is_not_run_again_while_the_result_of_a_later_step_exists(root: Path) -> None:
    plan = [make_step("first"), make_step("second")]
    run_steps(plan)
    (root / "first").unlink()
    # The folder of the second step's file is ".", the root.
    with pytest.raises(SystemExit, match=r"^This step's result is missing, but \. was made from it: remove that too"):
        run_steps(plan)


def test_a_step_that_fails_ends_the_example(root: Path) -> None:
    failing_step = Step("fails", ["-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match="This step failed"):
        run_steps([failing_step, make_step("later")])
    assert not (root / "later").exists()


@pytest.mark.parametrize(
    ("plan", "folder"),
    [
        pytest.param(quickstart.plan_steps(), quickstart.RUN, id="quickstart"),
        pytest.param([step for step, _minutes in run.plan_steps()], run.RUN, id="emoji"),
    ],
)
def test_all_steps_but_the_last_have_files_in_the_run_folder(plan: list[Step], folder: Path) -> None:
    *earlier_steps, last_step = plan
    assert last_step.last_files == ()  # so it runs on every call
    for step in earlier_steps:
        assert step.last_files
        assert all(path.is_relative_to(folder) for path in step.last_files)
