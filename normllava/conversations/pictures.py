"""The pictures of a row, opened when they are needed."""

import hashlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any, BinaryIO

from PIL import Image as PILImage

from normllava.conversations.pixels import to_rgb
from normllava.conversations.rows import BadRowError, Row, picture_path, row_images, shorten_path


def open_images(row: Row) -> list[PILImage.Image]:
    """The row's pictures, each opened and converted by [`to_rgb`].

    Raises:
        BadRowError: if a picture can't be read, or its path leaves the row's image folder.
    """
    return [_open_image(image, row, number) for number, image in enumerate(row_images(row), 1)]


def _open_image(image: Any, row: Row, number: int) -> PILImage.Image:
    """A picture of a row in RGB.

    Args:
        image: The undecoded picture.
        row: The row.
        number: The picture's number in the row, from 1. An error names a picture without a path by this number.

    Raises:
        BadRowError: if the picture can't be read, or its path leaves the row's image folder.
    """
    path = picture_path(row, image)
    try:
        with _open_file(image, path) as file, PILImage.open(file) as opened:
            return to_rgb(opened)
    except Exception as error:  # Pillow's decoders raise errors of any type on broken files
        name = image["path"] if isinstance(image, dict) else path
        if not name:
            name = str(number)
        problem = f"image {shorten_path(name)} can't be read ({error})"
        raise BadRowError(row["source"], problem) from error


def _open_file(image: Any, path: str | None) -> BinaryIO:
    """The encoded picture as an open file: the file at its path, or one in memory if the row holds the bytes."""
    if path is None:
        return BytesIO(image["bytes"])
    # From a path, Pillow would map an uncompressed file into memory, and then wouldn't turn a TIFF upright.
    return open(path, "rb")


def fingerprint(images: Iterable[PILImage.Image]) -> str:
    """A hash of the sizes and pixels of RGB pictures."""
    pixel_hash = hashlib.sha256()
    for image in images:
        pixel_hash.update(repr(image.size).encode())
        pixel_hash.update(image.tobytes())
    return pixel_hash.hexdigest()[:16]  # 64 bits are enough, and read better in a report
