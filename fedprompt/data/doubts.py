"""Doubts about a folder of images: facts that make a table wrong, with an example and a remedy.

A doubt is not an error. You can allow it by its name.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fedprompt.data.wording import named, similar

DOUBTS = {
    "train-and-test": ("the same image is in training and in tests", "Delete one of the two files"),
    "two-classes": ("the same image is in two classes", "Delete the wrong file"),
    "similar-names": (
        "names differ only in case, blanks, `_`, leading zeros, `.0` or the encoding of accents",
        "Move the images into one folder, or correct the list",
    ),
    "label-names": (
        "one label has two names, or two labels have one name",
        "Correct the names in the list",
    ),
    "no-words": (
        "class names are not words, and a CLIP reads them",
        "Write words into a file `classnames.txt` in the folder: one line with the folder's name, "
        "a blank, and the name in words, for each class",
    ),
    "part-names": (
        "classes have the name of a part of a data set, such as images or masks",
        "Pass the layout in which these folders are not classes, or move them away",
    ),
    "unreadable-class": ("no image of a class can be read", "Replace its files, or remove it"),
    "machine-folders": (
        "folders that programs make, such as thumbnails, are read as images",
        "Delete these folders",
    ),
}
"""What is doubted, and the remedy, by the name of a doubt."""

PARTS = re.compile(
    r"(images?|imgs?|jpe?g(images)?s?|pngs?|photos?|pictures?|pics?|(segmentation.?)?masks?|labels?"
    r"|annotations?|ground.?truth|gt|data|files|(parts?|batch|chunk|split|fold).?\d*|.* folder)"
)
"""Names in lower case of parts of a data set."""
MACHINES = re.compile(
    r"([@#]\w+|.?thumb(nail)?s?(\.db)?|.?trash(es)?(-\d+)?|lost\+found|\$?recycle[rd]?(\.bin)?"
    r"|system volume information|__\w+__|ipynb_checkpoints|node_modules|backups?.*|.*[~]|cvs)"
)
"""Names in lower case of folders that programs make."""
CODES = re.compile(r"[nvars]\d{8}|\d+|(class|label|category|cls|id|cat)[\W_]*\d+")
"""Names in lower case that are not words: of WordNet, numbers, and numbered classes."""
SHORT = re.compile(r"[\W\d_]+|[a-z]{1,3}[\W_]?\d+|[b-df-hj-np-tv-xz]{2,5}")
"""Names in lower case that may be words, such as f16, but not if most classes have such names."""
NUMBERED = re.compile(r"(\d+)[._ -]+(?=[^\W\d_])")
"""A number in front of a name."""


class Doubt(NamedTuple):
    """A fact that makes a table wrong, unless you know better.

    Attributes:
        name: Name by which you allow it.
        examples: Where it was found.
    """

    name: str
    examples: tuple[str, ...]

    def __str__(self) -> str:
        """Say it with up to three examples and the remedy."""
        what, remedy = DOUBTS[self.name]
        shown = "; ".join(self.examples[:3])
        more = f" ({len(self.examples)} times)" if len(self.examples) > 3 else ""
        return f"{self.name}: {what}{more}: {shown}. {remedy}."


def doubted(found: Mapping[str, Sequence[str]]) -> tuple[Doubt, ...]:
    """Make a doubt of each name that has examples."""
    return tuple(Doubt(name, tuple(found[name])) for name in DOUBTS if found.get(name))


def of_names(
    class_names: Sequence[str], domain_names: Sequence[str], folders: Iterable[Sequence[str]]
) -> dict[str, list[str]]:
    """Find doubts about the names of classes, of domains, and of all folders that have images."""
    alike = defaultdict[tuple[int, str], set[str]](set)
    for kind, names in enumerate((class_names, domain_names)):
        for name in names:
            alike[kind, similar(name)].add(name)
    machines = {part for parts in folders for part in parts if MACHINES.fullmatch(part.lower())}
    return {
        "similar-names": [both(sorted(group)) for group in alike.values() if len(group) > 1],
        "part-names": [f"`{name}`" for name in class_names if PARTS.fullmatch(name.lower())],
        "machine-folders": [f"`{name}`" for name in sorted(machines)],
    }


def of_words(class_names: Sequence[str]) -> dict[str, list[str]]:
    """Find class names that a CLIP does not know, such as numbers and codes."""
    lower = {name: name.lower().strip() for name in class_names}
    codes = [name for name in class_names if CODES.fullmatch(lower[name])]
    short = [name for name in class_names if SHORT.fullmatch(lower[name])]
    numbers = [found[1] for name in class_names if (found := NUMBERED.match(name))]
    counted = len(numbers) == len({*numbers}) == len(class_names)
    codes += [name for name in class_names if counted or 2 * len(short) > len(class_names)]
    return {"no-words": [f"`{name}`" for name in dict.fromkeys(codes)]}


def both(names: Iterable[object]) -> str:
    """Name things that are one."""
    return " and ".join(f"`{named(name)}`" for name in names)
