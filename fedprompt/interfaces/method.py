"""A federated method as three functions, and the state after a round.

Every engine runs the same objects: one process, ranks, Flower.
"""

from __future__ import annotations  # signatures have the short names of types

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, wraps
from types import BuiltinFunctionType, CellType, FunctionType, MappingProxyType
from typing import Any, NamedTuple, NoReturn, ParamSpec, Protocol, runtime_checkable

import numpy as np
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._own_copies import copied, own_module
from fedprompt._random_streams import kept_streams
from fedprompt.interfaces.calls import Calls, seed_of
from fedprompt.interfaces.nouns import Message

P = ParamSpec("P")
"""Arguments of a wrapper."""

State = Mapping[str, Any]
"""What a client or the server remembers: a tree as of :func:`fedprompt.save_checkpoint`."""

DECODES = "be a function, by which messages are decoded"
"""Rule for the form of a method."""

_OF_CLIENT = ("data", "answer", "state")

_ORDER = ("backdoored", "coded", "counted")
"""Wrappers from the innermost one on: of numbers, of their encoding, and of bytes."""

CODED = ("client", "codec")
"""Keys of the state of a client whose method is wrapped by :func:`fedprompt.rounds.coded`."""


AnswerFunction = Callable[[int, State], Message]
StepFunction = Callable[[int, Mapping[int, Message], State], State]
ClientFunction = Callable[[Any, Message, State], tuple[Message | None, State]]
PredictFunction = Callable[[Any, Message, State], nn.Module]
FormFunction = Callable[[int], Message]


class _ServerParts(NamedTuple):
    state: State
    answer: AnswerFunction
    step: StepFunction
    changes: bool | None
    empty: bool | None


class Server(_ServerParts):
    """Server of a method. Its functions receive copies, and return what a round keeps.

    A server checks its parts when it is built; ``_replace`` checks nothing.

    Attributes:
        state: State before the first round, a tree as of :func:`save_checkpoint`. Client ids in it
            are strings; an optimizer is its :func:`optimizer_state`.
        answer: Function (client, state) -> message. It is called for the clients of a cohort and
            for every client that predicts, new ones included. So it must be cheap.
        step: Function (server_round, payloads, state) -> state. The payloads are a dict by client
            id, in the order of ids.
        changes: Whether payloads are changes since the answer (True), or values that take its place
            (False). Codecs that leave numbers out need changes. If None, they refuse the method.
        empty: Whether a round without payloads takes a step with ``{}``, such as one that adds
            noise (True), or keeps the state (False). If None, it keeps the state, and a cohort
            without clients warns.

    Example:
        A server that counts the payloads of all rounds. The count is also its broadcast.

        >>> def answer(client, state):
        ...     return {"count": state["count"]}
        >>> def step(server_round, payloads, state):
        ...     return {"count": state["count"] + len(payloads)}
        >>> import torch
        >>> server = Server({"count": torch.tensor(0)}, answer, step)
        >>> server.step(0, {3: {}, 7: {}}, server.state)
        {'count': tensor(2)}
    """

    __slots__ = ()

    def __new__(
        cls,
        state: State,
        answer: AnswerFunction,
        step: StepFunction,
        changes: bool | None = None,
        empty: bool | None = None,
    ) -> Server:
        """Make a server of functions."""
        check.instance("state", state, Mapping, "be a tree of a dict")
        check.function("answer", answer, of=("client", "state"))
        check.function("step", step, of=("server_round", "payloads", "state"))
        check.instance("changes", changes, bool | None, "be a bool or None")
        check.instance("empty", empty, bool | None, "be a bool or None")
        return super().__new__(cls, state, answer, step, changes, empty)


@runtime_checkable
class Clients(Protocol):
    """Inputs of clients, such as a :class:`fedprompt.methods.Federation`."""

    @property
    def shards(self) -> Mapping[int, Any]:
        """Positions of the inputs of each client, by client id."""

    def data(self, setting: Any, client: int, server_round: int) -> Any:
        """Return the data of a client in a round of a method with this setting."""

    def images_of(self, client: int) -> str:
        """Return a digest by which the inputs of a client are told from others."""


class _MethodParts(NamedTuple):
    client: ClientFunction
    server: Server
    predict: PredictFunction
    exchanges: int
    form: FormFunction | None
    wrappers: tuple[str, ...]
    setting: Any
    name: str


class Method(_MethodParts):
    """Federated method: a client function, a server and a prediction.

    A method checks its parts when it is built; ``_replace`` checks nothing.

    Client functions receive the data of one client. They remember things between rounds only in the
    state that they return. A client that never trained has the state ``{}``.

    Attributes:
        client: Function (data, answer, state) -> (payload, state): one exchange of one client. A
            payload ``{}`` is a legal message. With the payload None, nothing is sent.
        server: Server.
        predict: Function (data, answer, state) -> model, an ``nn.Module`` that is complete in its
            state next to a frozen network. Personalization belongs here.
        exchanges: Number of exchanges in a round (at least 1). With 3, each client of the cohort
            gets three answers and sends three payloads in a round.
        form: Function from a client id to a payload with its names, shapes and dtypes; numbers are
            not read. Codecs and Flower need it. If None, the method runs in one process and on the
            ranks of one owner.
        wrappers: Functions that wrapped the method, with their plain values, such as
            "coded(codec=int8())", the first one first.
        setting: Setting of the run, such as a :class:`fedprompt.methods.Setting`: the data of
            clients and the cohorts follow from it. Functions with ``methods.register`` fill it. If
            None, the data are yours.
        name: Name and plain values, such as "fedprox(learning_rate=0.01)", by which its rounds are
            told from others. Functions with ``methods.register`` fill it. If empty, the names of
            the client function and the server's step, with the numbers that they were made with.

    Example:
        The mean of numbers that clients hold. A prediction is a module.

        >>> from fedprompt import averaging_server, collect, load_values, run_rounds, snapshot
        >>> model = nn.Linear(1, 1, bias=False)
        >>> def client(data, answer, state):
        ...     nn.init.constant_(model.weight, data.number)
        ...     return collect(model, weight=1.0), state
        >>> def predict(data, answer, state):
        ...     load_values(model, answer)
        ...     return model
        >>> method = Method(client, averaging_server(snapshot(model)), predict)
        >>> class Data:
        ...     def __init__(self, client):
        ...         self.id, self.number = client, 10.0 * client
        >>> *_, now = run_rounds(method, lambda client, server_round: Data(client), [[1, 2]])
        >>> now.model(method, Data(1)).weight.item()
        15.0
    """

    __slots__ = ()

    def __new__(
        cls,
        client: ClientFunction,
        server: Server,
        predict: PredictFunction,
        exchanges: int = 1,
        form: FormFunction | None = None,
        wrappers: tuple[str, ...] = (),
        setting: Any = None,
        name: str = "",
    ) -> Method:
        """Make a method of functions."""
        check.function("client", client, of=_OF_CLIENT)
        check.instance("server", server, Server, "be a Server(state, answer, step)")
        check.function("predict", predict, of=_OF_CLIENT)
        check.count("exchanges", exchanges)
        check.optional(check.function, "form", form, DECODES, of=("client",))
        check.instance("wrappers", wrappers, tuple, "be a tuple of names")
        check.instance("name", name, str, "be a string")
        name = name or f"{_told(client)} and {_told(server.step)}"
        parts = client, server, predict, exchanges, form, wrappers, setting, name
        return super().__new__(cls, *parts)

    @property
    def origin(self) -> dict[str, str]:
        """Description of a round: the method, its setting, its wrappers, the frozen network.

        Rounds, clients, devices, functions and inputs are not in it, because they may change.
        """
        described: Callable[[], dict[str, str]] = getattr(self.setting, "described", dict)
        wrappers = [each for each in self.wrappers if not each.startswith("counted")]
        return {"method": self.name, "wrappers": ", ".join(wrappers), **described()}


def _told(part: Any, level: int = 0) -> str:
    """Describe a function by its name, and by the numbers and functions that it was made with."""
    function = getattr(part, "__func__", part)
    name = getattr(function, "__qualname__", type(part).__qualname__)
    owner = None if isinstance(part, BuiltinFunctionType) else getattr(part, "__self__", part)
    found = {} if isinstance(owner, FunctionType) else {**getattr(owner, "__dict__", {})}
    if isinstance(part, partial):
        name, found = _told(part.func, level), {**dict(enumerate(part.args)), **part.keywords}
    elif isinstance(function, FunctionType):
        options = inspect.signature(function).parameters.values()
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        found |= {option.name: option.default for option in options}
        found |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    texts = {}
    for key, value in found.items():
        if type(value) in (int, float):
            texts[key] = f"{value:.6g}"
        elif level < 2 and (isinstance(value, FunctionType | partial) or hasattr(value, "stepped")):
            texts[key] = _told(value, level + 1)
    return f"{name}({', '.join(f'{key}={text}' for key, text in texts.items())})" if texts else name


class _Parts(NamedTuple):
    server_round: int
    server: State
    clients: Mapping[str, State]


class Round(_Parts):
    """State after a round: those of the server and of the clients, from which a run continues.

    It is a tree as of :func:`save_checkpoint`, and :func:`load_checkpoint` returns a round again.
    It unpacks into its first three attributes.

    Attributes:
        server_round: Round that ended (0-based).
        server: State of the server.
        clients: State of each client that ever took part, by its id as a string. With ranks, these
            are the clients of this rank.
        stateful: Ids of all clients whose state is not empty, on other ranks and nodes, too. The
            clients with a state in `clients` need not be given.
        origin: Description of the method that made the round. Another method refuses the round. If
            empty, as in ``Round(*now)``, the round is not compared.
        images: Digest of the inputs on which a client made its state, by its id as a string.

    Example:
        >>> now = Round(4, {"values": {}}, {"0": {"seen": 12}, "1": {}})
        >>> server_round, server, clients = now
        >>> server_round, clients["0"], sorted(now.stateful)
        (4, {'seen': 12}, ['0'])
    """

    stateful: frozenset[str] = frozenset()
    origin: Mapping[str, str] = MappingProxyType({})
    images: Mapping[str, str] = MappingProxyType({})

    def __new__(
        cls,
        server_round: int,
        server: State,
        clients: Mapping[str, State],
        stateful: Iterable[str] = (),
        origin: Mapping[str, str] | None = None,
        images: Mapping[str, str] | None = None,
    ) -> Round:
        """Make a round."""
        made = super().__new__(cls, server_round, server, clients)
        check.iterable("stateful", stateful, "ids of clients, as strings")
        check.texts("stateful", stateful := list(stateful), at_least=0)
        made.stateful = frozenset(stateful).union(filled(clients))
        for name, texts in {"origin": origin or {}, "images": images or {}}.items():
            check.names(name, texts, "map strings to strings")
            setattr(made, name, dict(texts))
        return made

    def _replace(self, **changes: Any) -> Round:
        return Round(**{**self._asdict(), **vars(self), **changes})

    def check_made_by(self, method: Method, argument: str = "now") -> None:
        """Refuse a method that did not make this round, by the first value that differs."""
        made = method.origin if self.origin else {}
        for name in (name for name in made if name in self.origin):
            here, there = repr(made[name]), repr(self.origin[name])
            rule = f"be a round of the same {name}, {here}, or Round(*{argument}) for its values"
            check.require(here == there, argument, rule, there)

    def missed(self, client: int | str) -> bool:
        """Whether a client has a state, and the state is not here."""
        return str(client) in self.stateful and not self.clients.get(str(client))

    def model(self, method: Method, data: Any, client: int | None = None) -> nn.Module:
        """Return the model with which a client predicts after this round.

        It is a module of its own, so you can keep the models of several clients and rounds. Only
        the frozen network is shared.

        Args:
            method: Method that made this round.
            data: Federation. Without one, the data of the client.
            client: Id of the client in the federation.

        Raises:
            ValueError: If another method made this round, or the prediction reads the state of a
                client that is on another rank or node.
        """
        self.check_made_by(method)
        with kept_streams():
            calls = Calls(method, seed_of(method), self.server_round)
            if client is None:
                client = data.id
            else:
                federation = _federation(method, data)
                data = calls.data(partial(federation.data, method.setting), client)
            own = self.clients.get(str(client), {})
            check_wrappers(method, client, own)
            state = _Missed(client) if self.missed(client) else copied(own)
            answer = calls.answer(client, self.server)
            return own_module(calls.predict(client, data, answer, state))


def filled(clients: Any) -> Iterable[str]:
    """Return the ids of clients whose states are not empty. States on disk are not read."""
    known: Iterable[str] | None = getattr(clients, "filled", None)
    if known is not None:
        return known
    items = clients.items() if isinstance(clients, Mapping) else ()
    return [client for client, state in items if state]


class _Missed(Mapping[str, Any]):
    """State of a client that is on another rank or node. It can be passed on, and not read."""

    def __init__(self, client: int) -> None:
        self._client = client

    def _refuse(self, *_: object) -> NoReturn:
        rule = f"have the state of client {self._client}, which the method reads"
        got = "none. The state is on another rank or node: predict there, or gather the states"
        raise check.wrong("now.clients", rule, got)

    __getitem__ = __iter__ = __len__ = _refuse


_DATA = "be a Federation, or a function (client, server_round) -> data"
_SETTING = "have a setting, Method(..., setting=setting), to take the data of a federation"


def _federation(method: Method, data: Any) -> Clients:
    check.instance("data", data, Clients, _DATA)
    check.require(method.setting is not None, "method", _SETTING, "a method without a setting")
    federation: Clients = data
    return federation


def run_of(
    method: Method, data: Any, cohorts: Iterable[Iterable[int]] | None, *, alone: bool
) -> tuple[Callable[[int, int], Any], Iterable[Iterable[int]], Callable[[int], str]]:
    """Return the data and the cohorts of a run, and digests of inputs.

    Args:
        method: Method.
        data: Federation, or a function (client, server_round) -> data.
        cohorts: Cohorts. If None, those of the method's setting.
        alone: Whether all clients run in this process. Then a setting without clients has those of
            the federation.
    """
    if callable(data):
        check.function("data", data, _DATA, of=("client", "server_round"))
        rule = "be given with your own data, such as [[0, 1], [1, 2]]"
        if cohorts is None:
            raise check.wrong("cohorts", rule, "None")
        check.iterable("cohorts", cohorts, "cohorts")
        return data, cohorts, lambda client: ""
    federation, setting = _federation(method, data), method.setting
    if not setting.clients:
        rule = "name the clients, such as range(100), because they are in several processes"
        check.require(alone, "method.setting.clients", rule, "none")
        setting = setting.completed(federation.shards)
        rule = "name the clients, because networks are given to them in turn"
        in_turn = setting.num_backbones == 1 or [*setting.clients] == [*range(len(setting.clients))]
        check.require(in_turn, "method.setting.clients", rule, "none")
    cohorts = setting.cohorts() if cohorts is None else cohorts
    check.iterable("cohorts", cohorts, "cohorts")
    return partial(federation.data, setting), cohorts, federation.images_of


def wrapper(function: Callable[P, Method]) -> Callable[P, Method]:
    """Let a function wrap methods: in their order, and with all its values in the origin.

    The first argument of the function is the method. Iterators are read once.
    """
    name, signature = function.__name__, inspect.signature(function)

    @wraps(function)
    def wrap(*args: P.args, **options: P.kwargs) -> Method:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        for key, value in bound.arguments.items():
            if isinstance(value, Iterator):
                bound.arguments[key] = [*value]
        made = function(*bound.args, **bound.kwargs)
        names = wrappers_of(made)
        later = [each for each in _ORDER[_ORDER.index(name) + 1 :] if each in names]
        if later:
            rule = f"be {name} before it is {later[0]}, as in {later[0]}({name}(method, ...), ...)"
            raise check.wrong("method", rule, f"a {later[0]} one")
        values = {key: _plain(value) for key, value in [*bound.arguments.items()][1:]}
        text = f"{name}({', '.join(f'{key}={value}' for key, value in values.items())})"
        return made._replace(wrappers=(*made.wrappers, text))

    return wrap


def wrappers_of(method: Method) -> list[str]:
    """Return the names of the functions that wrapped a method, the first one first."""
    return [each.partition("(")[0] for each in method.wrappers]


def _plain(value: Any) -> str:
    """Describe a value of a wrapper: ids in their order, and objects without addresses."""
    if isinstance(value, Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return _plain([f"{key}: {_plain(each)}" for key, each in value.items()])
    if isinstance(value, Iterable) and not isinstance(value, str):
        return f"[{', '.join(sorted(map(_plain, value)))}]"
    text = repr(value)
    return _told(value) if " at 0x" in text else text


def sends_changes(method: Method, why: str) -> bool:
    """Return whether payloads are changes; refuse a server that does not say it."""
    changes = method.server.changes
    rule = f"say whether payloads are changes, because {why}"
    check.require(changes is not None, "method.server.changes", rule, "None (Server(changes=))")
    return bool(changes)


def check_wrappers(method: Method, client: int | str, state: State) -> None:
    """Refuse the state of a coded run for a method that is not coded, and the other way round."""
    depth, inner = 0, state
    check.instance(f"clients[{str(client)!r}]", state, Mapping, "be a dict")
    while len(inner) == len(CODED) and all(key in inner for key in CODED):
        depth, inner = depth + 1, inner["client"]
    codecs = wrappers_of(method).count("coded")
    rule = f"have {depth} codecs, as in the run that made the state of client {client}"
    check.require(depth == codecs or (depth < codecs and not inner), "method", rule, codecs)


def check_takes_part(data: Any, client: int, server_round: int) -> None:
    """Refuse a client that the setting of its data does not name. It may only predict."""
    clients = getattr(getattr(data, "setting", None), "clients", None)
    rule = "have clients of `setting.clients`, because the others only predict"
    got = f"client {client} in round {server_round}"
    check.require(clients is None or client in clients, "cohorts", rule, got)
