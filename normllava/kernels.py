"""The kernel by which sets of keys are compared, in the diagnostics and in the losses on keys."""

import torch


# Bandwidths in multiples of σ², the mean squared distance between two keys.
BANDWIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


def gaussian_kernel(squared_distances: torch.Tensor, sigma_squared: torch.Tensor) -> torch.Tensor:
    """The kernel `mean_s exp(-|x - y|² / (s σ²))` over the bandwidths s, of the shape of `squared_distances`.

    Args:
        squared_distances: |x - y|² for pairs of keys.
        sigma_squared: σ², above 0; of a shape that broadcasts.
    """
    kernels = [torch.exp(-squared_distances / (bandwidth * sigma_squared)) for bandwidth in BANDWIDTHS]
    return torch.stack(kernels).mean(0)
