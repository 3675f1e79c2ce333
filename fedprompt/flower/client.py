"""Flower client apps."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.app import Message as Envelope
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod, arrays_size_mod, message_size_mod
from flwr.clientapp.typing import Mod

import fedprompt._refusals as check
from fedprompt._own_copies import copied
from fedprompt._random_streams import kept_streams
from fedprompt.checkpoint import load_checkpoint, save_checkpoint
from fedprompt.flower._records import STATEFUL, Encoded, Form, Plain, remember, remembered
from fedprompt.flower._rounds import CLIENT, Fingerprint, check_options, unchecked
from fedprompt.flower._tests import figures
from fedprompt.interfaces import Message, Method, Weighted
from fedprompt.interfaces.calls import Calls, seed_of
from fedprompt.interfaces.method import Clients, check_takes_part, run_of
from fedprompt.wire import Expected, Header

Tests = Callable[[int], tuple[Any, Any]]
_INITIAL: dict[str, Any] = {"asked": "", "before": {}, "after": {}}


def client_app(
    method: Method,
    data: Clients | Callable[[int, int], Any],
    *,
    max_bytes: int,
    fingerprint: Fingerprint | None = None,
    directory: str | os.PathLike[str] | None = None,
    tests: Tests | None = None,
    plain: bool = False,
    mods: Sequence[Mod] = (),
) -> ClientApp:
    """Make a ``ClientApp`` that runs the client function of a method.

    The app also replies to :func:`client_nodes` with its client id, the ``partition-id`` of its
    node. An answer of the server that is refused becomes an error reply, and the state is
    unchanged. The app accepts any round number, because a later run may count from 0 again.

    If the server crashes before saving and repeats a round, the client recomputes its payloads from
    the state it had before that round. So the resumed run is bitwise identical to an unbroken one.

    Args:
        method: Method with a `form`. An answer must have the names, shapes and dtypes of the first
            answer to this client, ``method.server.answer(client, method.server.state)``.
        data: Federation of the client of this node, or a function (client, server_round) -> data of
            the client, as for :func:`run_rounds`. It is called with this client alone. The setting
            of the method names all clients, so that networks are given to them as at the server.
        max_bytes: Maximum size of an answer in bytes.
        fingerprint: Function from a client id to its :func:`~fedprompt.fingerprint`, the same as
            at the server. If it is not given, backbones are not compared.
        directory: Directory with a checkpoint folder for each client. A later run then continues
            from these states. Only one process at a time may run a client. If None, the state is
            kept in ``context.state``, which ends with the run.
        tests: Function from a client id to its own test inputs and their labels. A strategy with
            `tested` then gets figures of the client's own model, and never the images.
        plain: Whether messages are Flower's own arrays, as at the server (:class:`ServerStrategy`).
        mods: Modifiers of Flower, such as ``flwr.clientapp.mod.fixedclipping_mod``. Those that
            change numbers need `plain`; without it they refuse the message.

    Returns:
        The app.

    Example:
        >>> def train(data, answer, state):
        ...     payload = {"head": Weighted(answer["head"] + data, torch.tensor(30.0))}
        ...     return payload, {"rounds": state.get("rounds", 0) + 1}
        >>> def predict(data, answer, state):
        ...     return torch.nn.Identity()  # in place of your model
        >>> def form(client):
        ...     return {"head": Weighted(torch.zeros(2), torch.tensor(0.0))}
        >>> server = averaging_server({"head": torch.zeros(2)})
        >>> method = Method(train, server, predict, form=form)
        >>> app = client_app(method, lambda client, server_round: client, max_bytes=10_000)
    """
    fingerprint = unchecked if fingerprint is None else fingerprint
    check_options(method, max_bytes, fingerprint)
    check.optional(check.function, "tests", tests)
    check.flag("plain", plain)
    check.sequence("mods", mods, "modifiers of Flower")
    own_data, *_ = run_of(method, data, (), alone=False)
    form = Plain() if plain else Encoded()
    without = arrays_size_mod, message_size_mod
    reading = [mod for mod in mods if mod not in without and not isinstance(mod, LocalDpMod)]
    limits = {"max_bytes": max_bytes, "configured": bool(reading)}
    node = _Node(method, own_data, fingerprint, directory, tests, form, limits)
    app = ClientApp()
    app.train(mods=list(mods))(node.train)
    app.evaluate(mods=list(mods))(node.test)
    app.query(CLIENT)(_identify)
    return app


@dataclass(frozen=True)
class _Node:
    """Handlers of the messages of a client."""

    method: Method
    data: Callable[[int, int], Any]
    fingerprint: Fingerprint
    directory: str | os.PathLike[str] | None
    tests: Tests | None
    form: Form
    limits: dict[str, Any]

    def train(self, message: Envelope, context: Context) -> Envelope:
        """Train, and reply with the payload."""
        client = _partition(context)
        with kept_streams():
            answer, header, asked = self._received(message.content, client)
            memory, folder = self._recalled(context, client)
            calls = self._calls(header)
            if not calls.exchange:
                memory = _begun(memory, asked)
            own = calls.data(self.data, client)
            check_takes_part(own, client, calls.server_round)
            payload, after = calls.train(client, own, answer, memory["after"])
        up = Header(self.fingerprint(client), header.server_round, str(client))
        reply = self.form.reply(payload, answer, up)
        if after:
            reply[STATEFUL] = ConfigRecord()
        _keep({**memory, "after": after}, context, folder)
        return Envelope(reply, reply_to=message)

    def test(self, message: Envelope, context: Context) -> Envelope:
        """Test the client's own model on its own images, and reply with the figures."""
        rule = "be given to `client_app`, because the strategy asks for them by `tested`"
        if self.tests is None:
            raise check.wrong("tests", rule, "None")
        client = _partition(context)
        with kept_streams():
            answer, header, _ = self._received(message.content, client)
            calls = self._calls(header)._replace(exchange=0)
            own = calls.data(self.data, client)
            memory, _ = self._recalled(context, client)
            model = calls.predict(client, own, answer, copied(memory["after"]))
            found = figures(model, *self.tests(client))
        return Envelope(RecordDict({"tests": found}), reply_to=message)

    def _received(self, content: RecordDict, client: int) -> tuple[Message, Header, str]:
        """Return the answer on the devices of the method, its header and its digest."""
        first = self.method.server.state
        like = Calls(self.method, seed_of(self.method), 0).answer(client, first)
        expect = Expected(like, self.fingerprint(client))
        sent, header, digest = self.form.received(content, expect, **self.limits)
        return {name: _beside(entry, like[name]) for name, entry in sent.items()}, header, digest

    def _calls(self, header: Header) -> Calls:
        place = divmod(header.server_round, self.method.exchanges)
        seed = header.meta.get("seed", seed_of(self.method))  # strategies of Flower send none
        return Calls(self.method, int(seed), *place)

    def _recalled(self, context: Context, client: int) -> tuple[dict[str, Any], Path | None]:
        """Return what a client remembers: its last round, and its states before and after it."""
        if self.directory is None:
            return remembered(context.state) or _INITIAL, None
        folder = Path(self.directory, str(client))
        return load_checkpoint(folder, default={}) or _INITIAL, folder


def _identify(message: Envelope, context: Context) -> Envelope:
    check.require(not message.content, "records", "be empty", list(message.content))
    record = ConfigRecord({CLIENT: _partition(context)})
    return Envelope(RecordDict({CLIENT: record}), reply_to=message)


def _beside(entry: Any, other: Any) -> Any:
    """Move an entry, which arrives on the CPU, to the device of another one."""
    if isinstance(entry, Weighted):
        return Weighted(*(part.to(like.device) for part, like in zip(entry, other, strict=True)))
    return entry.to(other.device)


def _begun(memory: dict[str, Any], asked: str) -> dict[str, Any]:
    """Begin a round with the last state, or a repeated round with the state before it."""
    before = memory["before"] if memory["asked"] == asked else memory["after"]
    return {"asked": asked, "before": before, "after": before}


def _keep(memory: dict[str, Any], context: Context, folder: Path | None) -> None:
    if folder is None:
        remember(memory, context.state)
    else:
        save_checkpoint(memory, folder)


def _partition(context: Context) -> int:
    partition = context.node_config.get("partition-id")
    if type(partition) is not int or partition < 0:
        rule = "have a partition-id, an integer of at least 0"
        raise check.wrong("context.node_config", rule, repr(partition))
    return partition
