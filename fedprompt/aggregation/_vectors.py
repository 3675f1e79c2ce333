"""Whole payloads as vectors, for distances between clients."""

from collections.abc import Iterable

import torch
from torch import Tensor

from fedprompt._checks import check_weights, checked_layout, known_rows, wrong_value
from fedprompt._float64 import widened
from fedprompt.aggregation._payloads import check_payload, check_several
from fedprompt.aggregation.means import check_alike
from fedprompt.interfaces import Payload


def alike(payloads: Iterable[Payload]) -> list[Payload]:
    """List payloads after checking that all have the names, shapes, dtypes and device of one."""
    check_several("payloads", payloads)
    held: list[Payload] = []
    for position, payload in enumerate(payloads):
        place = f"payloads[{position}]"
        check_payload(place, payload, reason=", because distances are over all names")
        first = held[0] if held else payload
        if not payload:
            raise wrong_value(place, "have at least one name", "none")
        if set(payload) != set(first):
            raise wrong_value(place, f"have the names {sorted(first)}", sorted(payload))
        for name, entry in payload.items():
            argument = f"{place}[{name!r}]"
            check_alike(argument, entry, checked_layout(argument, first[name]))
            check_weights(argument, entry)
        held.append(payload)
    return held


def vectors(payloads: list[Payload]) -> tuple[Tensor, Tensor]:
    """Return the known numbers of each payload in float64, and which payloads can be compared.

    Two payloads can be compared if they know the same rows and all known numbers are finite.
    """
    names = list(payloads[0])
    values = torch.stack([_flat([known_rows(each[name]) for name in names]) for each in payloads])
    known = torch.stack([_flat([each[name].weight > 0 for name in names]) for each in payloads])
    finite = values.isfinite().all(1)
    compared = torch.stack([(known == own).all(1) for own in known]) & finite[:, None] & finite
    return values, compared


def _flat(tensors: list[Tensor]) -> Tensor:
    """Concatenate tensors as one vector in float64."""
    return torch.cat([widened(tensor.flatten()) for tensor in tensors])
