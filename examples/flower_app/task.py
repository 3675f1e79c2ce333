"""A method by name, and images of clients: samples, your folder, or a folder of each node.

The samples are digits, or emoji for methods of CLIP. Everything is the same in every process.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt as fp
from fedprompt import methods, samples

Images = tuple[Any, Tensor]


class Task(NamedTuple):
    """What the server and the nodes run.

    Attributes:
        method: Method, with its setting.
        federation: Images of the clients of this process, or None at a server without images.
        tests: Function from a client to its own test images and labels.
    """

    method: fp.Method
    federation: methods.Federation | None
    tests: Callable[[int], Images]


def load(config: Mapping[str, Any], node: Mapping[str, Any] = {}) -> Task:
    """Make the task of a run configuration, and of the configuration of a node."""
    return _load(tuple(sorted(config.items())), node.get("data", ""), node.get("partition-id", -1))


@cache  # Flower's simulation runs several messages in one process
def _load(items: tuple[tuple[str, Any], ...], own: str, client: int) -> Task:
    torch.set_num_threads(1)  # the networks are tiny: more threads only wait for one another
    config = dict(items)
    entry = entry_of(str(config["method"]))
    if config["classes"]:
        setting, federation, tests = _of_node(entry, config, own, client)
    elif own:
        raise ValueError('`classes` must name the classes of all nodes, such as classes="cat,dog".')
    else:
        make = _of_folder if config["data"] else _of_samples
        setting, federation, tests = make(entry, config)
    method = entry.make(setting)
    if method.form is None:
        raise ValueError(f"`method` must have a form, and {config['method']} has none.")
    return Task(method._replace(setting=method.setting or setting), federation, tests)


def budget(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a setting that a run configuration has."""
    counts = {"rounds": config["rounds"], "cohort_size": config["cohort"], "steps": config["steps"]}
    return {name: int(value) for name, value in counts.items()}


def _of_samples(entry: methods.Entry, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Divide digits or emoji. Every fifth image of a client is for its tests."""
    images, labels, *_ = samples.digits()
    if "CLIP" in entry.families:
        train, _ = samples.emoji()
        images, labels = _for_clip(train.images, entry.inputs), train.labels
    clients, newcomers = int(config["clients"]), int(config["newcomers"])
    num_classes = len(samples.CLASS_NAMES) if "CLIP" in entry.families else 10
    common = {"clients": range(clients), "num_classes": num_classes, "public": images[:100]}
    setting = (_clip if "CLIP" in entry.families else _vit)(entry, common | budget(config))
    draw = torch.Generator().manual_seed(0)
    count = clients + newcomers  # the last ones never train
    shards = fp.data.dirichlet(labels[100:], count, alpha=1.0, min_size=10, generator=draw)
    parts = {client: 100 + torch.as_tensor(shard) for client, shard in enumerate(shards)}
    return setting, *_with_tests(images, labels, parts)


def _of_folder(entry: methods.Entry, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Divide a folder of images as ``fedprompt compare`` does."""
    from fedprompt import compare

    names = ("vit", "clip", "layout")
    given = {name: config[name] for name in names if config[name]}
    given |= {"clients": config["division"] or None, "newcomers": int(config["newcomers"])}
    problem = compare.folder(config["data"], **given, **budget(config))
    family = "CLIP" if "CLIP" in entry.families else "one model"
    row = compare.Row(entry.title, entry.name, family=family)
    trial = problem.trial(next(iter(problem.partitions)), row, seed=0)
    inputs, labels, own = trial.tests.inputs, trial.tests.labels, trial.tests.own

    def tests(client: int) -> Images:
        places = torch.arange(len(labels)) if own is None else own[client]
        return inputs[places], labels[places]

    return trial.setting, trial.federation, tests


def _of_node(
    entry: methods.Entry, config: Mapping[str, Any], folder: str, client: int
) -> tuple[Any, ...]:
    """Make the setting of named classes, and read the images of a node, which no server has."""
    from fedprompt.backbones.pretrained import network

    names = [name.strip() for name in str(config["classes"]).split(",")]
    kind = "clip" if config["clip"] else "vit"
    made = network(config[kind], kind)
    common: Any = {"clients": range(int(config["clients"])), **budget(config)}
    clip = "CLIP" in entry.families
    inputs = made.inputs if not clip or entry.inputs == "images" else made.tokens(made.inputs)
    common["public"] = inputs[:0]
    setting: Any = methods.VitSetting(trunk=made.trunk, num_classes=len(names), **common)
    if clip:
        words = [name.replace("_", " ") for name in names]
        setting = methods.ClipSetting(tower=made.tower, class_names=words, **common)
    if not folder:
        return setting, None, lambda client: None
    files = _files(Path(folder), names)
    images = torch.stack([made.preparation(path) for path, *_ in files])
    if clip and entry.inputs != "images":
        images = torch.cat([made.tokens(part) for part in images.split(64)])
    labels = torch.tensor([label for _, label, _ in files])
    tested = torch.tensor([test for *_, test in files])
    parts = {client: torch.arange(len(files))[~tested]}
    if not tested.any():
        return setting, *_with_tests(images, labels, parts)
    federation = methods.Federation(images, labels, parts)
    return setting, federation, lambda client: (images[tested], labels[tested])


def _files(folder: Path, names: list[str]) -> list[tuple[Path, int, bool]]:
    """List images in ``CLASS/*`` or ``{train,test}/CLASS/*``: file, class, and if it is a test."""
    sides = {False: folder / "train", True: folder / "test"}
    if not sides[False].is_dir():
        sides = {False: folder}
    found = []
    for test, side in sides.items():
        for place in sorted(path for path in side.iterdir() if path.is_dir()):
            if place.name not in names:
                raise ValueError(
                    f"`classes` must have each class of {side}; got none {place.name!r}."
                )
            found += [(path, names.index(place.name), test) for path in sorted(place.iterdir())]
    if not found:
        raise ValueError(f"`data` must have folders of images, CLASS/*; got none in {folder}.")
    return found


def _with_tests(images: Tensor, labels: Tensor, parts: Mapping[int, Tensor]) -> tuple[Any, ...]:
    """Take every fifth image of a client for its tests."""
    shards = {client: part[torch.arange(len(part)) % 5 > 0] for client, part in parts.items()}

    def tests(client: int) -> Images:
        return images[parts[client][::5]], labels[parts[client][::5]]

    return methods.Federation(images, labels, shards), tests


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
