"""Flower strategies for any method."""

from collections.abc import Iterable, Mapping
from itertools import islice

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app import Message as Envelope
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.flower._rounds import LOG, Fingerprint, Wire, client_nodes, unchecked
from fedprompt.interfaces import Method, Round
from fedprompt.messages.ledger import Ledger


class ServerStrategy(Strategy):
    """Flower strategy that runs the server of a method.

    ``strategy.start(grid, ArrayRecord(), num_rounds=3 * method.exchanges)`` runs three rounds,
    because each exchange is a round of Flower. Replies and steps are as in :func:`run_round`. The
    strategy does not evaluate. To save after each round, pass a function as `evaluate_fn`.

    Args:
        method: Method with a `form`.
        cohorts: Ids of the clients of each round, from round 0 on, as for :func:`run_rounds`. If
            None, those of the method's setting.
        start: Round to continue from, for example of :func:`load_checkpoint`. Cohorts up to it are
            read and skipped. If None, the run begins with the state of the method's server.
        max_bytes: Maximum size in bytes of a payload.
        fingerprint: Function from a client id to its :func:`~fedprompt.fingerprint`, the same as
            at the clients. If it is not given, backbones are not compared.
        max_abs: Largest magnitude of a value in a payload. The payload of a client that sends more
            is dropped. If None, every finite number is accepted.
        max_weight: Largest weight of a row in a payload, such as the number of examples of the
            largest client. The payload of a client that sends more is dropped. If None, every
            finite weight is accepted, and one client can dominate the mean.
        nodes: Nodes by client id, as printed when a node was registered. No node can then pose as
            another client. If None, nodes report their client ids (:func:`client_nodes`).
        patience: Maximum time in seconds to wait for clients of the cohort that are not connected,
            if `nodes` is None.
        ledger: Ledger that records the messages sent and accepted.

    Attributes:
        now: Last :class:`Round` that ended. Its `clients` are empty, because the states of clients
            are at their nodes, and `stateful` has the ids of those with a state. So it predicts if
            predictions read no state. Test personalized methods at the nodes, for example with
            ``Round(server_round, server, {client: state}).model(method, data)``.
        nodes: Nodes by client id.

    Example:
        >>> server = averaging_server({"head": torch.zeros(2)})
        >>> form = lambda client: {"head": Weighted(torch.zeros(2), torch.tensor(0.0))}
        >>> train = lambda data, answer, state: (form(data), state)
        >>> method = Method(train, server, predict=lambda *all: torch.nn.Identity(), form=form)
        >>> strategy = ServerStrategy(method, [[0, 2], [1, 2]], max_bytes=10_000)
        >>> strategy.now.server_round, strategy.now.server["values"]
        (-1, {'head': tensor([0., 0.])})
    """

    def __init__(
        self,
        method: Method,
        cohorts: Iterable[Iterable[int]] | None = None,
        *,
        max_bytes: int,
        start: Round | None = None,
        fingerprint: Fingerprint = unchecked,
        max_abs: float | None = None,
        max_weight: float | None = None,
        nodes: Mapping[int, int] | None = None,
        patience: float = 60.0,
        ledger: Ledger | None = None,
    ) -> None:
        self._wire = Wire(method, max_bytes, fingerprint, max_abs, max_weight, ledger)
        if cohorts is None:
            rule = "be given to a method without a setting, such as [[0, 1], [1, 2]]"
            check.require(method.setting is not None, "cohorts", rule, "None")
            cohorts = method.setting.cohorts()
        check.iterable("cohorts", cohorts, "cohorts")
        check.instance("start", start, Round | None, "be a Round or None")
        self.method = method
        self.now = start or Round(-1, method.server.state, {})
        self.now.check_made_by(method, "start")
        self.patience = patience
        self.nodes = dict(nodes or {})
        self._registered = nodes is not None
        self._cohorts = islice(cohorts, self.now.server_round + 1, None)
        self._cohort: list[int] = []
        self._state = self.now.server
        self._exchange = (self.now.server_round + 1) * method.exchanges
        self._asked = dict[int, int]()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Send the answers of the cohort, which is drawn in the first exchange of a round."""
        if self._exchange % self.method.exchanges == 0:
            self._cohort = self._draw(self._exchange // self.method.exchanges)
            if not self._registered:
                earlier = self.nodes
                self.nodes = client_nodes(grid, self._cohort, known=earlier, timeout=self.patience)
            self._asked = {self.nodes[each]: each for each in self._cohort if each in self.nodes}
        return self._wire.address(self._exchange, self._cohort, self._state, self.nodes)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Envelope]
    ) -> tuple[None, MetricRecord]:
        """Step the server with the accepted payloads."""
        payloads = self._wire.accept(self._exchange, replies, self._asked)
        self._state = self._wire.step(self._exchange, payloads, self._state)
        self._exchange += 1
        ended, more = divmod(self._exchange, self.method.exchanges)
        if not more:
            stateful = {*self.now.stateful, *self._wire.stateful}
            self.now = Round(ended - 1, self._state, {}, stateful, self.method.origin)
        return None, MetricRecord({"asked": len(self._asked), "accepted": len(payloads)})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Send nothing, because evaluation is left to the user."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Envelope]) -> None:
        """Ignore replies, because nothing was sent."""

    def summary(self) -> None:
        """Log the exchanges of a round."""
        LOG.info("\t├── exchanges in a round: %d", self.method.exchanges)

    def _draw(self, server_round: int) -> list[int]:
        for cohort in self._cohorts:
            return nouns.cohort(cohort, server_round)
        raise check.wrong("cohorts", f"have a cohort for round {server_round}", "no more")
