"""Keys before rotation as attention's modules return them, on tensors made for it."""

import pytest
import torch

from diagnostics.attention_call import in_heads


HEADS, LENGTH, SIZE = 2, 12, 8


def rotate(keys: torch.Tensor, size: int = SIZE) -> torch.Tensor:
    """Rotary embedding of the first `size` dimensions of `(num_heads, S, head_dim)`."""
    angles = torch.arange(keys.shape[1])[:, None] / 10 ** torch.arange(size // 2)
    first, second = keys[..., : size // 2], keys[..., size // 2 : size]
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    return torch.cat([*turned, keys[..., size:]], dim=-1).to(keys.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotated_size", [SIZE, SIZE // 2])
@pytest.mark.parametrize("layout", ["heads first", "tokens first", "flat"])
def test_what_a_module_returns_is_told_by_its_norms(dtype: torch.dtype, rotated_size: int, layout: str) -> None:
    torch.manual_seed(0)
    keys, other = torch.randn(2, HEADS, LENGTH, SIZE).to(dtype)
    rotated = rotate(keys.float(), rotated_size).to(dtype)
    for states, is_found in ((keys, True), (other, False)):
        returned = states if layout == "heads first" else states.transpose(0, 1)
        found = in_heads(returned.reshape(LENGTH, -1) if layout == "flat" else returned, rotated)
        assert (found is not None) is is_found
        assert found is None or torch.equal(found, keys)


def test_a_factor_on_all_keys_stays() -> None:
    """YaRN multiplies what it rotates."""
    torch.manual_seed(0)
    keys = torch.randn(HEADS, LENGTH, SIZE)
    found = in_heads(keys, 1.2 * rotate(keys))
    assert found is not None
    assert torch.allclose(found, 1.2 * keys)
    assert in_heads(keys[:1], keys) is None  # of another size
