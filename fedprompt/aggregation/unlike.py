"""Clients that hold the first rows of a value: cut what they receive, and pad what they send."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.interfaces import Payload, Weighted


def leading(values: Mapping[str, Tensor], form: Payload) -> dict[str, Tensor]:
    """Cut values to the first rows, which a smaller client can hold.

    Args:
        values: Values of the server, by name.
        form: Payload of the client, for its names and shapes. Numbers are not read.

    Returns:
        First rows of each value that the form names, on all axes, such as the first tokens of a
        context, or the first columns of B and the first rows of A of a product B A.

    Raises:
        ValueError: If `values` lacks a name, or the form has more rows than a value.

    Example:
        >>> values = {"tokens": torch.arange(6.0).view(3, 2)}
        >>> leading(values, {"tokens": Weighted(torch.zeros(2, 2), torch.tensor(0.0))})
        {'tokens': tensor([[0., 1.],
                [2., 3.]])}
    """
    check.names("values", values)
    blocks = {name: _block("form", name, entry, values) for name, entry in _entries("form", form)}
    return {name: values[name][block].clone() for name, block in blocks.items()}


def padded(payload: Payload, values: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """Give the payload of a smaller client the shapes of the server's values.

    The client does not know the rows that it does not have, so they get weight 0. Every number has
    a weight then, and payloads of all sizes can be averaged by :func:`weighted_mean`, each row over
    the clients that have it. Weights of 1 in their place, with value 0, are zero-padding.

    Args:
        payload: Payload of the client, which has the first rows of each value.
        values: Values of the server, by name.

    Returns:
        Entries of the shapes of the values, with a weight for each number.

    Raises:
        ValueError: If `values` lacks a name, or the payload has more rows than a value.

    Example:
        A client has two tokens of three, and another one has all of them.

        >>> values = {"tokens": torch.zeros(3, 1)}
        >>> two = {"tokens": Weighted(torch.tensor([[1.0], [2.0]]), torch.tensor(30.0))}
        >>> three = {"tokens": Weighted(torch.full((3, 1), 5.0), torch.tensor(10.0))}
        >>> mean = weighted_mean([padded(two, values), padded(three, values)])
        >>> mean["tokens"].value.flatten(), mean["tokens"].weight.flatten()
        (tensor([2.0000, 2.7500, 5.0000]), tensor([40., 40., 10.]))
    """
    check.names("values", values)
    found = {}
    for name, entry in _entries("payload", payload):
        block, shape = _block("payload", name, entry, values), values[name].shape
        value, weight = (part.new_zeros(shape) for part in entry)
        value[block] = entry.value
        weight[block] = entry.per_row(entry.weight)
        found[name] = Weighted._make((value, weight))
    return found


def _entries(argument: str, payload: Payload) -> list[tuple[str, Weighted]]:
    return [*nouns.form(argument, payload, at_least=0).items()]


def _block(
    argument: str, name: str, entry: Weighted, values: Mapping[str, Tensor]
) -> tuple[slice, ...]:
    """Return the place of an entry among the rows of a value."""
    check.known(argument, [name], values, "have no other names than `values`:")
    own, whole = entry.value.shape, values[name].shape
    fits = len(own) == len(whole) and all(map(int.__le__, own, whole))
    rule = f"have at most the sizes {tuple(whole)} of `values[{name!r}]`"
    check.require(fits, f"{argument}[{name!r}]", rule, entry.value)
    return tuple(map(slice, own))
