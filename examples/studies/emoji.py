"""Emoji in five styles and a small CLIP that has not seen their concepts: `fedprompt.samples`.

Clients differ in style, in classes, or have two classes each; one family of styles is left out of
the training, and its clients are new; there are a few images of each class, or classes that nobody
trains; or the emoji are small, among fragments of others. Test emoji show other concepts than
training emoji.
"""

from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from build_samples.canvas import on_canvases
from fedprompt import samples
from fedprompt.backbones.pretrained import tokens_of
from fedprompt.compare import Trial
from fedprompt.data import experiments as experiments
from fedprompt.methods import ClipSetting
from studies.core import Images, Machine, Row, divided, study, trial
from studies.tuning import rows_of

NUM_CLIENTS = 10
FAMILIES = {
    "noto": ("noto",),
    "noto-v1": ("noto-v1",),
    "twemoji": ("twemoji",),
    "fluent": ("fluent-emoji", "fluent-emoji-high-contrast"),
}
"""Styles that are renderings of the same drawings are left out together."""
SMALL = {"smallest": 14.0, "largest": 22.0}
"""Sides of emoji among fragments, in pixels of 32."""
OF_CLASSES = "fedapt", "promptfl_csc", "coop_csc", "linear_head", "linear_alone"
"""Rows that learn something for each class, so they know no new ones."""
RATE = {"learning_rate": 0.01, "epsilon": 0.1}
FIXED = Row("FedOTP (classical), rate 0.01", "fedotp_classical", RATE)
"""Row that is not tuned, with the rate of the mean of similarities."""


@cache
@torch.no_grad()
def sides(inputs: str, among_fragments: bool = False) -> tuple[Images, Images]:
    """Return training and test emoji as tokens of the CLIP, the pooled one first, or as images."""
    rng = torch.Generator().manual_seed(0)
    chosen = [Images(side.images, side.labels, side.styles) for side in samples.emoji()]
    if among_fragments:
        chosen = [side._replace(pixels=cluttered(side.pixels, rng)) for side in chosen]
    first, second = (side._replace(pixels=encoded(side.pixels, inputs)) for side in chosen)
    return first, second


def base_to_new(train: Images, test: Images) -> tuple[Images, Images, tuple[Any, ...]]:
    """Return the emoji of base classes, and the test emoji of new ones."""
    (base, _), (tests, new) = (
        experiments.base_to_new(side.labels, samples.CLASS_NAMES) for side in (train, test)
    )
    first, second, other = (
        side.at(torch.as_tensor(found.positions))._replace(labels=torch.as_tensor(found.labels))
        for side, found in ((train, base), (test, tests), (test, new))
    )
    return first, second, (other.pixels, other.labels, new.names, True)


def cluttered(images: Tensor, generator: torch.Generator) -> Tensor:
    """Put small emoji among fragments of others; on a canvas, ink is 1."""
    return 1 - on_canvases(1 - images, generator, domains=["plain"], **SMALL)[0]


def encoded(images: Tensor, inputs: str) -> Tensor:
    """Prepare emoji for the CLIP, and encode them unless a method takes images."""
    images = samples.preprocess(images)
    if inputs == "images":
        return images
    return torch.cat([tokens_of(samples.clip(), batch) for batch in images.split(256)])


PAIRS = {"of": "pathological", "count": 12, "classes_per_client": 2}
DIVISIONS = {
    "dirichlet": {"of": "dirichlet", "count": NUM_CLIENTS, "alpha": 0.3, "min_size": 20},
    "pairs": PAIRS,
    "clutter": PAIRS,
}
"""Divisions of some partitions. In the others, client k has style k % 5."""


def shards(train: Images, partition: str, rng: np.random.Generator) -> list[Any]:
    """Return the positions of the emoji of each client."""
    chosen = torch.arange(len(train.labels))
    if partition.endswith("-shots"):
        shots = int(partition.removesuffix("-shots"))
        chosen = experiments.few_shots(train.labels, shots=shots, generator=rng)
    how = DIVISIONS.get(partition, {"of": "domains", "count": NUM_CLIENTS})
    return [chosen[part] for part in divided(train.at(chosen), rng=rng, **how)]


def make(partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Divide the emoji over clients."""
    train, test = sides(row.inputs, partition == "clutter")
    names, further = samples.CLASS_NAMES, dict[str, Any]()
    if partition == "base-to-new":
        train, test, further["new"] = base_to_new(train, test)
        names = names[: len(names) // 2]
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    train = train.at(order)
    owned = shards(train, partition, np.random.default_rng(seed))
    left = FAMILIES.get(partition.removeprefix("without-"), ())
    styles = [samples.STYLES[k % len(samples.STYLES)] for k in range(len(owned))]
    # Clients that never train have the highest ids.
    ids = sorted(range(len(owned)), key=lambda k: styles[k] in left)
    tower = fp.TextTower(samples.clip(), samples.tokenize)
    build = partial(ClipSetting, tower=tower, template=samples.TEMPLATES[""][0])
    fields = {"rounds": 10, "steps": 8, "make_optimizer": torch.optim.Adam}
    fields |= {"class_names": names, "num_classes": len(names), "domain_names": samples.STYLES}
    fields |= {"seed": seed, "newcomers": sum(styles[k] in left for k in ids)}
    made = trial(build, train, test, [owned[k] for k in ids], **fields)
    places = torch.arange(len(test.labels))  # the same test emoji for all seeds
    return made._replace(further=further, places=places)


def rows(partition: str) -> list[Row]:
    """Return all methods for CLIP, and the control rows."""
    found = rows_of("CLIP", *(OF_CLASSES if partition == "base-to-new" else ()))
    return [*found, FIXED] if partition == "pairs" else found


STUDIES = {"emoji": study("emoji", rows=rows, make=make)}
