"""Payloads as flat vectors, whose sum over clients determines the weighted mean."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt.interfaces import Payload, Weighted
from fedprompt.interfaces.nouns import per_row


def to_summable(payload: Payload) -> Float[Tensor, " length"]:
    r"""Multiply values by their weights and concatenate both into one vector.

    For each name in sorted order, the vector contains the products :math:`w_r v_r` of all rows,
    then their weights :math:`w_r`. Its length depends only on names and shapes, not on the rows
    that a client knows. A secure aggregation protocol can add the vectors of all clients and reveal
    only the sum. :func:`from_sum` divides by the total weights and returns the weighted mean.

    Args:
        payload: Payload with the same names and shapes on all clients.

    Returns:
        Vector in float64, on the device of the payload, or on the CPU if the device has no
        float64. Rows of weight 0 become 0.

    Raises:
        ValueError: If `payload` is empty, a weight is negative, a number is not finite, or a
            product of weight and value overflows float64.

    Example:
        >>> rows, weight = torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([2.0, 0.0])
        >>> to_summable({"head": Weighted(rows, weight)})
        tensor([6., 8., 0., 0., 2., 0.], dtype=torch.float64)

    References:
        Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS
        2017.
    """
    nouns.payload(payload)
    parts = []
    for name, entry in sorted(payload.items()):
        weight = widened(entry.weight)
        product = widened(entry.known) * per_row(weight, entry.value)
        check.finite(f"payload[{name!r}] times its weight, in float64", product)
        parts += [product.flatten(), weight.flatten()]
    return torch.cat(parts)


def from_sum(vector: Float[Tensor, " length"], *, like: Payload) -> dict[str, Weighted]:
    """Divide a sum of vectors of :func:`to_summable` by its weights, into the weighted mean.

    Args:
        vector: Sum over clients. The vector of one client gives the payload of that client.
        like: Payload with the names, shapes, dtypes and devices of the result, such as
            ``collect(model, weight=0)``. Its numbers are not read.

    Returns:
        Weighted mean by name, as of :func:`weighted_mean`. Rows of total weight 0 become 0. A total
        weight that overflows its dtype becomes the largest number of the dtype.

    Raises:
        ValueError: If the length is not that of `like`, a total weight is negative, a number is not
            finite, or a mean overflows its dtype.

    Example:
        >>> def payload(value, weight):
        ...     return {"head": Weighted(torch.tensor([value]), torch.tensor(weight))}
        >>> total = to_summable(payload(1.0, 1.0)) + to_summable(payload(5.0, 3.0))
        >>> from_sum(total, like=payload(0.0, 0.0))
        {'head': Weighted(value=tensor([4.]), weight=tensor(4.))}
    """
    check.number_tensor("vector", vector, "be a floating-point tensor of shape (length,)", ndim=1)
    nouns.form("like", like)
    sizes = [tensor.numel() for _, entry in sorted(like.items()) for tensor in entry]
    check.shape("vector", vector, (sum(sizes),), "`like` as a vector")
    check.finite("vector", vector)
    pieces = iter(torch.split(widened(vector), sizes))
    means = {}
    for name, entry in sorted(like.items()):
        total, weight = (next(pieces).reshape(tensor.shape) for tensor in entry)
        check.nonnegative(f"vector as total weights of {name!r}", weight)
        quotient = Weighted(total / per_row(weight, total), weight)
        mean = quotient.known.to(entry.value)
        check.finite(f"vector as means of {name!r} in {mean.dtype}", mean)
        largest = torch.finfo(entry.weight.dtype).max
        means[name] = Weighted(mean, weight.clamp(max=largest).to(entry.weight))
    return {name: means[name] for name in like}
