"""Numbers of an entry whose weight is positive."""

from torch import Tensor

from fedprompt import Weighted


def known(entry: Weighted) -> Tensor:
    """Return where an entry has positive weight, as a mask of the shape of its value."""
    value, weight = entry
    return (weight > 0).reshape(weight.shape + (1,) * (value.ndim - weight.ndim)).expand_as(value)
