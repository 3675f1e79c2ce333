"""Forward passes of a model under other parameters, from which the model and the random streams come back unchanged."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

Result = TypeVar("Result")
RandomStates = list[Tensor]


class Passes:
    """Runs one model under parameters that are handed in; its own, its buffers and its gradients stay what they are."""

    def __init__(self, model: nn.Module) -> None:
        self.inside = _Inside(getattr(model, "_orig_mod", model))
        self.slots = _slots(self.inside)

    def parameters(self) -> dict[str, Tensor]:
        """What learns, each once, as constants."""
        return {
            name: value.detach()
            for name, value in self.inside.named_parameters()
            if value.requires_grad
        }

    def run(
        self, parameters: Mapping[str, Tensor], images: object, then: Callable[[Any], Result]
    ) -> Result:
        """Return ``then(model(images))``; `then` is called, and may differentiate, while the parameters are in their places.

        Gradient checkpointing runs the model's blocks again during the backward pass, and they must find the same parameters then.
        Every pass starts from the model's buffers and writes to a copy.
        """
        buffers = {name: buffer.clone() for name, buffer in self.inside.named_buffers()}
        given = {**buffers, **parameters}
        placed = {slot: value for name, value in given.items() for slot in self.slots[name]}
        result: Result = functional_call(self.inside, placed, (images, then), tie_weights=False)
        return result


class _Inside(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: object, then: Callable[[Any], Result]) -> Result:
        return then(self.model(images))


def _slots(model: nn.Module) -> dict[str, list[str]]:
    """Where each parameter and buffer is registered, by its first name.

    A tied tensor is registered in several modules and must be replaced in all of them. A module
    with several names is listed once: ``functional_call`` would otherwise replace its tensors
    twice and afterwards restore the replacement.
    """
    slots = dict[Tensor, list[str]]()
    for prefix, module in model.named_modules():
        own = {**module._parameters, **module._buffers}
        for name, tensor in own.items():
            if tensor is not None:
                slots.setdefault(tensor, []).append(f"{prefix}.{name}")
    return {names[0]: names for names in slots.values()}


@contextmanager
def differentiable_attention() -> Iterator[None]:
    """Attention from operators that forward mode and double backward know: no fused kernel, no fast path of ``nn.MultiheadAttention``."""
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fastpath)


def random_states(devices: list[torch.device]) -> RandomStates:
    """The state of PyTorch's global random stream on the CPU and on each device."""
    return [
        torch.get_rng_state(),
        *(torch.get_device_module(device).get_rng_state(device) for device in devices),
    ]


def replay(states: RandomStates, devices: list[torch.device]) -> None:
    """Set the global random streams back."""
    torch.set_rng_state(states[0])
    for state, device in zip(states[1:], devices, strict=True):
        torch.get_device_module(device).set_rng_state(state, device)
