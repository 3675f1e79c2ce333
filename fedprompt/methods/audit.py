"""An audit: whether messages are all that crosses between clients."""

import hashlib
import inspect
import os
import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._trees import to_blob
from fedprompt.interfaces import Message, Method, Round, State
from fedprompt.methods.setting import Federation, Setting
from fedprompt.rounds import run_rounds

__all__ = ["Audit", "check_messages"]

_TURN = "client {0.id}, round {0.server_round}"
_RULE = "read nothing of other clients but messages"


class Audit(NamedTuple):
    """Extent of an audit that found nothing.

    Attributes:
        repeats: Number of calls that were repeated.
        forked: Whether the repeats ran in processes that were started before the first run. If
            False, they shared the process of the first run. A secret that was written once, for
            example into the environment, is not found then.
    """

    repeats: int
    forked: bool


def check_messages(make: Callable[..., Method], setting: Setting, federation: Federation) -> Audit:
    """Check that a client reads nothing of other clients but what the server answers.

    All rounds run once. Then, for each client, a new method is made, and all calls are repeated
    with noise in place of the data, the labels and the shard sizes of all other clients. The client
    gets the answers of the first run. Its payloads, its states and its predictions must be bitwise
    the same, and so must the steps and the answers of the server, which gets the payloads of the
    first run. Clients and server are those of two methods, so they cannot share a variable.

    The repeats run in processes that were forked before the first run, where the images of other
    clients are noise under each of their names. Forking needs a POSIX system and the CPU.

    The audit finds mistakes. It cannot find a copy or a statistic of the data that was made before
    the audit, a secret in a file that is written once or in the number of random numbers that are
    drawn, nor a method that leaks later than these rounds or that recognizes the audit. The
    information in a message itself is another question: see ``fedprompt.privacy``.

    Args:
        make: Function (setting) -> method, such as ``methods.fedprox``.
        setting: Setting of the run. Few rounds are enough.
        federation: Data of all clients, with a tensor of inputs. Small shards are enough.

    Returns:
        Number of repeated calls, and whether they ran in processes of their own.

    Raises:
        ValueError: If something else crosses; the text names the client, the round and what differs
            there.

    Example:
        >>> from fedprompt import methods, samples, vit_trunk
        >>> split = samples.digits(seed=0)
        >>> shards = {client: torch.arange(20) + 20 * client for client in range(3)}
        >>> setting = methods.VitSetting(
        ...     trunk=vit_trunk(samples.vit("S")), clients=range(3), num_classes=10,
        ...     rounds=1, steps=1, cohort_size=2,
        ... )
        >>> train = split.train_images, split.train_labels
        >>> federation = methods.Federation(*train, shards)
        >>> methods.check_messages(methods.fedprox, setting, federation).repeats
        24
    """
    check.function("make", make)
    check.instance("federation", federation, Federation, "be a Federation")
    check.instance("federation.inputs", federation.inputs, Tensor, "be a tensor")
    check.instance("setting", setting, Setting, "be a Setting, such as VitSetting")
    check.count("setting.rounds", setting.rounds)
    setting = setting.completed(federation.shards)
    _check_reach(make, setting, federation)
    device = torch.device(setting.device).type
    started: Any = torch.cuda.is_initialized
    forked = hasattr(os, "fork") and device == "cpu" and not started()
    with _repeating(make, setting, federation, forked) as repeated:
        calls = _recorded(make, setting, federation)
        for client in federation.shards:
            repeated(calls, client)
    return Audit(len(calls) * len(federation.shards), forked)


class _Call(NamedTuple):
    """A call of the first run: its arguments, and the digest of its result.

    In place of its data, a client has its id and the round.
    """

    what: str
    where: str
    arguments: tuple[Any, ...]
    digest: str


def _digest(result: Any) -> str:
    return hashlib.sha256(to_blob({"": result}, "tree")).hexdigest()


def _recorded(make: Callable[..., Method], setting: Setting, federation: Federation) -> list[_Call]:
    """Return the calls of all rounds, and of the predictions after the last one."""
    calls: list[_Call] = []

    def watched(what: str, function: Callable[..., Any], where: str) -> Callable[..., Any]:
        def call(first: Any, *others: Any) -> Any:
            result = function(first, *others)
            known = (first.id, first.server_round) if where == _TURN else first
            calls.append(_Call(what, where.format(first), (known, *others), _digest(result)))
            return result

        return call

    with _stream() as draw:
        method = make(replace(setting))
        nouns.method(method)
        client, server = method.client, method.server
        answer = watched("answer", draw(server.answer), "client {}")
        step = watched("step", draw(server.step), "round {}")
        train = watched("train", draw(client), _TURN)
        whole = method._replace(client=train, server=server._replace(answer=answer, step=step))
        for now in run_rounds(whole._replace(setting=setting), federation):
            last: Round = now
        predict = watched("predict", draw(partial(_logits, method)), _TURN)
        for number in federation.shards:
            known = server.answer(number, last.server), last.clients.get(str(number), {})
            predict(federation.data(setting, number, last.server_round), *known)
    return calls


@contextmanager
def _stream() -> Iterator[Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """Begin PyTorch's global stream anew before each call, so that dropout is repeated.

    A stream that the method has seeded itself stays, because a seed may be a secret.
    """

    def begun(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if torch.initial_seed() == 0:
                torch.manual_seed(0)
            return function(*arguments)

        return call

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield begun


def _logits(method: Method, data: Any, answer: Message, state: State) -> Tensor:
    model = method.predict(data, answer, state)
    if isinstance(model, torch.nn.Module):
        model.eval()
    with torch.no_grad():
        logits: Tensor = model(data.own()[0]).clone()
    return logits


@contextmanager
def _repeating(
    make: Callable[..., Method], setting: Setting, federation: Federation, forked: bool
) -> Iterator[Callable[[list[_Call], int], None]]:
    """Yield a function that repeats calls with the true data of one client."""
    if not forked:

        def again(calls: list[_Call], client: int) -> None:
            _repeat(make, *_with_noise(setting, federation, client), calls, client)

        yield again
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forked process has no other threads
    here, there = Pipe()
    process = _fork()
    if not process:
        here.close()
        _serve(make, setting, federation, there)  # it ends the process
    there.close()

    def repeated(calls: list[_Call], client: int) -> None:
        here.send_bytes(pickle.dumps(([tuple(call) for call in calls], client)))
        try:
            found = pickle.loads(here.recv_bytes())
        except EOFError as error:
            raise RuntimeError("The process that repeats the calls has ended.") from error
        if found is not None:
            raise check.wrong("make", _RULE, found)

    try:
        yield repeated
    finally:
        here.close()
        os.waitpid(process, 0)
        torch.set_num_threads(threads)


def _fork() -> int:
    with warnings.catch_warnings():  # since Python 3.12, about threads, which the child never uses
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _serve(
    make: Callable[..., Method], setting: Setting, federation: Federation, pipe: Any
) -> None:
    """Repeat calls on request, each time in a new process, until the pipe ends."""
    try:
        while True:
            calls, client = pickle.loads(pipe.recv_bytes())
            if process := _fork():
                if os.waitpid(process, 0)[1]:  # it crashed, or was killed
                    return
                continue
            found: str | None = None
            try:
                noisy = _with_noise(setting, federation, client)
                _overwrite(setting, federation, client)
                _repeat(make, *noisy, calls, client)
            except Exception as error:
                found = str(error).removeprefix(f"`make` must {_RULE}; got ").removesuffix(".")
            pipe.send_bytes(pickle.dumps(found))
            os._exit(0)
    finally:  # also at the end of the pipe: nothing of the first process may run here
        os._exit(0)


def _repeat(
    make: Callable[..., Method],
    setting: Setting,
    noisy: Federation,
    calls: Sequence[tuple[Any, ...]],
    client: int,
) -> None:
    """Repeat all calls with noise in place of what the other clients have."""
    states: dict[int, Any] = {}
    with _stream() as draw:
        method = make(setting)
        server = make(replace(setting)).server  # shares no variable with the clients
        runs: dict[str, Any] = {"train": method.client, "predict": partial(_logits, method)}
        runs |= {"answer": server.answer, "step": server.step}
        for what, where, (first, *others), digest in calls:
            run = draw(runs[what])
            if what in ("train", "predict"):
                first = noisy.data(setting, *first)
                if first.id != client:  # it may leave something behind for `client` to read
                    mine = run(first, others[0], states.get(first.id, {}))
                    states[first.id] = mine[1] if what == "train" else others[1]
                    continue
            found, failed = None, None
            try:
                found = _digest(run(first, *others))
            except Exception as error:  # it misses what the other side left behind
                failed = error
            if failed or found != digest:
                why = f" ({type(failed).__name__}: {failed})" if failed else ""
                noise = f"with noise at all but client {client}{why}"
                raise check.wrong("make", _RULE, f"another result of {what!r} ({where}) {noise}")


def _with_noise(
    setting: Setting, federation: Federation, client: int
) -> tuple[Setting, Federation]:
    """Keep the data of one client; the others get noise, random labels and one input more."""
    drawn: Any = {"generator": torch.Generator().manual_seed(client), "device": "cpu"}
    public = setting.public
    setting = replace(setting, public=None if public is None else public.clone())
    whole: Any = federation.inputs
    pairs: list[tuple[Tensor, Tensor]] = []
    for other, shard in federation.shards.items():
        if other == client:
            pairs.append((whole[shard], federation.labels[shard]))
        else:
            size = len(shard) + 1
            noise = torch.rand(size, *whole.shape[1:], **drawn).to(whole)
            labels = torch.randint(setting.num_classes, (size,), **drawn).to(federation.labels)
            pairs.append((noise, labels))
    inputs, labels = map(torch.cat, zip(*pairs, strict=True))
    positions = torch.arange(len(labels), device="cpu")
    parts = torch.split(positions, [len(part) for _, part in pairs])
    shards = dict(zip(federation.shards, parts, strict=True))
    return setting, replace(federation, inputs=inputs, labels=labels, shards=shards)


def _overwrite(setting: Setting, federation: Federation, client: int) -> None:
    """Write noise over all that is not the client's, under whatever name a method reads it.

    Memory of a file, or memory that another process shares, is left as it is.
    """
    drawn: Any = {"generator": torch.Generator().manual_seed(client), "device": "cpu"}
    whole: Any = federation.inputs
    classes = setting.num_classes
    noise = torch.rand(whole.shape, **drawn).to(whole)
    labels = torch.randint(classes, federation.labels.shape, **drawn).to(federation.labels)
    own = federation.shards[client]
    for data, random in ((whole, noise), (federation.labels, labels)):
        if _is_private(data):
            random[own] = data[own]
            data.detach().copy_(random)


def _is_private(tensor: Tensor) -> bool:
    """Whether the memory of a tensor can be written, and nothing else sees it."""
    if tensor.untyped_storage().is_shared():
        return False
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:  # without a list of mapped memory
        return False
    address = tensor.untyped_storage().data_ptr()
    for line in maps:
        span, mode, *_ = line.split()
        start, end = (int(bound, 16) for bound in span.split("-"))
        if start <= address < end:
            return mode.startswith("rw") and mode.endswith("p")
    return False


def _check_reach(make: Callable[..., Method], setting: Setting, federation: Federation) -> None:
    """Require that neither the setting nor the function of the method has the clients' data."""
    data: list[Any] = [federation.inputs, federation.labels, *federation.shards.values()]
    owned = {tensor.untyped_storage().data_ptr() for tensor in data}
    for name, thing in _reached(make, setting):
        array = isinstance(thing, np.ndarray)
        tensor = torch.from_numpy(thing) if array and thing.dtype.kind in "fiub" else thing
        holds = isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() in owned
        if holds or isinstance(thing, Federation) or thing is federation.shards:
            raise check.wrong("make", "have no data of clients", f"{name} has them")


def _reached(make: Any, setting: Setting) -> Iterator[tuple[str, Any]]:
    for name, thing in vars(setting).items():
        if name != "public":
            yield from _contents(f"setting.{name}", thing)
    while isinstance(make, partial):
        for value in make.args:
            yield from _contents(f"an argument of {make.func.__name__}", value)
        for name, value in make.keywords.items():
            yield from _contents(name, value)
        make = make.func
    if hasattr(make, "__closure__"):  # a function, or a method of an object
        for name, value in inspect.getclosurevars(make).nonlocals.items():
            yield from _contents(name, value)


def _contents(name: str, thing: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """Yield a thing, and what the lists, dicts and attributes of it have."""
    yield name, thing
    if depth and isinstance(thing, list | tuple | Mapping):
        for part in thing.values() if isinstance(thing, Mapping) else thing:
            yield from _contents(name, part, depth - 1)
