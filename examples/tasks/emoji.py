"""Emoji in five styles and a small CLIP that has not seen their concepts: `fedprompt.samples`.

Clients differ in style, in classes, or have two classes each; or one family of styles is left out
of the training, and its clients are new. Test emoji show other concepts than training emoji.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from fedprompt import samples
from fedprompt.compare.problems import COLUMNS, NEWCOMERS
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import Images, Trial
from fedprompt.methods import METHODS, ClipSetting
from tasks.controls import CONTROLS
from tasks.core import Machine, Task
from tasks.digits import in_turn
from tasks.tuning import draws

NUM_CLIENTS = 10
FAMILIES = {
    "noto": ("noto",),
    "noto-v1": ("noto-v1",),
    "twemoji": ("twemoji",),
    "fluent": ("fluent-emoji", "fluent-emoji-high-contrast"),
}
"""Styles that are renderings of the same drawings are left out together."""
PARTITIONS = {
    "styles": "feature shift (one style for each client)",
    "dirichlet": "label shift (Dirichlet .3)",
    "pairs": "two classes a client",
    **{f"without-{name}": f"no training on {name}" for name in FAMILIES},
}


@cache
@torch.no_grad()
def sides(inputs: str, validate: bool) -> tuple[Images, Images]:
    """Return training and test emoji as tokens of the CLIP, the pooled one first, or as images.

    With `validate`, a quarter of the nouns of the training emoji take the place of the test emoji.
    """
    train, test = samples.emoji()
    if validate:
        nouns = [name.split()[-1] for name in train.names]  # "guide dog" is a dog
        of_class: dict[int, list[str]] = {}
        for noun, label in sorted(dict(zip(nouns, train.labels.tolist(), strict=True)).items()):
            of_class.setdefault(label, []).append(noun)
        drawn = {noun for members in of_class.values() for noun in members[::4]}
        held = torch.tensor([noun in drawn for noun in nouns])
        known = Images(train.images, train.labels, train.styles)
        chosen = [known.at(~held), known.at(held)]
    else:
        chosen = [Images(side.images, side.labels, side.styles) for side in (train, test)]
    first, second = (side._replace(pixels=encoded(side.pixels, inputs)) for side in chosen)
    return first, second


def encoded(images: Tensor, inputs: str) -> Tensor:
    """Prepare emoji for the CLIP, and encode them unless a method takes images."""
    images = samples.preprocess(images)
    if inputs == "images":
        return images
    pieces = [fp.image_tokens(samples.clip(), batch) for batch in images.split(256)]
    return torch.cat([torch.cat([pooled[:, None], patches], 1) for pooled, patches in pieces])


def shards(train: Images, partition: str, rng: np.random.Generator) -> list[Any]:
    """Return the positions of the emoji of each client."""
    if partition == "dirichlet":
        drawn = {"alpha": 0.3, "min_size": 20, "generator": rng}
        return list(fp.data.dirichlet(train.labels, NUM_CLIENTS, **drawn))
    if partition == "pairs":
        pairs = {"classes_per_client": 2, "generator": rng}
        return list(fp.data.pathological(train.labels, 12, **pairs))
    return in_turn(train.domains, NUM_CLIENTS)  # client k has style k % 5


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
    """Divide the emoji over clients."""
    train, test = sides(row.entry.inputs, validate)
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    train = train.at(order)
    owned = shards(train, partition, np.random.default_rng(seed))
    left = FAMILIES.get(partition.removeprefix("without-"), ())
    styles = [samples.STYLES[k % len(samples.STYLES)] for k in range(len(owned))]
    # Clients that never train have the highest ids.
    ids = sorted(range(len(owned)), key=lambda k: styles[k] in left)
    first = sum(styles[k] not in left for k in ids)
    setting = ClipSetting(
        tower=fp.TextTower(samples.clip(), samples.tokenize),
        class_names=samples.CLASS_NAMES,
        template=samples.TEMPLATES[""][0],
        clients=range(first),
        seed=seed,
        rounds=5 if validate else 10,
        steps=8,
        make_optimizer=torch.optim.Adam,
    )
    trial = Trial.of(
        setting, train, test, [owned[k] for k in ids], range(first, len(ids)), samples.STYLES
    )
    return trial.shrunk(machine.shrink)


def rows(partition: str) -> list[Row]:
    """Return all methods for CLIP, and the control rows."""
    methods = METHODS | CONTROLS
    return [Row.of(name) for name in methods if "CLIP" in methods[name].families]


TASKS = {
    "emoji": Task(
        title="emoji",
        partitions=PARTITIONS,
        hours=lambda partition, row: 20 / 3600,
        family=lambda partition: "CLIP",
        rows=rows,
        make=make,
        trials=lambda partition, row: draws(row, "emoji"),
        tuned_on="styles",
        columns=COLUMNS | NEWCOMERS,
        bound=0.03,
        references={
            word: [Row.of(name).title for name in names]
            for word, names in {"local": ("coop", "coop_twice"), "FedAvg": ("promptfl",)}.items()
        },
    )
}
