"""Freeze a model, or train only some of its parts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.nn as nn

import fedprompt._refusals as check

_Model = TypeVar("_Model", bound=nn.Module)


def freeze(model: _Model) -> _Model:
    """Put a model into eval mode and turn off its gradients, in place.

    Eval mode stops dropout and drop-path, and keeps the statistics of batch normalization.

    Args:
        model: Any module.

    Returns:
        The same model.

    Example:
        >>> layer = freeze(nn.Linear(2, 2))
        >>> layer.training, layer.weight.requires_grad
        (False, False)
    """
    check.module("model", model)
    return model.eval().requires_grad_(False)


@contextmanager
def training_only(model: nn.Module, *parts: nn.Module | nn.Parameter) -> Iterator[None]:
    """Train only some parts of a model, for block coordinate descent.

    Within the context, parameters of `model` outside the parts have ``requires_grad=False``.
    Parameters of the parts keep their flag. At the end, all flags are restored, after an error too.
    Train and eval modes are not changed.

    Args:
        model: Model that contains the parts.
        *parts: Submodules or parameters of `model`. At least one of their parameters must have
            ``requires_grad=True``.

    Raises:
        ValueError: If a part does not belong to `model`, or all parameters of the parts are
            frozen.

    Example:
        >>> model = nn.ModuleDict({"prompts": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        >>> with training_only(model, model["head"]):
        ...     [name for name, p in model.named_parameters() if p.requires_grad]
        ['head.weight', 'head.bias']
        >>> model["prompts"].weight.requires_grad
        True
    """
    check.module("model", model)
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    chosen = parameters_of("parts", parts, model)
    if not any(before[parameter] for parameter in chosen):
        got = f"{len(chosen)} parameters, none with requires_grad"
        raise check.wrong("parts", "contain a parameter that can be trained", got)
    try:
        for parameter in before.keys() - chosen:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def parameters_of(argument: str, parts: Iterable[Any], model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of some parts of a model, each once, in the order of the model."""
    chosen = set[nn.Parameter]()
    for position, part in enumerate(parts):
        rule = "be a parameter or a module of `model`"
        check.instance(f"{argument}[{position}]", part, nn.Parameter | nn.Module, rule)
        chosen.update(part.parameters() if isinstance(part, nn.Module) else [part])
    found = [parameter for parameter in model.parameters() if parameter in chosen]
    if foreign := len(chosen) - len(found):
        raise check.wrong(argument, "belong to `model`", f"{foreign} parameters that do not")
    return found
