"""Divide emoji into classes, keys and parts; `emoji.toml` next to this program has the result.

Variants of a concept have one key and stay in one part: men and women, colors, directions, hours,
"dog" and "dog face", "hammer" and "hammer and pick", and all concepts whose drawings are equal in
some style. `python examples/build_samples/emoji_division.py emoji.npz` checks the committed file
against the drawings; with `--write` it writes the file anew.
"""

import argparse
import json
import re
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
HELD = {TEST: 10, TRAINING: 4}
"""Smallest number of concepts of a class in each held-out part. Otherwise it is a fifth."""
SAME = 0.0125
"""Two drawings of one style are equal below this distance (root mean square, at 16 pixels)."""
VARIANTS = re.compile(
    r"\b(man|woman|men|women|person|people|boy|girl|older|old|child|mx|mrs|facing right|"
    r"facing left|left|right|leftwards|rightwards|up|down|medium|light|dark|red|orange|yellow|"
    r"green|blue|purple|brown|black|white|grey|pink|small|large|oncoming|with|behind|without)\b|-"
)


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


def keys(emoji: Emoji) -> list[str]:
    """Return the key of each concept: its head noun, or the one of an equal drawing."""
    words = [_words(concept) for concept in emoji.table]
    heads = set(words)
    found = [(area, last if (area, last := _last(name)) in heads else name) for area, name in words]
    joined = {key: key for key in found}

    def root(key: tuple[str, str]) -> tuple[str, str]:
        return key if joined[key] == key else root(joined[key])

    for first, second in same_drawings(emoji):
        joined[root(found[second])] = root(found[first])
    return [" ".join(root(key)) for key in found]


def _words(concept: Concept) -> tuple[str, str]:
    """Return the area of a concept, and its name without words that mark variants."""
    area, name = concept.subgroup.split("-")[0], concept.name.lower().replace("\u2019s", "")
    area = "animal" if area in ("cat", "monkey") else area
    if concept.subgroup in ("family", "keycap"):
        return area, concept.subgroup
    if concept.subgroup == "time" and re.search("o\u2019clock|thirty", name):
        return area, "clock"
    if area == "sky" and "moon" in name:
        return area, "moon"
    left = " ".join(re.sub("[^a-z0-9 ]", "", VARIANTS.sub(" ", name)).split())
    left = left.removesuffix(" face") if area in ("animal", "sky") else left
    return area, _singular(left or name)


def _last(name: str) -> str:
    return _singular(name.split()[-1])


def _singular(name: str) -> str:
    return name[:-1] if name.endswith("s") and not name.endswith("ss") else name


def divide(classes: dict[str, list[str]], table: list[Concept], key: list[str]) -> Division:
    """Draw three splits, in which each class has enough concepts in each held-out part."""
    of = {group: name for name, groups in classes.items() for group in groups}
    sizes: dict[str, dict[str, int]] = {}
    home: dict[str, str] = {}
    for concept, name in zip(table, key, strict=True):
        stratum = of.get(concept.subgroup, concept.subgroup)
        if home.setdefault(name, stratum) == stratum:
            members = sizes.setdefault(stratum, {})
            members[name] = members.get(name, 0) + 1
    parts: dict[str, list[int]] = {name: [] for name in home}
    for split in SPLITS:
        draw = np.random.default_rng(split)
        for stratum, members in sizes.items():
            small = HELD if stratum in classes else dict.fromkeys(HELD, 0)
            for name, part in _drawn(members, small, draw).items():
                parts[name].append(part)
    codes = {concept.code: name for concept, name in zip(table, key, strict=True)}
    owned = {
        name: [concept.code for concept in table if of.get(concept.subgroup) == name]
        for name in classes
    }
    return Division(owned, codes, {code: tuple(parts[name]) for code, name in codes.items()})


def _drawn(
    sizes: dict[str, int], small: dict[int, int], draw: np.random.Generator
) -> dict[str, int]:
    """Assign keys of these sizes to parts. A key with a quarter of all concepts is not held out."""
    total = sum(sizes.values())
    wanted = {part: max(least, total // 5) for part, least in small.items()}
    drawn = {}
    for name in draw.permutation(list(sizes)).tolist():
        free = [part for part in wanted if wanted[part] > 0 and sizes[name] * 4 <= max(total, 8)]
        drawn[name] = free[0] if free else PRETRAINING
        if free:
            wanted[free[0]] -= sizes[name]
    return drawn


def write(groups: dict[str, list[str]], found: Division) -> None:
    """Write the subgroups and the concepts of classes, and the keys with parts and concepts."""
    members: dict[str, list[str]] = {}
    for code, key in found.keys.items():
        members.setdefault(key, []).append(code)
    rows = {
        key: ["".join(map(str, found.parts[codes[0]])), *codes] for key, codes in members.items()
    }
    lines = [
        "# Written by emoji_division.py. A key has its parts in the three splits (0: training of"
    ]
    lines += ["# the network, 1 and 2: training and test of federations) and its code points."]
    for title, values in {"classes": groups, "concepts": found.classes, "keys": rows}.items():
        lines += ["", f"[{title}]"]
        lines += [
            f"{json.dumps(name, ensure_ascii=False)} = {json.dumps(value)}"
            for name, value in values.items()
        ]
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


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
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    emoji = load(arguments.file)
    if arguments.write:
        classes = tomllib.loads(FILE.read_text(encoding="utf-8"))["classes"]
        write(classes, divide(classes, emoji.table, keys(emoji)))
        division.cache_clear()
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
