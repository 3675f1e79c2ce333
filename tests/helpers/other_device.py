"""A stand-in for a GPU: it computes on the CPU, and refuses operands on two devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import narrow_device
from narrow_device import TYPE, Narrow


class _Generator(torch.Generator):
    """A generator that says that it is on the stand-in device."""

    @property
    def device(self) -> torch.device:
        return torch.device(TYPE)


class _Strict(TorchFunctionMode):
    """Refuse random numbers of a generator on another device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        generator, device = kwargs.get("generator"), kwargs.get("device")
        if args and isinstance(args[0], Tensor):
            device = args[0].device
        if generator is not None and torch.device(device or "cpu").type != generator.device.type:
            raise RuntimeError(f"{func}: expected a generator on {device}")
        return func(*args, **kwargs)


class _Known(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _PLAIN)


_PLAIN = torch.Generator


class _Maker(metaclass=_Known):
    """In place of `torch.Generator`, which refuses the stand-in device."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return _PLAIN() if torch.device(device).type == "cpu" else _Generator()


class _Streams:
    """The random stream of the stand-in device, which is that of the CPU."""

    get_rng_state = staticmethod(lambda device: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device: torch.set_rng_state(state))


def _module(device: Any = None, *, find: Callable[..., Any] = torch.get_device_module) -> Any:
    return _Streams if device is not None and torch.device(device).type == TYPE else find(device)


def _copied(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make a tensor of data on the CPU, and copy it: the copy keeps the numbers."""

    def made(data: Any, *, dtype: Any = None, device: Any = None) -> Tensor:
        if isinstance(data, Tensor):
            device = data.device if device is None else device
            return data.to(device) if dtype is None else data.to(device, dtype)
        device = torch.empty(0).device if device is None else device
        return make(data, dtype=dtype, device="cpu").to(device)

    return made


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Yield the stand-in device. Unlike :func:`narrow_device.narrow_device`, it has float64."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrow_device, "_checked", Narrow)
        with narrow_device.narrow_device() as device, _Strict():
            patch.setattr(torch, "Generator", _Maker)
            patch.setattr(torch, "get_device_module", _module)
            patch.setattr(torch, "tensor", _copied(torch.tensor))
            patch.setattr(torch, "as_tensor", _copied(torch.as_tensor))
            torch.__future__.set_overwrite_module_params_on_conversion(True)
            try:
                yield torch.device(device)
            finally:
                torch.__future__.set_overwrite_module_params_on_conversion(False)
