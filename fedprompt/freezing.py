"""What learns and what does not."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.nn as nn

from fedprompt._checks import kind, wrong_type, wrong_value

__all__ = ["frozen", "training_only"]

Model = TypeVar("Model", bound=nn.Module)


def frozen(model: Model) -> Model:
    """Put a model into eval mode and turn its gradients off, in place.

    The model is changed itself, not copied. Eval mode stops dropout and drop-path and keeps the statistics of
    batch normalisation; without gradients autograd keeps fewer activations.

    Args:
        model: Any module.

    Returns:
        The same model.

    Raises:
        TypeError: If `model` is not an ``nn.Module``.

    Example:
        >>> layer = frozen(nn.Linear(2, 2))
        >>> layer.training, layer.weight.requires_grad
        (False, False)
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "be an nn.Module", kind(model))
    return model.eval().requires_grad_(False)


@contextmanager
def training_only(model: nn.Module, *parts: nn.Module | nn.Parameter) -> Iterator[None]:
    """Let only some parts of a model learn: one block of block coordinate descent.

    Inside, every parameter of `model` outside the parts has ``requires_grad=False``. Parameters of the parts keep what they had, so a
    frozen backbone inside a part stays frozen. On leaving, after an error too, every flag is as it was. Modes (train, eval) stay yours.

    Args:
        model: The model that owns the parts.
        *parts: Submodules or parameters of `model`; at least one of their parameters must be able to learn.

    Raises:
        TypeError: If `model` is not an ``nn.Module``, or a part neither a module nor a parameter.
        ValueError: If a part does not belong to `model`, or nothing would learn.

    Example:
        >>> model = nn.ModuleDict({"prompts": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
        >>> with training_only(model, model["head"]):
        ...     [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        ['head.weight', 'head.bias']
        >>> model["prompts"].weight.requires_grad
        True
    """
    if not isinstance(model, nn.Module):
        raise wrong_type("model", "be an nn.Module", kind(model))
    before = {parameter: parameter.requires_grad for parameter in model.parameters()}
    learning = {parameter for position, part in enumerate(parts) for parameter in _parameters(f"parts[{position}]", part)}
    if foreign := len(learning - before.keys()):
        raise wrong_value("parts", "belong to `model`", f"{foreign} parameters that do not")
    if not any(before[parameter] for parameter in learning):
        raise wrong_value("parts", "hold a parameter that can learn", f"{len(learning)} parameters, none with requires_grad")
    try:
        for parameter in before.keys() - learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter, flag in before.items():
            parameter.requires_grad_(flag)


def _parameters(argument: str, part: object) -> list[nn.Parameter]:
    if isinstance(part, nn.Parameter):
        return [part]
    if isinstance(part, nn.Module):
        return list(part.parameters())
    raise wrong_type(argument, "be a module or a parameter", kind(part))
