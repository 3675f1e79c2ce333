"""Render emoji of eleven styles, align them by concept, and write one file.

    npm install --ignore-scripts $(python examples/build_samples/emoji.py --packages)
    python examples/build_samples/emoji.py --root node_modules --out emoji.npz

The file has the images, the concept and the style of each, and the names, keywords and subgroups of
the concepts. `emoji_division.py` divides the concepts.
"""

import argparse
import io
import json
import re
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SIDE = 84  # pixels: six patches of DINOv2
EMOJIBASE = "17.0.0"  # MIT, Miles Johnson; names and keywords are those of Unicode CLDR
LEFT_OUT = ("component", "flags")


class Style(NamedTuple):
    """One set of emoji, of `emoji_styles.toml`."""

    version: str
    license: str
    author: str
    source: str
    family: str
    look: str = ""
    sample: bool = False

    @property
    def seen(self) -> bool:
        """Whether the network is trained on it."""
        return bool(self.look)


_TABLE = Path(__file__).with_name("emoji_styles.toml").read_text(encoding="utf-8")
STYLES = {name: Style(**fields) for name, fields in tomllib.loads(_TABLE).items()}
"""Styles in the order of the file."""


class Concept(NamedTuple):
    """One emoji of Unicode, in any style."""

    code: str
    name: str
    subgroup: str
    keywords: tuple[str, ...]
    shortcodes: tuple[str, ...]


def packages() -> list[str]:
    """Return the npm packages that are read, with their versions."""
    icons = [f"@iconify-json/{name}@{style.version}" for name, style in STYLES.items()]
    return [*icons, f"emojibase-data@{EMOJIBASE}"]


def package(root: Path, name: str, version: str) -> Path:
    """Return the folder of a package; refuse another version, which has other drawings."""
    found = _read(root / name / "package.json")["version"]
    if found != version:
        raise ValueError(f"`{name}` must have version {version}; got {found}.")
    return root / name


def concepts(root: Path) -> list[Concept]:
    """Read all emoji in Unicode's order, without flags, components and skin tones."""
    folder = package(root, "emojibase-data", EMOJIBASE) / "en"
    messages = _read(folder / "messages.json")
    groups, subgroups = (
        {entry["order"]: entry["key"] for entry in messages[kind]}
        for kind in ("groups", "subgroups")
    )
    shortcodes = [_read(path) for path in sorted((folder / "shortcodes").glob("*.json"))]
    found = []
    for row in sorted(_read(folder / "data.json"), key=lambda row: row.get("order", 0)):
        if "group" in row and groups[row["group"]] not in LEFT_OUT:
            code = row["hexcode"]
            short = chain(
                *([x] if isinstance(x := codes.get(code, []), str) else x for codes in shortcodes)
            )
            subgroup, tags = subgroups[row["subgroup"]], tuple(row.get("tags", ()))
            found.append(
                Concept(code.lower(), row["label"], subgroup, tags, tuple(dict.fromkeys(short)))
            )
    return found


class Icons:
    """Icons of one style, found by code point, by name or by shortcode."""

    def __init__(self, folder: Path) -> None:
        self.all = _read(folder / "icons.json")
        self.codes = _read(folder / "chars.json") if (folder / "chars.json").exists() else {}
        names = [*self.all["icons"], *self.all.get("aliases", {})]
        self.names = {_letters(name): name for name in names}

    def match(self, found: list[Concept]) -> dict[int, str]:
        """Return the icon of each concept that the style has. Each icon is used once.

        Code points and names come first. Shortcodes find icons that are left, because a shortcode
        such as "cricket" may mean another thing.
        """
        owners: dict[str, int] = {}
        for index, concept in enumerate(found):
            codes = (concept.code, concept.code.replace("-fe0f", ""))
            known = [self.codes[code] for code in codes if code in self.codes]
            icon = self._icon([*known, self.names.get(_letters(concept.name))])
            if icon and (icon not in owners or _letters(icon) == _letters(concept.name)):
                owners[icon] = index
        done = set(owners.values())
        for index, concept in enumerate(found):
            short = [self.names.get(_letters(code)) for code in concept.shortcodes if len(code) > 2]
            icon = self._icon(short)
            if icon and index not in done:
                owners.setdefault(icon, index)
        return {index: icon for icon, index in owners.items()}

    def _icon(self, names: list[str | None]) -> str | None:
        """Return the first icon that one of the names or its alias has, as it is drawn."""
        aliases = self.all.get("aliases", {})
        for name in names:
            while name in aliases and not aliases[name].keys() & {"hFlip", "vFlip", "rotate"}:
                name = aliases[name]["parent"]
            if name in self.all["icons"]:
                return name
        return None

    def svg(self, name: str) -> str:
        """Return an icon as SVG."""
        icon = {key: self.all[key] for key in ("width", "height") if key in self.all}
        icon = {"left": 0, "top": 0, "width": 16, "height": 16} | icon | self.all["icons"][name]
        size = 'viewBox="{left} {top} {width} {height}" width="{width}" height="{height}"'
        spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
        return f'<svg {spaces} {size.format(**icon)} color="black">{icon["body"]}</svg>'


def render(svg: str, side: int = SIDE) -> np.ndarray:
    """Draw a picture on white, in the middle of a square of `side` pixels."""
    import resvg_py
    from PIL import Image

    drawn = resvg_py.svg_to_bytes(svg_string=svg, width=side, height=side, background="white")
    image = Image.open(io.BytesIO(bytes(drawn))).convert("RGB")
    image.thumbnail((side, side))
    square = Image.new("RGB", (side, side), "white")
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return np.asarray(square)


def drawings(root: Path, found: list[Concept]) -> Iterator[tuple[int, int, np.ndarray]]:
    """Yield the style, the concept and the image of each emoji that a style has."""
    for style, (name, about) in enumerate(STYLES.items()):
        icons = Icons(package(root, f"@iconify-json/{name}", about.version))
        for index, icon in sorted(icons.match(found).items()):
            if (image := render(icons.svg(icon))).std() > 2:  # it is not empty
                yield style, index, image


class Emoji(NamedTuple):
    """The contents of the file. Concept and style of an image are positions in the tables."""

    images: np.ndarray
    concept: np.ndarray
    style: np.ndarray
    table: list[Concept]


def load(path: Path) -> Emoji:
    """Read the file."""
    with np.load(path) as file:
        rows = [Concept(**row) for row in json.loads(str(file["table"]))]
        return Emoji(file["images"], file["concept"], file["style"], rows)


def _letters(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def main() -> None:
    """Render everything and write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=Path("node_modules"), help="folder of packages"
    )
    parser.add_argument("--out", type=Path, default=Path("emoji.npz"))
    parser.add_argument("--packages", action="store_true", help="print the packages and end")
    arguments = parser.parse_args()
    if arguments.packages:
        print(*packages())
        return
    found = concepts(arguments.root)
    style, concept, images = zip(*drawings(arguments.root, found), strict=True)
    table = json.dumps([entry._asdict() for entry in found])
    np.savez_compressed(
        arguments.out, images=np.stack(images), style=style, concept=concept, table=table
    )
    counts = dict(zip(STYLES, np.bincount(style, minlength=len(STYLES)).tolist(), strict=True))
    print(len(images), "images of", len(set(concept)), "concepts;", counts)


if __name__ == "__main__":
    main()
