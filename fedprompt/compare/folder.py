"""A problem from a folder of images: its layout, clients, frozen network and protocol."""

from __future__ import annotations

import atexit
import os
import shutil
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache, partial
from multiprocessing import parent_process
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

import fedprompt._refusals as check
import fedprompt.samples  # noqa: F401, whose networks have names
from fedprompt import data
from fedprompt._files import path_of
from fedprompt.backbones.pretrained import Network, network
from fedprompt.compare import problems, stamps
from fedprompt.compare.images import UNREADABLE, Bar, Mapped, decoded, shown
from fedprompt.compare.problems import Budget, Data, Problem, Protocol
from fedprompt.compare.tokens import Tokens
from fedprompt.compare.trials import Chosen, CompareError, Further
from fedprompt.data import divisions, experiments
from fedprompt.data.divisions import Division
from fedprompt.data.opening import MAX_PIXELS, common_depth
from fedprompt.methods import ClipSetting, Setting, VitSetting

ALPHA, MOST, EACH = 0.3, 10, 20
"""Division of a folder without domains, if none is given: concentration, and up to so many clients
with this number of training images on average."""
BASE = {
    "full": "base classes",
    "balanced": "base classes, balanced",
    "new": "new classes",
    "new_balanced": "new classes, balanced",
    "h": "H",
    "h_balanced": "H, balanced",
    "own": "own base tests",
    "own_balanced": "own base tests, balanced",
}


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
    further: Mapping[str, Tests] = {}


@dataclass(frozen=True, eq=False)
class Store:
    """Images of a folder, and what the frozen network makes of them.

    Attributes:
        folder: Labels, domains and splits.
        network: Network, with the preparation of all images.
        content: Digest of the files.
        cache: Folder of files.
        max_pixels: Largest number of pixels of an image.
        bar: Function that shows the progress of images.
    """

    folder: data.Folder
    network: Network
    content: str
    cache: Path
    max_pixels: int
    bar: Bar

    @cached_property
    def levels(self) -> Mapped:
        """Images, resized and cropped for the network, which are decoded once."""
        return self.decoded()[0]

    def decoded(self, **skip: bool) -> tuple[Mapped, data.Folder]:
        """Decode the images, or find the file that has them."""
        how: dict[str, Any] = {"content": self.content, "preparation": self.network.preparation}
        how |= {"max_pixels": self.max_pixels, "bar": self.bar, **skip}
        return decoded(self.folder, self.cache, **how)

    def inputs(
        self, keep: np.ndarray, family: str, kind: str, device: str, needed: Tensor
    ) -> Chosen:
        """Return inputs of methods: images, or for a CLIP the tokens of its image tower.

        Args:
            keep: Positions of the images of a partition.
            family: Family of models of the method.
            kind: Kind of its inputs.
            device: Device of the image tower.
            needed: Positions in `keep` of the images that are read.
        """
        places = torch.from_numpy(keep)
        if family != "CLIP" or kind == "images":
            return Chosen(self.levels, places, self.network.preparation.normalized)
        tokens = self.tokens(torch.device(device).type)
        tokens.need(places[needed])
        return Chosen(tokens, places)

    @lru_cache(2)  # noqa: B019
    def tokens(self, device: str) -> Tokens:
        """Return the tokens of all images, which are computed once."""
        model, prepare = self.network.model, self.network.preparation.normalized

        def encode(positions: Tensor) -> Tensor:
            with torch.no_grad():
                model.to(device)
                images = prepare(self.levels[positions].to(device))
                found = self.network.tokens(images).cpu()
                model.to("cpu")
                return found

        made = stamps.digest(stamps.of_preparing(), self.known, self.network.fingerprint, device)
        return Tokens(self.cache / f"tokens-{made}", len(self.folder), encode)

    @property
    def known(self) -> dict[str, Any]:
        """What tells images and labels from others, whatever the place of their files."""
        found = self.folder
        read = stamps.told([found.labels, found.domains, found.split.tolist()])
        names = found.class_names, found.domain_names
        labels = stamps.digest(read, names)
        how = stamps.digest(asdict(self.network.preparation))
        return {"images": self.content, "labels": labels, "preparation": how}


Tests = tuple[Store, np.ndarray, np.ndarray, Sequence[str] | None, bool]
"""Images, positions of tests, their labels, the names of their classes if they are others, and
whether clients train on such images."""


def folder(
    root: str | os.PathLike[str],
    *,
    vit: Any = None,
    clip: Any = None,
    size: int | None = None,
    test: str | os.PathLike[str] | None = None,
    layout: str | None = None,
    skip: bool = False,
    max_pixels: int = MAX_PIXELS,
    allow: Sequence[str] = (),
    template: str = "a photo of a {}.",
    cache: str | os.PathLike[str] | None = None,
    say: Callable[[str], object] | None = None,
    **options: Any,
) -> Problem:
    """Make a problem from a folder of images, which :func:`fedprompt.data.read_folder` reads.

    Without a split, a fifth of the images of each domain and class are tests, the same for all
    seeds. Inputs of frozen parts are computed once.

    Args:
        root: Folder of images, or a list of them.
        vit: Vision transformer: a name of timm, open_clip or transformers, NAME=FILE, or a model.
        clip: CLIP, in the same way.
        size: Side of the images in pixels. If None, that of the network.
        test: Folder of further tests, of the same or of other classes
            (:func:`fedprompt.data.experiments.transfer`). Without a split, all of its images are
            tests. It has the layout of the folder, if it can be read in several ways.
        layout: Layout of the folder. If None, it is found.
        skip: Whether to leave out damaged images.
        max_pixels: Largest number of pixels of an image, and of all that are open at a time.
        allow: Names of doubts (:func:`fedprompt.data.examine`) that do not stop the call.
        template: Sentence around a class name, for CLIP.
        cache: Folder of decoded images and tokens. If None, a temporary one.
        say: Function that is called with the description of the folder and of the clients, such as
            ``print``.
        **options: Protocol: `clients` (``"domains"``, ``"folders"``, ``"iid:N"``,
            ``"dirichlet:ALPHA:N"`` or ``"pathological:K:N"``), `shots`, `base_to_new`,
            `leave_one_out`, `newcomers`. Budget: `rounds`, `epochs` or `steps`, `batch_size`,
            `cohort_size`, `autocast`. Each has a line in ``fedprompt compare --help``.

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
        ...         for red in (len(place), 9 * len(place[::2]) + ord(place[0])):
        ...             Image.new("RGB", (32, 32), (red, ord(place[-1]), 0)).save(
        ...                 Path(root, place, f"{red}.png")
        ...             )
        ...     problem = folder(root, vit=model, layout="domain/class", rounds=2)
        >>> problem.families
        ('one model',)
    """
    protocol, budget = problems.split_options(options)
    check_given(vit, clip, size, max_pixels, test, template, cache, say, protocol)
    found = [with_tests(data.read_folder(root, layout=layout, skip=skip), divisions.SHARE)]
    found += [] if test is None else [with_tests(read_tests(test, found[0].layout, skip), 1)]
    say = (lambda text: None) if say is None else say
    say("\n".join(map(str, found)))
    kind: Literal["vit", "clip"] = "vit" if clip is None else "clip"
    made = network(vit if clip is None else clip, kind, size=size)
    content = read(found, clip is not None, protocol, allow, max_pixels, say)
    bits = common_depth((path for each in found for path in each.paths), max_pixels=max_pixels)
    made = replace(made, preparation=replace(made.preparation, bits=bits))
    say(str(made.preparation))
    where = Path(mkdtemp() if cache is None else cache)
    bar = shown("Decoding", hidden=_is_hidden())
    stores = [Store(each, made, content, where, max_pixels, bar) for each in found]
    stores = [_without_damaged(each, say) for each in stores] if skip else stores
    if cache is None:  # a trial that outlives the problem reads the file
        atexit.register(shutil.rmtree, where, ignore_errors=True)
    same = {"vit": vit, "clip": clip, "size": size, "test": test, "layout": layout, "skip": skip}
    same |= {"max_pixels": max_pixels, "allow": tuple(allow), "template": template}
    given = {**same, "cache": where, **options}
    again = partial(_again, os.fspath(root), tuple(given.items()))
    title = f"{Path(root).resolve().name}, {made.name}"
    return replace(_problem(stores, protocol, budget, template, title, say), again=again)


def check_given(
    vit: Any,
    clip: Any,
    size: Any,
    max_pixels: Any,
    test: Any,
    template: Any,
    cache: Any,
    say: Any,
    protocol: Protocol,
) -> None:
    """Require arguments of :func:`folder` before anything is read."""
    check.optional(check.count, "size", size)
    check.count("max_pixels", max_pixels)
    check.text("template", template)
    if template.count("{}") != 1:
        raise check.wrong("template", "have one {} for the name of a class", repr(template))
    for name, path in {"cache": cache, "test": test}.items():
        check.optional(path_of, name, path, of="folder")
    check.optional(check.function, "say", say)
    if (vit is None) == (clip is None):
        raise CompareError("Give one network: `vit` or `clip`, such as vit_base_patch16_224.")
    if protocol.base_to_new and (protocol.leave_one_out or clip is None):
        raise CompareError("`base_to_new` needs `clip`, and no `leave_one_out`.")


@lru_cache(1)
def _again(root: Hashable, given: tuple[tuple[str, Any], ...]) -> Problem:
    """Make the problem in another process, once for all of its runs."""
    return folder(cast(Any, root), **dict(given))


def read_tests(test: str | os.PathLike[str], layout: str, skip: bool) -> data.Folder:
    """Read a folder of further tests, if need be in the layout of the other folder."""
    try:
        return data.read_folder(test, skip=skip)
    except (ValueError, OSError) as error:
        if "`layout`" in str(error):
            return data.read_folder(test, layout=layout, skip=skip)
        raise CompareError(str(error).replace("`root`", "`test`")) from error


def with_tests(found: data.Folder, share: float) -> data.Folder:
    """Draw a share of a folder without a split as tests."""
    if len(divisions.sides(found)[1]):
        return found
    cells = found.domains * len(found.class_names) + found.labels
    tested = divisions.held_out(cells, share, np.random.default_rng(0))
    return replace(found, split=np.where(tested, "test", "train"))


def read(
    found: Sequence[data.Folder],
    words: bool,
    protocol: Protocol,
    allow: Sequence[str],
    max_pixels: int,
    say: Callable[[str], object],
) -> str:
    """Read all files once, refuse doubts, print notes, and return the digest of the files."""
    how: dict[str, Any] = {"words": words, "shots": protocol.shots}
    more: dict[str, Any] = {
        "test": found[1] if len(found) > 1 else None,
        "leave_one_out": protocol.leave_one_out,
        "max_pixels": max_pixels,
        "bar": shown("Reading", hidden=_is_hidden()),
    }
    reading = data.examine(found[0], **how, **more)
    for note in reading.notes[len(found[0].notes) :]:  # the first ones are known
        say(f"  {note}")
    reading.check(allow)
    return reading.digest


def _without_damaged(store: Store, say: Callable[[str], object]) -> Store:
    """Return the images that can be read, which are decoded here to know them."""
    _, kept = store.decoded(skip=True)
    lost = kept.skipped.get(UNREADABLE, ())
    if not lost:
        return store
    say(f"Left out, because they cannot be read: {len(lost)}.\n{kept}")
    names = [str(path.relative_to(kept.root)) for path in lost]
    return replace(store, folder=kept, content=stamps.digest(store.content, names))


def _is_hidden() -> bool:
    """Return whether another process shows what happens."""
    return parent_process() is not None or int(os.environ.get("RANK", 0)) > 0


def _problem(
    stores: Sequence[Store],
    protocol: Protocol,
    budget: Budget,
    template: str,
    title: str,
    say: Callable[[str], object],
) -> Problem:
    """Make the problem of images, and of further tests."""
    store = stores[0]
    parts = parts_of(stores, protocol)
    first = next(iter(parts.values())).folder
    clients, division = divided_once(first, protocol)
    say(f"clients {clients}, seed 0\n{division}")
    if store.network.tower is not None:
        size = f"{_tokens(stores) / 1e6:,.0f} MB"
        say(f"Tokens of the image tower take up to {size} in {store.cache}.")
    problems.check_clients(len(division.train), protocol.newcomers, budget.cohort_size)
    mean = sum(map(len, division.train)) / len(division.train)
    given = budget.given(mean)
    divide = partial(divided, clients=clients, shots=protocol.shots)
    of = {
        name: data_of(store, part, divide, protocol, settings_of(store, part, template, given))
        for name, part in parts.items()
    }
    columns, compared = columns_of(protocol, len(stores) > 1)
    options = {"template": template, **vars(protocol), "clients": clients, **given}
    return problems.of_data(
        of,
        title=title,
        partitions={name: f"{part.words}{clients}" for name, part in parts.items()},
        columns=columns,
        compared=compared,
        made=partial(made_of, stores, options),
        network=store.network,
        class_names={name: part.folder.class_names for name, part in parts.items()},
        pictures=partial(pictures, store, parts),
        cache=sum(len(each.folder) * each.network.inputs.numel() for each in stores),
    )


def pictures(store: Store, parts: Mapping[str, Part], partition: str, places: Tensor) -> Tensor:
    """Return the images at some places of a partition, as the network takes them."""
    keep = torch.from_numpy(parts[partition].keep)
    return store.network.preparation.normalized(store.levels[keep[places]])


def made_of(stores: Sequence[Store], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a problem is made from: images, network, and options."""
    network, layout = stores[0].network.fingerprint, stores[0].folder.layout
    known = {name: [each.known[name] for each in stores] for name in stores[0].known}
    return {**known, "network": network, "layout": layout, **options}


def _tokens(stores: Sequence[Store]) -> int:
    """Return the largest number of bytes of the tokens of all images."""
    one = stores[0].network.tokens(stores[0].network.inputs)
    return sum(len(store.folder) for store in stores) * one.nbytes


def divided_once(found: data.Folder, protocol: Protocol) -> tuple[str, Division]:
    """Return the division for seed 0, by domains or Dirichlet shares if none is given."""
    source = found.file or found.root
    train, test = map(len, divisions.sides(found))
    if not train or not test:
        rule = "have training and test images (without a split, two of a class)"
        raise CompareError(f"{source} must {rule}; got {train} and {test} images.")
    usual = f"dirichlet:{ALPHA}:{min(max(train // EACH, 2), MOST)}"
    usual = "domains" if found.domain_names != ("",) else usual
    how = protocol.clients or usual
    try:
        return how, divided(found, np.random.default_rng(0), clients=how, shots=protocol.shots)
    except ValueError as error:
        if protocol.clients is not None:
            raise
        raise CompareError(f"Without `clients`, {source} is divided by {usual}. {error}") from error


def columns_of(protocol: Protocol, test: bool) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the columns of a table, and those of which differences are tested."""
    columns, compared = dict(problems.COLUMNS), ("own", "full")
    if protocol.base_to_new:
        columns, compared = dict(BASE), ("h", "new")
    if protocol.leave_one_out:
        unseen = {"unseen": "unseen domain", "unseen_balanced": "unseen domain, balanced"}
        seen = {"full": "seen domains", "balanced": "seen domains, balanced"}
        columns, compared = {**unseen, **columns, **seen}, ("unseen", "own")
    if test:
        columns |= {"transfer": "other folder", "transfer_balanced": "other folder, balanced"}
        compared = ("transfer", compared[0])
    return {**columns, **(problems.NEWCOMERS if protocol.newcomers else {})}, compared


def parts_of(stores: Sequence[Store], protocol: Protocol) -> dict[str, Part]:
    """Return the partitions of a protocol, with the tests of another folder."""
    if protocol.leave_one_out and len(stores[0].folder.domain_names) < 2:
        raise CompareError("`leave_one_out` needs a folder with two domains or more.")
    parts = _parts(stores[0], protocol)
    for name, part in parts.items():
        pairs = [("transfer", transferred(other, part.folder)) for other in stores[1:]]
        parts[name] = part._replace(further={**part.further, **dict(pairs)})
    return parts


def _parts(store: Store, protocol: Protocol) -> dict[str, Part]:
    """Return one partition, or one for each domain that is left out."""
    found = store.folder
    if protocol.base_to_new:
        base, new = experiments.base_to_new(found.labels, found.class_names)
        if len(new.names) < 2:
            got = len(found.class_names)
            raise check.wrong("base_to_new", "have at least 4 classes, 2 on each side", got)
        names = tuple(base.names)
        kept = replace(found.at(base.positions), labels=base.labels, class_names=names)
        _, tests = divisions.sides(found)
        tested = np.isin(new.positions, tests)
        further = store, new.positions[tested], new.labels[tested], new.names, False
        return {"": Part("base to new, ", kept, base.positions, {"new": further})}
    if not protocol.leave_one_out:
        return {"": Part("", found, np.arange(len(found)))}
    parts = {}
    for target, (_, held) in experiments.leave_one_domain_out(found.domains).items():
        keep = np.flatnonzero(found.domains != target)
        rest = found.at(keep)
        numbers, domains = np.unique(rest.domains, return_inverse=True)
        names = tuple(found.domain_names[number] for number in numbers)
        rest = replace(rest, domains=domains, domain_names=names)
        unseen = store, held, found.labels[held], None, False
        name = found.domain_names[target]
        parts[name] = Part(f"without {name}, ", rest, keep, {"unseen": unseen})
    return parts


def transferred(other: Store, found: data.Folder) -> Tests:
    """Return the tests of another folder, whose classes may be others for a CLIP."""
    _, tests = divisions.sides(other.folder)
    names, clip = other.folder.class_names, other.network.tower is not None
    if set(names) == set(found.class_names) or (not clip and {*names} <= {*found.class_names}):
        labels = np.array([found.class_names.index(name) for name in names])
        return other, tests, labels[other.folder.labels[tests]], None, True
    if not clip:
        raise CompareError(f"`test` must have classes of the folder, without a CLIP; got {names}.")
    kept = experiments.transfer(other.folder.labels[tests], names)
    return other, tests[kept.positions], kept.labels, kept.names, False


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
    protocol: Protocol,
    settings: Mapping[str, Setting],
) -> Data:
    """Return the data of a partition."""

    def further(name: str, family: str, kind: str, device: str) -> Further | None:
        source, places, labels, names, trained = part.further[name]
        if names is not None and family != "CLIP":
            return None  # these methods learn something for each class
        every = source.inputs(places, family, kind, device, torch.arange(len(places)))
        return Further(every, torch.from_numpy(labels), names and worded(names), trained)

    inputs, labels = partial(store.inputs, part.keep), torch.from_numpy(part.folder.labels)
    return Data(
        settings=settings,
        inputs=inputs,
        labels=labels,
        tests=inputs,
        test_labels=labels,
        divide=partial(divide, part.folder),
        newcomers=protocol.newcomers,
        further={name: partial(further, name) for name in part.further},
    )


def settings_of(
    store: Store, part: Part, template: str, budget: Mapping[str, Any]
) -> dict[str, Setting]:
    """Return the settings of a network: with a CLIP, that of its image tower, too."""
    made, class_names = store.network, part.folder.class_names
    found: dict[str, Setting] = {}
    if made.tower is not None:
        names = worded(class_names)
        found["CLIP"] = ClipSetting(
            tower=made.tower, class_names=names, template=template, **budget
        )
        if "new" in part.further:  # others learn something for each class
            return found
    given: dict[str, Any] = {"num_classes": len(class_names), **budget}
    return {**found, "one model": VitSetting(trunk=made.trunk, **given)}


def worded(names: Sequence[str]) -> list[str]:
    """Return class names with spaces, as a text tower knows them, and require that they differ."""
    spaced = [name.replace("_", " ") for name in names]
    if len({*spaced}) < len({*names}):
        twice = max(spaced, key=spaced.count)
        raise CompareError(f"Class names must differ with a space for _; got {twice!r} twice.")
    return spaced
