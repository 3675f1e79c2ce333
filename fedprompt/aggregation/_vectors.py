"""Whole payloads as vectors, for distances between clients."""

from collections.abc import Iterable

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.aggregation._sums import check_alike
from fedprompt.interfaces import Payload


def alike(payloads: Iterable[Payload]) -> list[Payload]:
    """List payloads after checking that all have the names, shapes, dtypes and device of one."""
    check.iterable("payloads", payloads, "payloads")
    checked: list[Payload] = []
    for position, payload in enumerate(payloads):
        place = f"payloads[{position}]"
        check.names(place, payload, "map names to Weighted, because distances are over all names")
        first = checked[0] if checked else payload
        check.some(place, payload, "have at least one name")
        if set(payload) != set(first):
            raise check.wrong(place, f"have the names {sorted(first)}", sorted(payload))
        for name, entry in payload.items():
            argument = f"{place}[{name!r}]"
            check_alike(argument, entry, nouns.layout(argument, first[name]))
            nouns.weights(argument, entry)
        checked.append(payload)
    return checked


def vectors(payloads: list[Payload]) -> tuple[Tensor, Tensor]:
    """Return the known numbers of each payload in float64, and which payloads can be compared.

    Two payloads can be compared if they know the same rows and all known numbers are finite.
    """
    names = list(payloads[0])
    known = ([sent[name].known for name in names] for sent in payloads)
    values = torch.stack([_flat(rows) for rows in known])
    weighted = torch.stack([_flat([sent[name].weight > 0 for name in names]) for sent in payloads])
    finite = values.isfinite().all(1)
    same_rows = torch.stack([(weighted == rows).all(1) for rows in weighted])
    return values, same_rows & finite[:, None] & finite


def _flat(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors as one vector in float64."""
    return torch.cat([widened(tensor.flatten()) for tensor in tensors])
