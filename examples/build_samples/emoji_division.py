"""Division of emoji into classes and parts, `emoji.toml`, and its check against the drawings.

Variants of a concept have one key and stay in one part: men and women, colors, directions, hours,
"dog" and "dog face", "hammer" and "hammer and pick", and all concepts whose drawings are equal in
some style::

    python examples/build_samples/emoji_division.py emoji.npz
"""

import argparse
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from build_samples.emoji import STYLES, Concept, Emoji, load

FILE = Path(__file__).with_name("emoji.toml")
PRETRAINING, TRAINING, TEST = range(3)
"""Parts of a split: the training of the network, and training and test of federations."""
SPLITS = range(3)
SAME = 0.0125
"""Two drawings of one style are equal below this distance (root mean square, at 16 pixels)."""


class Division(NamedTuple):
    """Class and key of each concept, and its part in each split, by code point."""

    classes: dict[str, list[str]]
    """Code points of the concepts of each class. Other concepts have none."""
    keys: dict[str, str]
    parts: dict[str, tuple[int, ...]]

    def labels(self, table: list[Concept]) -> np.ndarray:
        """Return the class of each concept, or -1."""
        of = {code: label for label, codes in enumerate(self.classes.values()) for code in codes}
        return np.array([of.get(concept.code, -1) for concept in table])

    def part(self, table: list[Concept], split: int) -> np.ndarray:
        """Return the part of each concept."""
        return np.array([self.parts[concept.code][split] for concept in table])


@cache
def division() -> Division:
    """Read the committed division."""
    written = tomllib.loads(FILE.read_text(encoding="utf-8"))
    rows = [(key, *row) for key, row in written["keys"].items()]
    keys = {code: key for key, _, *codes in rows for code in codes}
    parts = {code: tuple(map(int, digits)) for _, digits, *codes in rows for code in codes}
    return Division(written["concepts"], keys, parts)


def same_drawings(emoji: Emoji) -> Iterator[tuple[int, int]]:
    """Yield pairs of concepts that have the same drawing in some style."""
    import torch
    import torch.nn.functional as F

    small = [
        F.interpolate(torch.tensor(images).movedim(3, 1).float() / 255, (16, 16), mode="area")
        for images in np.array_split(emoji.images, 1 + len(emoji.images) // 512)
    ]
    pixels = torch.cat(small).flatten(1)
    for style in np.unique(emoji.style):
        where = np.flatnonzero(emoji.style == style)
        distance = torch.cdist(pixels[where], pixels[where]) / pixels.shape[1] ** 0.5
        first, second = np.nonzero((distance < SAME).triu(1).numpy())
        yield from zip(emoji.concept[where[first]], emoji.concept[where[second]], strict=True)


def leaks(emoji: Emoji, found: Division) -> list[tuple[int, str, str]]:
    """Return split and names of all concepts of different parts that share a drawing."""
    table = emoji.table
    return [
        (split, table[first].name, table[second].name)
        for first, second in same_drawings(emoji)
        for split in SPLITS
        if found.parts[table[first].code][split] != found.parts[table[second].code][split]
    ]


def main() -> None:
    """Check the committed division, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="file of emoji.py")
    arguments = parser.parse_args()
    emoji = load(arguments.file)
    found = division()
    label = found.labels(emoji.table)
    for split in SPLITS:
        part = found.part(emoji.table, split)
        counts = np.stack(
            [np.bincount(part[label == k], minlength=3) for k in range(len(found.classes))]
        )
        least = counts.min(0)
        print(f"split {split}: {np.bincount(part)} concepts of parts, at least {least} of a class")
    shared = leaks(emoji, found)
    print(f"{len(STYLES)} styles, {len(emoji.images)} images")
    print(f"drawings in two parts: {shared or 'none'}")
    sys.exit(bool(shared))


if __name__ == "__main__":
    main()
