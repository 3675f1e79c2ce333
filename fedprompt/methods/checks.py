"""An audit: whether messages are all that crosses between clients."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt._checks as check
from fedprompt._trees import to_blob
from fedprompt.interfaces import Message, Method, Round, State
from fedprompt.methods.setting import Federation, Setting
from fedprompt.rounds import run_rounds

__all__ = ["check_messages"]

_TURN = "client {0.id}, round {0.server_round}"


def check_messages(make: Callable[..., Method], federation: Federation) -> None:
    """Check that a client knows nothing of others but what the server answers.

    All rounds run once. Then, for each client, a new method is made, and all calls are repeated
    with noise in place of the data, the labels and the shard sizes of all other clients. The client
    gets the answers of the first run. Its payloads, its states and its predictions must be bitwise
    the same, and so must the steps and the answers of the server, which gets the payloads of the
    first run. Clients and server are those of two methods, so they cannot share a variable.

    So messages and answers are all that crosses, in this federation. What a message itself tells
    about the data is another question: see ``fedprompt.privacy``.

    Args:
        make: Function (setting) -> method, such as ``methods.fedprox``.
        federation: Data of all clients, with a tensor of inputs. Few rounds and small shards are
            enough.

    Raises:
        ValueError: If something else crosses; the text names the client, the round and what differs
            there.

    Example:
        >>> from fedprompt import methods, samples, vit_trunk
        >>> split = samples.digits(seed=0)
        >>> shards = {client: torch.arange(20) + 20 * client for client in range(3)}
        >>> setting = methods.VitSetting(
        ...     trunks=[vit_trunk(samples.vit("S"))], clients=range(3), num_classes=10,
        ...     rounds=1, steps=1, cohort_size=2, batch_size=4, seed=0,
        ...     public=split.train_images[:0],
        ... )
        >>> federation = methods.Federation(setting, split.train_images, split.train_labels, shards)
        >>> methods.check_messages(methods.fedprox, federation)
    """
    check.function("make", make)
    check.instance("federation", federation, Federation, "be a Federation")
    check.instance("federation.inputs", federation.inputs, Tensor, "be a tensor")
    _check_reach(make, federation)
    calls = _recorded(make, federation)
    for client in federation.shards:
        _repeat(make, federation, calls, client)


class _Call(NamedTuple):
    """A call of the first run: its arguments, and what it returned."""

    what: str
    where: str
    arguments: tuple[Any, ...]
    result: Any


def _recorded(make: Callable[..., Method], federation: Federation) -> list[_Call]:
    """Return the calls of all rounds, and of the predictions after the last one."""
    calls: list[_Call] = []

    def watched(what: str, function: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            result = function(*arguments)
            calls.append(_Call(what, where.format(arguments[0]), arguments, result))
            return result

        return call

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        setting = replace(federation.setting)
        client, server, *_ = method = make(setting)
        data = replace(federation, setting=setting).data
        answer = watched("answer", server.answer, "client {}")
        step = watched("step", server.step, "round {}")
        train = watched("train", client, _TURN)
        whole = method._replace(client=train, server=server._replace(answer=answer, step=step))
        for now in run_rounds(whole, data, setting.cohorts()):
            last: Round = now
        predict = watched("predict", partial(_logits, method), _TURN)
        for number in federation.shards:
            known = server.answer(number, last.server), last.clients.get(str(number), {})
            predict(data(number, last.server_round), *known)
    return calls


def _logits(method: Method, data: Any, answer: Message, state: State) -> Tensor:
    model = method.predict(data, answer, state)
    if isinstance(model, torch.nn.Module):
        model.eval()
    with torch.no_grad():
        logits: Tensor = model(data.own()[0]).clone()
    return logits


def _repeat(
    make: Callable[..., Method], federation: Federation, calls: list[_Call], client: int
) -> None:
    """Repeat all calls with noise in place of what the other clients have."""
    states: dict[int, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client + 1)
        noisy = _with_noise(federation, client)
        method = make(noisy.setting)
        server = make(replace(noisy.setting)).server  # shares no variable with the clients
        for what, where, (first, *others), result in calls:
            again: partial[Any]
            if what in ("answer", "step"):
                again = partial(getattr(server, what), first, *others)
            else:
                data = noisy.data(first.id, first.server_round)
                run = method.client if what == "train" else partial(_logits, method)
                if data.id != client:  # it may leave something behind for `client` to read
                    mine = run(data, others[0], states.get(data.id, {}))
                    states[data.id] = mine[1] if what == "train" else others[1]
                    continue
                again = partial(run, data, *others)
            found, failed = None, None
            try:
                found = again()
            except Exception as error:  # it misses what the other side left behind
                failed = error
            if failed or to_blob({"": found}, "tree") != to_blob({"": result}, "tree"):
                noise = f"with noise at all but client {client}"
                got = f"another result of {what!r} ({where}) {noise}"
                rule = "read nothing of other clients but messages"
                raise check.wrong("make", rule, got) from failed


def _with_noise(federation: Federation, client: int) -> Federation:
    """Keep the data of one client; the others get noise, random labels and one input more."""
    draw = torch.Generator().manual_seed(client)
    setting = replace(federation.setting)
    whole: Any = federation.inputs
    pairs: list[tuple[Tensor, Tensor]] = []
    for other, shard in federation.shards.items():
        if other == client:
            pairs.append((whole[shard], federation.labels[shard]))
        else:
            size = len(shard) + 1
            noise = torch.rand(size, *whole.shape[1:], generator=draw).to(whole.dtype)
            labels = torch.randint(setting.num_classes, (size,), generator=draw)
            pairs.append((noise, labels))
    inputs, labels = map(torch.cat, zip(*pairs, strict=True))
    parts = torch.split(torch.arange(len(labels)), [len(part) for _, part in pairs])
    shards = dict(zip(federation.shards, parts, strict=True))
    return replace(federation, setting=setting, inputs=inputs, labels=labels, shards=shards)


def _check_reach(make: Callable[..., Method], federation: Federation) -> None:
    """Require that neither the setting nor the function of the method has the clients' data."""
    data: list[Any] = [federation.inputs, federation.labels, *federation.shards.values()]
    owned = {tensor.untyped_storage().data_ptr() for tensor in data}
    for name, thing in _reached(make, federation.setting):
        holds = isinstance(thing, Tensor) and thing.untyped_storage().data_ptr() in owned
        if holds or isinstance(thing, Federation) or thing is federation.shards:
            raise check.wrong("make", "have no data of clients", f"{name} has them")


def _reached(make: Any, setting: Setting) -> Iterator[tuple[str, Any]]:
    for name, thing in vars(setting).items():
        if name != "public":
            yield f"setting.{name}", thing
    while isinstance(make, partial):
        yield from ((f"an argument of {make.func.__name__}", value) for value in make.args)
        yield from make.keywords.items()
        make = make.func
    if hasattr(make, "__closure__"):  # a function, or a method of an object
        yield from inspect.getclosurevars(make).nonlocals.items()
