"""One rule for a picture's pixels, in training, behind an endpoint and on a Space.

A release ships this file beside the two others' code, so it imports nothing else of ours.
"""

import numpy as np
from PIL import Image, ImageOps, PngImagePlugin


# Pillow refuses a PNG with more than 1 MB of text, which some editors and generators write.
PngImagePlugin.MAX_TEXT_CHUNK = 64 * 2**20


def to_rgb(opened: Image.Image) -> Image.Image:
    """A picture's pixels in RGB of 8 bits.

    It is turned as its EXIF orientation says, what is transparent becomes white, 16-bit grey is scaled to 8 bits, and
    of an animation the first frame is taken.

    Raises:
        OSError: if its pixels have no known range.
    """
    upright = ImageOps.exif_transpose(opened)
    if upright.mode.startswith("I;16"):  # unscaled, everything above 255 would become white
        return Image.fromarray((np.asarray(upright) >> 8).astype(np.uint8)).convert("RGB")
    if upright.mode in ("I", "F"):
        raise OSError(f"pixels of mode {upright.mode} have no known range")
    if not upright.has_transparency_data:
        return upright.convert("RGB")

    # Dropping transparency would show the colour that lies below it: black, behind most black writing.
    with_alpha = upright.convert("RGBA")
    ground = Image.new("RGBA", with_alpha.size, "white")
    return Image.alpha_composite(ground, with_alpha).convert("RGB")
