"""Watches whether losses and gradients stay finite, without making Python wait for the device in every step."""

from collections.abc import Callable

import torch

from normllava.errors import UserError


class FiniteWatch:
    """Counts on the device the losses and gradient norms that are not finite, and raises at the next check.

    Reading a value makes Python wait until the device has computed it. So a step only adds to the count, which is read
    when a step is logged, and before anything is saved.

    Args:
        device: The device that the values are on.
    """

    def __init__(self, device: torch.device) -> None:
        self._num_not_finite = torch.zeros((), dtype=torch.long, device=device)
        # The values of all steps up to this step are known to be finite.
        self._last_checked_step = 0

    def start(self, step: int) -> None:
        """Watch the steps after `step`: 0 in a new run, the checkpoint's step in a resumed run."""
        self._last_checked_step = step

    def note(self, value: torch.Tensor) -> None:
        """Count `value`, a scalar, if it isn't finite."""
        is_finite = value.detach().isfinite()
        self._num_not_finite += torch.where(is_finite, 0, 1)

    def check(self, step: int, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Read the count. Every process must call this, and either all processes raise or none.

        Args:
            step: The number of the last step that was taken.
            reduce: Sums a tensor over all processes.

        Raises:
            UserError: if a value since the last check was not finite.
        """
        if reduce(self._num_not_finite).item() > 0:
            raise UserError(
                "The loss or the gradient's norm was not finite in "
                f"{describe_steps(self._last_checked_step + 1, step)}; lower the learning rate, or look at the rows "
                "of these steps."
            )
        self._last_checked_step = step


def describe_steps(first: int, last: int) -> str:
    """The steps from `first` to `last`, in words."""
    if first >= last:  # `first` is `last + 1` if this step was checked before
        return f"step {last}"
    return f"one of the steps {first} to {last}"
