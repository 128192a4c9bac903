"""The pictures of a row, opened when they are needed."""

import hashlib
from collections.abc import Iterable
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image as PILImage
from PIL import ImageOps

from conversations.rows import BadRowError, Row, picture_path, row_images


def open_images(row: Row) -> list[PILImage.Image]:
    """The row's pictures, decoded to RGB.

    The EXIF orientation is applied, 16-bit grey is scaled to 8 bits, transparency is dropped, and of an animation the
    first frame is taken. The content decides the format, not the file's name.

    Raises `BadRowError` if one can't be read, or its path leaves the row's folder.
    """
    return [_open_image(image, row, number) for number, image in enumerate(row_images(row), 1)]


def to_rgb(opened: PILImage.Image) -> PILImage.Image:
    """A picture's pixels in RGB, turned as its EXIF says. Raises `OSError` if they have no known range."""
    upright = ImageOps.exif_transpose(opened)
    if upright.mode.startswith("I;16"):  # unscaled, everything above 255 would become white
        return PILImage.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
    if upright.mode in ("I", "F"):
        raise OSError(f"pixels of mode {upright.mode} have no known range")
    return upright.convert("RGB")


def fingerprint(images: Iterable[PILImage.Image]) -> str:
    """Hash of the pixels of pictures in RGB."""
    seen = hashlib.sha256()
    for image in images:
        seen.update(repr(image.size).encode() + image.tobytes())
    return seen.hexdigest()[:16]


def _open_image(image: Any, row: Row, number: int) -> PILImage.Image:
    path = picture_path(row, image)
    try:
        # Opened here, since Pillow maps an uncompressed file that is given by its path, and does not turn a TIFF then.
        with BytesIO(image["bytes"]) if path is None else open(path, "rb") as file, PILImage.open(file) as opened:
            return to_rgb(opened)
    except Exception as error:  # Pillow's decoders raise errors of many types on broken files
        name = image["path"] if isinstance(image, dict) else path
        raise BadRowError(row["source"], f"image {name or number} can't be read ({error})") from error
