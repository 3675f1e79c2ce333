"""Modules, tensors and settings of any backbone, also of one of your own."""

import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import TextEncoder, Trunk

PREFIX = "own:"
"""Start of the names of a custom backbone's attributes."""


class Attributes(nn.Module):
    """Modules, tensors and plain settings that a custom trunk has as attributes."""

    def __init__(self, backbone: object) -> None:
        super().__init__()
        for name, part in getattr(backbone, "__dict__", {}).items():
            if isinstance(part, nn.Module):
                self.add_module(PREFIX + name, part)
            elif isinstance(part, Tensor):
                self.register_buffer(PREFIX + name, part)
            elif isinstance(part, list | tuple) and all(isinstance(m, nn.Module) for m in part):
                self.add_module(PREFIX + name, nn.ModuleList(part))
            elif is_plain(part):
                setattr(self, PREFIX + name, part)


def find_module(backbone: object, argument: str = "backbone") -> nn.Module:
    """Return the module whose tensors and settings determine the features.

    Raises:
        TypeError: If there is none.
    """
    model = getattr(backbone, "model", None)
    is_network = isinstance(backbone, nn.Module) and not isinstance(backbone, Trunk | TextEncoder)
    if isinstance(model, nn.Module) and not is_network:
        return model
    if is_network or isinstance(backbone, Trunk | TextEncoder):
        model = backbone if isinstance(backbone, nn.Module) else Attributes(backbone)
        if model.state_dict():
            return model
    rule = "be a network with weights, keep its nn.Module as `model`, or be a trunk or text tower"
    rule += " with its modules and tensors as attributes"
    raise check.wrong_type(argument, rule, check.kind(backbone))


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return all weights and buffers by name, also the packed weights of int8 layers."""
    found = {}
    for name, value in model.state_dict(keep_vars=True).items():
        for number, part in enumerate(value if isinstance(value, tuple) else (value,)):
            if isinstance(part, Tensor):
                found[f"{name}.{number}" if part is not value else name] = part
    return found


def is_plain(value: object) -> bool:
    """Whether a value is a number, a string or a tuple of them."""
    parts = value if isinstance(value, tuple) else (value,)
    return all(type(part) in (int, float, str) for part in parts)
