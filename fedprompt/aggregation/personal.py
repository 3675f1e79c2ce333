"""Servers that send an answer to each client."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedprompt.aggregation.means import weighted_mean
from fedprompt.aggregation.server import overwrite
from fedprompt.interfaces import Answers, Payload, Server, ServerUpdate


def averaging(
    values: Mapping[str, Tensor],
    *,
    clients: Iterable[int],
    aggregate: Callable[[Iterable[Payload]], Payload] | None = None,
    update: ServerUpdate[Mapping[str, Tensor], Payload] | None = None,
) -> Server:
    """Make a :class:`Server` that aggregates payloads and sends the same values to all clients.

    Args:
        values: First broadcast.
        clients: Ids of all clients.
        aggregate: Function from payloads to one payload. If None, :func:`weighted_mean` is used.
        update: Server update of the values. If None, :func:`overwrite` takes the mean.

    Returns:
        An ``(init, step)`` pair. Its state contains the values and the state of `update`.

    Example:
        >>> from fedprompt import ema
        >>> values = {"head": torch.tensor(0.0)}
        >>> server = averaging(values, clients=range(3), update=ema(decay=0.5))
        >>> answers, state = server.init()
        >>> payload = {"head": Weighted(torch.tensor(4.0), torch.tensor(1.0))}
        >>> answers, state = server.step({0: payload}, state)
        >>> answers[1]
        {'head': tensor(2.)}
    """
    return _Averaging(values, tuple(clients), aggregate or weighted_mean, update or overwrite())


class _Averaging(NamedTuple):
    values: Mapping[str, Tensor]
    clients: tuple[int, ...]
    aggregate: Callable[[Iterable[Payload]], Payload]
    update: ServerUpdate[Mapping[str, Tensor], Payload]

    def init(self) -> tuple[Answers, Any]:
        state = {"values": self.values, "update": self.update.init(self.values)}
        return dict.fromkeys(self.clients, self.values), state

    def step(self, payloads: Mapping[int, Any], state: Any, /) -> tuple[Answers, Any]:
        mean = self.aggregate([payloads[client] for client in sorted(payloads)])
        values, update = self.update.step(state["values"], mean, state["update"])
        return dict.fromkeys(self.clients, values), {"values": values, "update": update}
