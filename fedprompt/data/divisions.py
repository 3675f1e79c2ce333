"""Division of the images of a folder over clients, by a word such as ``dirichlet:0.3:10``."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int64

import fedprompt._refusals as check
from fedprompt.data.folders import Folder
from fedprompt.data.partition import dirichlet, iid, pathological
from fedprompt.data.shares import allocate, class_shares

Indices = Int64[np.ndarray, " _"]
KINDS: dict[str, tuple[Callable[[str], int | float], ...]] = {
    "domains": (),
    "folders": (),
    "iid": (int,),
    "dirichlet": (float, int),
    "pathological": (int, int),
}
"""Types of the numbers of each kind of division."""
RULE = "be domains, folders, iid:N, dirichlet:ALPHA:N or pathological:K:N"
SHARE = 0.2
"""Share of the images of each domain and class that is for testing, if the folder has no split."""


class Division(NamedTuple):
    """Inputs of the clients for one seed.

    Attributes:
        train: Positions of the training inputs of each client.
        own: Positions of the test inputs of each client; a small client may have none. If None,
            the mean on all tests counts by the client's mix of classes.
        names: Names of the clients: their domains, or numbers.
    """

    train: Sequence[Any]
    own: Sequence[Any] | None
    names: Sequence[str]

    def __str__(self) -> str:
        """List the numbers of training and test inputs of each client."""
        sizes = zip(self.names, self.train, self.own or self.train, strict=True)
        lines = [f"  {name}: train {len(own)}, test {len(test)}" for name, own, test in sizes]
        return "\n".join(lines)


def divide(folder: Folder, clients: str, *, generator: np.random.Generator) -> Division:
    """Divide the training images of a folder over clients, and give each its test images.

    With ``domains`` or ``folders``, each domain is a client. ``iid:N`` makes N clients of random
    images, ``dirichlet:ALPHA:N`` draws the shares of each class for N clients, and
    ``pathological:K:N`` gives each of N clients K classes.

    Test images are the split ``test`` of the folder, otherwise ``val``. A client is tested on the
    images of its domain, or on a part of the test images with its shares of the classes.

    Args:
        folder: Images.
        clients: Division.
        generator: Source of randomness.

    Raises:
        ValueError: If `clients` is not such a word, the images do not fit it, a client has no
            training images, or no client has test images.
    """
    kind, *given = clients.split(":")
    try:
        numbers = [read(word) for read, word in zip(KINDS[kind], given, strict=True)]
    except (KeyError, ValueError) as error:
        raise check.wrong("clients", RULE, repr(clients)) from error
    train, test = sides(folder)
    if kind in ("domains", "folders"):
        if folder.domain_names == ("",):
            source = folder.file or folder.root
            rule = f"divide by numbers, such as dirichlet:0.3:10, since {source} has no domains"
            raise check.wrong("clients", rule, repr(clients))
        names = folder.domain_names
        domains = range(len(names))
        parts = [[side[folder.domains[side] == k] for k in domains] for side in (train, test)]
    else:
        names = tuple(map(str, range(int(numbers[-1]))))
        try:
            parts = _by_numbers(folder, kind, numbers, generator)
        except ValueError as error:
            rule = f"fit {len(train)} training images of {len(folder.class_names)} classes"
            raise ValueError(f"`clients` must {rule}; got {clients}: {error}") from error
    for name, part in zip(names, parts[0], strict=True):
        check.some("clients", len(part), f"give client {name} training images")
    check.some("clients", sum(map(len, parts[1])), "leave some client test images")
    return Division(parts[0], parts[1], names)


def sides(folder: Folder) -> tuple[Indices, Indices]:
    """Return the positions of training and test images; without a test split, ``val`` is it."""
    train, val, test = (np.flatnonzero(folder.split == side) for side in ("train", "val", "test"))
    return train, test if len(test) else val


def held_out(
    cells: Indices, share: float, generator: np.random.Generator
) -> Bool[np.ndarray, " images"]:
    """Draw a share of the images of each cell, and return for each image whether it is drawn.

    Of two images or more, at least one is drawn.
    """
    drawn = np.zeros(len(cells), dtype=bool)
    order = np.argsort(cells, kind="stable")
    for own in np.split(order, np.flatnonzero(np.diff(cells[order])) + 1):
        places = generator.permutation(own)
        drawn[places[: max(len(places) > 1, round(share * len(places)))]] = True
    return drawn


def _by_numbers(
    folder: Folder, kind: str, numbers: list[int | float], generator: np.random.Generator
) -> list[list[Indices]]:
    """Divide training images at random, and test images with the same shares of the classes."""
    train, test = sides(folder)
    labels, first, count = folder.labels[train], numbers[0], int(numbers[-1])
    if kind == "iid":
        shards = iid(labels, count, generator=generator)
    elif kind == "dirichlet":
        shards = dirichlet(labels, count, alpha=first, min_size=2, generator=generator)
    else:
        classes = int(first)
        shards = pathological(labels, count, classes_per_client=classes, generator=generator)
    shares = class_shares(labels, shards, len(folder.class_names))
    tests = allocate(folder.labels[test], shares, min_size=0, generator=generator)
    return [[train[shard] for shard in shards], [test[part] for part in tests]]
