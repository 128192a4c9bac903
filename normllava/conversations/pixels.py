"""How a picture becomes pixels: the same way in training, behind an endpoint and on a Space.

A release has a copy of this file beside the code of its endpoint and its Space, so this file imports no other file of
this repository.
"""

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin


# Pillow refuses a PNG with more than 1 MB of text. Some editors and generators write more, so 64 MB are allowed here.
PngImagePlugin.MAX_TEXT_CHUNK = 64 * 2**20


def to_rgb(opened: Image.Image) -> Image.Image:
    """Convert a picture to RGB with 8 bits a channel.

    The picture is turned as its EXIF orientation says, its transparent pixels become white, and 16-bit grey is scaled
    to 8 bits. Of an animation the first frame is taken.

    Raises:
        OSError: if the pixels' values have no known range.
    """
    upright = ImageOps.exif_transpose(opened)
    if upright.mode.startswith("I;16"):
        # Pillow's `convert` wouldn't scale the values: all above 255 would become white.
        scaled = (np.asarray(upright) >> 8).astype(np.uint8)  # divided by 256
        return Image.fromarray(scaled).convert("RGB")
    if upright.mode in ("I", "F"):  # 32-bit integers, or floating-point numbers
        raise OSError(f"pixels of mode {upright.mode} have no known range")
    if not upright.has_transparency_data:
        return upright.convert("RGB")

    # Without the alpha channel, transparent pixels would show the colour that is stored for them. In most pictures of
    # black writing this colour is black as well.
    with_alpha = upright.convert("RGBA")
    white = Image.new("RGBA", with_alpha.size, "white")
    return Image.alpha_composite(white, with_alpha).convert("RGB")
