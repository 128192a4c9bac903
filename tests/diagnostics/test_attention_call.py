"""Keys before rotation among what a layer's modules returned, on tensors made for it."""

import pytest
import torch

from diagnostics.attention_call import KeysNotFoundError, count_repeats, find_keys, find_latent_keys


HEADS, LENGTH, SIZE = 2, 12, 8


def rotate(keys: torch.Tensor, size: int = SIZE) -> torch.Tensor:
    """Rotary embedding of the first `size` dimensions of `(num_heads, S, head_dim)`."""
    angles = torch.arange(keys.shape[1])[:, None] / 10 ** torch.arange(size // 2)
    first, second = keys[..., : size // 2], keys[..., size // 2 : size]
    turned = [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()]
    return torch.cat([*turned, keys[..., size:]], dim=-1).to(keys.dtype)


def as_projected(states: torch.Tensor) -> torch.Tensor:
    """As a linear layer returns it, `(1, S, num_heads * head_dim)`."""
    return states.transpose(0, 1).reshape(1, states.shape[1], -1)


@pytest.fixture
def made() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = ("hidden", "query", "key", "normed", "value")
    return {name: torch.randn(HEADS, LENGTH, SIZE) for name in names}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rotated_size", [SIZE, SIZE // 2])
@pytest.mark.parametrize("heads_first", [True, False])
def test_the_norm_is_found_whatever_its_name(
    made: dict[str, torch.Tensor], dtype: torch.dtype, rotated_size: int, heads_first: bool
) -> None:
    states = {name: tensor.to(dtype) for name, tensor in made.items()}
    normed = states["normed"][None] if heads_first else states["normed"].transpose(0, 1)[None]
    outputs = [as_projected(states[name]) for name in ("hidden", "query", "key", "value")]
    seen = [(None, outputs[0]), *((outputs[0], output) for output in outputs[1:]), (outputs[2], normed)]
    key = rotate(states["normed"].float(), rotated_size).to(dtype)
    assert torch.equal(find_keys(key, states["value"], seen), states["normed"])


def test_a_factor_on_all_keys_stays(made: dict[str, torch.Tensor]) -> None:
    """YaRN multiplies what it rotates."""
    seen = [(None, as_projected(made[name])) for name in ("hidden", "key", "value")]
    assert torch.allclose(find_keys(1.2 * rotate(made["key"]), made["value"], seen), 1.2 * made["key"])


def test_unit_norms_are_told_apart() -> None:
    """Where every query, key and value of a single head is of length 1, lengths alone tell nothing of the value."""
    torch.manual_seed(0)
    key, value = torch.nn.functional.normalize(torch.randn(2, 1, LENGTH, SIZE), dim=-1)
    seen = [(None, torch.randn(1, LENGTH, SIZE)), (None, key[None]), (None, value[None])]
    assert torch.equal(find_keys(rotate(key), value, seen), key)


def test_without_rotation_keys_are_what_attention_gets(made: dict[str, torch.Tensor]) -> None:
    projected = as_projected(made["key"])
    seen = [(None, as_projected(made["hidden"])), (as_projected(made["hidden"]), projected)]
    normed = made["normed"].transpose(0, 1)[None]
    seen.append((projected.view(1, LENGTH, HEADS, SIZE), normed))
    assert torch.equal(find_keys(made["normed"], made["value"], seen), made["normed"])


def test_a_norm_behind_the_rotation_is_refused_and_an_empty_one_is_not(made: dict[str, torch.Tensor]) -> None:
    projected, rotated = as_projected(made["key"]), rotate(made["key"])
    seen = [(None, as_projected(made["hidden"])), (as_projected(made["hidden"]), projected)]
    with pytest.raises(KeysNotFoundError, match="normed after their rotation"):
        find_keys(made["normed"], made["value"], [*seen, (rotated[None], made["normed"][None])])
    identity = (rotated[None], rotated[None])
    assert torch.equal(find_keys(rotated, made["value"], [*seen, identity]), made["key"])


def test_other_tensors_are_no_keys(made: dict[str, torch.Tensor]) -> None:
    seen = [(None, as_projected(made[name])) for name in ("hidden", "query", "value", "normed")]
    with pytest.raises(KeysNotFoundError, match="no module of the layer returns"):
        find_keys(rotate(made["key"]), made["value"], seen)
    with pytest.raises(KeysNotFoundError, match="no module of the layer returns"):
        find_latent_keys(made["key"], SIZE // 2, seen)


@pytest.mark.parametrize("part", [slice(0, 4), slice(-4, None)])
def test_latent_keys_stand_first_or_last(made: dict[str, torch.Tensor], part: slice) -> None:
    key = made["key"]
    expanded = torch.cat([key[..., part], made["value"]], dim=-1)
    assert torch.equal(find_latent_keys(key, 4, [(None, as_projected(expanded))]), key[..., part])


def test_repeated_heads_are_counted(made: dict[str, torch.Tensor]) -> None:
    assert count_repeats(made["key"]) == 1
    assert count_repeats(made["key"].repeat_interleave(3, dim=0)) == 3
    assert count_repeats(torch.full((4, 2, 2), torch.nan)) == 1
