"""Names of parameters, without the wrappers around a module."""

import torch.nn as nn

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def inner_name(module: nn.Module, name: str) -> str:
    """Return the name of a parameter or buffer in the module inside its wrappers."""
    parts: list[str] = []
    owner = module
    for part in name.split("."):
        if not ((isinstance(owner, _WRAPPERS) and part == "module") or part == "_orig_mod"):
            parts.append(part)
        owner = getattr(owner, part)
    return ".".join(parts)
