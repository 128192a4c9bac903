"""Opening the pictures of rows."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image as PILImage
from PIL import PngImagePlugin

from conversations.pictures import open_images
from conversations.rows import BadRowError


def open_one(path: Path) -> PILImage.Image:
    return open_images({"images": [str(path)], "source": "data.json, row 0"})[0]


def test_pictures_of_every_kind_come_out_as_people_see_them(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    PILImage.fromarray(ramp).save(tmp_path / "16bit.png")
    assert np.array_equal(np.asarray(open_one(tmp_path / "16bit.png"))[..., 0], (ramp >> 8).astype(np.uint8))

    red = PILImage.new("RGB", (6, 4), (255, 0, 0))
    red.convert("CMYK").save(tmp_path / "cmyk.jpg")
    red.convert("P").save(tmp_path / "palette.png")
    red.convert("RGBA").save(tmp_path / "alpha.png")
    red.save(tmp_path / "really_png.jpg", format="png")
    frames = [PILImage.new("RGB", (6, 4), (0, 0, 255))]
    red.save(tmp_path / "animated.gif", save_all=True, append_images=frames)
    for name in ("cmyk.jpg", "palette.png", "alpha.png", "really_png.jpg", "animated.gif"):
        picture = open_one(tmp_path / name)
        assert picture.mode == "RGB", name
        assert np.abs(np.array(picture.getpixel((3, 2))) - (255, 0, 0)).max() < 8, name

    turned = PILImage.Exif()
    turned[0x0112] = 6  # held upright by the photographer, stored on its side
    red.save(tmp_path / "turned.jpg", exif=turned)
    assert open_one(tmp_path / "turned.jpg").size == (4, 6)


@pytest.mark.parametrize("suffix", ["png", "webp", "gif"])
def test_what_is_transparent_is_white(tmp_path: Path, suffix: str) -> None:
    """Black writing on nothing: dropping transparency would make all of it black."""
    writing = PILImage.new("RGBA", (8, 8), (0, 0, 0, 0))
    writing.putpixel((2, 3), (0, 0, 0, 255))
    writing.save(tmp_path / f"writing.{suffix}", lossless=True)
    read = np.asarray(open_one(tmp_path / f"writing.{suffix}"))
    expected = np.full((8, 8, 3), 255)
    expected[3, 2] = 0
    assert np.array_equal(read, expected)

    if suffix == "png":  # grey and palettes can be transparent too, and half of it is half
        writing.convert("LA").save(tmp_path / "grey.png")
        assert np.array_equal(np.asarray(open_one(tmp_path / "grey.png")), expected)
        PILImage.new("RGBA", (1, 1), (0, 0, 0, 51)).save(tmp_path / "faint.png")
        assert open_one(tmp_path / "faint.png").getpixel((0, 0)) == (204, 204, 204)


def test_a_png_with_much_text_is_read(tmp_path: Path) -> None:
    notes = PngImagePlugin.PngInfo()
    notes.add_text("workflow", "x" * 3 * 2**20, zip=True)
    PILImage.new("RGB", (4, 4), (1, 2, 3)).save(tmp_path / "notes.png", pnginfo=notes)
    assert open_one(tmp_path / "notes.png").getpixel((0, 0)) == (1, 2, 3)


def test_pictures_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PILImage.new("F", (4, 4)).save(tmp_path / "float.tiff")
    PILImage.effect_noise((64, 64), 50).save(tmp_path / "whole.jpg")
    whole = (tmp_path / "whole.jpg").read_bytes()
    (tmp_path / "torn.jpg").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").write_bytes(b"")
    PILImage.new("L", (100, 100)).save(tmp_path / "bomb.png")
    for name in ("float.tiff", "torn.jpg", "text.png", "empty.png"):
        with pytest.raises(BadRowError, match=f"data.json, row 0: image .*{name} can't be read"):
            open_one(tmp_path / name)
    inside = {"images": [{"bytes": whole, "path": None}, {"bytes": b"?", "path": None}], "source": "row 1"}
    with pytest.raises(BadRowError, match=r"^row 1: image 2 can't be read \(cannot identify image file"):
        open_images(inside)
    monkeypatch.setattr(PILImage, "MAX_IMAGE_PIXELS", 4000)  # Pillow refuses twice this
    with pytest.raises(BadRowError, match=r"bomb.png can't be read .*decompression bomb"):
        open_one(tmp_path / "bomb.png")
