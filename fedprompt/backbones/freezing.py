"""Freeze a model, or train only some of its parts."""

from collections.abc import Collection, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._own_copies import shared_until_written
from fedprompt.backbones._models import classifier, listed

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


@contextmanager
def frozen_except(model: nn.Module, trainable: Any) -> Iterator[list[nn.Parameter]]:
    """Freeze a model but for a list of its parts, whose parameters are returned, and a classifier.

    The features do not read a classifier, so its flags and modes are yours. If the model is
    refused, all flags and modes are restored.
    """
    heads = classifier(model)
    own = {parameter for head in heads for parameter in head.parameters()}
    chosen = [] if trainable is None else _chosen_parameters(model, trainable)
    check_unadapted("model", model.named_parameters(), own.union(chosen))
    with restored_on_error(model):
        for part in model.modules():
            if part not in heads:
                part.training = False
                for parameter in part.parameters(recurse=False):
                    parameter.requires_grad_(False)
        yield chosen


def _chosen_parameters(model: nn.Module, trainable: Any) -> list[nn.Parameter]:
    fits = isinstance(trainable, Iterable) and not isinstance(trainable, str | nn.Parameter)
    check.typed(fits, "trainable", "be a list of parameters or modules of `model`", trainable)
    chosen = parameters_of("trainable", trainable, model)
    check.some("trainable", chosen, "contain at least one parameter of `model`")
    others = [p.dtype for p in chosen if p.dtype not in (torch.float32, torch.float64)]
    rule = "be in float32 or float64, because half precision loses small steps"
    check.nothing(others, "trainable", rule)
    return chosen


_ADAPTERS = ("lora_", "adapter")
# Sine and cosine tables of positions are parameters without gradients.
_POSITIONS = ("pos_embed", "positional_embedding")


def check_unadapted(
    argument: str,
    parameters: Iterable[tuple[str, nn.Parameter]],
    trained: Collection[nn.Parameter] = (),
    remedy: str = "merge adapters, pass them as `trainable`",
) -> None:
    """Require that either all parameters are trained or none, and that no adapter is trained.

    Adapters are recognized by the names of their parameters. Parameters in `trained` are not frozen
    later and may be either.
    """
    named = [(name, parameter) for name, parameter in parameters if parameter not in trained]
    trainable = [name for name, parameter in named if parameter.requires_grad]
    adapters = [name for name in trainable if any(word in name.lower() for word in _ADAPTERS)]
    fixed = any(
        not each.requires_grad and each.is_floating_point() and not name.endswith(_POSITIONS)
        for name, each in named
    )
    rule = (
        "have no adapters and train all parameters or none, because all are frozen here; "
        f"{remedy}, or call freeze(model) first"
    )
    got = f"a model that trains {listed(adapters or trainable)}"
    check.require(not adapters and not (trainable and fixed), argument, rule, got)


@contextmanager
def restored_on_error(model: nn.Module) -> Iterator[None]:
    """Restore train modes and gradient flags if a model is refused."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:  # also if it is interrupted; it is raised again
        for module, mode in modes:
            module.training = mode
        for parameter, flag in flags:
            if parameter.requires_grad != flag and not parameter.is_inference():
                parameter.requires_grad_(flag)
        raise


_Part = TypeVar("_Part")
_TOGETHER = (
    "The trainable parameters of a trunk belong to its model, which a shallow copy would not have. "
    "Copy the client by `copy.deepcopy`: the frozen weights are shared."
)


class Trainable(nn.Module):
    """Trained parameters of a model, under their names in the model.

    Parameters are read from the model's own modules and written there, so optimizers,
    ``load_values``, ``load_state_dict`` and ``torch.func.functional_call`` change the model.
    """

    def __init__(self, model: nn.Module | None = None, chosen: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self.__dict__["_model"] = model  # which is no part
        trained = set(chosen)
        for path, owner in model.named_modules() if model is not None else ():
            names = [name for name, parameter in owner._parameters.items() if parameter in trained]
            if names:
                part: nn.Module = self
                for word in path.split(".") if path else ():
                    if word not in part._modules:
                        part._modules[word] = nn.Module()
                    part = part.get_submodule(word)
                part.__dict__["_parameters"] = _Places(owner, names)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(_TOGETHER)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Trainable":
        return own_copy(self, self.__dict__["_model"], self, memo)


def own_copy(
    part: _Part, model: nn.Module | None, trained: Trainable, memo: dict[int, Any]
) -> _Part:
    """Copy a part of a client that trains some parameters of a model.

    The others share their memory until one of the two is written.
    """
    chosen = set(trained.parameters())
    if model is None or not chosen:
        return part
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor not in chosen:
            memo[id(tensor)] = shared_until_written(tensor)
    twin = memo[id(part)] = object.__new__(type(part))
    twin.__dict__.update(deepcopy(part.__dict__, memo))
    return twin


class _Places(MutableMapping[str, Tensor | None]):
    """Some parameters of a module by name, in place of the ``_parameters`` of another module.

    ``torch.func`` writes tensors there that are not parameters.
    """

    def __init__(self, owner: nn.Module, names: Iterable[str]) -> None:
        self._owner: Any = owner
        self._names = {name: name for name in names}

    def __getitem__(self, name: str) -> Tensor | None:
        parameter: Tensor | None = self._owner._parameters[self._names[name]]
        return parameter

    def __setitem__(self, name: str, parameter: Tensor | None) -> None:
        self._owner._parameters[self._names[name]] = parameter

    def __delitem__(self, name: str) -> None:
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
