"""Flower strategies for any method."""

from __future__ import annotations  # the documentation is built without flwr

from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.app import Message as Envelope
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.flower._records import all_tensors, arrays_of, encoded_state, tensors_of
from fedprompt.flower._rounds import LOG, Fingerprint, Wire, client_nodes, unchecked
from fedprompt.flower._tests import mean_figures
from fedprompt.interfaces import Method, Round
from fedprompt.messages.ledger import Ledger

_CONFIG = "be empty, because a method reads its setting; for noise and clipping see plain=True"
_ARRAYS = "be an empty ArrayRecord, or `strategy.arrays`; pass other values as `start`"
_HANDED = (
    "be read after `take(arrays)`, because a strategy around this one may have changed the arrays"
)
_PLAIN = "have one exchange, and an averaging_server that answers with all values, to be plain"


class Best(NamedTuple):
    """Round with the best figures of the clients.

    Attributes:
        figures: Means over the clients, by name.
        now: Round.
    """

    figures: Mapping[str, float]
    now: Round


class ServerStrategy(Strategy):
    """Flower strategy that runs the server of a method.

    ``strategy.start(grid, ArrayRecord(), num_rounds=3 * method.exchanges)`` runs three rounds,
    because each exchange is a round of Flower. Replies and steps are as in :func:`run_round`. To
    save after each round, pass a function as `evaluate_fn`.

    The result has the arrays of the last round, the metrics `asked`, `accepted`, `bytes_down` and
    `bytes_up` of each exchange, and other metrics of plain replies, weighted by images. With
    `tested`, it has the clients' figures of each round: `clients`, `images`, `accuracy`, `loss` and
    your own metrics (weighted by images), and `balanced_accuracy` (of each client on its own
    classes, the mean over clients).

    Nothing that Flower hands over is dropped without a line in the log. Messages of bytes cannot be
    changed on their way, so first arrays, a config, and strategies around this one that clip or add
    noise are refused. With `plain`, they are honored.

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
            is dropped. If None, the limit is 1,000 times the largest of 1, the client's answer, and
            the median of the other payloads.
        max_weight: Largest weight of a row in a payload, such as the number of examples of the
            largest client. The payload of a client that sends more is dropped. If None, the limit
            is 1,000 times the larger of 1 and the median of the other payloads. A client without
            others has no limit.
        nodes: Nodes by client id, as printed when a node was registered. No node can then pose as
            another client. If None, nodes report their client ids (:func:`client_nodes`).
        patience: Maximum time in seconds to wait for clients of the cohort that are not connected,
            if `nodes` is None.
        ledger: Ledger that records the messages sent and accepted.
        tested: Ids of clients that test their own models on their own images after each round,
            which need `tests` in :func:`client_app`. Figures are self-reported.
        best_by: Figure by which the best round is kept, such as "balanced_accuracy".
        plain: Whether messages are Flower's own arrays, which its privacy wrappers and modifiers
            can clip and add noise to, and other strategies of Flower can average. The method has
            one exchange and :func:`averaging_server`, and its payloads have the names of its
            answer and one weight. Messages are then not encoded: a fingerprint is compared, and
            names, shapes and limits are checked.

    Attributes:
        nodes: Nodes by client id.
        best: Round with the best figures, or None without `tested`. Its personal states are those
            that the nodes had then, and they are not kept.

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
        fingerprint: Fingerprint | None = None,
        max_abs: float | None = None,
        max_weight: float | None = None,
        nodes: Mapping[int, int] | None = None,
        patience: float = 60.0,
        ledger: Ledger | None = None,
        tested: Iterable[int] = (),
        best_by: str = "accuracy",
        plain: bool = False,
    ) -> None:
        fingerprint = unchecked if fingerprint is None else fingerprint
        self._wire = Wire(method, max_bytes, fingerprint, max_abs, max_weight, ledger, plain)
        cohorts = _given_or_drawn(cohorts, method)
        check.instance("start", start, Round | None, "be a Round or None")
        check.flag("plain", plain)
        figures = ("accuracy", "balanced_accuracy", "loss")
        check.require(best_by in figures, "best_by", f"be one of {figures}", repr(best_by))
        self.method = method
        self.patience = patience
        self.nodes = dict(nodes or {})
        self.best: Best | None = None
        self._now = start or Round(-1, method.server.state, {})
        self._now.check_made_by(method, "start")
        if plain:
            _check_plain(method, self._now)
        self._tested, self._best_by = nouns.cohort(tested, 0), best_by
        self._registered = nodes is not None
        self._cohorts = islice(cohorts, self._now.server_round + 1, None)
        self._cohort: list[int] = []
        self._state = self._now.server
        self._exchange = (self._now.server_round + 1) * method.exchanges
        self._asked, self._asked_to_test = dict[int, int](), dict[int, int]()
        self._alone = False  # whether Flower's loop has no other strategy around this one
        self._handed = True  # whether the arrays of the last round came back
        self._untested = False  # whether a round has ended, and no client was asked for figures

    @property
    def now(self) -> Round:
        """Last :class:`Round` that ended.

        Its `clients` are empty, because the states of clients are at their nodes, and `stateful`
        has the ids of those with a state. So it predicts if predictions read no state. Test
        personalized methods at the nodes, with `tested`.
        """
        check.require(self._handed, "strategy.now", _HANDED, "a round that was not handed back")
        return self._now

    @property
    def arrays(self) -> ArrayRecord:
        """Arrays of the last round: the values of an averaging server, or all tensors by path."""
        values = self._state.get("values")
        return arrays_of(all_tensors(self._state if values is None else values))

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Run rounds as ``Strategy.start``, and return arrays and metrics."""
        options: dict[str, Any] = {"train_config": train_config, "evaluate_fn": evaluate_fn}
        self._alone = True
        try:
            arrays = initial_arrays or self.arrays
            options |= {"num_rounds": num_rounds, "timeout": timeout}
            result = super().start(grid, arrays, evaluate_config=evaluate_config, **options)
        finally:
            self._alone = False
        if rest := self._exchange % self.method.exchanges:
            text = "round %d is dropped: it ended after %d of %d exchanges"
            LOG.warning(text, self._now.server_round + 1, rest, self.method.exchanges)
        result.arrays = self.arrays
        return result

    def take(self, arrays: ArrayRecord) -> Round:
        """Go on from the arrays of another strategy around this one, with its noise.

        Args:
            arrays: Arrays of the last round, such as ``result.arrays`` of that strategy.

        Returns:
            Last round, with these values.
        """
        if self._wire.plain:
            if not arrays:
                raise check.wrong("initial_arrays", "be strategy.arrays", "an empty ArrayRecord")
            like = self._state["values"]
            found = tensors_of(arrays, like)
            own = {name: value.to(like[name].device) for name, value in found.items()}
            self._state = {**self._state, "values": own}
            self._now = self._now._replace(server=self._state)
        elif arrays:
            given = all(arrays != own for own in (self.arrays, encoded_state(self._state)))
            check.require(not given, "arrays", _ARRAYS, f"others, with the names {list(arrays)}")
        self._handed = True
        return self._now

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Send the answers of the cohort, which is drawn in the first exchange of a round."""
        self.take(arrays)
        check.require(self._wire.plain or not config, "train_config", _CONFIG, sorted(config))
        if self._exchange % self.method.exchanges == 0:
            self._cohort = self._draw(self._exchange // self.method.exchanges)
            self._asked = self._find(self._cohort, grid)
        self._wire.traffic.clear()
        given = self._exchange, self._cohort, self._state, self.nodes
        return self._wire.address(*given, config)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Envelope]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Step the server with the accepted payloads."""
        payloads = self._wire.accept(self._exchange, replies, self._asked)
        self._state = self._wire.step(self._exchange, payloads, self._state)
        self._exchange += 1
        ended, more = divmod(self._exchange, self.method.exchanges)
        if not more:
            stateful = {*self._now.stateful, *self._wire.stateful}
            self._now = Round(ended - 1, self._state, {}, stateful, self.method.origin)
            self._untested = bool(self._tested)
        counts: dict[str, Any] = {"asked": len(self._asked), "accepted": len(payloads)}
        counts |= {name: self._wire.traffic[name] for name in ("bytes_down", "bytes_up")}
        self._handed = self._alone or not self._wire.plain
        readable = self._alone or self._wire.plain
        arrays = self.arrays if readable else encoded_state(self._state)
        return arrays, MetricRecord(self._wire.figures | counts)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> list[Envelope]:
        """Ask the tested clients for figures, after the last exchange of a round."""
        self.take(arrays)
        check.require(not config, "evaluate_config", _CONFIG, sorted(config))
        self._asked_to_test.clear()
        if not self._untested:
            return []
        self._untested = False
        self._asked_to_test |= self._find(self._tested, grid)
        given = self._exchange - 1, self._tested, self._state, self.nodes
        return self._wire.address(*given, kind="evaluate")

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Envelope]
    ) -> MetricRecord | None:
        """Average the figures of clients, and keep the best round."""
        found = self._wire.tested(self._exchange - 1, replies, self._asked_to_test)
        if not found:
            return None
        figures = mean_figures(found)
        if self._best_by in figures:
            sign = -1 if self._best_by == "loss" else 1
            best = self.best.figures[self._best_by] if self.best else -sign * float("inf")
            if sign * figures[self._best_by] > sign * best:
                self.best = Best(figures, self._now)
        return MetricRecord(figures)

    def summary(self) -> None:
        """Log the exchanges of a round."""
        LOG.info("\t├── exchanges in a round: %d", self.method.exchanges)

    def _find(self, clients: Iterable[int], grid: Grid) -> dict[int, int]:
        """Find the nodes of clients, and return the client ids by node."""
        if not self._registered:
            known, patience = self.nodes, self.patience
            self.nodes = client_nodes(grid, clients, known=known, timeout=patience)
        return {self.nodes[client]: client for client in clients if client in self.nodes}

    def _draw(self, server_round: int) -> list[int]:
        for cohort in self._cohorts:
            return nouns.cohort(cohort, server_round)
        raise check.wrong("cohorts", f"have a cohort for round {server_round}", "no more")


def _given_or_drawn(
    cohorts: Iterable[Iterable[int]] | None, method: Method
) -> Iterable[Iterable[int]]:
    if cohorts is None:
        rule = "be given to a method without a setting, such as [[0, 1], [1, 2]]"
        check.require(method.setting is not None, "cohorts", rule, "None")
        cohorts = method.setting.cohorts()
    check.iterable("cohorts", cohorts, "cohorts")
    return cohorts


def _check_plain(method: Method, now: Round) -> None:
    values = now.server.get("values")
    for client in getattr(method.setting, "clients", None) or [0]:
        answer = method.server.answer(client, now.server)
        same = isinstance(values, Mapping) and _shapes(answer) == _shapes(values)
        check.require(same and method.exchanges == 1, "method", _PLAIN, f"answers {list(answer)}")


def _shapes(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", None) for name, value in message.items()}
