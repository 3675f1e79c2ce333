"""Aggregators of entries, applied to each name of payloads."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, cast

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.interfaces import Payload, Weighted


class Statistic(Protocol):
    """A running aggregate of entries of one layout."""

    def add(self, argument: str, entry: Weighted) -> None:
        """Add an entry. Errors call it `argument`."""

    def result(self) -> Weighted:
        """Return the aggregate of all entries that were added."""


class ByName:
    """One statistic for each name of payloads.

    Args:
        make: Constructor of a statistic, called with the first entry of each name. All other
            entries of the name must have its layout.
    """

    def __init__(self, make: Callable[[Weighted], Statistic]) -> None:
        self.make = make
        self.statistics: dict[str, Statistic] = {}

    def add(self, argument: str, payload: Any) -> None:
        """Add a payload. Errors call its entries by `argument` and their name."""
        check.names(argument, payload, "map names to Weighted")
        for name, entry in payload.items():
            place = f"{argument}[{name!r}]"
            if name not in self.statistics:
                self.statistics[name] = self.make(nouns.layout(place, entry))
            self.statistics[name].add(place, entry)

    def result(self) -> dict[str, Weighted]:
        """Return the aggregate of each name."""
        return {name: statistic.result() for name, statistic in self.statistics.items()}


def aggregate(
    things: Iterable[Weighted] | Iterable[Payload],
    make: Callable[[Weighted], Statistic],
    by_name: Callable[[Callable[[Weighted], Statistic]], ByName] = ByName,
) -> Weighted | dict[str, Weighted]:
    """Stream entries through one statistic, or payloads through one statistic for each name.

    Args:
        things: Entries or payloads (iterated once).
        make: Constructor of a statistic, called with the first entry.
        by_name: Constructor of the statistics of payloads, called with `make`.
    """
    check.iterable("entries", things, "entries or of payloads")
    total: Any = None
    each: Any
    for position, each in enumerate(things):
        payloads = isinstance(each, Mapping) if total is None else isinstance(total, ByName)
        place = f"{'payloads' if payloads else 'entries'}[{position}]"
        if total is None:
            total = by_name(make) if payloads else make(nouns.layout(place, each))
        total.add(place, each)
    check.some("entries", total is not None, "hold at least one entry or payload")
    return cast(Weighted | dict[str, Weighted], total.result())
