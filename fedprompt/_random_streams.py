"""PyTorch's global random streams, saved and replayed."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

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
