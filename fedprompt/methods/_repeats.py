"""The helper of an audit: a process that repeats calls, and is forked before it has any data.

python -m fedprompt.methods._repeats
"""

import os
import pickle
import select
import sys
from functools import partial
from importlib import import_module
from typing import Any

import torch

from fedprompt._own_copies import copied
from fedprompt.interfaces.calls import Calls
from fedprompt.methods.audit import digest, function_at


def repeated(shipped: bytes, federation: Any, calls: Any, client: int) -> str:
    """Describe the first call with another result, or return an empty text."""
    places: list[tuple[Any, Any]] = [pickle.loads(shipped) for _ in range(2)]
    method, other = (function_at(place)(setting) for place, setting in places)
    method = method._replace(server=other.server)  # shares no variable with the clients
    states: dict[int, Any] = {}
    for what, run, first, others, expected in calls:
        again, data, why = Calls(method, *run), None, ""
        arguments = others if what == "step" else (first, *others)
        if what in ("train", "predict"):
            data = again.data(partial(federation.data, places[0][1]), first)
            if first != client:  # it may leave something behind for `client` to read
                result = getattr(again, what)(first, data, others[0], states.get(first, {}))
                states[first] = copied(result[1]) if what == "train" else others[1]
                continue
            arguments = first, data, *others
        try:
            found = digest(getattr(again, what)(*arguments), data if what == "predict" else None)
        except Exception as error:  # it misses what the other side left behind
            found, why = "", f" ({type(error).__name__}: {error})"
        if found != expected:
            where = "" if what == "step" else f"client {first}, "
            noise = f"with noise at all but client {client}{why}"
            return f"another result of {what!r} ({where}round {run[1]}) {noise}"
    return ""


def serve(results: int) -> None:
    """Repeat the calls of each job in a new process, until the pipe ends."""
    while True:
        if hasattr(os, "fork"):
            select.select([0], [], [])
            if os.fork():
                if os.wait()[1]:  # the pipe ended, or a method ended its process
                    return
                continue
        torch.set_num_threads(1)  # a forked process has no other threads
        with open(0, "rb", closefd=False) as jobs:  # nothing was read before the fork
            text = repeated(*pickle.load(jobs))
        os.write(results, pickle.dumps(text))
        os._exit(0)


if __name__ == "__main__":
    standard = os.dup(1)
    os.dup2(2, 1)  # so that prints of a method are no results
    for package in sys.argv[1:]:
        import_module(package)
    try:
        serve(standard)
    except EOFError:
        sys.exit(1)
