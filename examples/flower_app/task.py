"""A method by name, and sample images divided over clients, the same in every process.

Images are digits, or emoji for methods of CLIP.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fedprompt as fp
from fedprompt import methods, samples


def load(config: Mapping[str, Any]) -> tuple[fp.Method, methods.Federation, Tensor, Tensor]:
    """Make the method of a run configuration, the federation, and the test inputs and labels."""
    counts = {name: int(config[name]) for name in ("clients", "cohort", "rounds")}
    return _load(str(config["method"]), **counts)


@cache  # Flower's simulation runs several messages in one process
def _load(
    name: str, clients: int, cohort: int, rounds: int
) -> tuple[fp.Method, methods.Federation, Tensor, Tensor]:
    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for one another
    if name not in methods.METHODS:
        names = ", ".join(sorted(methods.METHODS))
        raise ValueError(f"`method` must be one of {names}; got {name!r}.")
    entry = methods.METHODS[name]
    images, labels, test_images, test_labels = samples.digits()
    if "CLIP" in entry.families:
        train, test = samples.emoji()
        images, test_images = (_for_clip(side.images, entry.inputs) for side in (train, test))
        labels, test_labels = train.labels, test.labels
    budget = {"clients": range(clients), "cohort_size": cohort, "rounds": rounds, "steps": 8}
    num_classes = len(samples.CLASS_NAMES) if "CLIP" in entry.families else 10
    common = {"num_classes": num_classes, "batch_size": 32, "seed": 0, "public": images[:100]}
    setting = (_clip if "CLIP" in entry.families else _vit)(entry, budget | common)
    method = entry.make(setting)
    if method.form is None:
        raise ValueError(f"`method` must have a form, and {name} has none.")
    draw = torch.Generator().manual_seed(0)
    # One client more than those that train: a new client.
    shards = fp.data.dirichlet(labels[100:], clients + 1, alpha=1.0, min_size=10, generator=draw)
    positions = dict(enumerate(map(torch.as_tensor, shards)))
    federation = methods.Federation(setting, images[100:], labels[100:], positions)
    return method, federation, test_images, test_labels


def _vit(entry: methods.Entry, common: dict[str, Any]) -> methods.VitSetting:
    """One frozen ViT for all clients, or two of different sizes."""
    several = "one model" not in entry.families
    trunks = [fp.vit_trunk(samples.vit(size)) for size in ("S", "B")[: 1 + several]]
    features = 48 if several else None
    return methods.VitSetting(
        **common, trunks=trunks, num_features=features, augment=samples.augment
    )


def _clip(entry: methods.Entry, common: dict[str, Any]) -> methods.ClipSetting:
    """One frozen CLIP for all clients."""
    clip = samples.clip()
    return methods.ClipSetting(
        **common,
        clip=clip,
        tower=fp.TextTower(clip, samples.tokenize),
        class_names=samples.CLASS_NAMES,
        scale=clip.logit_scale.exp().item(),
        template=samples.TEMPLATES[""][0],
        make_optimizer=torch.optim.Adam,
    )


def wire(federation: methods.Federation) -> dict[str, Any]:
    """Return the largest size of a message in bytes, and the backbone of each client."""
    setting = federation.setting
    clip = isinstance(setting, methods.ClipSetting)

    def fingerprint(client: int) -> dict[str, str]:
        return fp.fingerprint(setting.tower if clip else setting.trunk_of(client))

    return {"max_bytes": 10**7, "fingerprint": fingerprint}


def folder(config: Mapping[str, Any], part: str) -> Path | None:
    """Return the folder of the server or of the clients, or None if nothing is saved."""
    return Path(str(config["out"]), part) if config["out"] else None


@torch.no_grad()
def _for_clip(images: Tensor, inputs: str) -> Tensor:
    """Return images for the CLIP, or its tokens for them, the pooled one first."""
    images = samples.preprocess(images)
    if inputs == "images":
        return images
    pooled, patches = fp.image_tokens(samples.clip(), images)
    return torch.cat([pooled[:, None], patches], 1)
