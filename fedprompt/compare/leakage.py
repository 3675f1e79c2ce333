"""What a classifier folder gives away about its training images."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt import data
from fedprompt.compare.classifier import BATCH, Classifier
from fedprompt.privacy.leakage import MemorizingClassifier, Success, confidences, success

COLUMNS = "model", "compared with", "AUC", "95 %", "true positives at 1 %", "95 %"


class Row(NamedTuple):
    """Row of a table.

    Attributes:
        model: Model that is attacked.
        control: Images, or another model, with which its members are compared.
        found: Success of the attack.
    """

    model: str
    control: str
    found: Success


def rows_of(
    model: Classifier, members: Path, held_out: Path, without: Classifier | None = None
) -> list[Row]:
    """Test whether a classifier shows which images it was trained on.

    The score of an image is the classifier's confidence in its label. The last row is the positive
    control: the same attack on a model that memorized the members.

    Args:
        model: Classifier.
        members: Folder of images that the classifier was trained on, as ``CLASS/*``.
        held_out: Folder of other images, from the same source.
        without: Classifier that was trained without the members. If None, there is no such row.

    Raises:
        ValueError: If a folder has a class that the classifier does not know, or an image is in
            both folders.
    """
    sides = _read("members", members, model), _read("held_out", held_out, model)
    digests = [{hashlib.sha256(path.read_bytes()).digest() for path in side[0]} for side in sides]
    rule, common = "have no image of `members`", len(digests[0] & digests[1])
    check.require(not common, "held_out", rule, f"{common} images that both have")
    (inside, labels), (outside, others) = (
        (torch.stack([model.preparation(path) for path in paths]), labels)
        for paths, labels in sides
    )

    def score(each: Any, inputs: Tensor, labels: Tensor) -> Tensor:
        return confidences(each, inputs, labels, batch_size=BATCH)

    own = score(model, inside, labels)
    rows = [Row("classifier", "held-out images", success(own, score(model, outside, others)))]
    if without is not None:
        rule = "have the classes and the preparation of the classifier"
        same = (without.class_names, without.preparation) == (model.class_names, model.preparation)
        check.require(same, "without", rule, "others")
        absent = score(without, inside, labels)
        rows.append(Row("classifier", "one without the members", success(own, absent)))
    control = MemorizingClassifier(inside, labels, max(2, len(model.class_names)))
    found = success(score(control, inside, labels), score(control, outside, others))
    return [*rows, Row("control, memorizes members", "held-out images", found)]


def _read(argument: str, root: Path, model: Classifier) -> tuple[list[Path], Tensor]:
    """Return the images of a folder and their labels in the order of the classifier's classes."""
    folder = data.read_folder(root)
    names = model.class_names
    check.known(argument, folder.class_names, names, "have classes of the classifier,")
    places = torch.tensor([names.index(name) for name in folder.class_names])
    return [*folder.paths], places[torch.as_tensor(folder.labels)]


def table(rows: list[Row]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [COLUMNS, tuple("---" for _ in COLUMNS)]
    for model, control, found in rows:
        auc, tpr = (f"{low:.2f} to {high:.2f}" for low, high in (found[1], found[3]))
        lines.append((model, control, f"{found.auc:.2f}", auc, f"{found.tpr:.2f}", tpr))
    widths = [max(len(line[k]) for line in lines) for k in range(len(COLUMNS))]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
              for line in lines]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)
