"""Models of users: the libraries that define them, and the parameters that are trained."""

from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from copy import deepcopy
from itertools import chain
from typing import Any, NoReturn, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.freezing import parameters_of

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
    """Copy a part of a client that trains some parameters of a model; the others are shared."""
    chosen = set(trained.parameters())
    if model is None or not chosen:
        return part
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor not in chosen:
            memo[id(tensor)] = tensor
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


def chosen_parameters(model: nn.Module, trainable: Any) -> list[nn.Parameter]:
    """Return the parameters of parts of a model, each once, in the order of the model.

    All others will be frozen, so they must not be trained now.
    """
    if trainable is None:
        check_unadapted("model", model.named_parameters())
        return []
    fits = isinstance(trainable, Iterable) and not isinstance(trainable, str | nn.Parameter)
    check.typed(fits, "trainable", "be a list of parameters or modules of `model`", trainable)
    chosen = parameters_of("trainable", trainable, model)
    check.some("trainable", chosen, "contain at least one parameter of `model`")
    others = [p.dtype for p in chosen if p.dtype not in (torch.float32, torch.float64)]
    rule = "be in float32 or float64, because half precision loses small steps"
    check.nothing(others, "trainable", rule)
    check_unadapted("model", model.named_parameters(), set(chosen))
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
