"""A payload as one vector, and back: what a protocol that sees nothing but sums can add."""

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import (
    check_finite,
    check_form,
    check_payload,
    kind,
    known_rows,
    per_row,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Payload, Weighted


def to_summable(payload: Payload) -> Float[Tensor, " length"]:
    r"""Write a payload as one vector whose sum over clients is all that a mean needs.

    By sorted names, first :math:`w_r v_r` for every row and then :math:`w_r`. Its length depends on the form alone, not on which rows are
    known, and all clients' vectors can be added by a protocol that shows the server nothing but their sum: :func:`from_sum` makes
    :func:`weighted_mean` of it.

    Args:
        payload: Of any form that all clients share.

    Returns:
        In float64, on the device of the payload; rows of weight 0 are 0.

    Raises:
        TypeError: If `payload` does not map names to :class:`Weighted`.
        ValueError: If it is empty, a weight is negative, a number is not finite, or weight times value is too large for float64.

    Example:
        >>> to_summable({"head": Weighted(torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([2.0, 0.0]))})
        tensor([6., 8., 0., 0., 2., 0.], dtype=torch.float64)

    References:
        Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, for such a protocol.
    """
    check_payload(payload)
    parts = []
    for name, upload in sorted(payload.items()):
        weight = upload.weight.double()
        product = known_rows(upload).double() * per_row(weight, upload.value)
        if wrong := int((~torch.isfinite(product)).sum()):
            rule = "have products of weight and value that fit float64"
            raise wrong_value(
                f"payload[{name!r}]", rule, f"{wrong} entries of {product.numel()} that do not"
            )
        parts += [product.flatten(), weight.flatten()]
    return torch.cat(parts)


def from_sum(vector: Float[Tensor, " length"], *, like: Payload) -> dict[str, Weighted]:
    """Make the weighted mean out of the sum of vectors of :func:`to_summable`.

    Args:
        vector: A sum of them; of one alone, the payload comes back.
        like: A payload of the same form, whose numbers are not read: ``collect(model, weight=0)``.

    Returns:
        By the names of `like` and in its dtypes. Rows of total weight 0 are 0. A total weight that its dtype cannot hold becomes the
        largest number that it can, as in :func:`weighted_mean`.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If the length is not that of `like`, a total weight is negative, a number is not finite, or a mean is too large for its
            dtype.

    Example:
        >>> sent = [{"head": Weighted(torch.tensor([value]), torch.tensor(weight))} for value, weight in ((1.0, 1.0), (5.0, 3.0))]
        >>> from_sum(to_summable(sent[0]) + to_summable(sent[1]), like=sent[0])
        {'head': Weighted(value=tensor([4.]), weight=tensor(4.))}
    """
    if not isinstance(vector, Tensor) or not vector.is_floating_point() or vector.ndim != 1:
        raise wrong_type("vector", "be a floating-point tensor of shape (length,)", kind(vector))
    check_form("like", like)
    sizes = {name: [tensor.numel() for tensor in upload] for name, upload in sorted(like.items())}
    if len(vector) != (length := sum(map(sum, sizes.values()))):
        raise wrong_value("vector", f"have the length of `like`, {length}", len(vector))
    check_finite("vector", vector)
    pieces = iter(torch.split(vector.double(), [size for pair in sizes.values() for size in pair]))
    means = {}
    for name in sizes:
        total, weight = (next(pieces).reshape(tensor.shape) for tensor in like[name])
        if bool((weight < 0).any()):
            raise wrong_value(
                "vector", f"hold total weights of at least 0 for {name!r}", float(weight.min())
            )
        value = known_rows(Weighted(total / per_row(weight, total), weight)).to(
            like[name].value.dtype
        )
        if wrong := int((~torch.isfinite(value)).sum()):
            rule = f"hold means for {name!r} that fit {value.dtype}"
            raise wrong_value("vector", rule, f"{wrong} entries of {value.numel()} that do not")
        dtype = like[name].weight.dtype
        means[name] = Weighted(value, weight.clamp(max=torch.finfo(dtype).max).to(dtype, copy=True))
    return {name: means[name] for name in like}
