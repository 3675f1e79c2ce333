"""Labels of a data set, without reading its images."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import fedprompt._conversions as convert
import fedprompt._refusals as check
from fedprompt.data._arguments import Indices


def labels_of(dataset: Any, *, column: str = "label", read: bool = False) -> Indices:
    r"""Return the labels of all samples of a data set, in its order.

    No image is read, unless `read` is set. Labels are found in

    - ``targets`` or ``labels``, such as in ``ImageFolder``, CIFAR, MNIST and SVHN of torchvision,
      after the ``target_transform`` of the data set;
    - the second of the two tensors of a ``TensorDataset``;
    - the column `column` of a Hugging Face ``Dataset``, whose transform is not applied, or of a
      dict of columns;
    - the parts of a ``Subset``, also from ``random_split``, or of a ``ConcatDataset``;
    - `dataset`, if it is a list, an array or a tensor of labels.

    Args:
        dataset: Map-style data set, or labels.
        column: Name of the labels in a sample that is a dict, and in columns.
        read: If True, every sample is read, including its image. The label of a tuple is its second
            entry.

    Returns:
        Labels, at least 0, int64.

    Raises:
        TypeError: If no labels are found, or one of them is not an integer.
        ValueError: If `column` is missing, labels and samples differ in number, or a label is
            negative.

    Example:
        >>> from torch.utils.data import Subset, TensorDataset
        >>> images = TensorDataset(torch.zeros(4, 3, 8, 8), torch.tensor([2, 0, 1, 0]))
        >>> labels_of(images)
        array([2, 0, 1, 0])
        >>> labels_of(Subset(images, [3, 0]))
        array([0, 2])
    """
    check.text("column", column)
    check.flag("read", read)
    rule, kind = "be a map-style data set, with a length, or labels", type(dataset).__name__
    check.require(isinstance(dataset, Sized), "dataset", rule, f"a {kind}", TypeError)
    if read:
        return _plain("dataset", [_label(dataset, i, column) for i in range(len(dataset))])
    if isinstance(dataset, Subset):
        chosen = np.asarray(dataset.indices, dtype=int)
        return labels_of(dataset.dataset, column=column).take(chosen)
    if isinstance(dataset, ConcatDataset):
        return np.concatenate([labels_of(part, column=column) for part in dataset.datasets])
    place, found = _stored(dataset, column)
    labels = _plain(place, convert.entries(place, found))
    if len(labels) != len(dataset) and not isinstance(dataset, Mapping):
        raise check.wrong(place, f"have one label for each of {len(dataset)} samples", len(labels))
    return labels


def _stored(dataset: Any, column: str) -> tuple[str, Any]:
    """Find labels that are stored apart from images; return their place and the labels."""
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return "dataset.tensors[1]", dataset.tensors[1]
    columns = getattr(dataset, "column_names", None) if hasattr(dataset, "with_format") else None
    if isinstance(dataset, Mapping):
        columns = list(dataset)
    if isinstance(columns, list):
        rule = f"name a column of `dataset`, one of {sorted(map(str, columns))}"
        check.require(column in columns, "column", rule, repr(column))
        plain = dataset if isinstance(dataset, Mapping) else dataset.with_format(None)
        return f"dataset[{column!r}]", plain[column]
    for name in ("targets", "labels"):  # of map-style data sets, in torchvision and elsewhere
        if hasattr(dataset, name):
            found = getattr(dataset, name)
            if (change := getattr(dataset, "target_transform", None)) is not None:
                found = [change(label) for label in convert.entries(f"dataset.{name}", found)]
            return f"dataset.{name}", found
    if isinstance(dataset, Tensor | np.ndarray | Sequence):
        return "dataset", dataset
    rule = (
        "have its labels in `targets`, `labels` or a column; otherwise pass the labels, "
        "or `read=True` to read every sample"
    )
    raise check.wrong_type("dataset", rule, f"a {type(dataset).__name__}")


def _label(dataset: Any, index: int, column: str) -> Any:
    """Read the label of one sample."""
    sample = dataset[index]
    if isinstance(sample, Mapping):
        rule = f"name an entry of a sample, one of {sorted(map(str, sample))}"
        check.require(column in sample, "column", rule, repr(column))
        return sample[column]
    if isinstance(sample, tuple | list) and len(sample) > 1:
        return sample[1]
    rule = "return samples (image, label) or dicts"
    raise check.wrong_type("dataset", rule, f"{check.kind(sample)} at {index}")


def _plain(place: str, found: list[Any]) -> Indices:
    """Copy labels into an array; a label may be a tensor or an array without axes."""
    scalar = (Tensor, np.ndarray)
    plain = [x.item() if isinstance(x, scalar) and not x.ndim else x for x in found]
    return convert.integers(place, plain)
