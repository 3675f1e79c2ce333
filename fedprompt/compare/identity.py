"""Hashes and descriptions that tell the data, settings and functions of a run from others."""

import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor

import fedprompt as fp
from fedprompt.compare.trials import CompareError

FROZEN = "tower", "clip"
"""Fields of a setting that are frozen networks, beside its trunks."""
PLAIN = (int, float, str, tuple, list, dict, Tensor)
"""Types of the values of a class and of a module that are compared."""


def stamp(values: Tensor | np.ndarray | str | bytes) -> str:
    """Return a hash of a tensor, an array, a text or bytes."""
    if isinstance(values, Tensor):
        if values.is_floating_point():  # NumPy has no bfloat16
            values = values.detach().flatten().view(torch.uint8)
        values = values.numpy(force=True)
    if isinstance(values, np.ndarray):
        values = values.tobytes()
    content = values.encode() if isinstance(values, str) else values
    return hashlib.sha256(content).hexdigest()[:12]


def settled(setting: Any) -> list[Any]:
    """Describe a setting and its frozen networks, the same in each process."""
    names = [field.name for field in fields(setting) if field.init]
    plain = {name: getattr(setting, name) for name in names if name not in ("trunks", *FROZEN)}
    frozen = [*getattr(setting, "trunks", ()), *(getattr(setting, n, None) for n in FROZEN)]
    prints = [fp.fingerprint(network) for network in frozen if network is not None]
    return [type(setting).__qualname__, told(plain), *prints]


def told(value: Any, above: tuple[Any, ...] = ()) -> Any:
    """Describe a value, the same in each process, so that no other value is described alike.

    Functions are compared by their code, by default values and by the variables around them, so a
    lambda is not taken for another one. Those of installed packages are compared by name. Global
    variables of a function are not compared.

    Args:
        value: Value, such as a field of a setting.
        above: Values that contain it.

    Raises:
        CompareError: If the value cannot be told from others of its type.
    """
    if any(value is each for each in above):
        return "itself"
    inner = partial(told, above=(*above, value))
    if isinstance(value, np.ndarray) and value.dtype.hasobject:
        return ["array", inner(value.tolist())]
    if isinstance(value, Tensor | np.ndarray):
        return [str(value.dtype), *value.shape, stamp(value)]
    if isinstance(value, nn.Module):
        return [repr(value), *map(inner, _parts(value))]
    if isinstance(value, Mapping):
        return [[inner(key), inner(each)] for key, each in value.items()]
    if isinstance(value, list | tuple):
        return [type(value).__name__, *map(inner, value)]
    if isinstance(value, set | frozenset):  # each process has its own order
        return [type(value).__name__, *sorted(map(inner, value), key=repr)]
    if isinstance(value, partial):
        return ["partial", *map(inner, (value.func, value.args, value.keywords))]
    if inspect.ismethod(value):
        return [inner(value.__self__), inner(value.__func__)]
    if inspect.isfunction(value):
        value = _unchecked(value)
        around = inspect.getclosurevars(value).nonlocals
        parts = around, value.__defaults__, value.__kwdefaults__
        module = value.__module__.replace("__mp_main__", "__main__")  # in another process
        return [module, value.__qualname__, _compiled(value), *map(inner, parts)]
    if inspect.ismodule(value):
        return value.__name__
    if inspect.isbuiltin(value):
        return [inner(value.__self__), value.__qualname__]
    text = repr(value)
    if isinstance(value, type):
        return [text, *map(inner, _contents(value))]
    if " at 0x" not in text and not is_dataclass(value):
        return [text, inner(type(value))]
    if not hasattr(value, "__dict__"):
        rule = "have a __repr__ that tells its values, for the records"
        raise CompareError(f"A {type(value).__name__} of a setting or a method must {rule}.")
    return [inner(type(value)), inner(vars(value))]


def _parts(module: nn.Module) -> list[Any]:
    """Return weights, buffers, types and plain values of a module and of those in it.

    Flags and private values of the modules of installed packages are left out.
    """
    kinds, usual = dict.fromkeys(map(type, module.modules())), vars(nn.Module())
    plain: list[Any] = []
    for part in module.modules():
        fixed = _is_installed(type(part))  # some of its flags depend on the machine
        for name, value in vars(part).items():
            left_out = fixed and (name.startswith("_") or isinstance(value, bool))
            if isinstance(value, PLAIN) and name not in usual and not left_out:
                plain.append((name, value))
    return [dict(module.named_parameters()), dict(module.named_buffers()), *kinds, *plain]


def _is_installed(value: Any) -> bool:
    """Return whether a function or a class is that of the library or of an installed package."""
    module = sys.modules.get(str(value.__module__).partition(".")[0])
    places = Path(getattr(module, "__file__", None) or "").parts
    return module is fp or not {"site-packages", "dist-packages"}.isdisjoint(places)


def _contents(given: type) -> list[Any]:
    """Return functions and plain values of a class and of its bases, without installed ones."""
    own = [vars(each).items() for each in given.__mro__ if not _is_installed(each)]
    names = "__func__", "fget", "func"  # of methods without `self`, and of properties
    found: list[Any] = []
    for name, part in (item for items in own for item in items):
        inner = next((getattr(part, each) for each in names if hasattr(part, each)), part)
        if inspect.isfunction(inner):
            found.append(inner)
        elif isinstance(part, PLAIN) and not name.startswith("__"):
            found.append((name, part))
    return found


def _unchecked(function: Any) -> Any:
    """Return a function without the checks of shapes that jaxtyping puts around it."""
    while "jaxtyping" in Path(function.__code__.co_filename).parts:
        function = function.__wrapped__
    return function


def _compiled(function: Any) -> list[Any]:
    """Describe the code of a function; an installed one has its name."""

    def parts(code: CodeType) -> list[Any]:
        constants = [parts(c) if isinstance(c, CodeType) else told(c) for c in code.co_consts]
        return [code.co_code.hex(), code.co_names, constants]

    return [] if _is_installed(function) else parts(function.__code__)
