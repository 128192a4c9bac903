"""What training measures in every step, and reads only in steps that are logged."""

from collections.abc import Callable
from typing import Any

import torch

from normllava.tokens import IGNORED, attended_tokens


class StepMeasurements:
    """The measurements of the steps since the last log.

    They are kept on the device, since reading a value makes Python wait until the device has computed it.

    Args:
        device: The device that computes losses and gradients.

    Attributes:
        learning_rates: The learning rate of each trained module in the last step.
        grad_norms: The last step's gradient norm of each trained module, before clipping.
    """

    def __init__(self, device: torch.device) -> None:
        self.learning_rates: dict[str, float] = {}
        self.grad_norms: dict[str, torch.Tensor] = {}
        # Tokens of this process's batches, since the last call of `take_tokens`.
        self._num_tokens = 0
        # Sums over this process's supervised tokens: their entropy, the number of tokens that the model finds
        # likeliest, and the number of all.
        self._token_sums = torch.zeros(3, device=device)

    def count_tokens(self, inputs: dict[str, Any]) -> None:
        """Count a batch's tokens, without padding. The batch must still be on the CPU."""
        # Every row has supervised tokens, so a batch without supervised tokens has no rows. The collator has given
        # such a batch a token of padding, which isn't counted.
        has_rows = (inputs["labels"] != IGNORED).any()
        if has_rows:
            self._num_tokens += int(attended_tokens(inputs).sum())

    def take_tokens(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> int:
        """The number of tokens counted since the last call, over all processes, each of which must call this.

        Args:
            reduce: Sums a tensor over all processes.
        """
        num_tokens = reduce(torch.tensor(self._num_tokens))
        self._num_tokens = 0
        return int(num_tokens)

    def add_predictions(self, outputs: Any) -> None:
        """Add a batch's entropy and its number of right predictions, from the output of TRL's patched forward pass."""
        entropy = outputs.entropy.detach().sum()
        num_correct = outputs.is_top1.sum()
        self._token_sums += torch.stack([entropy, num_correct, outputs.label_mask.sum()])

    def forget_predictions(self) -> None:
        """Forget the predictions that were added."""
        self._token_sums.zero_()

    def collect(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
        """Figures for a step's log: entropy, accuracy, learning rates and gradient norms.

        Every process must call this.

        Args:
            reduce: Sums a tensor over all processes.
        """
        entropy, num_correct, num_tokens = reduce(self._token_sums).tolist()
        self.forget_predictions()

        figures = {"entropy": entropy / num_tokens, "mean_token_accuracy": num_correct / num_tokens}
        figures |= {f"learning_rate/{name}": rate for name, rate in self.learning_rates.items()}
        figures |= {f"grad_norm/{name}": norm.item() for name, norm in self.grad_norms.items()}
        return figures
