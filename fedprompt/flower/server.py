"""Flower strategies for any server."""

from collections.abc import Callable, Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app import Message as Envelope
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedprompt._checks import wrong_value
from fedprompt.flower.rounds import LOG, Wire, client_nodes
from fedprompt.interfaces import Message, PairServer, Weighted
from fedprompt.messages import Ledger
from fedprompt.wire import Expected


class ServerStrategy(Strategy):
    """Flower strategy that runs a :class:`~fedprompt.interfaces.PairServer`.

    ``strategy.start(grid, ArrayRecord(), num_rounds=3)`` runs the rounds. Each round is a
    :func:`run_round` and a step with the accepted messages. The strategy does not evaluate.

    If no message is accepted, or if the server refuses the step with a ValueError, answers and
    state are unchanged and the run goes on. For example, an adaptive rule refuses values that
    overflow its state. One line of the log has the reason, and the largest magnitude that each
    client sent. To refuse only the message of the client at fault, set ``max_abs`` in `expect`.

    Args:
        server: Server, such as :func:`averaging`.
        cohort: Function from the round (0-based, although Flower counts from 1) to the ids of its
            clients. `server` must have an answer for each.
        expect: Function from a client id to the message that it should send.
        max_bytes: Maximum size in bytes of a client's message.
        nodes: Nodes by client id, as printed when a node was registered. No node can then pose as
            another client. If None, nodes report their client ids (:func:`client_nodes`).
        patience: Maximum time in seconds to wait for clients of the cohort that are not connected,
            if `nodes` is None.
        ledger: Ledger that records the messages sent and accepted.

    Attributes:
        answers: Answers by client id, after the last step.
        state: State of the server.
        nodes: Nodes by client id.

    Example:
        >>> expected = Expected({"head": Weighted(torch.zeros(2), torch.tensor(0.0))})
        >>> strategy = ServerStrategy(
        ...     averaging({"head": torch.zeros(2)}, clients=range(3)),
        ...     cohort=lambda server_round: [0, 2],
        ...     expect=lambda client: expected,
        ...     max_bytes=10_000,
        ... )
        >>> strategy.answers[2]
        {'head': tensor([0., 0.])}
    """

    def __init__(
        self,
        server: PairServer,
        *,
        cohort: Callable[[int], Iterable[int]],
        expect: Callable[[int], Expected],
        max_bytes: int,
        nodes: Mapping[int, int] | None = None,
        patience: float = 60.0,
        ledger: Ledger | None = None,
    ) -> None:
        self.server = server
        self.cohort = cohort
        self.patience = patience
        self.answers, self.state = server.init()
        self.nodes = dict(nodes or {})
        self._registered = nodes is not None
        self._wire = Wire(expect, max_bytes, ledger)
        self._asked = dict[int, int]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Send the answers of the cohort."""
        drawn = list(self.cohort(server_round - 1))
        if unknown := [client for client in drawn if client not in self.answers]:
            raise wrong_value("cohort", "name clients that have an answer", unknown)
        if not self._registered:
            self.nodes = client_nodes(grid, drawn, known=self.nodes, timeout=self.patience)
        self._asked = {self.nodes[client]: client for client in drawn if client in self.nodes}
        answers = {client: self.answers[client] for client in drawn}
        return self._wire.address(answers, self.nodes, server_round - 1)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Envelope]
    ) -> tuple[None, MetricRecord]:
        """Step the server with the accepted messages, or drop the round if it refuses them."""
        messages = self._wire.accept(replies, self._asked, server_round - 1)
        if messages:
            try:
                self.answers, self.state = self.server.step(messages, self.state)
            except ValueError as error:
                largest = ", ".join(
                    f"{client}: {_largest(message):.3g}" for client, message in messages.items()
                )
                text = "round %d is dropped: %.300s Largest magnitude of each client: %s"
                LOG.warning(text, server_round - 1, error, largest)
        return None, MetricRecord({"asked": len(self._asked), "accepted": len(messages)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Send nothing, because evaluation is left to the user."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Envelope]) -> None:
        """Ignore replies, because nothing was sent."""

    def summary(self) -> None:
        """Log the server and its number of clients."""
        LOG.info(
            "\t├── %s: %d clients, each with its own answer",
            type(self.server).__name__,
            len(self.answers),
        )


def _largest(message: Message) -> float:
    """Return the largest magnitude of the floating-point values of a message, or 0 without any."""
    values = [entry.value if isinstance(entry, Weighted) else entry for entry in message.values()]
    known = [value for value in values if value.is_floating_point() and value.numel()]
    return max((value.abs().max().item() for value in known), default=0.0)
