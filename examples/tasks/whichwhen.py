"""Which method when: the rows that decide, on your images, and one recommendation.

With ``--root FOLDER``, each folder in it is a client with ``train/CLASS/*`` and ``test/CLASS/*``.
``--weights NAME=FILE`` names a vision transformer of timm; ``--pretrained`` downloads DINOv2 ViT-S.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np

import fedprompt as fp
import photographs
from fedprompt.interfaces import TrainableTrunk
from tasks import core, digits
from tasks.ablations import VIT, trial
from tasks.core import COLUMNS, HEAD_RATE, NEWCOMERS, Images, Machine, Row, Task, TaskError, Trial
from tasks.heads import HeadSetting
from tasks.photos import DINO
from tasks.pipeline import Preparation, prepared_trunk
from tasks.records import Record
from tasks.sets.readers import class_folders, decoded_sides
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
    train, test = read(machine.root)
    num_classes = 1 + int(train.labels.max())
    if validate:  # a quarter of the training images of each client and class is for testing
        tested = core.held_out(train.cells(num_classes), 0.25, np.random.default_rng(seed))
        train, test = train.at(~tested), train.at(tested)
    count = 1 + int(train.domains.max())
    budget = {"rounds": 10 if validate else 20, "steps": 10, "cohort_size": count, "batch_size": 32}
    budget |= {"num_classes": num_classes, "make_optimizer": VIT["make_optimizer"]}
    build = partial(HeadSetting, trunks=[network(machine)], head_rate=row.values.get(HEAD_RATE))
    shards = fp.data.by_domain(train.domains)
    return trial(build, train, test, shards, seed=seed, **budget).shrunk(machine.shrink)


def read(root: Path) -> tuple[Images, Images]:
    """Read the training and test images of all clients, with the client as domain.

    Raises:
        TaskError: If no folder is that of a client.
    """
    sides = "train", "test"
    clients = [
        path for path in sorted(root.glob("*")) if all((path / side).is_dir() for side in sides)
    ]
    if not clients:
        rule = "have a folder for each client, with train/CLASS/* and test/CLASS/*"
        raise TaskError(f"`--root` must {rule}; got {root}.")
    try:
        first = class_folders(clients[0] / "train", SIZE).classes
        parts = [
            [class_folders(client / side, SIZE, classes=first) for client in clients]
            for side in sides
        ]
    except (FileNotFoundError, ValueError) as error:  # an empty class, or other classes
        raise TaskError(str(error)) from error
    return decoded_sides(*parts, root, "clients", SIZE)


def network(machine: Machine) -> TrainableTrunk:
    """Make the trunk of the network that is named, or of the one that timm downloads.

    Raises:
        TaskError: If there is none.
    """
    if not machine.weights and not machine.pretrained:
        raise TaskError("`--weights NAME=FILE` is missing; or add --pretrained.")
    name, path = next(iter(machine.weights.items()), (DINO, None))
    model = photographs.load_network(name, path, machine.pretrained, img_size=SIZE)
    normal = {key: model.pretrained_cfg[key] for key in ("mean", "std")}
    return prepared_trunk(fp.vit_trunk(model), Preparation(SIZE, **normal))


def advice(found: Sequence[Record], partition: str) -> str:
    """Recommend a row for the clients' images, and a row for one model of all test images."""
    by_row = grouped(found, partition)
    if min(map(len, by_row.values())) < FEWEST or any("shrink" in record for record in found):
        return f"This run recommends nothing: it takes {FEWEST} seeds, and whole runs."
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
        hours=lambda partition, row: 15 / 3600 if partition == "example" else None,
    )
}
