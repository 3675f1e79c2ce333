"""A method by name, and sample images divided over clients, the same in every process.

Images are digits, or emoji for methods of CLIP.
"""

import inspect
from collections.abc import Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import fedprompt as fp
from fedprompt import methods, samples


def load(config: Mapping[str, Any]) -> tuple[fp.Method, methods.Federation, Tensor, Tensor]:
    """Make the method of a run configuration, the federation, and the test inputs and labels."""
    counts = {name: int(config[name]) for name in ("clients", "cohort", "rounds", "newcomers")}
    return _load(str(config["method"]), **counts)


@cache  # Flower's simulation runs several messages in one process
def _load(
    name: str, clients: int, cohort: int, rounds: int, newcomers: int
) -> tuple[fp.Method, methods.Federation, Tensor, Tensor]:
    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for one another
    entry = entry_of(name)
    images, labels, test_images, test_labels = samples.digits()
    if "CLIP" in entry.families:
        train, test = samples.emoji()
        images, test_images = (_for_clip(side.images, entry.inputs) for side in (train, test))
        labels, test_labels = train.labels, test.labels
    budget = {"clients": range(clients), "cohort_size": cohort, "rounds": rounds, "steps": 8}
    num_classes = len(samples.CLASS_NAMES) if "CLIP" in entry.families else 10
    common = {"num_classes": num_classes, "public": images[:100]}
    setting = (_clip if "CLIP" in entry.families else _vit)(entry, budget | common)
    method = entry.make(setting)
    if method.form is None:
        raise ValueError(f"`method` must have a form, and {name} has none.")
    method = method._replace(setting=method.setting or setting)
    draw = torch.Generator().manual_seed(0)
    count = clients + newcomers  # the last ones never train
    shards = fp.data.dirichlet(labels[100:], count, alpha=1.0, min_size=10, generator=draw)
    positions = dict(enumerate(map(torch.as_tensor, shards)))
    federation = methods.Federation(images[100:], labels[100:], positions)
    return method, federation, test_images, test_labels


def entry_of(name: str) -> methods.Entry:
    """Return a method of the gallery, or NAME of a file of yours, by FILE:NAME.

    FILE is next to this one, which Flower sends to the nodes, or has its full path on each machine.
    """
    file, _, function = name.rpartition(":")
    if file:
        make = getattr(module_of(Path(__file__).parent / file), function, None)
        if not callable(make):
            raise ValueError(f"`method` must name a function of {file}; got {function!r}.")
        if function not in methods.METHODS or methods.METHODS[function].make is not make:
            setting = str(next(iter(inspect.signature(make).parameters.values())).annotation)
            family = "CLIP" if "ClipSetting" in setting else "one model"
            return methods.Entry(function, function, make, (family,), (), {}, "")
    if function not in methods.METHODS:
        names = ", ".join(sorted(methods.METHODS))
        raise ValueError(f"`method` must be one of {names}, or FILE:NAME; got {name!r}.")
    return methods.METHODS[function]


@cache  # a file that registers its methods does so once
def module_of(path: Path) -> ModuleType:
    """Import a file of yours."""
    if not path.is_file() or (spec := spec_from_file_location(path.stem, path)) is None:
        raise ValueError(
            f"`method` must name a file next to task.py, or its full path; got {path}."
        )
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    return methods.ClipSetting(
        **common,
        tower=fp.TextTower(samples.clip(), samples.tokenize),
        class_names=samples.CLASS_NAMES,
        template=samples.TEMPLATES[""][0],
        make_optimizer=torch.optim.Adam,
    )


def wire(method: fp.Method) -> dict[str, Any]:
    """Return the largest size of a message in bytes, and the backbone of each client."""
    setting = method.setting
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
