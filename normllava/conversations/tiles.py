"""Asks a model's image processor whether it cuts pictures into tiles, and lets it cut them into fewer."""

from typing import Any


def cuts_tiles(image_processor: Any) -> bool:
    """Whether an image processor cuts pictures into tiles, as GotOcr2's does with `crop_to_patches`."""
    return bool(getattr(image_processor, "crop_to_patches", False))


def tile_options(image_processor: Any, max_tiles: int | None) -> dict[str, int]:
    """The options for a call of an image processor that make it cut a picture into at most `max_tiles` tiles.

    Args:
        image_processor: The image processor.
        max_tiles: The largest number of tiles, without the thumbnail. 1 leaves the picture whole, and `None` stands
            for the image processor's own number.

    Returns:
        The options, which are empty if the image processor doesn't cut pictures.
    """
    if max_tiles is None or not cuts_tiles(image_processor):
        return {}
    return {"max_patches": max_tiles}  # GotOcr2 calls tiles patches
