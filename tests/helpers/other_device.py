"""A stand-in for a GPU: it computes on the CPU, and refuses operands on two devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

COPY = torch.ops.aten._to_copy.default
INDEX = torch.ops.aten.index.Tensor
TYPE = "meta"  # a device type that every build of PyTorch has, and whose kernels never run here


class Held(Tensor):
    """A tensor of the stand-in device. Its numbers are in `held`, a tensor on the CPU."""

    held: Tensor
    is_meta = False  # it has numbers

    @staticmethod
    def __new__(cls, held: Tensor) -> "Held":
        tensor = Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(TYPE),
        )
        tensor.held = held
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("use the stand-in device inside `other_device`")

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, data: Any) -> Tensor:
        return torch.tensor(data, dtype=self.dtype).to(TYPE)


class _Device(TorchDispatchMode):
    """Run each operator on the CPU; refuse operands on two devices."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here: list[Held] = []
        elsewhere: list[Tensor] = []

        def held(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Held):
                here.append(tensor)
                return tensor.held
            elsewhere.append(tensor)
            return tensor

        operands = _changed(args, held)
        options = {name: _changed(value, held) for name, value in (kwargs or {}).items()}
        if any(tensor.is_meta for tensor in elsewhere):
            raise NotImplementedError("the stand-in device lost the numbers of a tensor")
        if func is INDEX and here and args[0] is here[0]:
            elsewhere = []  # as on a GPU, positions may be on the CPU
        if here and func is not COPY and any(tensor.ndim for tensor in elsewhere):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device")
        wanted = options.get("device") or (here[0].device if here else None)
        inside = wanted is not None and torch.device(wanted).type == TYPE
        if inside and "device" in options:
            options["device"] = torch.device("cpu")
        result = func(*operands, **options)
        return _changed(result, Held) if inside else result


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change a tensor, or the tensors of a list: operators take and return nothing deeper.

    With PyTorch's functions for any tree, the stand-in takes twice as long.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, change) for each in value])
    return value


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
    """Yield the stand-in device."""
    autocast, orthogonal = torch.autocast, torch.nn.init.orthogonal_

    def on_cpu(device: str, **options: Any) -> torch.autocast:
        return autocast("cpu" if device == TYPE else device, **options)

    def of_held(tensor: Tensor, *options: Any, **more: Any) -> Tensor:
        orthogonal(getattr(tensor, "held", tensor), *options, **more)
        return tensor

    with pytest.MonkeyPatch.context() as patch, _Device(), _Strict():
        patch.setattr(torch, "autocast", on_cpu)  # the device type of the stand-in has none
        patch.setattr(torch.nn.init, "orthogonal_", of_held)  # transposes a tensor in place
        patch.setattr(torch, "Generator", _Maker)
        patch.setattr(torch, "get_device_module", _module)
        patch.setattr(torch, "tensor", _copied(torch.tensor))
        patch.setattr(torch, "as_tensor", _copied(torch.as_tensor))
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            yield torch.device(TYPE)
        finally:
            torch.__future__.set_overwrite_module_params_on_conversion(False)
