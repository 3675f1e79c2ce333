"""Names of parameters, without the wrappers around a module."""

import torch.nn as nn
from torch.optim.swa_utils import AveragedModel

STATISTICS = ("running_mean", "running_var")
"""Last parts of the names of running statistics in PyTorch's modules."""

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel, AveragedModel)
_AVERAGES = ("ModelEma", "ModelEmaV2", "ModelEmaV3")  # of timm


def inner_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter or buffer in the module inside its wrappers."""
    parts: list[str] = []
    owner = module
    for part in name.split("."):
        wraps = isinstance(owner, _WRAPPERS) or type(owner).__name__ in _AVERAGES
        if not ((wraps and part == "module") or part == "_orig_mod"):
            parts.append(part)
        owner = getattr(owner, part)
    return ".".join(parts)
