"""A stand-in for a device without float64, such as Apple's MPS, that computes on the CPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fedprompt._float64

COPY = torch.ops.aten._to_copy.default
INDEX = torch.ops.aten.index.Tensor
TYPE = "meta"  # a device type that every build of PyTorch has, and whose kernels never run here


class Narrow(Tensor):
    """A tensor of the stand-in device. Its numbers are in `held`, a tensor on the CPU."""

    held: Tensor
    is_meta = False  # it has numbers

    @staticmethod
    def __new__(cls, held: Tensor) -> "Narrow":
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
        raise RuntimeError("use the stand-in device inside `narrow_device`")

    def tolist(self) -> Any:
        return self.held.tolist()

    def new_tensor(self, data: Any) -> Tensor:
        return torch.tensor(data, dtype=self.dtype).to(TYPE)


class _Device(TorchDispatchMode):
    """Run each operator on the CPU; refuse float64 and operands on two devices, as MPS does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping it would import it, which takes seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        here: list[Narrow] = []
        elsewhere: list[Tensor] = []

        def held(tensor: Tensor) -> Tensor:
            if isinstance(tensor, Narrow):
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
        return _changed(result, _checked) if inside else result


def _changed(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Change a tensor, or the tensors of a list: operators take and return nothing deeper.

    With PyTorch's functions for any tree, the stand-in takes twice as long.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)([_changed(each, change) for each in value])
    return value


def _checked(held: Tensor) -> Narrow:
    if held.dtype == torch.float64:
        raise TypeError("Cannot convert to float64, which the device does not support")
    return Narrow(held)


@contextmanager
def narrow_device() -> Iterator[str]:
    """Yield the name of the stand-in device, of which the library knows that it lacks float64."""
    autocast = torch.autocast

    def on_cpu(device: str, **options: Any) -> torch.autocast:
        return autocast("cpu" if device == TYPE else device, **options)

    orthogonal = torch.nn.init.orthogonal_

    def of_held(tensor: Tensor, *options: Any, **more: Any) -> Tensor:
        orthogonal(getattr(tensor, "held", tensor), *options, **more)
        return tensor

    with pytest.MonkeyPatch.context() as patch, _Device():
        patch.setattr(torch, "autocast", on_cpu)  # the device type of the stand-in has none
        patch.setattr(torch.nn.init, "orthogonal_", of_held)  # transposes a tensor in place
        patch.setattr(fedprompt._float64, "WITHOUT_FLOAT64", ("mps", TYPE))
        yield TYPE
