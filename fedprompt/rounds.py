"""Rounds of a method: in one process, or on the ranks of a process group."""

from __future__ import annotations

import copy
import os
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as distributed
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
from fedprompt._files import path_of
from fedprompt._own_copies import copied
from fedprompt._random_streams import kept_streams, resumed_streams
from fedprompt._state_files import carried, states_of, tidy
from fedprompt._trees import digest, packed
from fedprompt.aggregation.optimizers import load_state
from fedprompt.interfaces import Codec, Message, Method, Round, State, Weighted
from fedprompt.interfaces.calls import Calls, seed_of
from fedprompt.interfaces.method import (
    Clients,
    check_takes_part,
    check_wrappers,
    filled,
    run_of,
    sends_changes,
    wrapper,
    wrappers_of,
)
from fedprompt.messages.ledger import Ledger
from fedprompt.messages.payload import delta
from fedprompt.wire.encode import check_message
from fedprompt.wire.gather import is_here, on_all_ranks, rank_of, ranks_of

__all__ = ["coded", "counted", "load_optimizer", "optimizer_state", "run_rounds"]

_OPTIMIZER = "be an optimizer of torch.optim"
_ALL_STATES = "have the state of each client that has one"
_EMPTY = (
    "A round has no clients, so its server keeps its state. If a step does more than a mean, such "
    "as add noise, write Server(..., empty=True); if not, Server(..., empty=False)."
)
_OTHER_IMAGES = (
    "The state of client {} was made on other images or labels than it has in round {}, such as "
    "those of another division."
)


def run_rounds(
    method: Method,
    data: Clients | Callable[[int, int], Any],
    cohorts: Iterable[Iterable[int]] | None = None,
    *,
    start: Round | None = None,
    group: distributed.ProcessGroup | None = None,
    share: bool = False,
    states: str | os.PathLike[str] | None = None,
) -> Iterator[Round]:
    """Run the rounds of a method.

    The loop over the rounds is yours, because this function does not evaluate, print or save. In
    one process it equals a dozen lines, which the guide to rounds shows. Each function of a method
    receives copies: a client may train on its answer in place, and a round that you keep never
    changes.

    The global random streams of PyTorch, NumPy and Python begin anew before each call of a method,
    by the seed, the round and the client. So dropout draws the same numbers on every engine, in
    every order of a cohort, and after a resume. The seed is that of the method's setting, or else
    that of ``torch.manual_seed`` when the run begins. Your loop finds its streams as it left them.

    In a round without payloads, the server keeps its state, unless it says ``empty=True``. After an
    error nothing of the round is kept, so you can continue from the round before.

    A round knows the method, the values, the setting and the frozen network that made it, and only
    the same ones continue it. The number of rounds, clients, devices and functions may change. If a
    client of a federation has a state that was made on other images, one warning says so.

    Args:
        method: Method.
        data: Federation, from which clients get the data of the method's setting. Or a function
            (client, server_round) -> data of the client.
        cohorts: Ids of the clients of each round, from round 0 on. Cohorts up to `start` are read
            and skipped. If None, those of the method's setting, drawn anew for each run. If it
            names no clients, all clients of the federation take part.
        start: Round to continue from, for example of :func:`load_checkpoint`. With ranks, it has
            the states of this rank's clients, and may have those of all. If None, the run begins
            with the state of the method's server.
        group: Process group of one owner, of a backend that supports CPU tensors, such as gloo.
            Client c then runs on rank ``c % world``, where its data and its state stay. Every rank
            receives all payloads and takes the same server step. If None, all clients run in this
            process.
        share: Whether ranks share the work. Each rank then runs at most ``ceil(cohort / world)``
            clients of a round. The others are guests of the ranks that are not full, where `data`
            must have them, too. The state of a guest is sent there, and home again before the round
            is yielded.
        states: Folder for the states of clients while the run lasts. They are then not in memory:
            each is in a file of its client and round, which is read when it is needed, and removed
            when no round has it. :func:`save_checkpoint` gives the files a second name in its own
            folder, so you resume from the checkpoint alone. Another process cannot use the folder.
            With ranks, each has a folder in it. If None, states are in memory.

    Yields:
        State after each round, with the clients of this process.

    Raises:
        TypeError: If a payload is not a message, or a state is not a tree. The text names the
            client and the round.
        ValueError: If a client is in a cohort twice, `data` does not have it, or the setting of its
            data does not name it; if ranks differ in the number of rounds, in a cohort or in the
            state of the server; if another method made `start`; if `start` lacks the state of a
            client that has one; or under
            ``torch.autocast`` with its cache, because all steps would then use the weights of the
            first one.
        RuntimeError: If another rank has an error; the text names the rank, the client and the
            round. Or if a rank has died, has left its loop, or is slower than the timeout of the
            group; the text names the round and the result that the other ranks waited for.

    Example:
        Each client adds its id, and the server averages.

        >>> def train(data, answer, state):
        ...     payload = {"x": Weighted(answer["x"] + data, torch.tensor(1.0))}
        ...     return payload, {"count": state.get("count", 0) + 1}
        >>> server = averaging_server({"x": torch.tensor(0.0)})
        >>> method = Method(train, server, predict=lambda *all: torch.nn.Identity())
        >>> data = lambda client, server_round: client
        >>> for now in run_rounds(method, data, [[1, 3], [3]]):
        ...     print(now.server_round, now.server["values"]["x"].item(), now.clients)
        0 2.0 {'1': {'count': 1}, '3': {'count': 1}}
        1 5.0 {'1': {'count': 1}, '3': {'count': 2}}
    """
    nouns.method(method)
    data, cohorts, images = run_of(method, data, cohorts, alone=group is None)
    check.instance("start", start, Round | None, "be a Round or None")
    check.flag("share", share)
    folder = None if states is None else path_of("states", states, of="folder")
    given = method, data, images, group, _unspent(cohorts), share, seed_of(method), folder
    engine = _Engine(*given)
    first = start or Round(-1, method.server.state, {})
    first.check_made_by(method, "start")
    check.count("start.server_round", first.server_round, at_least=-1)
    check.names("start.clients", first.clients, "map ids of clients, as strings, to states")
    engine, now = engine.begun(first._replace(origin=method.origin))
    del start, first  # their states are freed when no later round has them
    while (clients := engine.drawn(now.server_round + 1)) is not None:
        with kept_streams():
            now = engine.next(now, clients)
        yield now


def _unspent(cohorts: Iterable[Iterable[int]]) -> Iterator[Iterable[int]]:
    """Yield cohorts. An iterator that has none was used up by another run."""
    first = object()
    found = iter(cohorts)
    cohort: Any = next(found, first)
    rule, got = "be a list, or a new iterator for each run", "an iterator that has ended"
    check.require(cohort is not first or found is not cohorts, "cohorts", rule, got)
    yield from () if cohort is first else chain([cohort], found)


def moved(
    now: Round,
    sources: Mapping[int, int],
    targets: Mapping[int, int],
    group: distributed.ProcessGroup | None,
) -> Round:
    """Send the states of clients from one rank to another one."""
    routes = {str(c): (sources[c], targets[c]) for c in sources if sources[c] != targets[c]}
    if not routes:
        return now
    rank, _ = rank_of(group)
    leaving = [c for c, (source, _) in routes.items() if source == rank and c in now.clients]

    def states() -> dict[str, State]:
        return {client: now.clients[client] for client in leaving}

    trees = on_all_ranks(states, max(now.server_round, 0), group=group, what="the states of guests")
    sent = (pair for tree in trees for pair in tree.items())
    arrived = {client: state for client, state in sent if routes[client][1] == rank}
    own = carried(now.clients, now.server_round)
    for client in leaving:
        del own[client]
    own.update(arrived)
    return now._replace(clients=own)


@wrapper
def counted(method: Method, ledger: Ledger) -> Method:
    """Count the messages of a method.

    Answers are counted when a client trains on them, and not when it predicts. With ranks, a ledger
    counts the clients that trained on its rank.

    Args:
        method: Method whose data has an `id` and a `server_round`.
        ledger: Ledger that records the messages.

    Returns:
        The method, with the same results.

    Example:
        >>> def train(data, answer, state):
        ...     return {"x": Weighted(answer["x"], torch.tensor(1.0))}, state
        >>> values, ledger = {"x": torch.zeros(3)}, Ledger()
        >>> predict = lambda *all: torch.nn.Identity()
        >>> method = Method(train, averaging_server(values), predict)
        >>> from types import SimpleNamespace
        >>> def data(client, server_round):
        ...     return SimpleNamespace(id=client, server_round=server_round)
        >>> last = list(run_rounds(counted(method, ledger), data, [[0, 1]]))
        >>> ledger.total(direction="down"), ledger.total(direction="up")  # with weights
        (24, 32)
    """
    nouns.method(method)
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


@wrapper
def coded(method: Method, codec: Codec) -> Method:
    """Compress the payloads of a method.

    The memory of the codec is part of each client's state, so it is saved and resumed with it. A
    run continues only with as many codecs as it began with.

    A codec that leaves numbers out, such as :func:`fedprompt.codecs.top_k`, encodes the change
    since the answer. The server adds its answer again, so its step gets values. If the payloads are
    changes already (``method.server.changes``), they are encoded as they are.

    Args:
        method: Method with a `form`, by which its server decodes. Its payloads have entries of
            :class:`Weighted` only.
        codec: Codec, such as :func:`fedprompt.codecs.int8`.

    Returns:
        A method whose payloads and `form` are encoded. Its server decodes them before each step.

    Raises:
        ValueError: If `method` is counted: count the coded method.
            If the codec leaves numbers out, also if `method` is coded already, if its server does
            not say whether payloads are changes, or if an answer lacks an entry of the payload.

    Example:
        >>> values = {"x": torch.tensor([1.0, 2.0])}
        >>> def train(data, answer, state):
        ...     return {"x": Weighted(answer["x"] + 1, torch.tensor(1.0))}, state
        >>> def form(client):
        ...     return {"x": Weighted(values["x"], torch.tensor(0.0))}
        >>> server = averaging_server(values)
        >>> method = Method(train, server, predict=lambda *all: torch.nn.Identity(), form=form)
        >>> half = coded(method, codecs.float16())
        >>> num_bytes(method.form(0)), half.form(0)["x"].value.dtype
        (4, torch.float16)
        >>> (now,) = run_rounds(half, lambda client, server_round: None, [[0]])
        >>> now.server["values"]["x"]
        tensor([2., 3.])
    """
    nouns.method(method, needs_form=True)
    check.instance("codec", codec, Codec, "be a codec, such as codecs.int8()")
    form: Any = method.form
    server = method.server
    moves = False
    if getattr(codec, "needs_changes", False):
        rule = "not be coded; a codec that leaves numbers out comes first"
        check.require("coded" not in wrappers_of(method), "method", rule, "a coded one")
        moves = not sends_changes(method, "the codec leaves numbers out")

    def client(data: Any, answer: Message, state: State) -> tuple[Message | None, State]:
        payload: Any
        payload, inner = method.client(data, answer, state.get("client", {}))
        memory = state.get("codec", {})
        if payload:
            payload = delta(payload, _known(payload, answer)) if moves else payload
            payload, memory = codec.encode(payload, memory or codec.init(payload))
        return payload, {"client": inner, "codec": memory} if inner or memory else {}

    def decoded(client: int, payload: Any, state: State) -> Message:
        entries = codec.decode(payload, like=form(client)) if payload else payload
        if not moves:
            return entries
        with resumed_streams("answer", client):  # the same answer as the client had
            return _moved(entries, server.answer(client, copied(state)))

    def step(server_round: int, payloads: Mapping[int, Message], state: State) -> State:
        found = {client: decoded(client, payload, state) for client, payload in payloads.items()}
        return server.step(server_round, found, state)

    if begin := getattr(server.step, "begin", None):  # payloads are added as they come
        step.begin = lambda state: _DecodedSums(begin(state), partial(decoded, state=state))  # type: ignore[attr-defined]

    def predict(data: Any, answer: Message, state: State) -> Any:
        return method.predict(data, answer, state.get("client", {}))

    def coded_form(client: int) -> Message:
        check.count("client", client, at_least=0)
        # Numbers of a form are not read.
        zeros = partial(torch.zeros_like, device="cpu")
        empty = {name: Weighted(*map(zeros, entry)) for name, entry in form(client).items()}
        return codec.encode(empty, codec.init(empty))[0]

    parts: Any = {"client": client, "predict": predict, "form": coded_form}
    return method._replace(server=server._replace(step=step), **parts)


class _DecodedSums(NamedTuple):
    sums: Any
    decoded: Callable[[int, Any], Message]

    def add(self, client: int, payload: Any) -> None:
        self.sums.add(client, self.decoded(client, copied(payload)))

    def end(self, server_round: int, state: State) -> State:
        ended: State = self.sums.end(server_round, state)
        return ended


def _moved(changes: Any, answer: Message) -> Message:
    """Add changes to an answer."""
    known = _known(changes, answer)
    new = {name: widened(known[name]) + widened(each.value) for name, each in changes.items()}
    return {name: each._replace(value=new[name].to(each.value)) for name, each in changes.items()}


def _known(payload: Message, answer: Message) -> dict[str, Tensor]:
    """Return the value of the answer for each entry of a payload."""
    values = {}
    for name in payload:
        rule = "have each entry of the payload, because the codec sends changes"
        check.require(name in answer, "answer", rule, f"none for {name!r}")
        entry = answer[name]
        values[name] = entry.value if isinstance(entry, Weighted) else entry
    return values


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


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: State, *, rate: Literal["round", "state"] = "round"
) -> None:
    """Load a state of :func:`optimizer_state`, which later steps of the optimizer do not change.

    ``optimizer.load_state_dict`` does not copy all tensors, so a step would change the old state.
    It also loads the learning rate of an earlier round, and so ends a schedule.

    Args:
        optimizer: Optimizer to write into.
        state: State to load. With ``{}``, as before the first step, the optimizer keeps its own.
        rate: "round" to keep the learning rates of `optimizer`, or "state" to load them.

    Example:
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> state = optimizer_state(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        >>> again = torch.optim.SGD([weight], lr=0.05)
        >>> load_optimizer(again, state)
        >>> again.param_groups[0]["lr"], again.param_groups[0]["momentum"]
        (0.05, 0.9)
    """
    check.instance("optimizer", optimizer, torch.optim.Optimizer, _OPTIMIZER)
    check.instance("state", state, Mapping, "be a state of `optimizer_state`")
    check.require(rate in ("round", "state"), "rate", 'be "round" or "state"', repr(rate))
    if state:
        rates = [group["lr"] for group in optimizer.param_groups]
        load_state(optimizer, state)
        for group, own in zip(optimizer.param_groups, rates, strict=True):
            if rate == "round":
                group["lr"] = own


class _Engine(NamedTuple):
    """Exchanges and steps of a method, in one process or on one rank."""

    method: Method
    data: Callable[[int, int], Any]
    images: Callable[[int], str]
    group: distributed.ProcessGroup | None
    cohorts: Iterator[Iterable[int]]
    share: bool
    seed: int
    folder: Path | None

    def begun(self, start: Round) -> tuple[_Engine, Round]:
        """Skip the cohorts up to a round, and return it with the states of this rank's clients."""
        first = start.server_round + 1

        def own() -> list[Any]:
            ids = [*start.clients, *start.stateful]
            strange = [repr(c) for c in ids if not c.isdecimal() or str(int(c)) != c]
            check.nothing(strange, "start.clients", "have ids of clients as keys")
            away = map(int, start.stateful.difference(filled(start.clients)))
            if missing := sorted(c for c in away if is_here(c, self.group)):
                rule = "have the states of this rank's clients" if self.group else _ALL_STATES
                raise check.wrong("start", rule, f"none of client {missing[0]}")
            with noted("the rounds up to `start`"):
                deque(islice(self.cohorts, first), maxlen=0)
            here = [client for client in start.clients if is_here(int(client), self.group)]
            on_disk = not isinstance(start.clients, dict)  # and so of one run
            for client in islice(filled(start.clients), 1) if on_disk else here:
                check_wrappers(self.method, client, start.clients[client])
            folder = self.folder
            if folder and self.group:
                folder /= f"rank-{rank_of(self.group)[0]}"
            found.append(states_of(start.clients, here, folder, start.server_round))
            return [str(self.share), self.seed]

        found = list[Any]()
        starts = on_all_ranks(own, first, group=self.group, what="the start")
        self._check_same("share", [share for share, _ in starts], first)
        server = self._agreed(lambda: start.server, first)
        return self._replace(seed=starts[0][1]), start._replace(server=server, clients=found[0])

    def next(self, now: Round, clients: list[int]) -> Round:
        """Run the next round with these clients."""
        now = now._replace(server_round=now.server_round + 1)
        rank, world = rank_of(self.group)
        homes, hosts = (ranks_of(clients, world, share=guests) for guests in (False, self.share))
        now = moved(now, homes, hosts, self.group)
        here = sorted(client for client in clients if hosts[client] == rank)
        for exchange in range(self.method.exchanges):
            calls = Calls(self.method, self.seed, now.server_round, exchange)
            now = self._exchange(here, now, calls)
        now = moved(now, hosts, homes, self.group)
        tidy(now.clients)
        return now

    def drawn(self, server_round: int) -> list[int] | None:
        """Return the next cohort, the same on all ranks, or None at the end on all ranks.

        An iterator of cohorts draws from the streams of the loop.
        """

        def draw() -> list[int] | None:
            refuse_autocast("run_rounds")
            with noted(f"round {server_round}"):
                found = [nouns.cohort(each, server_round) for each in islice(self.cohorts, 1)]
            return found[0] if found else None

        drawn = on_all_ranks(draw, server_round, group=self.group, what="the cohort")
        texts = ["no more" if cohort is None else str(cohort) for cohort in drawn]
        self._check_same("cohorts", texts, server_round)
        cohort: list[int] | None = drawn[0]
        if cohort == [] and self.method.server.empty is None:
            warnings.warn(_EMPTY, stacklevel=3)
        return cohort

    def _exchange(self, clients: list[int], now: Round, calls: Calls) -> Round:
        """Train clients on this rank, and take the step of the server with all payloads."""
        states = carried(now.clients, now.server_round)
        sums, count = calls.sums(now.server) if self.group is None else None, 0

        def train() -> dict[str, Any]:
            nonlocal count
            payloads, seen = dict[int, Message | None](), dict[str, str]()
            for client in clients:
                with noted(f"client {client}, round {now.server_round}"):
                    payload, state = self._trained(client, now, calls)
                    states[str(client)] = state
                    if state:
                        seen[str(client)] = self.images(client)
                if sums is None or payload is None:
                    payloads[client] = copied(payload)
                    continue
                with noted(f"server, round {now.server_round}; payload of client {client}"):
                    calls.add(sums, client, payload)
                count += 1
            return {"payloads": payloads, "images": seen}

        trees = on_all_ranks(train, now.server_round, group=self.group, what="the payloads")
        sent = sorted(pair for tree in trees for pair in tree["payloads"].items())
        images = {client: seen for tree in trees for client, seen in tree["images"].items()}
        known = {"images": {**now.images, **images}, "stateful": now.stateful | images.keys()}
        now = now._replace(clients=states, **known)
        if count:  # all payloads have been added
            server = self._agreed(lambda: calls.summed(sums, now.server), now.server_round)
            return now._replace(server=server)
        payloads = {client: payload for client, payload in sent if payload is not None}
        return now._replace(server=self._stepped(payloads, now, calls))

    def _trained(self, client: int, now: Round, calls: Calls) -> tuple[Message | None, State]:
        try:
            data = calls.data(self.data, client)
        except LookupError as error:
            got = f"client {client} in round {now.server_round}"
            raise check.wrong("cohorts", "have clients that `data` knows", got) from error
        check_takes_part(data, client, now.server_round)
        answer, own = calls.answer(client, now.server), now.clients.get(str(client), {})
        if own and self.images(client) != now.images.get(str(client), self.images(client)):
            warnings.warn(_OTHER_IMAGES.format(client, now.server_round), stacklevel=2)
        result: Any = calls.train(client, data, answer, own)
        check.pair("method.client", result, "return a payload and a state")
        payload, state = result
        with check.located(f"client {client}, round {now.server_round}"):
            if payload is not None:
                check_message("payload", payload)
            _check_state(state)
        return payload, copied(state)

    def _stepped(self, payloads: dict[int, Message], now: Round, calls: Calls) -> State:
        if not payloads and not self.method.server.empty:
            return now.server

        def step() -> State:
            try:
                state: State = calls.step(payloads, now.server)
            except (TypeError, ValueError) as error:
                _check_payloads(payloads)
                error.add_note(f"payloads of clients {list(payloads)}")
                raise
            return state

        return self._agreed(step, now.server_round)

    def _agreed(self, make: Callable[[], State], server_round: int) -> State:
        """Make a state of the server, which must be the same on all ranks."""
        made = list[State]()

        def described() -> str:
            with noted(f"server, round {server_round}"):
                state = make()
            with check.located(f"server, round {server_round}"):
                _check_state(state)
            made.append(copied(state))
            return digest(state, "state") if self.group else ""

        what = "the state of the server"
        digests = on_all_ranks(described, server_round, group=self.group, what=what)
        self._check_same("server.state", digests, server_round)
        return made[0]

    def _check_same(self, what: str, texts: list[str], server_round: int) -> None:
        rule = f"be the same on every rank in round {server_round}"
        check.require(len(set(texts)) <= 1, what, rule, [text[: check.LONGEST] for text in texts])


@contextmanager
def noted(where: str) -> Iterator[None]:
    """Add a note to an error, whose type and text stay."""
    try:
        yield
    except Exception as error:
        error.add_note(where)
        raise


def refuse_autocast(function: str) -> None:
    """Refuse ``torch.autocast`` with its cache around several steps of training."""
    enabled = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda", "xpu", "mps"))
    if enabled and torch.is_autocast_cache_enabled():
        raise ValueError(
            f"{function} must not run under torch.autocast with its cache, because all steps would "
            "use the weights of the first one; use Setting(autocast=torch.bfloat16), or enter "
            "autocast for each batch."
        )


def _check_payloads(payloads: Mapping[int, Message]) -> None:
    """Refuse a payload that a server refused by its position, and name its client."""
    for client, payload in payloads.items():
        for name, entry in payload.items():
            if isinstance(entry, Weighted):
                nouns.entry(f"payloads[{client}][{name!r}]", entry)


def _check_state(state: object) -> None:
    check.instance("state", state, dict, "be a dict")
    packed(state, "state", {})
