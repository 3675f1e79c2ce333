"""Queries minus their mean over all clients, for backbones whose features resemble one another."""

from __future__ import annotations

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._conversions import single, widened
from fedprompt.interfaces import Weighted

_QUERY = "be a floating-point tensor (batch, dim)"


@torch.no_grad()
def query_mean(query: Float[Tensor, "batch dim"]) -> Weighted:
    """Average a client's queries into an entry, with their number as weight.

    :func:`weighted_mean` of such entries is the mean over all samples of all clients. One message
    of each client before the first round is enough, because the backbone is frozen. It reveals the
    mean of the client's images.

    Args:
        query: Features of the unprompted backbone, possibly none.

    Returns:
        Mean (dim,), in float32 at least, and number of queries (). Without queries both are 0.

    Example:
        >>> query_mean(torch.tensor([[1.0, 4.0], [3.0, 4.0]]))
        Weighted(value=tensor([2., 4.]), weight=tensor(2.))
    """
    check.number_tensor("query", query, _QUERY, ndim=2, read=True)
    check.dense("query", query)
    number = query.shape[0]
    mean = (widened(query).sum(0) / max(number, 1)).to(single(query))
    return Weighted(mean, torch.tensor(float(number)).to(query.device))


class CenteredQueries(nn.Module):
    r"""Queries minus a fixed mean, :math:`h - \bar h`, for selection and for the key loss.

    Class tokens of pretrained transformers can lie in a narrow cone: with DINOv2, two photographs
    have a cosine of 0.9. A key on the axis of the cone is then nearest to every query and takes all
    samples. Subtracting the mean removes the cone.

    Pass the result to the selector and to :func:`key_loss`. Keys learned with one mean
    are useless with another, so the mean is part of the model.

    Args:
        dim: Width of a query, ``trunk.num_features``.
        center: Mean query (dim,), such as the mean over public images. If None, load it before the
            first call.

    Attributes:
        center: Buffer (dim,), the mean query. ``load_values(queries, {"center": mean})`` loads the
            mean over clients. ``collect`` and ``snapshot`` do not send buffers.

    Raises:
        ValueError: When called on a CPU, if no mean was given or loaded.

    Example:
        The mean of three queries of two clients.

        >>> one, other = torch.tensor([[9.0, 1.0]]), torch.tensor([[9.0, -2.0], [9.0, -2.0]])
        >>> mean = weighted_mean([query_mean(one), query_mean(other)])
        >>> centered = CenteredQueries(2)
        >>> load_values(centered, {"center": mean})
        >>> centered(torch.tensor([[9.0, 1.0], [9.0, -2.0]]))
        tensor([[ 0.,  2.],
                [ 0., -1.]])
    """

    center: Tensor

    def __init__(self, dim: int, *, center: Float[Tensor, " dim"] | None = None) -> None:
        check.count("dim", dim)
        super().__init__()
        if center is None:
            center = torch.full((dim,), torch.nan)
        else:
            check.number_tensor("center", center, "be a floating-point tensor (dim,)")
            check.shape("center", center, (dim,))
            check.finite("center", center)
        self.register_buffer("center", single(center.detach().clone()))

    def forward(self, query: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Subtract the mean, in float32 at least."""
        check.number_tensor("query", query, _QUERY, ndim=2, read=True)
        dim = self.center.shape[0]
        rule = f"have the width of `center`, {dim}"
        check.require(query.shape[1] == dim, "query", rule, query.shape[1])
        check.same_device("query", query, self.center.device, "the device of `center`,")
        if check.values_readable(self.center, sync=False) and bool(self.center.isnan().any()):
            raise check.wrong("center", "be given or loaded before the first call", "NaN")
        return single(query) - self.center

    def extra_repr(self) -> str:
        """Show the width."""
        return str(self.center.shape[0])
