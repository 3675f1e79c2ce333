"""Settings of the four papers, read from ``settings/*.toml``, with the figures that they print.

A file has tables of its paper. A table has settings, which are columns that share rows, and the
printed cells of each row: those of the first setting, then those of the next one. A field that a
setting does not have is that of its table, then that of the file, then that of the paper's call in
:mod:`fedprompt.methods.papers`, then the default here. So are the arguments of the paper's methods.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal

from fedprompt.methods import METHODS
from fedprompt.methods.papers import PRINTED, Printed
from studies.core import Row, content

PAPERS = ("fedhpl", "sgpt", "fedl2g", "fedotp")
POINTS = 50
"""Number of points of a curve; a few more where it does not divide the rounds."""
FAMILIES = {"networks": "mixed models"}
"""Family of the methods of a setting, where it has another name."""


@dataclass(frozen=True)
class PaperRow(Row):
    """Row of a paper's table.

    Attributes:
        changes: Fields of the setting that this row changes.
        figures: Figures of the paper in percent, by column.
        spread: Standard deviations of the paper, by column.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)
    spread: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How the training images are divided over the clients.

    Attributes:
        kind: "iid"; "dirichlet", disjoint; "overlapping", shards of equal size that may share
            images, by Dirichlet; "classes", a few classes a client; "domains", clients of one
            domain each.
        alpha: Concentration of the Dirichlet distribution. With "classes" or "clients", each client
            and class has one at random, and they sum to 1 over classes or over clients. With the
            kind "domains", the images of a domain are divided over its clients by it, or evenly if
            it is None.
        classes: Number of classes of a client, for "classes". If None, with `disjoint`, all classes
            are divided evenly over the clients.
        disjoint: Whether no two clients have a class in common, for "classes".
        shots: Maximum number of training images of each class, drawn before the division. If None,
            all are used.
        min_per_class: Smallest number of images of each class that a client has, or share of each
            class, for "dirichlet" and "overlapping".
        capped: Whether a client that has an equal part of all images gets none of further classes,
            for a Dirichlet distribution without overlap.
    """

    kind: str
    alpha: float | Literal["classes", "clients"] | None = None
    classes: int | None = None
    disjoint: bool = False
    shots: int | None = None
    min_per_class: float = 0
    capped: bool = False


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One column, or a few, of one table of a paper.

    Attributes:
        name: Name on the command line, such as "fedhpl-1-cifar10-dirichlet".
        source: Paper and table.
        data: Name of the data set in :data:`studies.sets.SETS`.
        family: Family of the methods. "networks" are networks trained from scratch, whose methods
            are those of "mixed models".
        backbones: Names of timm, of open_clip or in ``zoo.py``. Clients have them in turn.
            Pretrained convolutional networks have prompts of pixels around the image.
        partition: Division over the clients.
        num_clients: Number of clients.
        cohort_size: Number of clients in a round.
        rounds: Number of rounds.
        rows: Rows of the table. Their figures are in percent, by column: "full", the mean over
            clients on all test images; "lowest" and "highest", of a client on all test images;
            "own", on the client's own tests; "worst", the lowest of these; "pooled", the accuracy
            on all own test images together; "clusters", the share of test images whose superclass
            is the most frequent one of their group; or the name of a domain, the mean over its
            clients on their own tests.
        choices: Choices where the paper leaves something open, one sentence each.
        optimizer_values: Arguments of SGD other than the learning rate, which each row has.
        epochs: Number of epochs of a client in a round.
        batch_size: Number of images in a batch.
        drop_last: Whether an epoch has full batches only. A client with fewer images than a batch
            keeps its only one.
        flip: Whether images are flipped at random.
        image_size: Side of the input images in pixels.
        num_prompts: Number of prompts at a layer, or pixels of a border on each side.
        num_features: Width of the features after a learned projection, or None.
        length: Number of learnable tokens of a context.
        last_rounds: Number of last rounds whose accuracies are averaged.
        curve: Column of an accuracy over rounds, whose best round is a figure, too; or "loss", the
            mean training loss of the clients.
        per_class: Whether the accuracy of each class is a figure.
        per_group: Whether the groups of SGPT are: those that a client selects over rounds, and
            their congruence with k-means.
        test_share: Share of each client's images that are its own test images, after the training
            and test images of the data set are pooled. If None, the test images are those of the
            data set.
        own_tests: Whether a client is tested on its share of the test images of each class and
            domain, as large as its share of the training images. If not, and if `test_share` is
            None, a client is tested on all test images, weighted by its mix of classes and domains.
    """

    name: str
    source: str
    data: str
    family: Literal["one model", "mixed models", "networks", "CLIP"]
    backbones: tuple[str, ...]
    partition: Partition
    num_clients: int
    cohort_size: int
    rounds: int
    rows: tuple[PaperRow, ...] = ()
    choices: tuple[str, ...] = ()
    optimizer_values: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    flip: bool = False
    image_size: int = 224
    num_prompts: int = 8
    num_features: int | None = None
    length: int = 16
    last_rounds: int = 1
    curve: str = ""
    per_class: bool = False
    per_group: bool = False
    test_share: float | None = None
    own_tests: bool = False

    def of(self, row: Row) -> "Setting":
        """Return the setting that a row changes, without its rows."""
        changes = row.changes if isinstance(row, PaperRow) else {}
        return replace(self, rows=(), **changes)


@cache
def settings(paper: str) -> dict[str, Setting]:
    """Read the settings of a paper by name."""
    return {setting.name: setting for setting in read(content(paper), PRINTED[paper])}


OWN = {
    **dict.fromkeys(("fedhpl", "fedhpl_p", "fedhpl_h"), "fedhpl"),
    "sgpt": "sgpt",
    **dict.fromkeys(("fedl2g_l", "fedl2g_f"), "fedl2g"),
    "fedotp": "fedotp",
}
"""Paper of each method that has the printed arguments."""


def printed_fields(printed: Printed) -> dict[str, Any]:
    """Return the fields of a setting that the call of a paper has."""
    known = {name: each for name, each in printed.fields.items() if name != "make_optimizer"}
    count = len(known.pop("clients"))
    values = getattr(printed.fields["make_optimizer"], "keywords", {})
    return {"num_clients": count, "cohort_size": count, "optimizer_values": values} | known


def read(content: Mapping[str, Any], printed: Printed | None = None) -> list[Setting]:
    """Make the settings of a file. The tests check the names in it, and the numbers of cells."""
    sentences, groups, made = content["choices"], content.get("backbones", {}), []
    lowest = {} if printed is None else printed_fields(printed)
    for table in content["tables"]:
        start = 0
        for setting in table["settings"]:
            levels = lowest, content["common"], table, setting
            values = {name: value for level in levels for name, value in level.items()}
            measures, added = values.pop("measures"), values.pop("values", {})
            changes = table.get("changes", {}) | setting.get("changes", {})
            listed, rows = values.pop("rows"), []
            for title, text in listed.items():
                cells = text.split()[start : start + len(measures)]
                if {*cells} != {"-"}:
                    own = content["methods"].get(title, {}) | added.get(title, {})
                    change = _named(changes.get(title, {}), groups)
                    rows.append(_row(title, dict(zip(measures, cells, strict=True)), own, change))
            start += len(measures)
            chosen = {key for level in levels for key in level.get("choices", ())}
            values["choices"] = tuple(map(sentences.get, sorted(chosen, key=[*sentences].index)))
            values |= {"source": f"{content['paper']}, {table['table']}", "rows": tuple(rows)}
            values["partition"] = Partition(**values["partition"])
            kept = values.keys() - {"table", "settings", "changes"}
            made.append(Setting(**_named({name: values[name] for name in kept}, groups)))
    return made


def _named(values: Mapping[str, Any], groups: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Replace the name of a group of backbones by the group."""
    if "backbones" not in values:
        return dict(values)
    names = values["backbones"]
    return {**values, "backbones": tuple(groups[names] if isinstance(names, str) else names)}


def _row(
    title: str, cells: Mapping[str, str], values: Mapping[str, Any], changes: Mapping[str, Any]
) -> PaperRow:
    """Make a row; a cell is "75.27" or "75.27±0.05", "-" for no cell, or "?" for no figure."""
    printed = {name: cell.partition("±") for name, cell in cells.items() if cell not in ("-", "?")}
    method, own = values.get("method"), {k: v for k, v in values.items() if k != "method"}
    plain = PRINTED[OWN[method]].arguments if method in OWN else {}
    pieces = {k: v for k, v in plain.items() if callable(v)} if method in PRINTED else {}
    taken = inspect.signature(METHODS[method].make).parameters if method else {}
    known = {k: v for k, v in plain.items() if k in taken and not callable(v)}
    return PaperRow(
        title,
        method,
        known | own,
        changes,
        {name: float(figure) for name, (figure, _, _) in printed.items()},
        {name: float(spread) for name, (_, _, spread) in printed.items() if spread},
        instead=partial(METHODS[method].make, **pieces) if pieces else None,
    )
