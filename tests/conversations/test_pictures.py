"""Opening the pictures of rows."""

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from PIL import PngImagePlugin

from conversations.pictures import open_images
from conversations.rows import BadRowError


def open_one(path: Path) -> PILImage.Image:
    """Open the picture of a row that has a single picture."""
    (image,) = open_images({"images": [str(path)], "source": "data.json, row 0"})
    return image


def test_16_bit_grey_is_scaled(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    PILImage.fromarray(ramp).save(tmp_path / "16bit.png")
    red_channel = np.asarray(open_one(tmp_path / "16bit.png"))[..., 0]
    assert np.array_equal(red_channel, (ramp >> 8).astype(np.uint8))


def test_pictures_of_every_kind_keep_their_colour(tmp_path: Path) -> None:
    red = PILImage.new("RGB", (6, 4), (255, 0, 0))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg")
    red.convert("P").save(tmp_path / "palette.png")
    red.convert("RGBA").save(tmp_path / "alpha.png")
    red.save(tmp_path / "png_named.jpg", format="png")
    blue = PILImage.new("RGB", (6, 4), (0, 0, 255))
    red.save(tmp_path / "animated.gif", save_all=True, append_images=[blue])  # the first frame counts

    for name in ("cmyk.jpg", "palette.png", "alpha.png", "png_named.jpg", "animated.gif"):
        picture = open_one(tmp_path / name)
        assert picture.mode == "RGB", name
        difference = np.abs(np.array(picture.getpixel((3, 2))) - (255, 0, 0))
        assert difference.max() < 8, name  # JPEG is not exact


def test_a_picture_is_turned_upright(tmp_path: Path) -> None:
    exif = PILImage.Exif()
    exif[0x0112] = 6  # the EXIF orientation of a picture that is to be turned by 90 degrees
    PILImage.new("RGB", (6, 4)).save(tmp_path / "turned.jpg", exif=exif)
    assert open_one(tmp_path / "turned.jpg").size == (4, 6)


@pytest.mark.parametrize("suffix", ["png", "webp", "gif"])
def test_what_is_transparent_is_white(tmp_path: Path, suffix: str) -> None:
    """Dropping the alpha channel of black writing on a transparent ground would make the ground black too."""
    path = tmp_path / f"writing.{suffix}"
    writing, expected = black_dot()
    writing.save(path, lossless=True)
    assert np.array_equal(np.asarray(open_one(path)), expected)


def black_dot() -> tuple[PILImage.Image, np.ndarray]:
    """A black dot on a transparent ground, and the pixels of a black dot on a white ground."""
    dot = PILImage.new("RGBA", (8, 8), (0, 0, 0, 0))
    dot.putpixel((2, 3), (0, 0, 0, 255))
    on_white = np.full((8, 8, 3), 255)
    on_white[3, 2] = 0  # row 3, column 2
    return dot, on_white


def test_transparent_grey_is_white(tmp_path: Path) -> None:
    writing, expected = black_dot()
    writing.convert("LA").save(tmp_path / "grey.png")
    assert np.array_equal(np.asarray(open_one(tmp_path / "grey.png")), expected)


def test_a_faint_pixel_is_mixed_with_white(tmp_path: Path) -> None:
    PILImage.new("RGBA", (1, 1), (0, 0, 0, 51)).save(tmp_path / "faint.png")  # a fifth black
    assert open_one(tmp_path / "faint.png").getpixel((0, 0)) == (204, 204, 204)


def test_a_png_with_much_text_is_read(tmp_path: Path) -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * 3 * 2**20, zip=True)  # 3 MB; Pillow's own limit is 1 MB
    PILImage.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "notes.png", pnginfo=notes)
    assert open_one(tmp_path / "notes.png").getpixel((0, 0)) == (1, 2, 3)


@pytest.mark.parametrize("name", ["float.tiff", "torn.jpg", "text.png", "empty.png"])
def test_pictures_that_cannot_be_read_are_named(tmp_path: Path, name: str) -> None:
    PILImage.new("F", (4, 4)).save(tmp_path / "float.tiff")
    jpeg = encoded_noise()
    (tmp_path / "torn.jpg").write_bytes(jpeg[: len(jpeg) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    with pytest.raises(BadRowError, match=f"data.json, row 0: image .*{name} can't be read"):
        open_one(tmp_path / name)


def encoded_noise() -> bytes:
    """A JPEG of noise, which is long enough to be torn."""
    file = BytesIO()
    PILImage.effect_noise((64, 64), 50).save(file, "jpeg")
    return file.getvalue()


def test_a_picture_without_a_name_is_named_by_its_number() -> None:
    images = [{"bytes": encoded_noise(), "path": None}, {"bytes": b"?", "path": None}]
    with pytest.raises(BadRowError, match=r"^row 1: image 2 can't be read \(cannot identify image file"):
        open_images({"images": images, "source": "row 1"})


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PILImage.new("L", (100, 100)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 4000)  # Pillow warns from here, and refuses twice as many
    with pytest.raises(BadRowError, match=r"bomb.png can't be read .*decompression bomb"):
        open_one(tmp_path / "bomb.png")
