"""A problem from a folder of images: its layout, clients, frozen network and protocol."""

import os
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple, cast
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt import data
from fedprompt._files import path_of
from fedprompt.backbones.features import precompute
from fedprompt.backbones.pretrained import Network, network
from fedprompt.compare import divisions, experiments, identity, own
from fedprompt.compare.divisions import Division
from fedprompt.compare.images import UNREADABLE, decoded, stamp
from fedprompt.compare.own import Chosen, Data
from fedprompt.compare.pipeline import Preparation, prepared_trunk
from fedprompt.compare.problems import Problem
from fedprompt.compare.trials import CompareError, Further
from fedprompt.methods import ClipSetting, Setting, VitSetting

ALPHA, MOST, EACH = 0.3, 10, 20
"""Division of a folder without domains, if none is given: concentration, and up to so many clients
with this number of training images on average."""
BASE = {"full": "base classes", "new": "new classes", "h": "H"}


class Part(NamedTuple):
    """Images of a partition, and further tests.

    Attributes:
        words: Title.
        folder: Images that train or are tests of clients.
        keep: Their positions among all images.
        further: Further tests by the name of their figure: a store, positions, labels, names.
    """

    words: str
    folder: data.Folder
    keep: np.ndarray
    further: Mapping[str, "Tests"] = {}


@dataclass(frozen=True, eq=False)
class Store:
    """Images of a folder, and what the frozen network makes of them.

    Attributes:
        pixels: Images, uint8, as large as those of the network.
        folder: Their labels, domains and splits.
        network: Network.
        cache: Folder of files, or None.
    """

    pixels: Tensor
    folder: data.Folder
    network: Network
    cache: Path

    def inputs(self, positions: np.ndarray, kind: str, device: str) -> Chosen:
        """Return inputs of methods: images, or for a CLIP the tokens of its image tower."""
        places = torch.from_numpy(positions)
        if self.network.tower is None:
            return Chosen(self.pixels, places)
        prepare = preparation(self.network)
        if kind == "images":
            return Chosen(self.pixels, places, prepare)
        return Chosen(self.tokens(prepare, device), places)

    def tokens(self, prepare: Preparation, device: str) -> Tensor:
        """Compute the tokens once, and map the file."""
        side, identity = self.network.preparation.size[0], self.network.fingerprint["weights"]
        name = f"{stamp(self.folder)}-{side}px-{identity[:12]}.npy"
        path = self.cache / name
        if not whole(path, len(self.pixels)):
            model, prepared = self.network.model.to(device), prepare.to(device)
            encode: Any = lambda images: self.network.tokens(prepared(images)).cpu()  # noqa: E731
            found = precompute(encode, self.pixels, batch_size=64)
            model.to("cpu")
            part = path.with_name(f"{path.name}.{os.getpid()}.part")
            with part.open("wb") as file:
                np.save(file, found.numpy())
            part.replace(path)
        return torch.from_numpy(np.load(path, mmap_mode="c"))


Tests = tuple[Store, np.ndarray, np.ndarray, Sequence[str] | None]
"""Images, positions of tests, their labels, and the names of their classes, if they are others."""


def whole(path: Path, count: int) -> bool:
    """Return whether a file has an array of a length, and is not damaged."""
    try:
        return len(np.load(path, mmap_mode="r")) == count
    except (FileNotFoundError, ValueError, EOFError):
        return False


def preparation(made: Network) -> Preparation:
    """Return the preparation of a network's images, which already have its size."""
    own = made.preparation
    return Preparation(own.size[0], own.mean, own.std, own.interpolation)


def folder(
    root: str | os.PathLike[str],
    *,
    vit: Any = None,
    clip: Any = None,
    size: int | None = None,
    clients: str | None = None,
    shots: int | None = None,
    base_to_new: bool = False,
    leave_one_out: bool = False,
    test: str | os.PathLike[str] | None = None,
    newcomers: int = 0,
    layout: str | None = None,
    skip: bool = False,
    rounds: int = 10,
    steps: int | None = None,
    cohort_size: int | None = None,
    batch_size: int | None = None,
    autocast: torch.dtype | None = None,
    template: str = "a photo of a {}.",
    cache: str | os.PathLike[str] | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Problem:
    """Make a problem from a folder of images, which :func:`fedprompt.data.read_folder` reads.

    Without a split, a fifth of the images of each domain and class are tests, the same for all
    seeds. Inputs of frozen parts are computed once.

    Args:
        root: Folder of images, or a list of them.
        vit: Vision transformer: a name of timm, open_clip or transformers, NAME=FILE, or a model.
        clip: CLIP, in the same way.
        size: Side of the images in pixels. If None, that of the network.
        clients: ``"domains"``, ``"folders"``, ``"iid:N"``, ``"dirichlet:ALPHA:N"`` or
            ``"pathological:K:N"``. If None, domains are clients; without any, two to ten clients
            with Dirichlet shares of the classes.
        shots: Number of training images of each class, of all clients together. If None, all.
        base_to_new: Whether clients train on the first half of the classes, and are also tested on
            the others (``experiments.base_to_new``).
        leave_one_out: Whether each domain in turn is left out, and the others are clients
            (``experiments.leave_one_domain_out``).
        test: Folder of further tests, of the same or of other classes
            (``experiments.transfer``). Without a split, all of its images are tests.
        newcomers: Number of clients, the last ones, that never train.
        layout: Layout of the folder. If None, it is found. A folder of further tests that can be
            read in two ways is read in the layout of the folder.
        skip: Whether to leave out damaged images.
        rounds: Number of rounds.
        steps: Number of batches of a client in a round. If None, an epoch of an average client.
        cohort_size: Number of clients in a round. If None, all, but at most ten.
        batch_size: Number of images in a batch. If None, a quarter of those of an average client,
            from 4 to 32.
        autocast: torch.bfloat16, or None for float32.
        template: Sentence around a class name, for CLIP.
        cache: Folder of decoded images and tokens. If None, a temporary one.
        say: Function that is called with the description of the folder and of the clients.

    Raises:
        ValueError: If the folder, the network or the division cannot be used.
        ConnectionError: If the weights are not on this machine.

    Example:
        >>> import timm
        >>> from tempfile import TemporaryDirectory
        >>> from PIL import Image
        >>> model = timm.create_model("test_vit", img_size=32, num_classes=0)
        >>> with TemporaryDirectory() as root:
        ...     for place in ("art/cat", "art/dog", "photo/cat", "photo/dog"):
        ...         Path(root, place).mkdir(parents=True)
        ...         for name in ("1.png", "2.png"):
        ...             Image.new("RGB", (32, 32)).save(Path(root, place, name))
        ...     problem = folder(root, vit=model)
        >>> problem.family("")
        'one model'
    """
    given = {name: value for name, value in locals().items() if name not in ("root", "say")}
    own.check_counts(given)
    for name in ("clients", "template"):
        check.optional(check.text, name, given[name])
        check.require(given[name] != "", name, "not be empty", repr(given[name]))
    for name in ("base_to_new", "leave_one_out"):
        check.flag(name, given[name])
    for name in ("cache", "test"):
        check.optional(path_of, name, given[name], of="folder")
    check.function("say", say)
    if template.count("{}") != 1:
        raise check.wrong("template", "have one {} for the name of a class", repr(template))
    if (vit is None) == (clip is None):
        raise CompareError("Give one network: `vit` or `clip`, such as vit_base_patch16_224.")
    if base_to_new and (leave_one_out or clip is None):
        raise CompareError("`base_to_new` needs a CLIP, and no `leave_one_out`.")
    found = [data.read_folder(root, layout=layout, skip=skip)]
    found += [] if test is None else [read_tests(test, found[0].layout, skip)]
    say("\n".join(map(str, found)))
    kind = "vit" if clip is None else "clip"
    made = network(vit if clip is None else clip, kind, size=size, argument=f"--{kind}")
    where = Path(mkdtemp() if cache is None else cache)
    shares = divisions.SHARE, 1  # of another folder without a split, all images are tests
    stores = [stored(*pair, made, where, skip) for pair in zip(found, shares, strict=False)]
    for store in stores:
        if lost := store.folder.skipped.get(UNREADABLE):
            say(f"Left out, because they cannot be read: {len(lost)}.\n{store.folder}")
    if cache is None:
        finalize(stores[0], shutil.rmtree, where, ignore_errors=True)
    title = f"{Path(root).resolve().name}, {made.name}"
    again = partial(_again, os.fspath(root), tuple(given.items()))
    return replace(_problem(stores, given, title, say), again=again)


def read_tests(test: str | os.PathLike[str], layout: str, skip: bool) -> data.Folder:
    """Read a folder of further tests; one with two readings, in the layout of the other folder."""
    try:
        return data.read_folder(test, skip=skip)
    except (ValueError, OSError) as error:
        if "Choose by `layout`" in str(error):
            with suppress(ValueError):
                return data.read_folder(test, layout=layout, skip=skip)
        raise CompareError(str(error).replace("`root`", "`test`")) from error


def _problem(
    stores: Sequence[Store], given: Mapping[str, Any], title: str, say: Callable[[str], object]
) -> Problem:
    """Make the problem of images, and of further tests, from the arguments of :func:`folder`."""
    store = stores[0]
    if given["leave_one_out"] and len(store.folder.domain_names) < 2:
        raise CompareError("`leave_one_out` needs a folder with two domains or more.")
    parts = parts_of(store, given["base_to_new"], given["leave_one_out"])
    for name, part in parts.items():
        pairs = [("transfer", transferred(other, part.folder)) for other in stores[1:]]
        parts[name] = part._replace(further={**part.further, **dict(pairs)})
    first = next(iter(parts.values())).folder
    clients, division = divided_once(first, given["clients"], given["shots"])
    divide = partial(divided, clients=clients, shots=given["shots"])
    say(f"clients {clients}, seed 0\n{division}")
    own.check_clients(len(division.train), given["newcomers"], given["cohort_size"])
    mean = sum(map(len, division.train)) / len(division.train)
    batch_size = given["batch_size"] or int(min(max(mean / 4, 4), 32))
    budget = {name: given[name] for name in ("rounds", "steps", "cohort_size", "autocast")}
    budget["batch_size"] = batch_size
    of = {
        name: data_of(store, part, divide, given["newcomers"], given["template"], budget)
        for name, part in parts.items()
    }
    same = ("shots", "base_to_new", "leave_one_out", "newcomers", "template")
    known = [*map(identified, stores), clients, budget]
    columns, compared = columns_of(given["base_to_new"], given["leave_one_out"], len(stores) > 1)
    words = {name: f"{part.words}{clients}" for name, part in parts.items()}
    known.append([given[name] for name in same])
    return own.of_data(words, of.__getitem__, columns, known, title=title, compared=compared)


def divided_once(
    found: data.Folder, clients: str | None, shots: int | None
) -> tuple[str, Division]:
    """Return the division for seed 0, by domains or Dirichlet shares if none is given."""
    source = found.file or found.root
    train, test = map(len, divisions.sides(found))
    if not train or not test:
        rule = "have training and test images (without a split, two of a class)"
        raise CompareError(f"{source} must {rule}; got {train} and {test} images.")
    usual = f"dirichlet:{ALPHA}:{min(max(train // EACH, 2), MOST)}"
    usual = "domains" if found.domain_names != ("",) else usual
    how = clients or usual
    try:
        return how, divided(found, np.random.default_rng(0), clients=how, shots=shots)
    except ValueError as error:
        if clients is not None:
            raise
        raise CompareError(f"Without `clients`, {source} is divided by {usual}. {error}") from error


@lru_cache(1)
def _again(root: Hashable, given: tuple[tuple[str, Any], ...]) -> Problem:
    """Make the problem in another process, once for all of its cells."""
    return folder(cast(Any, root), **dict(given))


def columns_of(
    base_to_new: bool, leave_one_out: bool, test: bool
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the columns of a table, and those of which differences are tested."""
    columns, compared = dict(own.COLUMNS), ("own", "full")
    if base_to_new:
        columns, compared = BASE | {"own": "own base tests"}, ("h", "new")
    if leave_one_out:
        columns |= {"unseen": "unseen domain", "full": "seen domains"}
        compared = ("unseen", "own")
    if test:
        columns, compared = columns | {"transfer": "other folder"}, ("transfer", compared[0])
    return columns, compared


def stored(found: data.Folder, share: float, made: Network, cache: Path, skip: bool) -> Store:
    """Decode the images of a folder once, and draw tests of a folder without a split."""
    cache.mkdir(parents=True, exist_ok=True)
    pixels, found = decoded(found, cache, size=made.preparation.size[0], skip=skip)
    if not len(divisions.sides(found)[1]):
        cells = found.domains * len(found.class_names) + found.labels
        tested = divisions.held_out(cells, share, np.random.default_rng(0))
        found = replace(found, split=np.where(tested, "test", "train"))
    return Store(pixels, found, made, cache)


def identified(store: Store) -> list[object]:
    """Return what tells the images, labels and network of a store from others."""
    made, found = store.network, store.folder
    read = found.labels, found.domains, found.split == "test", found.split == "val"
    names = found.class_names, found.domain_names
    prepared = [*made.fingerprint.values()], [*vars(made.preparation).values()]
    return [stamp(found), *map(identity.stamp, read), names, prepared]


def parts_of(store: Store, base_to_new: bool, leave_one_out: bool) -> dict[str, Part]:
    """Return the partitions of a protocol: one, or one for each domain that is left out."""
    found = store.folder
    if base_to_new:
        base, new = experiments.base_to_new(found.labels, found.class_names)
        if len(new.names) < 2:
            got = len(found.class_names)
            raise check.wrong("base_to_new", "have at least 4 classes, 2 on each side", got)
        names = tuple(base.names)
        kept = replace(found.at(base.positions), labels=base.labels, class_names=names)
        _, tests = divisions.sides(found)
        tested = np.isin(new.positions, tests)
        further = store, new.positions[tested], new.labels[tested], new.names
        return {"": Part("base to new, ", kept, base.positions, {"new": further})}
    if not leave_one_out:
        return {"": Part("", found, np.arange(len(found)))}
    parts = {}
    for target, (_, held) in experiments.leave_one_domain_out(found.domains).items():
        keep = np.flatnonzero(found.domains != target)
        rest = found.at(keep)
        numbers, domains = np.unique(rest.domains, return_inverse=True)
        names = tuple(found.domain_names[number] for number in numbers)
        rest = replace(rest, domains=domains, domain_names=names)
        name, unseen = found.domain_names[target], (store, held, found.labels[held], None)
        parts[name] = Part(f"without {name}, ", rest, keep, {"unseen": unseen})
    return parts


def transferred(other: Store, found: data.Folder) -> Tests:
    """Return the tests of another folder, whose classes may be others for a CLIP."""
    _, tests = divisions.sides(other.folder)
    names, clip = other.folder.class_names, other.network.tower is not None
    if set(names) == set(found.class_names) or (not clip and {*names} <= {*found.class_names}):
        labels = np.array([found.class_names.index(name) for name in names])
        return other, tests, labels[other.folder.labels[tests]], None
    if not clip:
        raise CompareError(f"`test` must have classes of the folder, without a CLIP; got {names}.")
    kept = experiments.transfer(other.folder.labels[tests], names)
    return other, tests[kept.positions], kept.labels, kept.names


def divided(
    found: data.Folder, generator: np.random.Generator, *, clients: str, shots: int | None
) -> Division:
    """Divide the images of a folder, or a few training images of each class, over clients."""
    chosen = np.arange(len(found))
    if shots is not None:
        train, test = divisions.sides(found)
        few = experiments.few_shots(found.labels, shots=shots, generator=generator, among=train)
        chosen = np.sort(np.concatenate([few, test]))
    parts = divisions.divide(found.at(chosen), clients, generator=generator)
    sides = [[chosen[part] for part in side] for side in (parts.train, parts.own or ())]
    return Division(sides[0], sides[1], parts.names)


def data_of(
    store: Store,
    part: Part,
    divide: Callable[[data.Folder, np.random.Generator], Division],
    newcomers: int,
    template: str,
    budget: Mapping[str, Any],
) -> Data:
    """Return the data of a partition."""

    def further(name: str, kind: str, device: str) -> Further:
        source, places, labels, names = part.further[name]
        every = source.inputs(places, kind, device)
        return Further(every, torch.from_numpy(labels), names and worded(names))

    inputs, labels = partial(store.inputs, part.keep), torch.from_numpy(part.folder.labels)
    return Data(
        setting=setting_of(store.network, part.folder.class_names, template, budget),
        inputs=inputs,
        labels=labels,
        tests=inputs,
        test_labels=labels,
        divide=partial(divide, part.folder),
        newcomers=newcomers,
        further={name: partial(further, name) for name in part.further},
    )


def setting_of(
    made: Network, class_names: Sequence[str], template: str, budget: Mapping[str, Any]
) -> Setting:
    """Return the setting of a network."""
    if made.tower is not None:
        names = worded(class_names)
        return ClipSetting(tower=made.tower, class_names=names, template=template, **budget)
    trunk: Any = prepared_trunk(made.trunk, preparation(made))  # type: ignore[arg-type]
    return VitSetting(trunk=trunk, num_classes=len(class_names), **budget)


def worded(names: Sequence[str]) -> list[str]:
    """Return class names with spaces, as a text tower knows them, and require that they differ."""
    spaced = [name.replace("_", " ") for name in names]
    if len({*spaced}) < len({*names}):
        twice = max(spaced, key=spaced.count)
        raise CompareError(f"Class names must differ with a space for _; got {twice!r} twice.")
    return spaced
