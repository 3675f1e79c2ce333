"""Sums of payloads of many small entries, which are added in one vector for each dtype and device.

A round has as many additions as clients times names. Of small entries, calls of PyTorch take longer
than the arithmetic.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from fedprompt._conversions import widened
from fedprompt.aggregation._payloads import ByName, Statistic
from fedprompt.aggregation._sums import RowSums, as_entry, form_of, quotient
from fedprompt.interfaces import Weighted

_SMALL = 2**14
"""Largest number of values of an entry that is packed. Larger ones would be copied for nothing."""


class PayloadSums(ByName):
    """Sums of each name over payloads, bitwise those of a :class:`RowSums` for each name.

    Packed sums are divided into those of their names when a payload lacks one of them, has another
    layout, or has a number that needs a closer look. What is packed needs no other check.
    """

    def __init__(self, make: Callable[[Weighted], Statistic]) -> None:
        super().__init__(make)
        self.packs: list[_Pack] | None = None
        self.names = dict[str, None]()

    def add(self, argument: str, payload: Any) -> None:
        sent = payload if isinstance(payload, Mapping) else {}
        if self.packs is None:
            self.packs = list(_packs(sent))
        self.names |= dict.fromkeys(sent)
        added = {pack: pack.added(sent) for pack in self.packs}
        self.packs = [pack for pack, fits in added.items() if fits]
        for pack in added.keys() - self.packs:
            self.statistics |= pack.split()
        packed = {name for pack in self.packs for name in pack.names}
        others = {name: entry for name, entry in sent.items() if name not in packed}
        super().add(argument, others if sent else payload)

    def result(self) -> dict[str, Weighted]:
        means = super().result()
        for pack in self.packs or ():
            means |= pack.result()
        return {name: means[name] for name in self.names}


class _Pack:
    """Sums of entries of one dtype and device, one behind the other."""

    def __init__(self, entries: Mapping[str, Weighted]) -> None:
        self.names = list(entries)
        self.forms = list(map(form_of, entries.values()))
        self.shapes = [(value.shape, weight.shape) for value, weight in entries.values()]
        self.like = Weighted._make(part.new_empty(()) for part in next(iter(entries.values())))
        self.joins = [_join(parts) for parts in zip(*entries.values(), strict=True)]
        self.sizes = [[shape.numel() for shape in each] for each in zip(*self.shapes, strict=True)]
        self.value, self.weight = (
            widened(part.new_zeros(sum(sizes)))
            for part, sizes in zip(self.like, self.sizes, strict=True)
        )
        repeats = [
            value[len(weight) :].numel()
            for value, weight in self.shapes
            for _ in range(weight.numel())
        ]
        self.repeats: Tensor | int = torch.tensor(repeats, device=self.value.device)
        if len(set(repeats)) == 1:
            self.repeats = repeats[0]

    def added(self, payload: Mapping[str, Weighted]) -> bool:
        """Add a payload, and return True, if it has these entries and all sums are finite."""
        entries = [payload[name] for name in self.names if name in payload]
        if not all(map(_is_entry, entries)) or list(map(form_of, entries)) != self.forms:
            return False
        value, weight = map(widened, self._flat(zip(*entries, strict=True)))
        value_sum = (value * self._of_values(weight)).add_(self.value)
        weight_sum = self.weight + weight
        # One synchronization checks everything. The root of a negative weight is NaN.
        checksum = value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()
        if not math.isfinite(checksum.item()):
            return False
        self.value, self.weight = value_sum, weight_sum
        return True

    def _of_values(self, weight: Tensor) -> Tensor:
        """Repeat the weight of each row for its values."""
        size = len(self.value) if isinstance(self.repeats, Tensor) else None
        return weight.repeat_interleave(self.repeats, output_size=size)

    def _flat(self, columns: Iterable[tuple[Tensor, ...]]) -> Iterator[Tensor]:
        """Return all values and all weights, each as one vector."""
        return (join(parts) for join, parts in zip(self.joins, columns, strict=True))

    def split(self) -> dict[str, RowSums]:
        """Return the sums of each name."""
        sums = {}
        for name, (value, weight) in self._parts(self.value, self.weight).items():
            likes = zip(self.like, (value, weight), strict=True)
            sums[name] = RowSums(Weighted._make(like.expand(part.shape) for like, part in likes))
            sums[name].value, sums[name].weight = value, weight
        return sums

    def result(self) -> dict[str, Weighted]:
        """Return the mean of each name. Entries share no memory."""
        weight = self._of_values(self.weight)
        mean = as_entry(quotient(self.value, weight), weight, like=self.like).value
        rows = as_entry(self.weight, self.weight, like=self.like).weight
        return self._parts(mean, rows)

    def _parts(self, value: Tensor, weight: Tensor) -> dict[str, Weighted]:
        """Divide packed values and weights into copies for their names."""
        copies: Any = torch.split_with_sizes_copy  # its annotation has no result
        columns = [
            map(Tensor.view, copies(packed, sizes), shapes)
            for packed, sizes, shapes in zip(
                (value, weight), self.sizes, zip(*self.shapes, strict=True), strict=True
            )
        ]
        return dict(zip(self.names, map(Weighted._make, zip(*columns, strict=True)), strict=True))


def _is_entry(entry: object) -> bool:
    return isinstance(entry, Weighted) and isinstance(entry.value, Tensor)


def _join(parts: tuple[Tensor, ...]) -> Callable[[tuple[Tensor, ...]], Tensor]:
    """Return a function that concatenates tensors of these shapes into one vector."""
    if all(part.shape == parts[0].shape for part in parts):
        return lambda parts: torch.stack(parts).flatten()
    return lambda parts: torch.cat([part.flatten() for part in parts])


def _packs(entries: Mapping[str, Weighted]) -> Iterator[_Pack]:
    """Pack the small entries by dtypes and device, where there are two or more."""
    groups: dict[tuple[object, ...], dict[str, Weighted]] = {}
    for name, entry in entries.items():
        if isinstance(name, str) and _is_entry(entry) and entry.value.numel() <= _SMALL:
            key = (entry.value.dtype, entry.weight.dtype, entry.value.device, entry.weight.device)
            groups.setdefault(key, {})[name] = entry
    return (_Pack(group) for group in groups.values() if len(group) > 1)
