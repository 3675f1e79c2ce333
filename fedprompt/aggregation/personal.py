"""Servers that answer each client."""

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
    """Make a :class:`Server` that broadcasts, of an aggregator and a server update over names.

    Args:
        values: The first broadcast.
        clients: All ids.
        aggregate: Payloads in, one out; None is :func:`fedprompt.weighted_mean`.
        update: None is :func:`fedprompt.overwrite`, which takes the mean as the new value.

    Returns:
        The pair. Its state holds the values and what `update` remembers.

    Example:
        >>> server = averaging({"head": torch.zeros(2)}, clients=range(3), update=ema(decay=0.5))
        >>> uploads = {client: {"head": Weighted(torch.full((2,), float(client)), torch.tensor(1.0))} for client in (0, 2)}
        >>> answers, state = server.step(uploads, server.init()[1])
        >>> answers[1]
        {'head': tensor([0.5000, 0.5000])}
    """
    return _Averaging(values, tuple(clients), aggregate or weighted_mean, update or overwrite())


class _Averaging(NamedTuple):
    values: Mapping[str, Tensor]
    clients: tuple[int, ...]
    aggregate: Callable[[Iterable[Payload]], Payload]
    update: ServerUpdate[Mapping[str, Tensor], Payload]

    def init(self) -> tuple[Answers, Any]:
        return dict.fromkeys(self.clients, self.values), {
            "values": self.values,
            "update": self.update.init(self.values),
        }

    def step(self, uploads: Mapping[int, Any], state: Any, /) -> tuple[Answers, Any]:
        mean = self.aggregate([uploads[client] for client in sorted(uploads)])
        values, memory = self.update.step(state["values"], mean, state["update"])
        return dict.fromkeys(self.clients, values), {"values": values, "update": memory}
