"""Float64 on every device, on the CPU for a device without it; and float32 of half precision."""

import torch
from torch import Tensor

WITHOUT_FLOAT64 = ("mps",)
"""Types of devices that have no float64: Apple's MPS."""


def supports_float64(device: torch.device) -> bool:
    """Whether a device has float64."""
    return device.type not in WITHOUT_FLOAT64


def on_wide_device(tensor: Tensor) -> Tensor:
    """Return a tensor on its device, or on the CPU if the device has no float64."""
    return tensor if supports_float64(tensor.device) else tensor.cpu()


def widened(tensor: Tensor) -> Tensor:
    """Convert to float64, on the device of :func:`on_wide_device`."""
    return on_wide_device(tensor).double()


def wide_zeros(like: Tensor) -> Tensor:
    """Return float64 zeros of the shape of `like`, on the device of :func:`on_wide_device`."""
    device = like.device if supports_float64(like.device) else "cpu"
    return torch.zeros(like.shape, dtype=torch.float64, device=device)


def single(tensor: Tensor) -> Tensor:
    """Convert half precision to float32. Other dtypes are unchanged."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def rounded(tensor: Tensor, like: Tensor) -> Tensor:
    """Convert to the dtype of `like`, and only then move to its device."""
    return tensor.to(like.dtype).to(like.device)
