"""`FiniteWatch` notes losses and gradients' norms, and raises at the next check if one of them was not finite."""

import pytest
import torch

from normllava.errors import UserError
from training.loop.finite import FiniteWatch, describe_steps


def sum_over_one_process(count: torch.Tensor) -> torch.Tensor:
    return count


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_found_at_the_next_check(value: float) -> None:
    watch = FiniteWatch(torch.device("cpu"))
    watch.note(torch.tensor(1.0))
    watch.check(step=10, reduce=sum_over_one_process)  # up to step 10, all is finite

    watch.note(torch.tensor(value))
    watch.note(torch.tensor(1.0))
    with pytest.raises(UserError, match="was not finite in one of the steps 11 to 20;"):
        watch.check(step=20, reduce=sum_over_one_process)


def test_a_resumed_run_names_only_steps_of_its_own() -> None:
    watch = FiniteWatch(torch.device("cpu"))
    watch.start(step=100)
    watch.note(torch.tensor(torch.nan))
    with pytest.raises(UserError, match="in step 101;"):
        watch.check(step=101, reduce=sum_over_one_process)


def test_a_value_that_is_not_finite_on_another_process_is_found_on_this_process() -> None:
    def add_one_of_another_process(count: torch.Tensor) -> torch.Tensor:
        return count + 1

    watch = FiniteWatch(torch.device("cpu"))
    with pytest.raises(UserError, match="was not finite"):
        watch.check(step=1, reduce=add_one_of_another_process)


def test_a_single_step_is_named_alone() -> None:
    assert describe_steps(first=3, last=3) == "step 3"
    assert describe_steps(first=4, last=3) == "step 3"  # when step 3 is checked twice
