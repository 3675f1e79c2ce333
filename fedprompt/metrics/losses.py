"""The curves of the clients' own losses, and what an aid from the server did to them."""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from fedprompt._checks import check_finite, kind, wrong_type, wrong_value

__all__ = ["NegativeEffect", "negative_effect"]


class NegativeEffect(NamedTuple):
    """How far losses rose again.

    Attributes:
        clients: ``(clients,)``, float64, for each client the largest rise of its loss over its lowest value before; at least 0.
        average: The unweighted mean over clients.
        highest: Of the client that suffered most.
    """

    clients: Float[Tensor, " clients"]
    average: float
    highest: float


def negative_effect(losses: Float[Tensor, "rounds clients"]) -> NegativeEffect:
    r"""Measure how much a shared aid worked against the clients (FedL2G, Fig. 1): the largest rise of a loss over its previous minimum.

    .. math:: \max_t \big( L_t - \min_{s < t} L_s \big)^+

    A curve that only falls has 0. A curve of the whole federation is a single column: ``losses.mean(1, keepdim=True)``, or whatever mean
    you report; rises of single clients may cancel in it.

    Args:
        losses: Of each client on its own data, after each round, with what the server sent left out (the cross-entropy alone).

    Returns:
        The effect on each client, its mean and its maximum.

    Raises:
        TypeError: If `losses` is not floating-point.
        ValueError: If it has not the shape (rounds, clients) with one of each at least, or holds NaN or infinity.

    Example:
        The first client rises from 1 to 3, the second one never.

        >>> effect = negative_effect(torch.tensor([[2.0, 4.0], [1.0, 3.0], [3.0, 2.0], [2.0, 1.0]]))
        >>> effect.clients.tolist(), effect.average, effect.highest
        ([2.0, 0.0], 1.0, 2.0)

    References:
        Zhang et al., "FedL2G: Learning to Guide Local Training in Heterogeneous Federated Learning", 2024, Fig. 1.
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        raise wrong_type(
            "losses", "be a floating-point tensor of shape (rounds, clients)", kind(losses)
        )
    if losses.ndim != 2 or 0 in losses.shape:
        raise wrong_value(
            "losses", "have shape (rounds, clients), one of each at least", tuple(losses.shape)
        )
    check_finite("losses", losses)
    curves = losses.detach().cpu().double()
    clients = (curves - torch.cummin(curves, 0).values).amax(0)
    return NegativeEffect(clients, clients.mean().item(), clients.max().item())
