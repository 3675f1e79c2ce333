"""Which method when: the rows that decide, on your images, and one recommendation.

With ``--root FOLDER``, each folder in it is a client with ``train/CLASS/*`` and ``test/CLASS/*``.
``--weights NAME=FILE`` names a vision transformer of timm; ``--pretrained`` downloads DINOv2 ViT-S.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torchvision.datasets import ImageFolder

import fedprompt as fp
import photographs
from fedprompt.compare.images import opened, squared
from fedprompt.interfaces import TrainableTrunk
from tasks import core, digits
from tasks.ablations import VIT, trial
from tasks.core import COLUMNS, HEAD_RATE, NEWCOMERS, Images, Machine, Row, Task, TaskError, Trial
from tasks.heads import HeadSetting
from tasks.photos import DINO
from tasks.pipeline import Preparation, prepared_trunk
from tasks.records import Record
from tasks.sets.readers import decoded_sides
from tasks.tables import FEWEST, gains, grouped, interval, mean, percent
from tasks.tuning import draws, two_rates

LOCAL = Row.of("local").title
LORA = Row.of("fedlora", learning_rate=3e-3, rank=4)  # first, since it needs a package
OTHERS = ("local", "head_tuning", "fedvpt_d", "scaffold")
ROWS = [two_rates(row) for row in (LORA, *map(Row.of, OTHERS))]
RATES = {"fedlora": (3e-4, 3e-2)}
SIZE = 224  # pixels


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
    """Divide the sample digits, or read the clients' folders.

    Raises:
        TaskError: If a folder or a package is missing.
    """
    if row.method == "fedlora" and find_spec("peft") is None:
        rule = "needs PEFT: pip install -e '.[examples,peft]', or leave it out by --rows"
        raise TaskError(f"The row {row.title} {rule}.")
    if partition == "example":
        where = {"seed": seed, "machine": machine, "validate": validate}
        return digits.make(partial(digits.vits, "S"), "domains", row, **where)
    train, test, num_classes = read(machine.root)
    if validate:  # a quarter of the training images of each client is for testing
        tested = core.held_out(train.domains, 0.25, np.random.default_rng(seed))
        train, test = train.at(~tested), train.at(tested)
    count = 1 + int(train.domains.max())
    budget = {"rounds": 10 if validate else 20, "steps": 10, "cohort_size": count, "batch_size": 32}
    budget |= {"num_classes": num_classes, "make_optimizer": VIT["make_optimizer"]}
    build = partial(HeadSetting, trunks=[network(machine)], head_rate=row.values.get(HEAD_RATE))
    shards = fp.data.by_domain(train.domains)
    return trial(build, train, test, shards, seed=seed, **budget).shrunk(machine.shrink)


class ClassFolders(ImageFolder):
    """Folder with one folder of images for each class.

    Args:
        folder: Folder.
        size: Side of the images.
        classes: Names of the classes, of which some may be missing. If None, those of the folders.
        values: Further arguments of ``ImageFolder``.
    """

    def __init__(
        self, folder: Path, size: int, classes: Sequence[str] | None = None, **values: Any
    ) -> None:
        self.given = classes
        values |= {"transform": partial(squared, size=size), "loader": opened}
        super().__init__(str(folder), allow_empty=classes is not None, **values)

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """Return the names of the classes, and their labels."""
        if self.given is None:
            return super().find_classes(directory)
        return list(self.given), {name: label for label, name in enumerate(self.given)}


LEAST = {"train": 2, "test": 1}
"""Smallest number of images of a client on each side."""


def folders(root: Path) -> list[list[ClassFolders]]:
    """Return the folders of training images of all clients, and those of test images.

    A client may lack some of the classes.

    Raises:
        TaskError: If there is no client, or a client has too few images.
    """
    clients = sorted({path.parent for side in LEAST for path in root.glob(f"[!.]*/{side}")})
    paths = [path for side in LEAST for path in root.glob(f"[!.]*/{side}/[!.]*")]
    classes = sorted({path.name for path in paths if path.is_dir()})
    if not classes:
        rule = "have a folder for each client, with train/CLASS/* and test/CLASS/*"
        raise TaskError(f"`--root` must {rule}; got {root}.")
    sides = [[ClassFolders(client / side, SIZE, classes) for client in clients] for side in LEAST]
    for folder in (*sides[0], *sides[1]):
        least = LEAST[Path(folder.root).name]
        if len(folder) < least:
            rule = f"have at least {least} images in folders of their classes"
            raise TaskError(f"{folder.root} must {rule}; got {len(folder)}.")
    return sides


def hashed(sides: Sequence[Sequence[ClassFolders]], root: Path) -> str:
    """Return a hash of the names, sizes and times of images."""
    paths = [Path(path) for side in sides for folder in side for path, _ in folder.samples]
    stats = [(str(path.relative_to(root)), path.stat()) for path in paths]
    found = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(found).encode()).hexdigest()[:12]


@cache
def identity(root: Path, weights: tuple[tuple[str, Path], ...]) -> list[str]:
    """Return what tells the images and the weights of a user from others."""
    files = [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for _, path in weights]
    return [hashed(folders(root), root), *(name for name, _ in weights), *files]


def inputs(partition: str, machine: Machine) -> dict[str, Any]:
    """Return the field of records of a user's images."""
    if partition == "example":
        return {}
    return {"inputs": identity(machine.root, tuple(machine.weights.items()))}


def read(root: Path) -> tuple[Images, Images, int]:
    """Read the training and test images with the client as domain, and the number of classes."""
    sides = folders(root)
    images = decoded_sides(*sides, root, f"clients-{hashed(sides, root)}", SIZE)
    return *images, len(sides[0][0].classes)


def network(machine: Machine) -> TrainableTrunk:
    """Make the trunk of the network that is named, or of the one that timm downloads.

    Raises:
        TaskError: If there is none or several, or it cannot be used.
    """
    if len(machine.weights) > 1 or not (machine.weights or machine.pretrained):
        raise TaskError("`--weights NAME=FILE` must be given once; or add --pretrained.")
    name, path = next(iter(machine.weights.items()), (DINO, None))
    try:
        model = photographs.load_network(name, path, machine.pretrained, img_size=SIZE)
        trunk = fp.vit_trunk(model)
    except (RuntimeError, TypeError, ValueError, SafetensorError) as error:
        first = f"{name}: {error}".splitlines()[0]
        raise TaskError(f"`--weights` must name a vision transformer; {first}") from error
    normal = {key: model.pretrained_cfg[key] for key in ("mean", "std")}
    return prepared_trunk(trunk, Preparation(SIZE, **normal))


def advice(found: Sequence[Record], partition: str) -> str:
    """Recommend a row for the clients' images, and a row for one model of all test images."""
    by_row = grouped(found, partition)
    if LOCAL not in by_row or min(map(len, by_row.values())) < FEWEST:
        return f"This run recommends nothing: it takes {FEWEST} seeds, and the row {LOCAL}."
    own_mix, full = (chosen(by_row, column) for column in ("own", "full"))
    return f"**Use** {own_mix} for a client's images, and {full} for the images of all clients."


def chosen(by_row: Mapping[str, Sequence[Record]], column: str) -> str:
    """Return the cheapest row that is not shown to be less accurate than the best one."""
    best = max(by_row, key=lambda title: mean(by_row[title], column))
    for title in sorted(by_row, key=lambda title: mean(by_row[title], "bytes_up")):
        lost = gains(column, by_row[best], by_row[title])
        if title == best or (len(lost) > 1 and np.mean(lost) <= interval(lost)):
            break
    gain = percent(gains(column, by_row[title], by_row[LOCAL]), signed=True)
    return title if title == LOCAL else f"{title} ({gain} points to local training)"


TASKS = {
    "which-when": Task(
        title="Which method when",
        partitions={
            "example": "sample digits, one domain for each client",
            "yours": "one client for each folder",
        },
        rows=lambda partition: ROWS,
        make=make,
        trials=lambda partition, row: draws(row, "which", RATES.get(str(row.method))),
        columns=COLUMNS | NEWCOMERS,
        references={"local": [LOCAL]},
        compared=("own", "full"),
        advice=advice,
        inputs=inputs,
        hours=lambda partition, row: 15 / 3600 if partition == "example" else None,
    )
}
