"""Sums of payloads of many small entries, which are added in one vector for each dtype and device.

A round has as many additions as clients times names. Of small entries, calls of PyTorch take longer
than the arithmetic.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._float64 import wide_zeros, widened
from fedprompt.aggregation._payloads import ByName, Statistic
from fedprompt.aggregation._sums import RowSums, as_entry, is_alike, layout_of
from fedprompt.aggregation._wide import WideSum
from fedprompt.interfaces import Weighted

_SMALL = 2**14
"""Largest number of values of an entry that is packed. Larger ones would be copied for nothing."""


class PayloadSums(ByName):
    """Sums of each name over payloads, bitwise those of a :class:`RowSums` for each name.

    Packed sums are divided into those of their names when a payload lacks one of them, has another
    layout, or has a number that needs a closer look.
    """

    def __init__(self, make: Callable[[Weighted], Statistic]) -> None:
        super().__init__(make)
        self.packs: list[_Pack] | None = None
        self.names = dict[str, None]()

    def add(self, argument: str, payload: Any) -> None:
        check.names(argument, payload, "map names to Weighted")
        if self.packs is None:
            entries = {n: nouns.layout(f"{argument}[{n!r}]", e) for n, e in payload.items()}
            self.packs = list(_packs(entries))
        self.names |= dict.fromkeys(payload)
        added = {pack: pack.added(payload) for pack in self.packs}
        self.packs = [pack for pack, fits in added.items() if fits]
        for pack in added.keys() - self.packs:
            self.statistics |= pack.split()
        packed = {name for pack in self.packs for name in pack.names}
        super().add(argument, {n: entry for n, entry in payload.items() if n not in packed})

    def result(self) -> dict[str, Weighted]:
        means = super().result()
        for pack in self.packs or ():
            means |= pack.result()
        return {name: means[name] for name in self.names}


class _Pack:
    """Sums of entries of one dtype and device, one behind the other."""

    def __init__(self, entries: Mapping[str, Weighted]) -> None:
        self.names = {name: layout_of(entry) for name, entry in entries.items()}
        self.value, self.weight = map(wide_zeros, _flat(entries.values()))
        repeats = [
            value.shape[weight.ndim :].numel()
            for value, weight in entries.values()
            for _ in range(weight.numel())
        ]
        rows = torch.arange(len(repeats)).repeat_interleave(torch.tensor(repeats))
        self.rows = rows.to(self.value.device)

    def added(self, payload: Mapping[str, Weighted]) -> bool:
        """Add a payload, and return True, if it has these entries and all sums are finite."""
        for name, like in self.names.items():
            entry = payload.get(name)
            if not isinstance(entry, Weighted) or not is_alike(entry, like):
                return False
        value, weight = map(widened, _flat(payload[name] for name in self.names))
        value_sum = (value * weight[self.rows]).add_(self.value)
        weight_sum = self.weight + weight
        # One synchronization checks everything. The root of a negative weight is NaN.
        checksum = value_sum.sum() + weight_sum.sum() + weight.sqrt().sum()
        if not math.isfinite(checksum.item()):
            return False
        self.value, self.weight = value_sum, weight_sum
        return True

    def split(self) -> dict[str, RowSums]:
        """Return the sums of each name."""
        sums = {name: RowSums(like) for name, like in self.names.items()}
        for name, parts in self._parts(Weighted._make((self.value, self.weight))).items():
            sums[name].value.low, sums[name].weight.low = parts
        return sums

    def result(self) -> dict[str, Weighted]:
        """Return the mean of each name. Entries share no memory."""
        like = next(iter(self.names.values()))
        weight = self.weight[self.rows]  # of each value
        mean = as_entry(WideSum(self.value).over(WideSum(weight)), weight, like=like).value
        rows = as_entry(self.weight, self.weight, like=like).weight
        parts = self._parts(Weighted._make((mean, rows)))
        return {n: Weighted._make(part.clone() for part in entry) for n, entry in parts.items()}

    def _parts(self, flat: Weighted) -> dict[str, Weighted]:
        """Divide a packed entry into views of its names."""
        likes = zip(*self.names.values(), strict=True)
        parts = (
            map(Tensor.view_as, torch.split(tensor, [like.numel() for like in shapes]), shapes)
            for tensor, shapes in zip(flat, likes, strict=True)
        )
        return dict(zip(self.names, map(Weighted._make, zip(*parts, strict=True)), strict=True))


def _flat(entries: Iterable[Weighted]) -> Iterator[Tensor]:
    """Concatenate the values, and the weights, of some entries."""
    for parts in zip(*entries, strict=True):
        yield torch.cat([part if part.ndim == 1 else part.flatten() for part in parts])


def _packs(entries: Mapping[str, Weighted]) -> Iterator[_Pack]:
    """Pack the small entries by dtypes and device, where there are two or more."""
    groups: dict[tuple[object, ...], dict[str, Weighted]] = {}
    for name, entry in entries.items():
        if entry.value.numel() <= _SMALL:
            key = (entry.value.dtype, entry.weight.dtype, entry.value.device, entry.weight.device)
            groups.setdefault(key, {})[name] = entry
    return (_Pack(group) for group in groups.values() if len(group) > 1)
