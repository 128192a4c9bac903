"""The pictures of a row, opened when they are needed."""

import hashlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any

from PIL import Image as PILImage

from conversations.pixels import to_rgb
from conversations.rows import BadRowError, Row, picture_path, row_images, shortened


def open_images(row: Row) -> list[PILImage.Image]:
    """The row's pictures, decoded to RGB as [`to_rgb`] does it. The content decides the format, not the file's name.

    Raises:
        BadRowError: if one can't be read, or its path leaves the row's folder.
    """
    return [_open_image(image, row, number) for number, image in enumerate(row_images(row), 1)]


def _open_image(image: Any, row: Row, number: int) -> PILImage.Image:
    path = picture_path(row, image)
    try:
        # The file is opened here: Pillow maps an uncompressed one that it opens itself, and then turns no TIFF.
        with BytesIO(image["bytes"]) if path is None else open(path, "rb") as file, PILImage.open(file) as opened:
            return to_rgb(opened)
    except Exception as error:  # Pillow's decoders raise errors of any type on broken files
        name = image["path"] if isinstance(image, dict) else path
        problem = f"image {shortened(name or str(number))} can't be read ({error})"
        raise BadRowError(row["source"], problem) from error


def fingerprint(images: Iterable[PILImage.Image]) -> str:
    """Hash of the pixels of pictures in RGB."""
    pixels = hashlib.sha256()
    for image in images:
        pixels.update(repr(image.size).encode())
        pixels.update(image.tobytes())
    return pixels.hexdigest()[:16]
