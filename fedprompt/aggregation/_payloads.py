"""Aggregators of entries, applied to each name of payloads."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import fedprompt._checks as check
from fedprompt.interfaces import Payload, Weighted


class Statistic(Protocol):
    """A running aggregate of entries of one layout."""

    def add(self, argument: str, entry: Weighted) -> None:
        """Add an entry. Errors call it `argument`."""

    def result(self) -> Weighted:
        """Return the aggregate of all entries that were added."""


def aggregate(
    things: Iterable[Weighted] | Iterable[Payload], make: Callable[[Weighted], Statistic]
) -> Weighted | dict[str, Weighted]:
    """Stream entries through one statistic, or payloads through one statistic for each name.

    Args:
        things: Entries or payloads (iterated once).
        make: Constructor of a statistic, called with the first entry of each name. All other
            entries of the name must have its layout.
    """
    check.iterable("entries", things, "entries or of payloads")
    statistics: dict[str, Statistic] = {}
    payloads: bool | None = None
    for position, thing in enumerate(things):
        payloads = isinstance(thing, Mapping) if payloads is None else payloads
        for name, argument, entry in _labeled(thing, position, payloads):
            if name not in statistics:
                statistics[name] = make(check.layout(argument, entry))
            statistics[name].add(argument, entry)
    check.some("entries", payloads is not None, "hold at least one entry or payload")
    results = {name: statistic.result() for name, statistic in statistics.items()}
    return results if payloads else results[""]


def _labeled(thing: Any, position: int, payloads: bool) -> list[tuple[str, str, Any]]:
    """List name, argument for errors, and entry. An entry outside a payload has an empty name."""
    if not payloads:
        if isinstance(thing, Mapping):
            rule = "be a Weighted(value, weight), as the first one"
            raise check.wrong_type(f"entries[{position}]", rule, "a payload")
        return [("", f"entries[{position}]", thing)]
    check.names(f"payloads[{position}]", thing, "map names to Weighted")
    return [(name, f"payloads[{position}][{name!r}]", entry) for name, entry in thing.items()]
