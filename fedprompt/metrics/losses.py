"""Rises of the clients' losses under help from the server."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check


class NegativeEffect(NamedTuple):
    """Largest rise of each client's loss over its previous minimum.

    Attributes:
        clients: ``(clients,)``, float64, the rise of each client, at least 0.
        average: Unweighted mean over clients.
        highest: Largest rise of all clients.
    """

    clients: Float[Tensor, " clients"]
    average: float
    highest: float


def negative_effect(losses: Float[Tensor, "rounds clients"]) -> NegativeEffect:
    r"""Measure the largest rise of each client's loss over its previous minimum.

    .. math:: \max_t \big( L_t - \min_{s < t} L_s \big)^+

    FedL2G (Fig. 1) measures in this way how much guidance from the server harms a client. A loss
    that never increases has the effect 0. For one figure of the whole federation pass the mean
    loss, ``losses.mean(1, keepdim=True)``. Rises of single clients can cancel in the mean.

    Args:
        losses: Loss of each client on its data after each round, without the terms that use the
            server's message (in FedL2G the cross-entropy).

    Returns:
        Effect on each client, its mean and its maximum.

    Raises:
        ValueError: If an axis is empty, or a loss is NaN or infinite.

    Example:
        The loss of the first client rises from 1 to 3. The loss of the second client never rises.

        >>> losses = torch.tensor([[2.0, 4.0], [1.0, 3.0], [3.0, 2.0], [2.0, 1.0]])
        >>> effect = negative_effect(losses)
        >>> effect.clients.tolist(), effect.average, effect.highest
        ([2.0, 0.0], 1.0, 2.0)

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated
        Learning", 2024, Fig. 1.
    """
    curves = convert.table("losses", losses, "(rounds, clients)")
    check.finite("losses", curves)
    clients = (curves - torch.cummin(curves, 0).values).amax(0)
    return NegativeEffect(clients, clients.mean().item(), clients.max().item())
