"""Handwritten digits: one network, three networks, or a CLIP, divided in three ways.

One client in six never trains.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

import build_samples
import fedprompt as fp
from build_samples import digits_clip
from build_samples.canvas import DOMAINS
from build_samples.canvas import on_canvases as put
from fedprompt import samples
from fedprompt.backbones.pretrained import tokens_of
from fedprompt.compare import Trial
from fedprompt.interfaces import Trunk
from fedprompt.methods import ClipSetting, Setting
from studies.core import HEAD_RATE, Images, Machine, Row, Study, study, trial
from studies.tuning import HeadSetting, rows_of, two_rates

NUM_CLIENTS, NUM_NEWCOMERS, NUM_PUBLIC = 18, 3, 100
DIVISIONS = {
    "dirichlet": {"of": "dirichlet", "alpha": 0.3},
    "domains": {"of": "domains"},
    "example": {"of": "domains"},
    "few": {"of": "iid", "most": 50},
}
SHIFTED = ("raw", "inverted", "rotated", "inverted_rotated", "noisy")
SIZES = {"smallest": 16, "largest": 24}
"""Sides of digits on canvases, in pixels of 32."""
RATE = {"learning_rate": 0.01}
FIXED = {
    "mixed models": [Row("Local training, rate 0.01", "local", {**RATE, HEAD_RATE: 0.01})],
    "CLIP": [Row("FedCLIP's adapter (local), rate 0.01", "adapter_alone", RATE)],
}
"""Rows that are not tuned, with the rate of methods that they are compared with."""


def vits(sizes: str, **common: Any) -> HeadSetting:
    """Make a setting of frozen ViTs, given to the clients in turn."""
    width = None if len(sizes) == 1 else 48
    trunks = [trunk(size) for size in sizes]
    return HeadSetting(augment=samples.augment, trunks=trunks, num_features=width, **common)


def clip(**common: Any) -> ClipSetting:
    """Make a setting of one frozen CLIP, whose image tokens are computed once."""
    return ClipSetting(
        tower=fp.TextTower(digits_clip.clip(), digits_clip.tokenize),
        class_names=digits_clip.CLASS_NAMES,
        **{**common, "make_optimizer": torch.optim.Adam},
    )


def make(build: Any, partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Divide the digits over clients, for a setting that `build` makes."""
    shifted = partition in ("domains", "example")
    train, public, test = digits(build is clip, shifted, seed, row.inputs)
    fields = {"rounds": 15, "steps": 8, "cohort_size": 5, "batch_size": 32, "public": public}
    fields |= {"make_optimizer": partial(torch.optim.AdamW, weight_decay=1e-3)}
    fields |= {"newcomers": NUM_NEWCOMERS, "places": torch.arange(len(test.labels))}
    division = {"count": NUM_CLIENTS, **DIVISIONS[partition]}
    return trial(build, train, test, division, seed=seed, **fields)


@cache
def trunk(size: str) -> Trunk:
    """Return a sample network as a trunk: "S", "B" or "L"."""
    return fp.vit_trunk(build_samples.vit(size))


@cache
def digits(
    on_canvases: bool, shifted: bool, seed: int, inputs: str
) -> tuple[Images, Tensor, Images]:
    """Return training, public and test digits, in one domain or in several.

    All seeds have the same test digits.
    """
    names = (list(DOMAINS) if on_canvases else SHIFTED) if shifted else None
    names = names or ["inverted" if on_canvases else "inverted_rotated"]
    split = samples.digits(0, domain=samples.raw)
    order = torch.randperm(len(split.train_labels), generator=torch.Generator().manual_seed(seed))
    images, labels = split.train_images[order], split.train_labels[order]
    public, images, labels = images[:NUM_PUBLIC], images[NUM_PUBLIC:], labels[NUM_PUBLIC:]
    test, test_labels = split.test_images, split.test_labels
    rng = fp.stream_generator(seed, server_round=0, purpose="domains")
    (train, domains), (public, _), (test, test_domains) = (
        in_domains(side, names, rng, SIZES if on_canvases else None, inputs)
        for side in (images, public, test)
    )
    return Images(train, labels, domains), public, Images(test, test_labels, test_domains)


def in_domains(
    images: Tensor,
    names: Sequence[str],
    rng: torch.Generator,
    sizes: Mapping[str, float] | None = None,
    inputs: str = "",
) -> tuple[Tensor, Tensor]:
    """Return the images in domains, in turn, and the domains; with sizes, tokens of canvases."""
    if sizes is not None:
        canvases, domains = put(images, rng, domains=names, **sizes)
        return tokens(canvases, inputs), domains
    domains, images = torch.arange(len(images)) % len(names), images.clone()
    for number, name in enumerate(names):
        how = {"generator": rng} if name == "noisy" else {}
        images[domains == number] = getattr(samples, name)(images[domains == number], **how)
    return images, domains


@torch.no_grad()
def tokens(canvases: Tensor, inputs: str = "") -> Tensor:
    """Return the image tokens of CLIP with the pooled one first, or its preprocessed images."""
    images = samples.preprocess(canvases)
    if inputs == "images":
        return images
    return torch.cat([tokens_of(digits_clip.clip(), batch) for batch in images.split(256)])


def study_of(name: str, family: str, build: Callable[..., Setting]) -> Study:
    """Make the study of all methods of a family."""

    def rows(partition: str) -> list[Row]:
        found = rows_of(family)
        return [*(found if family == "CLIP" else map(two_rates, found)), *fixed]

    fixed = FIXED.get(family, [])
    return study(name, rows=rows, make=partial(make, build))


OTHERS = ("local", "head_tuning", "fedvpt_d", "scaffold")
LORA = Row.of("fedlora", learning_rate=3e-3, rank=4)
WHICH = [two_rates(row) for row in (LORA, *map(Row.of, OTHERS))]
"""Which method when: the rows that decide, one of which is recommended."""

STUDIES = {
    "digits": study_of("digits", "one model", partial(vits, "S")),
    "networks": study_of("networks", "mixed models", partial(vits, "SBL")),
    "clip": study_of("clip", "CLIP", clip),
    "which-when": study(
        "which-when", rows=lambda partition: WHICH, make=partial(make, partial(vits, "S"))
    ),
}
