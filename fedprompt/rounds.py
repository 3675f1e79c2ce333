"""Rounds of a method: in one process, or on the ranks of a process group."""

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as distributed

import fedprompt._checks as check
from fedprompt._trees import packed, to_blob
from fedprompt.interfaces import Codec, Message, Method, Round, State, Weighted
from fedprompt.messages.ledger import Ledger
from fedprompt.wire.encode import slots
from fedprompt.wire.gather import is_here, on_all_ranks

__all__ = ["coded", "counted", "load_optimizer", "optimizer_state", "run_rounds"]

_OPTIMIZER = "be an optimizer of torch.optim"


def run_rounds(
    method: Method,
    data: Callable[[int, int], Any],
    cohorts: Iterable[Iterable[int]],
    *,
    start: Round | None = None,
    group: "distributed.ProcessGroup | None" = None,
) -> Iterator[Round]:
    """Run the rounds of a method.

    The loop over the rounds is yours, because this function does not evaluate, print or save. In
    one process it equals ten lines, which the guide to rounds shows. It copies nothing, because the
    functions of a method change no argument.

    In a round without payloads, the server keeps its state. After an error nothing of the round is
    kept, so you can continue from the round before.

    Args:
        method: Method.
        data: Function (client, server_round) -> data of the client, such as ``federation.data``.
        cohorts: Ids of the clients of each round, from round 0 on. Cohorts up to `start` are read
            and skipped.
        start: Round to continue from, for example of :func:`load_checkpoint`. With ranks, it has
            the states of this rank's clients, and may have those of all. If None, the run begins
            with the state of the method's server.
        group: Process group of one owner, of a backend that supports CPU tensors, such as gloo.
            Client c then runs on rank ``c % world``, where its data and its state stay. Every rank
            receives all payloads and takes the same server step. If None, all clients run in this
            process.

    Yields:
        State after each round, with the clients of this process.

    Raises:
        TypeError: If a payload is not a message, or a state is not a tree. The text names the
            client and the round.
        ValueError: If a client is in a cohort twice, or `data` does not have it; or if ranks differ
            in their rounds, in a cohort or in the state of the server; or if `start` has the states
            of other ranks' clients, and lacks one of this rank.
        RuntimeError: If another rank has an error; the text names the rank, the client and the
            round.

    Example:
        Each client adds its id, and the server averages.

        >>> def train(data, answer, state):
        ...     payload = {"x": Weighted(answer["x"] + data, torch.tensor(1.0))}
        ...     return payload, {"count": state.get("count", 0) + 1}
        >>> server = averaging_server({"x": torch.tensor(0.0)})
        >>> predict = lambda data, answer, state: answer["x"]
        >>> method = Method(train, server, predict)
        >>> data = lambda client, server_round: client
        >>> for now in run_rounds(method, data, [[1, 3], [3]]):
        ...     print(now.server_round, now.server["values"]["x"].item(), now.clients)
        0 2.0 {'1': {'count': 1}, '3': {'count': 1}}
        1 5.0 {'1': {'count': 1}, '3': {'count': 2}}
    """
    check.iterable("cohorts", cohorts, "cohorts")
    check.method(method)
    check.function("data", data)
    check.instance("start", start, Round | None, "be a Round or None")
    engine = _Engine(method, data, group)
    now = start or Round(-1, method.server.state, {})
    check.count("start.server_round", now.server_round, at_least=-1)
    check.names("start.clients", now.clients, "map ids of clients, as strings, to states")
    numbered = enumerate(cohorts)
    now = engine.begun(now, dict(islice(numbered, now.server_round + 1)))
    engine.agreed(lambda: now.server, now.server_round + 1)
    for server_round, cohort in numbered:
        check.iterable(f"cohorts[{server_round}]", cohort, "ids of clients")
        clients = list(cohort)
        _, server, states = now
        for _ in range(method.exchanges):
            payloads, states = engine.exchange(server_round, clients, server, states)
            if payloads:
                step = partial(method.server.step, server_round, payloads, server)
                server = engine.agreed(step, server_round)
        now = Round(server_round, server, states)
        yield now


def counted(method: Method, ledger: Ledger) -> Method:
    """Count the messages of a method.

    Answers are counted when a client trains on them, and not when it predicts. With ranks, a ledger
    counts the clients of its rank.

    Args:
        method: Method whose data has an `id` and a `server_round`.
        ledger: Ledger that records the messages.

    Returns:
        The method, with the same results.

    Example:
        >>> def train(data, answer, state):
        ...     return {"x": Weighted(answer["x"], torch.tensor(1.0))}, state
        >>> values, ledger = {"x": torch.zeros(3)}, Ledger()
        >>> method = Method(train, averaging_server(values), predict=lambda *all: None)
        >>> from types import SimpleNamespace
        >>> def data(client, server_round):
        ...     return SimpleNamespace(id=client, server_round=server_round)
        >>> last = list(run_rounds(counted(method, ledger), data, [[0, 1]]))
        >>> ledger.total(direction="down"), ledger.total(direction="up")  # with weights
        (24, 32)
    """
    check.method(method)
    check.instance("ledger", ledger, Ledger, "be a Ledger")

    def client(data: Any, answer: Message, state: State) -> tuple[Message | None, State]:
        payload, state = method.client(data, answer, state)
        where = {"client": data.id, "server_round": data.server_round}
        if answer is not None:
            ledger.record(answer, direction="down", **where)
        if payload is not None:
            ledger.record(payload, direction="up", **where)
        return payload, state

    return method._replace(client=client)


def coded(method: Method, codec: Codec) -> Method:
    """Compress the payloads of a method.

    The memory of the codec is part of each client's state, so it is saved and resumed with it.

    Args:
        method: Method with a `form`, by which its server decodes. Its payloads have entries of
            :class:`Weighted` only.
        codec: Codec, such as :func:`fedprompt.codecs.int8`.

    Returns:
        A method whose payloads and `form` are encoded. Its server decodes them before each step.

    Example:
        >>> values = {"x": torch.tensor([1.0, 2.0])}
        >>> def train(data, answer, state):
        ...     return {"x": Weighted(answer["x"] + 1, torch.tensor(1.0))}, state
        >>> def form(client):
        ...     return {"x": Weighted(values["x"], torch.tensor(0.0))}
        >>> server = averaging_server(values)
        >>> method = Method(train, server, predict=lambda *all: None, form=form)
        >>> half = coded(method, codecs.float16())
        >>> num_bytes(method.form(0)), half.form(0)["x"].value.dtype
        (4, torch.float16)
        >>> (now,) = run_rounds(half, lambda client, server_round: None, [[0]])
        >>> now.server["values"]["x"]
        tensor([2., 3.])
    """
    check.method(method, needs_form=True)
    check.instance("codec", codec, Codec, "be a codec, such as codecs.int8()")
    form: Any = method.form

    def client(data: Any, answer: Message, state: State) -> tuple[Message | None, State]:
        payload: Any
        payload, inner = method.client(data, answer, state.get("client", {}))
        after = {**state, "client": inner}
        if payload:
            memory = state["codec"] if "codec" in state else codec.init(payload)
            payload, after["codec"] = codec.encode(payload, memory)
        return payload, after

    def step(server_round: int, payloads: Mapping[int, Message], state: State) -> State:
        decoded = {
            client: codec.decode(payload, like=form(client)) if payload else payload
            for client, payload in payloads.items()
        }
        return method.server.step(server_round, decoded, state)

    def predict(data: Any, answer: Message, state: State) -> Any:
        return method.predict(data, answer, state.get("client", {}))

    def coded_form(client: int) -> Message:
        check.count("client", client, at_least=0)
        empty = {name: Weighted(*map(_zeros, entry)) for name, entry in form(client).items()}
        return codec.encode(empty, codec.init(empty))[0]

    server = method.server._replace(step=step)
    return method._replace(client=client, server=server, predict=predict, form=coded_form)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    """Make zeros on the CPU, of the shape and dtype of a tensor whose numbers are not read."""
    return torch.zeros(like.shape, dtype=like.dtype, device="cpu")


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copy the state of an optimizer, so that later steps of the optimizer do not change it.

    Args:
        optimizer: Optimizer of a server or a client.

    Returns:
        Its ``state_dict()``, which shares no memory with the optimizer.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        >>> optimizer_state(optimizer)["param_groups"][0]["lr"]
        0.1
    """
    check.instance("optimizer", optimizer, torch.optim.Optimizer, _OPTIMIZER)
    return copy.deepcopy(optimizer.state_dict())


def load_optimizer(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Load a state of :func:`optimizer_state`, which later steps of the optimizer do not change.

    ``optimizer.load_state_dict`` does not copy all tensors, so a step would change the old state.

    Args:
        optimizer: Optimizer to write into.
        state: State to load. With ``{}``, as before the first step, the optimizer keeps its own.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.1)
        >>> state = optimizer_state(optimizer)
        >>> again = torch.optim.SGD([torch.zeros(2, requires_grad=True)], lr=0.9)
        >>> load_optimizer(again, state)
        >>> again.param_groups[0]["lr"]
        0.1
    """
    check.instance("optimizer", optimizer, torch.optim.Optimizer, _OPTIMIZER)
    check.instance("state", state, Mapping, "be a state of `optimizer_state`")
    if state:
        check.load_state(optimizer, state)


class _Engine(NamedTuple):
    """Exchanges and steps of a method, in one process or on one rank."""

    method: Method
    data: Callable[[int, int], Any]
    group: "distributed.ProcessGroup | None"

    def begun(self, start: Round, past: Mapping[int, Iterable[int]]) -> Round:
        """Return the round with the states of this rank's clients, of which none may be missing."""
        if self.group is None:
            return start

        def check_states() -> None:
            cohorts = [check.cohort(list(clients), number) for number, clients in past.items()]
            trained = {c for cohort in cohorts for c in cohort if is_here(c, self.group)}
            missing = sorted(client for client in trained if str(client) not in own)
            if missing and any(start.clients.values()):  # without states, all may begin at {}
                rule = "have the states of this rank's clients"
                raise check.wrong("start", rule, f"none of client {missing[0]}")

        own = {client: s for client, s in start.clients.items() if is_here(int(client), self.group)}
        on_all_ranks(check_states, server_round=start.server_round + 1, group=self.group)
        return start._replace(clients=own)

    def exchange(
        self, server_round: int, cohort: list[int], server: State, states: Mapping[str, State]
    ) -> tuple[dict[int, Message], dict[str, State]]:
        """Train the clients of this rank; return the payloads of all ranks, and the states here."""
        new = dict(states)

        def train() -> dict[str, Any]:
            clients = check.cohort(cohort, server_round)
            payloads = dict[int, Message | None]()
            for client in clients:
                if is_here(client, self.group):
                    state = new.get(str(client), {})
                    result = self._train(client, server_round, server, state)
                    payloads[client], new[str(client)] = result
            return {"cohort": clients, "payloads": payloads}

        trees = on_all_ranks(train, server_round=server_round, group=self.group)
        self._check_same("cohorts", [str(tree["cohort"]) for tree in trees], server_round)
        sent = sorted(pair for tree in trees for pair in tree["payloads"].items())
        return {client: payload for client, payload in sent if payload is not None}, new

    def _train(
        self, client: int, server_round: int, server: State, state: State
    ) -> tuple[Message | None, State]:
        try:
            data = self.data(client, server_round)
        except LookupError as error:
            got = f"client {client} in round {server_round}"
            raise check.wrong("cohorts", "have clients that `data` knows", got) from error
        with _noted(f"client {client}, round {server_round}"):
            answer = self.method.server.answer(client, server)
            result: Any = self.method.client(data, answer, state)
            check.pair("method.client", result, "return a payload and a state")
            payload, state = result
        with check.named(f"client {client}, round {server_round}"):
            if payload is not None:
                slots("payload", payload)
            _check_state(state)
        return payload, state

    def agreed(self, make: Callable[[], State], server_round: int) -> State:
        """Make a state of the server, which must be the same on all ranks."""
        made = []

        def digest() -> str:
            with _noted(f"server, round {server_round}"):
                made.append(make())
            with check.named(f"server, round {server_round}"):
                _check_state(made[0])
            return hashlib.sha256(to_blob(made[0], "state")).hexdigest() if self.group else ""

        digests = on_all_ranks(digest, server_round=server_round, group=self.group)
        self._check_same("server.state", digests, server_round)
        return made[0]

    def _check_same(self, what: str, texts: list[str], server_round: int) -> None:
        if len(set(texts)) > 1:
            rule = f"be the same on every rank in round {server_round}"
            raise check.wrong(what, rule, [text[: check.LONGEST] for text in texts])


@contextmanager
def _noted(where: str) -> Iterator[None]:
    """Add a note to an error of the method, whose type and text stay."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def _check_state(state: object) -> None:
    check.instance("state", state, dict, "be a dict")
    packed(state, "state", {})
