"""The weighted mean of entries or payloads, one client at a time."""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

from fedprompt.aggregation._packed import PayloadSums
from fedprompt.aggregation._payloads import aggregate
from fedprompt.aggregation._sums import RowSums
from fedprompt.interfaces import Payload, Weighted


@overload
def weighted_mean(entries: Iterable[Weighted], /) -> Weighted: ...
@overload
def weighted_mean(entries: Iterable[Payload], /) -> dict[str, Weighted]: ...
def weighted_mean(
    entries: Iterable[Weighted] | Iterable[Payload], /
) -> Weighted | dict[str, Weighted]:
    r"""Average entries row by row, with a weight for each row.

    .. math:: \bar v_r = \sum_k w_{k,r} v_{k,r} \,\big/\, \sum_k w_{k,r}

    Payloads are averaged name by name. If a client does not send a name, it has weight 0 for that
    name. Clients are streamed one by one. A mean of means is a mean, so edge servers can average
    their clients first.

    Sums are computed in float64, on the CPU if the device has no float64 (Apple's MPS). If clients
    are added in the order of their ids, the means are bitwise identical on every engine.

    Args:
        entries: Entries or payloads (at least one). All entries of a name have the same shapes,
            dtypes and device. A row of weight 0 may contain anything, including NaN.

    Returns:
        Mean of each row, in the dtypes of the entries. Its weight is the total weight, or the
        largest number of its dtype if the total overflows. Rows of total weight 0 have value 0.

    Raises:
        ValueError: If `entries` is empty, layouts differ, a weight is negative or not finite, a row
            of positive weight contains NaN or infinity, or a sum overflows float64.

    Example:
        Two clients know class 0; only the second knows class 1.

        >>> first = Weighted(torch.tensor([[1.0], [0.0]]), torch.tensor([1.0, 0.0]))
        >>> second = Weighted(torch.tensor([[4.0], [5.0]]), torch.tensor([2.0, 1.0]))
        >>> weighted_mean([first, second]).value
        tensor([[3.],
                [5.]])
        >>> weighted_mean([{"logits": first}, {"logits": second}])["logits"].weight
        tensor([3., 1.])

    References:
        McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
        AISTATS 2017.
    """
    return aggregate(entries, RowSums, PayloadSums)
