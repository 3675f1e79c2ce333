"""Global random streams, saved and replayed, and begun anew before each call of a method."""

import hashlib
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

import fedprompt._refusals as check

RandomStates = list[Tensor]


class RandomStreams:
    """PyTorch's global random streams on the CPU and on each accelerator of some tensors."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        self.devices = sorted(devices, key=str)

    def states(self) -> RandomStates:
        """Return the current state of each stream."""
        others = (torch.get_device_module(device).get_rng_state(device) for device in self.devices)
        return [torch.get_rng_state(), *others]

    def replay(self, states: RandomStates) -> None:
        """Set each stream back to a state."""
        torch.set_rng_state(states[0])
        for state, device in zip(states[1:], self.devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Set each stream back to its present state at the end."""
        before = self.states()
        try:
            yield
        finally:
            self.replay(before)


def device_of(generator: torch.Generator | None) -> torch.device | None:
    """Return the device of a generator of PyTorch, or None for the global one."""
    check.instance("generator", generator, torch.Generator | None, "be a torch.Generator")
    return None if generator is None else generator.device


def _generators() -> list[torch.Generator]:
    """Return PyTorch's global generators, of the CPU and of the accelerators that are in use."""
    found = [torch.default_generator, *torch.cuda.default_generators]
    if torch.backends.mps.is_available():
        found.append(torch.mps._get_default_mps_generator())
    return found


class _Place(threading.local):
    """Seed, round and exchange of the last call in a thread."""

    run: tuple[int, int, int] | None = None


_PLACE = _Place()


@contextmanager
def kept_streams() -> Iterator[None]:
    """Set the global streams of PyTorch, NumPy and Python back to their present states at the end.

    Generators are set back in place, so ``torch.initial_seed`` is as before, too.
    """
    states = [(generator, generator.get_state()) for generator in _generators()]
    numpy, python = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        np.random.set_state(numpy)  # noqa: NPY002
        random.setstate(python)


def begin_streams(
    seed: int, server_round: int, exchange: int, client: int | None, purpose: str
) -> None:
    """Begin the global streams of PyTorch, NumPy and Python at a place that these arguments name.

    So draws depend neither on the order of clients nor on the process, and a run can be resumed.
    """
    _PLACE.run = (seed, server_round, exchange)
    place = f"{seed}/{server_round}/{exchange}/{client}/{purpose}"
    digest = int.from_bytes(hashlib.sha256(place.encode()).digest()[:8], "little")
    for generator in _generators():
        generator.manual_seed(digest >> 1)
    np.random.seed(digest % 2**32)  # noqa: NPY002
    random.seed(digest)


def present_run() -> tuple[int, int, int]:
    """Return seed, round and exchange of the present call of a method."""
    assert _PLACE.run is not None
    return _PLACE.run


@contextmanager
def resumed_streams(purpose: str, client: int) -> Iterator[None]:
    """Repeat the streams of an earlier call of the present exchange, and go on as before.

    Outside of an engine, streams are as they are.
    """
    if (run := _PLACE.run) is None:
        yield
        return
    with kept_streams():
        begin_streams(*run, client, purpose)
        yield
