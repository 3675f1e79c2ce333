"""Labels of data sets of torch, torchvision and Hugging Face, against reading every sample."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from fedprompt.data import labels_of
from refusals import refused

LABELS = [2, 0, 1, 0, 2, 2, 1]


class Unread(Dataset):
    """Images that no test may read, with labels in an attribute."""

    def __init__(self, labels: Any, name: str = "targets", **others: Any) -> None:
        self.size = len(LABELS)
        for key, thing in {name: labels, **others}.items():
            setattr(self, key, thing)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an image was read")


class Pairs(Dataset):
    """Samples that have to be read for their labels."""

    def __init__(self, label: Callable[[int], Any] = int) -> None:
        self.label = label

    def __len__(self) -> int:
        return len(LABELS)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return torch.zeros(3, 4, 4), self.label(LABELS[index])


class Column(Sequence):
    """Lazy column, as of `datasets` 4."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: Any) -> Any:
        return self.entries[index]


class HuggingFace:
    """Stand-in for `datasets.Dataset`: columns, and a transform that needs all of them."""

    def __init__(self, transform: Callable[[dict[str, Any]], Any] | None = None) -> None:
        self.columns = {"image": [f"image {label}" for label in LABELS], "label": LABELS}
        self.column_names = ["image", "label"]
        self.transform = transform

    def __len__(self) -> int:
        return len(LABELS)

    def with_format(self, kind: str | None) -> "HuggingFace":
        assert kind is None
        plain = HuggingFace()
        plain.columns = self.columns
        return plain

    def __getitem__(self, key: int | str) -> Any:
        if isinstance(key, str):
            chosen = {key: self.columns[key]}
            return Column((self.transform(chosen) if self.transform else chosen)[key])
        sample = {name: column[key] for name, column in self.columns.items()}
        return self.transform(sample) if self.transform else sample


def image_folder(root: Path, **options: Any) -> ImageFolder:
    """Write seven files that are not images, so that reading one is an error."""
    for index, label in enumerate(sorted(LABELS)):
        folder = root / f"class{label}"
        folder.mkdir(exist_ok=True, parents=True)
        (folder / f"{index}.png").write_bytes(b"not an image")
    return ImageFolder(root, **options)


STORED: dict[str, Callable[[], Any]] = {
    "a list": lambda: list(LABELS),
    "an array": lambda: np.array(LABELS, dtype=np.uint8),
    "a tensor": lambda: torch.tensor(LABELS),
    "targets, a list": lambda: Unread(LABELS),
    "targets, a tensor": lambda: Unread(torch.tensor(LABELS)),
    "labels, an array": lambda: Unread(np.array(LABELS), name="labels"),
    "a TensorDataset": lambda: TensorDataset(torch.zeros(7, 2), torch.tensor(LABELS)),
    "a subset": lambda: Subset(Unread([9, *LABELS[::-1]], size=8), range(7, 0, -1)),
    "a subset of a subset": lambda: Subset(
        Subset(Unread([9, *LABELS], size=8), range(1, 8)), range(7)
    ),
    "positions in a tensor": lambda: Subset(Unread(LABELS), torch.arange(7)),
    "parts": lambda: ConcatDataset([Unread(LABELS[:3], size=3), Unread(LABELS[3:], size=4)]),
    "columns": lambda: {"image": ["file"] * 7, "label": LABELS},
    "Hugging Face": HuggingFace,
    "Hugging Face with a transform": lambda: HuggingFace(lambda batch: {"label": batch["image"]}),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_labels_are_found_without_reading_an_image(name: str) -> None:
    labels = labels_of(STORED[name]())
    assert labels.dtype == np.int64
    assert labels.tolist() == LABELS


def test_a_target_transform_is_applied(tmp_path: Path) -> None:
    """Attributes have the labels before it, and samples those after it."""
    changed = [(label + 1) % 3 for label in sorted(LABELS)]
    folder = image_folder(tmp_path, target_transform=lambda label: (label + 1) % 3)
    assert labels_of(folder).tolist() == changed
    as_tensors = image_folder(tmp_path, target_transform=torch.tensor)
    assert labels_of(as_tensors).tolist() == sorted(LABELS)


READ: dict[str, Callable[[], Any]] = {
    "integers": Pairs,
    "tensors": lambda: Pairs(torch.tensor),
    "arrays": lambda: Pairs(np.array),
    "numpy integers": lambda: Pairs(np.int16),
    "dicts": HuggingFace,
    "a list of pairs": lambda: list(zip("abcdefg", LABELS, strict=True)),
    "a TensorDataset": STORED["a TensorDataset"],
    "a subset": lambda: Subset(Pairs(), range(7)),
}


@pytest.mark.parametrize("name", READ)
def test_labels_are_read_on_request(name: str) -> None:
    labels = labels_of(READ[name](), read=True)
    assert labels.dtype == np.int64
    assert labels.tolist() == LABELS


@pytest.mark.parametrize("read", [False, True])
def test_another_column_can_be_named(read: bool) -> None:
    dataset = HuggingFace()
    dataset.columns["fine"] = [5] * 7
    dataset.column_names.append("fine")
    assert labels_of(dataset, column="fine", read=read).tolist() == [5] * 7


def test_labels_are_copied() -> None:
    kept = np.array(LABELS)
    labels_of(kept)[0] = 7
    assert kept.tolist() == LABELS


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        return iter([])


test_wrong_calls_are_refused_by_name = refused(globals())("""
labels_of(TensorDataset(*3 * (torch.zeros(2),))) -> TypeError: `dataset` must have its labels in
labels_of(Stream()) -> TypeError: `dataset` must be a map-style data set, with a length, or labels
labels_of(Unread(torch.zeros(7, 3, dtype=int))) -> ValueError: `dataset.targets` must have shape
labels_of(Unread([0, 1])) -> ValueError: `dataset.targets` must have one label for each of 7
labels_of(Unread([-1] * 7, name='labels')) -> ValueError: `dataset.labels` must be at least 0; got
labels_of(HuggingFace(), column='fine') -> ValueError: `column` must name a column of `dataset`
labels_of(HuggingFace(), column='fine', read=True) -> ValueError: `column` must name an entry of a
labels_of(LABELS, column=3) -> TypeError: `column` must be a string; got 3 (int)
labels_of(LABELS, read=1) -> TypeError: `read` must be True or False; got 1 (int)
labels_of([(3,)], read=True) -> TypeError: `dataset` must return samples (image, label) or dicts
labels_of([torch.zeros(2)], read=True) -> TypeError: `dataset` must return samples (image, label)
""")
