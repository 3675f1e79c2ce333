"""Stamps: what a run and each of its rows are made from, the same in each process.

A stamp is a digest, and never a comparison of functions. A function is known by the text of its
file and of all files that this one imports, or by the version of its package. Another function,
such as a lambda or one of a notebook, is :class:`UntoldError`: what it makes is never found again.
"""

import ast
import hashlib
import inspect
import json
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp

STARTED = time.time()
"""Start of this process. A file that is newer may have another text than the loaded module."""
LENGTH = 16
"""Number of hex digits of a digest."""
SHOWN = (bool, int, float, str, type(None))
"""Types of the values of a setting that messages show."""
PLAIN = (bool, int, str, bytes, type(None), torch.dtype, torch.device, range, complex, Path)
TEXTS: dict[str, tuple[Path, bytes]] = {}
"""Path and text of each file of methods that was imported, by the name of its module."""
CHUNK = 64
"""Number of inputs that are read at a time."""


class UntoldError(ValueError):
    """A value that cannot be told from all others in another process."""


def digest(*parts: Any) -> str:
    """Return a digest of plain values."""
    return hashed(json.dumps(parts, sort_keys=True, default=str).encode())


def hashed(content: Any) -> str:
    """Return a digest of bytes."""
    return hashlib.sha256(content).hexdigest()[:LENGTH]


def told(value: Any, of: Callable[[Any], Any] | None = None) -> Any:
    """Describe a value by lists of plain values, so that no other value is described alike.

    Args:
        value: Value.
        of: Function that describes functions and classes. If None, :func:`source`.

    Raises:
        UntoldError: If the value, or a part of it, cannot be told from others.
    """
    kind, of = type(value), of or source
    inner = partial(told, of=of)
    if kind in PLAIN or isinstance(value, Path | torch.device):
        return [kind.__name__, repr(value)]
    if isinstance(value, float):
        return [kind.__name__, "nan" if math.isnan(value) else value.hex()]
    if isinstance(value, Tensor | np.ndarray):
        return [str(value.dtype), *value.shape, hashed(_bytes(value))]
    if kind in (list, tuple):
        return [kind.__name__, *map(inner, value)]
    if kind in (set, frozenset):  # each process has its own order
        return [kind.__name__, *sorted(map(inner, value), key=repr)]
    if kind is dict:
        return ["dict", *([inner(key), inner(each)] for key, each in value.items())]
    if isinstance(value, partial):
        return ["partial", *map(inner, (value.func, value.args, value.keywords))]
    if inspect.isroutine(value) or isinstance(value, type):
        return of(value)
    if is_dataclass(value):
        named = [field.name for field in fields(value) if hasattr(value, field.name)]
        return [of(kind), *([name, inner(getattr(value, name))] for name in named)]
    raise UntoldError(f"a value of type {kind.__name__}")


def _bytes(values: Tensor | np.ndarray) -> Any:
    """Return the bytes of an array or a tensor, of which NumPy may not know the dtype."""
    if isinstance(values, Tensor):
        try:
            values = values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        except (NotImplementedError, RuntimeError) as error:  # sparse, or on the meta device
            raise UntoldError("a tensor without bytes of its own") from error
    if values.dtype.hasobject:
        raise UntoldError("an array of objects")
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


def named(value: Any) -> list[str]:
    """Return the module and the name of a function or a class at the top of a module.

    Raises:
        UntoldError: If it is at another place, such as a lambda, or a method of an object.
    """
    owner, module = getattr(value, "__self__", None), getattr(value, "__module__", None)
    if module is None and owner is not None:  # of a function in C
        module = getattr(owner, "__name__" if inspect.ismodule(owner) else "__module__", None)
    for name in (getattr(value, "__qualname__", ""), getattr(value, "__name__", "")):
        found: Any = sys.modules.get(str(module))
        for part in name.split("."):
            found = getattr(found, part, None)
        if found is not None and found == value:
            return [str(module).replace("__mp_main__", "__main__"), name]
    text = getattr(value, "__qualname__", repr(value))
    raise UntoldError(f"the function {text}, which is not at the top of a file")


def source(value: Any) -> list[str]:
    """Describe a function or a class by its name and by its source.

    The source covers the files of all modules that its module imports, directly or not, without
    those of installed packages, which have their versions. Global numbers, texts and tensors are
    part of it, because a program may change them.

    Raises:
        UntoldError: If it is not at the top of a module, or if the text of a module is not known,
            as in a notebook, or has changed since the process began.
    """
    module, name = named(value)
    versions, texts, waiting = dict[str, str](), dict[str, Any](), [value.__module__ or module]
    while waiting:
        each = waiting.pop()
        top = each.partition(".")[0]
        if each in texts or top in versions:
            continue
        if (version := installed(each)) is not None:
            versions[top] = version
        elif top == fp.__name__:
            texts[top] = _package()
        else:
            text = text_of(each)
            loaded = sys.modules.get(each)
            values = {} if loaded is None else vars(loaded)
            texts[each] = hashed(text), _globals(values)
            waiting += _imported(each, values, text)
    if module in TEXTS:  # its name has a digest of its path
        module = TEXTS[module][0].stem
        texts = {key if key not in TEXTS else module: each for key, each in texts.items()}
    return [module, name, digest(texts, versions)]


def _place(name: str) -> Path | None:
    """Return the file of a module, or the folder of a package without one; None without a file."""
    module = sys.modules.get(name)
    if module is not None:
        places = [getattr(module, "__file__", None), *getattr(module, "__path__", ())]
    else:
        spec = find_spec(name)
        places = [] if spec is None else [spec.origin, *(spec.submodule_search_locations or ())]
    found = [place for place in places if place not in (None, "built-in", "frozen")]
    return Path(found[0]).resolve() if found else None


def installed(name: str) -> str | None:
    """Return the version of an installed module, "" for those of Python, None for another one."""
    top = name.partition(".")[0]
    place, library = _place(top), Path(sysconfig.get_path("stdlib")).resolve()
    if place is None:
        return "" if top in sys.stdlib_module_names else None
    if {"site-packages", "dist-packages"} & {*place.parts}:
        return str(getattr(sys.modules.get(top), "__version__", ""))
    return "" if library in place.parents else None


@cache
def _package() -> str:
    """Return a digest of the files of this library, which is not installed, as in a clone."""
    root = Path(str(fp.__file__)).parent
    files = sorted(root.rglob("*.py"))
    return digest([(str(file.relative_to(root)), hashed(_read(file))) for file in files])


def text_of(name: str) -> bytes:
    """Return the text of a module, as it was loaded."""
    if name in TEXTS:
        return TEXTS[name][1]
    path = _place(name)
    if path is not None and path.is_dir():
        return b""
    if path is None or path.suffix != ".py":
        raise UntoldError(f"a function of {name}, which is in no file")
    return _read(path)


def _read(path: Path) -> bytes:
    if path.stat().st_mtime > STARTED:
        raise UntoldError(f"a function of {path.name}, which has changed since this process began")
    return path.read_bytes()


def _globals(values: Mapping[str, Any]) -> list[Any]:
    """Describe the plain values and tensors at the top of a module."""
    found = []
    for name, value in sorted(values.items()):
        if not name.startswith("__") and not callable(value):
            try:
                found.append([name, told(value, of=named)])
            except (UntoldError, RecursionError):  # made by the text, or by an imported module
                continue
    return found


def _imported(name: str, values: Mapping[str, Any], text: bytes) -> list[str]:
    """Return the names of the modules that a module imports or names, with their packages."""
    package = str(values.get("__package__") or name.rpartition(".")[0]).split(".")
    names = {str(getattr(value, "__module__", "")) for value in values.values()}
    names |= {value.__name__ for value in values.values() if inspect.ismodule(value)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {node.value} & (sys.modules.keys() - {"__main__"})  # of import_module
    parts = [each.split(".") for each in names if each]
    every = {".".join(each[:size]) for each in parts for size in range(1, len(each) + 1)}
    return sorted(each for each in every if each in sys.modules or _is_own(each))


def _is_own(name: str) -> bool:
    """Return whether there is a module of the user, which is imported later."""
    try:
        return find_spec(name) is not None and installed(name) is None
    except (ImportError, ValueError, AttributeError):
        return False


def of_file(file: Any) -> str:
    """Return a digest of the rest of a file."""
    return hashlib.file_digest(file, "sha256").hexdigest()[:LENGTH]


def of_inputs(inputs: Any) -> str:
    """Return a digest of all inputs, which are read once, in parts."""
    total = hashlib.sha256()
    for part in torch.split(torch.arange(len(inputs)), CHUNK):
        total.update(json.dumps(told(inputs[part])).encode())
    return total.hexdigest()[:LENGTH]


def of_setting(setting: Any) -> dict[str, Any]:
    """Describe each field of a setting, and its frozen networks by their full fingerprints.

    A field that cannot be told is an :class:`UntoldError` among the values.
    """
    found: dict[str, Any] = {"kind": source(type(setting))[:2]}
    for field in fields(setting):
        if not field.init:
            continue
        value = getattr(setting, field.name)
        networks = value if field.name == "trunks" else [value]
        if field.name in FROZEN and value is not None:
            found[field.name] = [fp.fingerprint(network) for network in networks]
        else:
            found[field.name] = value if type(value) in SHOWN else known(value)
    return found


def known(value: Any) -> Any:
    """Describe a value, or return why it cannot be told from others."""
    try:
        return told(value)
    except UntoldError as error:
        return error


FROZEN = "trunks", "tower", "clip"
"""Fields of a setting that are frozen networks."""


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Name the parts in which two stamps differ, with plain values of both."""
    names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    return [f"{name}{_values(before.get(name), now.get(name))}" for name in names]


def _values(before: Any, now: Any) -> str:
    short = [str(each) for each in (before, now)]
    plain = all(not isinstance(each, list | dict) for each in (before, now))
    shown = plain and max(map(len, short)) < LENGTH
    return f" ({short[0]} there, {short[1]} here)" if shown else ""
