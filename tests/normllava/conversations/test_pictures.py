"""`open_images` opens the pictures of a row as RGB, and names a picture that can't be read."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from PIL import ImageDraw, PngImagePlugin

from normllava.conversations.pictures import open_images
from normllava.conversations.rows import BadRowError


def open_one(path: Path) -> PILImage.Image:
    """Open the picture of a row whose only picture is this file."""
    (image,) = open_images({"images": [str(path)], "source": "data.json, row 0"})
    return image


def test_16_bit_grey_is_scaled_to_8_bits(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)  # from black to white
    PILImage.fromarray(ramp).save(tmp_path / "16bit.png")
    red_channel, _, _ = open_one(tmp_path / "16bit.png").split()
    assert np.array_equal(np.asarray(red_channel), ramp // 256)


def test_pictures_of_every_kind_keep_their_colour(tmp_path: Path) -> None:
    red = PILImage.new("RGB", (6, 4), (255, 0, 0))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg")
    red.convert("P").save(tmp_path / "palette.png")
    red.convert("RGBA").save(tmp_path / "alpha.png")
    red.save(tmp_path / "png_named.jpg", format="png")
    blue = PILImage.new("RGB", (6, 4), (0, 0, 255))
    red.save(tmp_path / "animated.gif", save_all=True, append_images=[blue])  # red is the first frame

    for name in ("cmyk.jpg", "palette.png", "alpha.png", "png_named.jpg", "animated.gif"):
        picture = open_one(tmp_path / name)
        assert picture.mode == "RGB", name
        middle_pixel = picture.getpixel((3, 2))
        assert middle_pixel == pytest.approx((255, 0, 0), abs=7), name  # JPEG is not exact


def test_a_picture_is_turned_upright(tmp_path: Path) -> None:
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the EXIF orientation of a picture that is to be turned by 90 degrees
    PILImage.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_one(tmp_path / "turned.jpg").size == (4, 6)


def black_dot(mode: str, background: tuple[int, ...]) -> PILImage.Image:
    """A picture of 8 x 8 pixels: one is black and opaque, and the others have the background's colour."""
    picture = PILImage.new(mode, (8, 8), background)
    ImageDraw.Draw(picture).point((2, 3), fill="black")
    return picture


DOT_ON_TRANSPARENT = black_dot("RGBA", background=(0, 0, 0, 0))
DOT_ON_WHITE = black_dot("RGB", background=(255, 255, 255))


@pytest.mark.parametrize("suffix", ["png", "webp", "gif"])
def test_transparent_pixels_become_white(tmp_path: Path, suffix: str) -> None:
    """Without their alpha channel the transparent pixels would be black, as the dot is."""
    path = tmp_path / f"dot.{suffix}"
    DOT_ON_TRANSPARENT.save(path, lossless=True)  # WebP would be lossy by default
    assert open_one(path).tobytes() == DOT_ON_WHITE.tobytes()


def test_transparent_pixels_of_a_grey_picture_become_white(tmp_path: Path) -> None:
    path = tmp_path / "grey.png"
    DOT_ON_TRANSPARENT.convert("LA").save(path)
    assert open_one(path).tobytes() == DOT_ON_WHITE.tobytes()


def test_a_faint_pixel_is_mixed_with_white(tmp_path: Path) -> None:
    a_fifth_opaque = 255 // 5
    four_fifths_white = 255 * 4 // 5
    PILImage.new("RGBA", (1, 1), (0, 0, 0, a_fifth_opaque)).save(tmp_path / "faint.png")  # a black pixel
    red_green_blue = (four_fifths_white, four_fifths_white, four_fifths_white)
    assert open_one(tmp_path / "faint.png").getpixel((0, 0)) == red_green_blue


def test_a_png_with_much_text_is_read(tmp_path: Path) -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * 3 * 2**20, zip=True)  # 3 MB; Pillow's own limit is 1 MB
    PILImage.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "notes.png", pnginfo=notes)
    assert open_one(tmp_path / "notes.png").getpixel((0, 0)) == (1, 2, 3)


def encoded_noise() -> bytes:
    """A JPEG of noise. Noise can't be compressed well, so the first half of the file lacks a part of the picture."""
    file = BytesIO()
    PILImage.effect_noise((64, 64), 50).save(file, "jpeg")
    return file.getvalue()


@pytest.mark.parametrize("name", ["float.tiff", "torn.jpg", "text.png", "empty.png"])
def test_pictures_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    PILImage.new("F", (4, 4)).save(tmp_path / "float.tiff")
    jpeg = encoded_noise()
    (tmp_path / "torn.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(BadRowError, match=f"data.json, row 0: image .*{name} can't be read"):
        open_one(tmp_path / name)


def test_a_picture_without_a_name_is_named_by_its_number() -> None:
    images = [{"bytes": encoded_noise(), "path": None}, {"bytes": b"?", "path": None}]
    with pytest.raises(BadRowError, match=r"^row 1: image 2 can't be read \(cannot identify image file"):
        open_images({"images": images, "source": "row 1"})


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PILImage.new("L", (100, 100)).save(tmp_path / "bomb.png")
    # Pillow warns of more pixels than this, and refuses more than twice as many. The picture has 10,000.
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 4000)
    with pytest.raises(BadRowError, match=r"bomb.png can't be read .*decompression bomb"):
        open_one(tmp_path / "bomb.png")
