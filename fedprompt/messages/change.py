"""The change of a client since the broadcast."""

from collections.abc import Mapping

from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.interfaces import Payload, Weighted


def delta(payload: Payload, values: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """Subtract the broadcast from a payload: how far a client moved.

    Send the change instead of the value if a codec leaves numbers out
    (:func:`fedprompt.codecs.top_k`), or if an aggregator shall compare directions. A server adds
    the mean change with ``descend(partial(torch.optim.SGD, lr=1.0, maximize=True))``.

    Args:
        payload: Payload of :func:`collect`.
        values: Broadcast by name, with at least the names of the payload. Each tensor has the shape
            and dtype of the payload's value.

    Returns:
        Value minus broadcast by name, with the weights of the payload. Rows of weight 0 become 0.

    Raises:
        ValueError: If `values` lacks a name, a weight is negative, a number is not finite, or a
            difference overflows its dtype.

    Example:
        >>> payload = {"head": Weighted(torch.tensor([3.0, 5.0]), torch.tensor(40.0))}
        >>> delta(payload, {"head": torch.tensor([1.0, 6.0])})
        {'head': Weighted(value=tensor([ 2., -1.]), weight=tensor(40.))}
    """
    nouns.payload(payload)
    check.names("values", values)
    moved = {}
    for name, entry in payload.items():
        change = entry.value - nouns.value_of("values", values, name, entry)
        change = entry._replace(value=change).known
        check.finite(f"payload[{name!r}] minus values[{name!r}]", change)
        moved[name] = Weighted(change, entry.weight.clone())
    return moved
