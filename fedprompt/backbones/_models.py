"""Models of users: the libraries that define them, models inside of wrappers, and classifiers."""

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn as nn


def listed(names: Sequence[object]) -> str:
    """Return the first names, and the number of the others."""
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(map(str, names[:3])) + rest


def inside(model: object, known: Callable[[Any], object]) -> str | None:
    """Name the model inside a wrapper, such as PEFT's, DataParallel or torch.compile."""
    if "peft" in libraries(model) and hasattr(model, "get_base_model"):
        return "it wraps the model; pass model.get_base_model()"
    for name, part in model.named_modules() if isinstance(model, nn.Module) else ():
        if name and known(part):
            is_path = all(word.isidentifier() for word in name.split("."))
            place = f"model.{name}" if is_path else f"model.get_submodule({name!r})"
            return f"it contains one; pass {place}"
    return None


def libraries(model: object) -> set[str]:
    """Return the names of the packages that define the model's class and its base classes."""
    return {base.__module__.partition(".")[0] for base in type(model).__mro__}


def classifier(model: Any) -> set[nn.Module]:
    """Return the modules of a classifier of timm or torchvision, which features do not read."""
    if hasattr(model, "get_classifier"):
        heads = model.get_classifier()
    else:
        heads = getattr(model, "heads", None) if "torchvision" in libraries(model) else None
    found = heads if isinstance(heads, tuple) else (heads,)  # distilled models have two
    trained = [head for head in found if isinstance(head, nn.Module) and list(head.parameters())]
    return {part for head in trained for part in head.modules()}
