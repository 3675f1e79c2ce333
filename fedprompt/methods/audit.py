"""An audit: whether messages are all that crosses between clients."""

import os
import pickle
import select
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt._files import IN_A_FILE, function_at
from fedprompt._own_copies import copied
from fedprompt._threads import one_thread
from fedprompt._trees import digest
from fedprompt.interfaces import Method
from fedprompt.methods.setting import ClientData, Federation, Setting

__all__ = ["check_messages"]

_SHIPPED = "have functions at the top of files alone, because another process imports them"


def check_messages(
    method: "str | Callable[..., Method]", setting: "Setting", federation: "Federation"
) -> int:
    """Check that a client reads nothing of other clients but what the server answers.

    All rounds run once. Then all calls are repeated for each client, in a process that has the data
    of this client alone, and noise in place of the data, the labels and the shard sizes of others.
    The client gets the answers of the first run. Its payloads, its states and its predictions must
    be bitwise the same, and so must the steps and the answers of the server, which gets the
    payloads of the first run. Clients and server are those of two methods.

    The processes never had the data of others: a helper is started once, imports this library, and
    is forked for each client. Where a process cannot be forked, one is started for each client.
    Random numbers are as in each run, so honest dropout passes.

    The audit finds mistakes. It cannot find data that the file of the method reads by itself, a
    secret in a file that is written once, nor a method that leaks later than these rounds or that
    recognizes the audit. The information in a message itself is another question: see
    ``fedprompt.privacy``.

    Args:
        method: Function (setting) -> method at the top of a file, such as ``methods.fedprox``, or
            its place, such as ``"mine.py:method"``. The file is imported in other processes.
        setting: Setting of the run. Few rounds are enough. Its functions are in files, too.
        federation: Data of all clients, with a tensor of inputs. Small shards are enough.

    Returns:
        Number of calls that were repeated.

    Raises:
        ValueError: If something else crosses; the text names the client, the round and what differs
            there. Or if a function is not at the top of a file.

    Example:
        >>> from fedprompt import methods, samples, vit_trunk
        >>> split = samples.digits(seed=0)
        >>> shards = {client: torch.arange(20) + 20 * client for client in range(3)}
        >>> setting = methods.VitSetting(
        ...     trunk=vit_trunk(samples.vit("S")), clients=range(3), num_classes=10,
        ...     rounds=1, steps=1, cohort_size=2,
        ... )
        >>> federation = methods.Federation(split.train_images, split.train_labels, shards)
        >>> methods.check_messages(methods.fedprox, setting, federation)
        33
    """
    top = isinstance(method, FunctionType) and "<" not in method.__qualname__
    check.require(top or isinstance(method, str), "method", IN_A_FILE, check.kind(method))
    check.instance("setting", setting, Setting, "be a Setting, such as VitSetting")
    check.instance("federation", federation, Federation, "be a Federation")
    check.instance("federation.inputs", federation.inputs, torch.Tensor, "be a tensor")
    check.count("setting.rounds", setting.rounds)
    public = copied(setting.public)  # without the memory that it is a view of
    setting = replace(setting.completed(federation.shards), public=public)
    place = os.path.abspath(method) if isinstance(method, str) else method
    with one_thread():  # as in the processes, whose sums must be equal
        calls = _run(function_at(place)(setting), setting, federation)
    shipped = _pickled((place, setting))
    for client in federation.shards:
        noisy = _with_noise(federation, client, setting.num_classes)
        if text := _sent(_pickled((shipped, noisy, calls, client))):
            raise check.wrong("method", "read nothing of other clients but messages", text)
    return len(calls) * len(federation.shards)


def _digest(result: Any, data: Any) -> str:
    """Return the digest of a result; of a model, that of the logits of all inputs of a client."""
    if isinstance(result, torch.nn.Module):
        with torch.no_grad():
            result = result.eval()(data.own()[0])
    return digest({"": result})


def _run(method: Any, setting: Any, federation: Any, client: Any = None, known: Any = ()) -> Any:
    """Run all rounds and predict; return the digest of each call, and the payloads of clients.

    With a client, its calls and those of the server must be the known ones, and the other clients
    send the known payloads.
    """
    check.instance("method", method, Method, "be a Method(client, server, predict)")
    calls, expected = list[tuple[str, Any]](), iter(known)

    def watched(what: str, function: Callable[..., Any]) -> Any:
        def call(first: Any, *others: Any) -> Any:
            result = function(first, *others)
            calls.append((_digest(result, first), copied(result[0]) if what == "client" else None))
            before, payload = next(expected, calls[-1])
            if isinstance(first, ClientData) and client not in (None, first.id):
                return (payload, result[1]) if what == "client" else result
            if calls[-1][0] != before:
                raise ValueError(f"another result of {what!r}")
            return result

        return call

    server = {name: watched(name, getattr(method.server, name)) for name in ("answer", "step")}
    clients = {name: watched(name, getattr(method, name)) for name in ("client", "predict")}
    parts: Any = {"server": method.server._replace(**server), "setting": setting}
    method = method._replace(**clients, **parts)
    *_, last = fp.run_rounds(method, federation)
    for number in federation.shards:
        last.model(method, federation, number)
    return calls


def _with_noise(federation: Federation, client: int, classes: int) -> Federation:
    """Keep the data of one client; the others get noise, random labels and one input more."""
    draw: Any = {"generator": torch.Generator().manual_seed(client), "device": "cpu"}
    whole: Any = federation.inputs
    own, size = federation.shards[client], max(map(len, federation.shards.values())) + 1
    noise = torch.rand(size, *whole.shape[1:], **draw).to(whole)
    guesses = torch.randint(classes, (size,), **draw).to(federation.labels)
    places = torch.arange(len(own) + size, device="cpu")
    found = {c: places[len(own) :][: len(shard) + 1] for c, shard in federation.shards.items()}
    labels, found[client] = torch.cat([federation.labels[own], guesses]), places[: len(own)]
    return replace(federation, inputs=torch.cat([whole[own], noise]), labels=labels, shards=found)


def _pickled(thing: Any) -> bytes:
    try:
        blob = pickle.dumps(thing)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise check.wrong("setting", _SHIPPED, error) from error
    check.require(b"__main__" not in blob, "setting", _SHIPPED, "the main program")
    return blob


_LARGE = ("torchvision", "timm", "transformers", "open_clip", "peft", "ot")
"""Packages that a helper imports once if they are in use, and not for each client."""


_HELPERS = dict[bool, Any]()
"""The running helper, if there is one."""


def _helper(forks: bool) -> "subprocess.Popen[bytes]":
    names = ["fedprompt.methods.audit", *(name for name in _LARGE if name in sys.modules)]
    command = [sys.executable, "-c", f"import {', '.join(names)}; {names[0]}.serve({forks})"]
    path = os.pathsep.join(map(os.path.abspath, sys.path))
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": path})


def _sent(job: bytes) -> str:
    """Send a job to the helper, and return what it found."""
    helper: Any = _HELPERS.pop(forks := hasattr(os, "fork"), None) or _helper(forks)
    try:
        helper.stdin.write(job)
        helper.stdin.flush()
        text: str = pickle.load(helper.stdout)
    except (BrokenPipeError, EOFError) as error:
        helper.communicate()  # closes its pipes
        raise RuntimeError("The process that repeats the calls has ended.") from error
    if forks:
        _HELPERS[forks] = helper
    else:
        helper.communicate()
    return text


def serve(forks: bool) -> None:
    """Repeat the calls of a job. A process that forks does so for each job, until the pipe ends."""
    results = os.dup(1)
    os.dup2(2, 1)  # so that prints of a method are no results
    while forks and select.select([0], [], []) and os.fork():
        if os.wait()[1]:  # the pipe ended, or a method ended its process
            return
    torch.set_num_threads(1)
    with open(0, "rb", closefd=False) as jobs:  # nothing was read before the fork
        if jobs.peek(1):
            os.write(results, pickle.dumps(_repeated(*pickle.load(jobs))))
            os._exit(0)
    os._exit(1)


def _repeated(shipped: bytes, federation: Federation, calls: Any, client: int) -> str:
    """Describe the first call with another result, or return an empty text."""
    (place, setting), (_, another) = (pickle.loads(shipped) for _ in range(2))
    method, other = (function_at(place)(each) for each in (setting, another))
    method = method._replace(server=other.server)  # shares no variable with the clients
    try:
        _run(method, setting, federation, client, calls)
    except Exception as error:  # also of a call that misses what the other side left behind
        where = ", ".join(getattr(error, "__notes__", ["predictions"]))
        return f"{type(error).__name__}: {error} ({where}; noise at all but client {client})"
    return ""
