"""Global, local and worst-client accuracy from a (clients, test sets) matrix.

Entry (i, j) is the accuracy of client i's model on client j's test set. One global model is a
single row. The figures differ in the entries that they use and in how they average them, so name
the one that you report.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Real
from torch import Tensor

import fedprompt._conversions as convert
import fedprompt._refusals as check


class ClientSpread(NamedTuple):
    """Accuracy of the worst and the best client, and the average over clients.

    Attributes:
        lowest: Accuracy of the worst client.
        average: Unweighted mean over clients.
        highest: Accuracy of the best client.
    """

    lowest: float
    average: float
    highest: float


class Summary(NamedTuple):
    """Mean of the last rounds and best round of a history.

    Attributes:
        last_mean: Mean of the last rounds. Report this figure.
        best: Highest figure of all rounds. It is optimistically biased, because the round is
            selected on the reported metric.
        best_round: First round that reached it, 0-based.
    """

    last_mean: float
    best: float
    best_round: int


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


def global_accuracy(
    accuracy: Float[Tensor, "clients tests"], num_examples: Real[Tensor, " tests"] | None = None
) -> float:
    r"""Average the accuracy on all test sets together over clients.

    .. math:: \frac{1}{M} \sum_i \sum_j n_j A_{ij} \,\big/\, \sum_j n_j

    Args:
        accuracy: Matrix A, in [0, 1], with a row for each client, or one row for a global model.
        num_examples: Sizes n of the test sets. If None, all are equal.

    Returns:
        Accuracy in [0, 1]. For one global model it equals :func:`pooled_local_accuracy`.

    Raises:
        ValueError: If shapes disagree, an accuracy is NaN or outside [0, 1], or sizes are negative,
            not finite or all 0.

    Example:
        >>> global_accuracy(torch.tensor([[1.0, 0.5], [0.0, 0.5]]), torch.tensor([30, 10]))
        0.5
    """
    return client_spread(accuracy, num_examples).average


def client_spread(
    accuracy: Float[Tensor, "clients tests"], num_examples: Real[Tensor, " tests"] | None = None
) -> "ClientSpread":
    r"""Find the worst, average and best client by the accuracy on all test sets together.

    FedHPL tests every client on one full test set. `accuracy` then has the shape (clients, 1).

    Args:
        accuracy: Matrix A, in [0, 1], with a row for each client.
        num_examples: Sizes n of the test sets. If None, all are equal.

    Returns:
        Minimum, mean and maximum of :math:`\sum_j n_j A_{ij} / \sum_j n_j` over clients i. The mean
        is the :func:`global_accuracy`.

    Raises:
        ValueError: If shapes disagree, an accuracy is NaN or outside [0, 1], or sizes are negative,
            not finite or all 0.

    Example:
        >>> client_spread(torch.tensor([[0.25], [0.75], [0.5]]))
        ClientSpread(lowest=0.25, average=0.5, highest=0.75)
    """
    matrix = convert.accuracies(accuracy)
    tests = matrix.shape[1]
    sizes = _sizes(torch.ones(tests) if num_examples is None else num_examples, tests)
    clients = matrix @ sizes / sizes.sum()
    return ClientSpread(clients.min().item(), clients.mean().item(), clients.max().item())


def local_accuracy(accuracy: Float[Tensor, "clients tests"]) -> float:
    r"""Average the accuracy of each client on its test set over clients.

    .. math:: \frac{1}{M} \sum_i A_{ii}

    Every client has the same weight, whatever the size of its test set.

    Args:
        accuracy: Matrix A, in [0, 1], square or a single row. A single row has the accuracy of one
            global model on each test set, or of each client on its test set.

    Returns:
        Accuracy in [0, 1].

    Raises:
        ValueError: If there are neither as many rows as test sets nor a single row, or an accuracy
            is NaN or outside [0, 1].

    Example:
        >>> local_accuracy(torch.tensor([[0.75, 0.0], [0.0, 0.25]]))
        0.5
    """
    return _diagonal(accuracy).mean().item()


def worst_local_accuracy(accuracy: Float[Tensor, "clients tests"]) -> float:
    r"""Find the lowest accuracy of a client on its test set, :math:`\min_i A_{ii}`.

    Args:
        accuracy: Matrix A, in [0, 1], square or a single row, as for :func:`local_accuracy`.

    Returns:
        Accuracy in [0, 1].

    Raises:
        ValueError: If there are neither as many rows as test sets nor a single row, or an accuracy
            is NaN or outside [0, 1].

    Example:
        >>> worst_local_accuracy(torch.tensor([[0.75, 0.0], [0.0, 0.25]]))
        0.25
    """
    return _diagonal(accuracy).min().item()


def pooled_local_accuracy(
    accuracy: Float[Tensor, "clients tests"], num_examples: Real[Tensor, " tests"]
) -> float:
    r"""Average the accuracy of each client on its test set over samples.

    .. math:: \sum_i n_i A_{ii} \,\big/\, \sum_i n_i

    Args:
        accuracy: Matrix A, in [0, 1], square or a single row, as for :func:`local_accuracy`.
        num_examples: Sizes n of the test sets.

    Returns:
        Accuracy in [0, 1]. With equal sizes it is the :func:`local_accuracy`.

    Raises:
        ValueError: If shapes disagree, an accuracy is NaN or outside [0, 1], or sizes are negative,
            not finite or all 0.

    Example:
        >>> accuracy = torch.tensor([[0.75, 0.0], [0.0, 0.25]])
        >>> pooled_local_accuracy(accuracy, torch.tensor([30, 10]))
        0.625
    """
    clients = _diagonal(accuracy)
    sizes = _sizes(num_examples, len(clients))
    return (clients @ sizes / sizes.sum()).item()


def last_and_best(history: Sequence[float], *, last: int) -> "Summary":
    """Summarize a history over rounds by the mean of its last rounds and by its best round.

    Args:
        history: One figure for each round. Higher is better.
        last: Number of rounds to average, at least 1 and at most all. SGPT averages 10, FedOTP 5.

    Returns:
        Both figures, and the round of the best figure. If several tie, it is the first of them.

    Example:
        >>> last_and_best([0.25, 1.0, 0.5, 0.75], last=2)
        Summary(last_mean=0.625, best=1.0, best_round=1)
    """
    if not isinstance(history, Sequence | np.ndarray) or isinstance(history, str | bytes):
        raise check.wrong_type("history", "be a sequence of numbers", check.kind(history))
    check.count("last", last, at_most=len(history), of="the number of rounds")
    for server_round, figure in enumerate(history):
        check.number(f"history[{server_round}]", figure)
    figures = list(map(float, history))  # sums of narrow numbers of NumPy overflow
    best_round = max(range(len(figures)), key=figures.__getitem__)
    return Summary(sum(figures[-int(last) :]) / int(last), figures[best_round], best_round)


def negative_effect(losses: Float[Tensor, "rounds clients"]) -> "NegativeEffect":
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


def _diagonal(accuracy: object) -> Float[Tensor, " clients"]:
    matrix = convert.accuracies(accuracy)
    clients, tests = matrix.shape
    rule = "have as many rows as test sets, or one row"
    check.require(clients in (1, tests), "accuracy", rule, matrix)
    return matrix[0] if clients == 1 else matrix.diagonal()


def _sizes(num_examples: Any, tests: int) -> Float[Tensor, " tests"]:
    sizes = convert.counts("num_examples", num_examples, f"({tests},)", ndims=(1,))
    check.shape("num_examples", sizes, (tests,))
    check.some("num_examples", bool(sizes.any()), "count at least one sample")
    return sizes
