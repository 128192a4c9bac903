"""Checks the number of image tokens that a page costs, whole or cut into tiles, with patches merged or not."""

import pytest

from benchmarks.pages import Setting, measure_page


@pytest.mark.parametrize(
    ("setting", "image_tokens"),
    [
        # In the tiny model, a whole page and a tile have 8 x 8 patches. A merge size of 2 leaves 4 x 4 image tokens.
        pytest.param(Setting(max_tiles=1, spatial_merge_size=1), 64, id="whole"),
        pytest.param(Setting(max_tiles=1, spatial_merge_size=2), 16, id="whole, merged"),
        # The grid nearest to a page's shape has 2 x 3 tiles. With the thumbnail there are seven pictures.
        pytest.param(Setting(max_tiles=6, spatial_merge_size=2), 7 * 16, id="cut, merged"),
    ],
)
def test_a_page_costs_its_image_tokens(setting: Setting, image_tokens: int) -> None:
    cost = measure_page(setting, tiny=True)
    assert cost.image_tokens == image_tokens
    assert cost.seconds > 0
