"""An audit: whether messages are all that crosses between clients."""

import hashlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from io import BytesIO
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._own_copies import copied
from fedprompt._random_streams import present_run
from fedprompt._trees import to_blob
from fedprompt.interfaces import Method
from fedprompt.methods.setting import ClientData, Federation, Setting
from fedprompt.rounds import run_rounds

__all__ = ["Audit", "check_messages"]

_IN_A_FILE = "be a function at the top of a file, or its place, such as 'mine.py:method'"
_SHIPPED = "have functions at the top of files alone, because another process imports them"


class Audit(NamedTuple):
    """Extent of an audit that found nothing.

    Attributes:
        repeats: Number of calls that were repeated.
        forked: Whether one process was forked for each client. If False, each started anew.
    """

    repeats: int
    forked: bool


def check_messages(
    method: "str | Callable[..., Method]", setting: "Setting", federation: "Federation"
) -> "Audit":
    """Check that a client reads nothing of other clients but what the server answers.

    All rounds run once. Then all calls are repeated for each client, in a process that has the data
    of this client alone, and noise in place of the data, the labels and the shard sizes of others.
    The client gets the answers of the first run. Its payloads, its states and its predictions must
    be bitwise the same, and so must the steps and the answers of the server, which gets the
    payloads of the first run. Clients and server are those of two methods.

    The processes never had the data of others: a helper is started once, imports this library, and
    is forked for each client. Random numbers are as in each run, so honest dropout passes.

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
        Number of repeated calls, and whether they ran in forked processes.

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
        >>> methods.check_messages(methods.fedprox, setting, federation).repeats
        33
    """
    top = isinstance(method, FunctionType) and "<" not in method.__qualname__
    check.require(top or isinstance(method, str), "method", _IN_A_FILE, check.kind(method))
    check.instance("setting", setting, Setting, "be a Setting, such as VitSetting")
    check.instance("federation", federation, Federation, "be a Federation")
    check.instance("federation.inputs", federation.inputs, Tensor, "be a tensor")
    check.count("setting.rounds", setting.rounds)
    setting = setting.completed(federation.shards)
    place = os.path.abspath(method) if isinstance(method, str) else method
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the processes, whose sums must be equal
    try:
        calls = _recorded(function_at(place)(setting), setting, federation)
    finally:
        torch.set_num_threads(threads)
    shipped = _pickled((place, setting))
    for client in federation.shards:
        noisy = _with_noise(federation, client, setting.num_classes)
        if text := _repeated(_pickled((shipped, noisy, calls, client))):
            raise check.wrong("method", "read nothing of other clients but messages", text)
    return Audit(len(calls) * len(federation.shards), hasattr(os, "fork"))


def function_at(place: Any) -> Callable[[Setting], Method]:
    """Return the function at a place FILE:NAME; a function is returned as it is."""
    if isinstance(place, str):
        file, _, name = place.rpartition(":")
        spec: Any = spec_from_file_location(Path(file).stem, file)
        check.require(Path(file).is_file() and spec, "method", _IN_A_FILE, repr(place))
        module = sys.modules.get(spec.name)
        if getattr(module, "__file__", None) != spec.origin:  # its functions stay the same
            module = sys.modules[spec.name] = module_from_spec(spec)
            spec.loader.exec_module(module)
        place = getattr(module, name, None)
    check.function("method", place, _IN_A_FILE)
    make: Callable[[Setting], Method] = place
    return make


def digest(result: Any, data: Any = None) -> str:
    """Return the digest of a result; of a model, that of the logits of all inputs of a client."""
    if data is not None:
        with torch.no_grad():
            result = result.eval()(data.own()[0])
    return hashlib.sha256(to_blob({"": result}, "tree")).hexdigest()


def _recorded(method: Method, setting: Setting, federation: Federation) -> list[tuple[Any, ...]]:
    """Return the calls of all rounds, and of the predictions after the last one.

    A call is a name; seed, round and exchange; the client, if there is one; the other arguments;
    and the digest of the result.
    """
    nouns.method(method)
    calls: list[tuple[Any, ...]] = []

    def watched(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *others: Any) -> Any:
            known = first.id if isinstance(first, ClientData) else first
            run, kept = present_run(), copied(others)
            result = function(first, *others)
            found = digest(result, first if what == "predict" else None)
            calls.append((what, run, known, kept, found))
            return result

        return call

    server = method.server
    answer, step = watched("answer", server.answer), watched("step", server.step)
    client, predict = watched("train", method.client), watched("predict", method.predict)
    parts: Any = {"client": client, "predict": predict, "setting": setting}
    whole = method._replace(server=server._replace(answer=answer, step=step), **parts)
    *_, last = run_rounds(whole, federation)
    for number in federation.shards:
        last.model(whole, federation, number)
    return calls


def _with_noise(federation: Federation, client: int, classes: int) -> Federation:
    """Keep the data of one client; the others get noise, random labels and one input more."""
    draw: Any = {"generator": torch.Generator().manual_seed(client), "device": "cpu"}
    whole: Any = federation.inputs
    pairs: list[tuple[Tensor, Tensor]] = []
    for other, shard in federation.shards.items():
        noise = torch.rand(len(shard) + 1, *whole.shape[1:], **draw).to(whole)
        labels = torch.randint(classes, (len(shard) + 1,), **draw).to(federation.labels)
        own = whole[shard], federation.labels[shard]
        pairs.append(own if other == client else (noise, labels))
    inputs, labels = map(torch.cat, zip(*pairs, strict=True))
    sizes = [len(part) for _, part in pairs]
    parts = torch.split(torch.arange(len(labels), device="cpu"), sizes)
    shards = dict(zip(federation.shards, parts, strict=True))
    return replace(federation, inputs=inputs, labels=labels, shards=shards)


class _Pickler(pickle.Pickler):
    """Pickles tensors alone, and not the memory that they are views of."""

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is Tensor and thing.untyped_storage().nbytes() > thing.nbytes:
            own: Any = thing.clone(memory_format=torch.contiguous_format)
            return own.__reduce_ex__(4)
        return NotImplemented


def _pickled(thing: Any) -> bytes:
    blob = BytesIO()
    try:
        _Pickler(blob, 4).dump(thing)
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise check.wrong("setting", _SHIPPED, error) from error
    check.require(b"__main__" not in blob.getvalue(), "setting", _SHIPPED, "the main program")
    return blob.getvalue()


_LARGE = ("torchvision", "timm", "transformers", "open_clip", "peft")
"""Packages that a helper imports once if they are in use, and not for each client."""

_HELPERS: list["subprocess.Popen[bytes]"] = []
"""The running helper, if there is one."""


def _repeated(job: bytes) -> str:
    """Send a job to the helper, and return what it found."""
    if not _HELPERS or _HELPERS[0].poll() is not None:
        loaded = [name for name in _LARGE if name in sys.modules]
        for ended in _HELPERS:
            ended.communicate()  # closes its pipes
        command = [sys.executable, "-m", "fedprompt.methods._repeats", *loaded]
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        path = os.pathsep.join(map(os.path.abspath, sys.path))
        _HELPERS[:] = [subprocess.Popen(command, **pipes, env=os.environ | {"PYTHONPATH": path})]
    there: Any = _HELPERS[0].stdin
    back: Any = _HELPERS[0].stdout
    try:
        there.write(job)
        there.flush()
        text: str = pickle.load(back)
    except (BrokenPipeError, EOFError) as error:
        raise RuntimeError("The process that repeats the calls has ended.") from error
    return text
