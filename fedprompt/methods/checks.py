"""An audit: whether messages are all that crosses between clients."""

from collections.abc import Callable, Iterator, Mapping
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
    first = _Recorded(make, federation)
    for client in federation.shards:
        _repeat(make, federation, first, client)


class _Call(NamedTuple):
    """A call of the first run: its arguments, and what it returned."""

    what: str
    client: int | None
    server_round: int
    arguments: tuple[Any, ...]
    result: Any


class _Recorded:
    """The calls of all rounds, and of the predictions after the last one."""

    def __init__(self, make: Callable[..., Method], federation: Federation) -> None:
        self.calls: list[_Call] = []
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            setting = replace(federation.setting)
            method = make(setting)
            data = replace(federation, setting=setting).data
            for now in run_rounds(self.watched(method), data, setting.cohorts()):
                last: Round = now
            for client in federation.shards:
                self.predict(method, data(client, last.server_round), last)

    def watched(self, method: Method) -> Method:
        """Return the method, which records its calls."""

        def client(data: Any, answer: Message, state: State) -> Any:
            result = method.client(data, answer, state)
            self.calls.append(_Call("train", data.id, data.server_round, (answer, state), result))
            return result

        def answer(client: int, state: State) -> Message:
            result = method.server.answer(client, state)
            self.calls.append(_Call("answer", client, -1, (state,), result))
            return result

        def step(server_round: int, payloads: Mapping[int, Message], state: State) -> State:
            result = method.server.step(server_round, payloads, state)
            self.calls.append(_Call("step", None, server_round, (payloads, state), result))
            return result

        server = method.server._replace(answer=answer, step=step)
        return method._replace(client=client, server=server)

    def predict(self, method: Method, data: Any, now: Round) -> None:
        """Record the logits of a client for its own inputs."""
        answer = method.server.answer(data.id, now.server)
        state = now.clients.get(str(data.id), {})
        logits = _logits(method, data, answer, state)
        self.calls.append(_Call("predict", data.id, data.server_round, (answer, state), logits))


def _logits(method: Method, data: Any, answer: Message, state: State) -> Tensor:
    model = method.predict(data, answer, state)
    if isinstance(model, torch.nn.Module):
        model.eval()
    with torch.no_grad():
        logits: Tensor = model(data.own()[0]).clone()
    return logits


def _repeat(
    make: Callable[..., Method], federation: Federation, first: _Recorded, client: int
) -> None:
    """Repeat all calls with noise in place of what the other clients have."""
    states: dict[int, Any] = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(client + 1)
        noisy = _with_noise(federation, client)
        method = make(noisy.setting)
        server = make(replace(noisy.setting)).server  # shares no variable with the clients
        for call in first.calls:
            again: partial[Any]
            if call.what == "answer":
                again = partial(server.answer, call.client or 0, *call.arguments)
            elif call.what == "step":
                again = partial(server.step, call.server_round, *call.arguments)
            else:
                data = noisy.data(call.client or 0, call.server_round)
                run = method.client if call.what == "train" else partial(_logits, method)
                answer, state = call.arguments
                if call.client != client:  # it may leave something behind for `client` to read
                    result = run(data, answer, states.get(data.id, {}))
                    states[data.id] = result[1] if call.what == "train" else state
                    continue
                again = partial(run, data, answer, state)
            found, failed = None, None
            try:
                found = again()
            except Exception as error:  # it misses what the other side left behind
                failed = error
            if failed or to_blob({"": found}, "tree") != to_blob({"": call.result}, "tree"):
                where = f"client {call.client}, round {call.server_round}"
                noise = f"with noise at all but client {client}"
                got = f"another result of {call.what!r} ({where}) {noise}"
                rule = "read nothing of other clients but messages"
                raise check.wrong("make", rule, got) from failed


def _with_noise(federation: Federation, client: int) -> Federation:
    """Keep the data of one client; the others get noise, random labels and one input more."""
    draw = torch.Generator().manual_seed(client)
    setting = replace(federation.setting)
    whole: Any = federation.inputs
    inputs: list[Tensor] = []
    labels: list[Tensor] = []
    shards: dict[int, Tensor] = {}
    for other, shard in federation.shards.items():
        if other == client:
            inputs.append(whole[shard])
            labels.append(federation.labels[shard])
        else:
            size = len(shard) + 1
            inputs.append(torch.rand(size, *whole.shape[1:], generator=draw).to(whole.dtype))
            labels.append(torch.randint(setting.num_classes, (size,), generator=draw))
        begin = sum(map(len, shards.values()))
        shards[other] = torch.arange(begin, begin + len(labels[-1]))
    return replace(
        federation,
        setting=setting,
        inputs=torch.cat(inputs),
        labels=torch.cat(labels),
        shards=shards,
    )


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
    cells = getattr(make, "__closure__", None) or ()
    names = getattr(make, "__code__", None)
    yield from zip(
        names.co_freevars if names else (), (c.cell_contents for c in cells), strict=True
    )
