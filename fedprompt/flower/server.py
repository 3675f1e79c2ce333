"""What answers the clients, as a Flower strategy."""

from collections.abc import Callable, Iterable, Mapping

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app import Message as Envelope
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedprompt._checks import wrong_value
from fedprompt.flower.rounds import LOG, Wire, client_nodes
from fedprompt.interfaces import Server
from fedprompt.messages import Ledger
from fedprompt.wire import Expected


class ServerStrategy(Strategy):
    """A Flower strategy around a :class:`Server`; ``start(grid, ArrayRecord(), num_rounds=3)`` runs it.

    Each round is :func:`run_round`, and then a step with the uploads of those who answered; where nobody did, answers and state stay as
    they are. Evaluation is the user's.

    Args:
        server: For instance :func:`averaging`.
        cohort: From the round, 0-based though Flower counts from 1, to the ids of its clients; an id that `server` has no answer for is a
            ValueError.
        expect: From a client's id to the upload that is expected.
        max_bytes: At most so many bytes for an upload.
        nodes: Node by client id, as printed when a node was registered; nobody is asked then, and no node can be another client.
            None asks them: :func:`client_nodes`.
        patience: Seconds to wait for clients of the cohort that are not connected, if they are asked.
        ledger: Records what is sent and what is accepted.

    Attributes:
        answers: By client id, after the last step.
        state: Of the server.
        nodes: Node by client id.

    Example:
        >>> upload = Expected({"head": Weighted(torch.zeros(2), torch.tensor(0.0))})
        >>> server = averaging({"head": torch.zeros(2)}, clients=range(3))
        >>> strategy = ServerStrategy(server, cohort=lambda server_round: [0, 2], expect=lambda client: upload, max_bytes=10_000)
        >>> strategy.answers[2]
        {'head': tensor([0., 0.])}
    """

    def __init__(
        self,
        server: Server,
        *,
        cohort: Callable[[int], Iterable[int]],
        expect: Callable[[int], Expected],
        max_bytes: int,
        nodes: Mapping[int, int] | None = None,
        patience: float = 60.0,
        ledger: Ledger | None = None,
    ) -> None:
        self.server, self.cohort, self.patience = server, cohort, patience
        self.answers, self.state = server.init()
        self.nodes, self._registered = dict(nodes or {}), nodes is not None
        self._wire, self._asked = Wire(expect, max_bytes, ledger), dict[int, int]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Address the answers of the cohort."""
        drawn = list(self.cohort(server_round - 1))
        if strangers := [client for client in drawn if client not in self.answers]:
            raise wrong_value("cohort", "name clients that have an answer", strangers)
        if not self._registered:
            self.nodes = client_nodes(grid, drawn, known=self.nodes, timeout=self.patience)
        self._asked = {self.nodes[client]: client for client in drawn if client in self.nodes}
        return self._wire.address(
            {client: self.answers[client] for client in drawn}, self.nodes, server_round - 1
        )

    def aggregate_train(
        self, server_round: int, replies: Iterable[Envelope]
    ) -> tuple[None, MetricRecord]:
        """Step with the uploads that are accepted."""
        uploads = self._wire.accept(replies, self._asked, server_round - 1)
        if uploads:
            self.answers, self.state = self.server.step(uploads, self.state)
        return None, MetricRecord({"asked": len(self._asked), "accepted": len(uploads)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Ask nobody."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Envelope]) -> None:
        """Expect nothing."""

    def summary(self) -> None:
        """Log the server and how many clients it answers."""
        LOG.info(
            "\t├── %s: %d clients, each with its own answer",
            type(self.server).__name__,
            len(self.answers),
        )
