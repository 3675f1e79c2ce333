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
import os
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from pathlib import Path
from types import CellType
from typing import Any

import numpy as np
import torch
import torch.nn as nn
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
LIBRARIES = (
    *("fedprompt", "torch", "timm", "torchvision"),
    *("open_clip_torch", "transformers", "peft", "pillow"),
)
"""Libraries that decide figures. Another version is another run."""


class UntoldError(ValueError):
    """A value that cannot be told from all others in another process."""


def digest(*parts: Any) -> str:
    """Return a digest of plain values."""
    return hashed(json.dumps(parts, sort_keys=True, default=str).encode())


def hashed(content: Any) -> str:
    """Return a digest of bytes."""
    return hashlib.sha256(content).hexdigest()[:LENGTH]


def told(
    value: Any, of: Callable[[Any], Any] | None = None, other: Callable[[Any], Any] | None = None
) -> Any:
    """Describe a value by lists of plain values, so that no other value is described alike.

    Args:
        value: Value.
        of: Function that describes functions and classes. If None, :func:`source`.
        other: Function that describes other objects. If None, they cannot be told.

    Raises:
        UntoldError: If the value, or a part of it, cannot be told from others.
    """
    kind, of = type(value), of or source
    inner, name = partial(told, of=of, other=other), kind.__name__
    if kind in PLAIN or isinstance(value, Path | torch.device):
        return [name, repr(value)]
    if isinstance(value, float):
        return [name, "nan" if math.isnan(value) else value.hex()]
    if isinstance(value, Tensor | np.ndarray | np.generic):
        made = np.asarray(value) if isinstance(value, np.generic) else value
        return [name, str(made.dtype), *made.shape, hashed(_bytes(made))]
    if isinstance(value, list | tuple | set | frozenset | dict):
        parts = value.items() if isinstance(value, dict) else value
        listed = [inner(part) for part in parts]
        if isinstance(value, set | frozenset):  # each process has its own order
            listed.sort(key=repr)
        return [name if kind.__module__ == "builtins" else of(kind), *listed]
    if isinstance(value, partial):
        return ["partial", *map(inner, (value.func, value.args, value.keywords))]
    if inspect.isroutine(value) or isinstance(value, type):
        return of(value)
    if is_dataclass(value):
        named = [field.name for field in fields(value) if hasattr(value, field.name)]
        return [of(kind), *([name, inner(getattr(value, name))] for name in named)]
    if other is None:
        raise UntoldError(f"a value of type {name}")
    return other(value)


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
            return [_plain_name(str(module)), name]
    text = getattr(value, "__qualname__", repr(value))
    raise UntoldError(f"the function {text}, which is not at the top of a file")


def _plain_name(module: str) -> str:
    """Return the name of a module, which is the same in each process and for each path."""
    known = TEXTS.get(module)
    return known[0].stem if known else module.replace("__mp_main__", "__main__")


def source(value: Any) -> list[str]:
    """Describe a function or a class by its name and by its source.

    The source covers the files of all modules that its module imports, directly or not, without
    those of installed packages, which have their versions. It also covers what a text reads (files
    and variables of the environment that it names), and what a program may have changed: globals,
    attributes, defaults and closures.

    Raises:
        UntoldError: If it is not at the top of a module, or if the text of a module is not known,
            as in a notebook, or has changed since the process began, or reads what it does not
            name.
    """
    where, versions, texts = named(value), dict[str, str](), dict[str, Any]()
    waiting = [value.__module__ or where[0]]
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
            text, loaded = text_of(each), sys.modules.get(each)
            values = {} if loaded is None else vars(loaded)
            tree = ast.parse(text)
            texts[each] = hashed(text), _globals(values), _read_by(each, tree)
            waiting += _imported(each, values, tree)
    texts = {_plain_name(key): each for key, each in texts.items()}
    return [*where, digest(texts, versions)]


def _place(name: str) -> Path | None:
    """Return the file of a module, or the folder of a package without one; None without a file."""
    module = sys.modules.get(name)
    if name in TEXTS:
        return TEXTS[name][0]
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
        return _version(top)
    return "" if library in place.parents else None


@cache
def _version(top: str) -> str | None:
    """Return the version of an installed package; None for a file that was copied there."""
    loaded = getattr(sys.modules.get(top), "__version__", None)
    for name in (top, *([] if loaded else packages_distributions().get(top, ()))):
        with suppress(PackageNotFoundError):
            return version(name)
    return loaded and str(loaded)


def versions() -> dict[str, str]:
    """Return the versions of the libraries that decide figures, "" for those that are missing."""
    found = dict[str, str]()
    for name in LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return {**dict.fromkeys(LIBRARIES, ""), **found, "torch": str(torch.__version__)}


@cache
def _package() -> str:
    """Return a digest of the files of this library, which is not installed, as in a clone."""
    root = Path(str(fp.__file__)).parent
    files = sorted(root.rglob("*.py"))
    return digest([(str(file.relative_to(root)), hashed(_read(file))) for file in files])


@cache
def of_preparing() -> str:
    """Return a digest of all that makes inputs from files: libraries, and modules of this one."""
    root = Path(str(fp.__file__)).parent
    files = sorted([*root.glob("backbones/**/*.py"), *root.glob("data/opening.py")])
    return digest(versions(), [hashed(file.read_bytes()) for file in files])


def text_of(name: str) -> bytes:
    """Return the text of a module, as it was loaded, or will be."""
    if name in TEXTS:
        return TEXTS[name][1]
    path = _place(name)
    if path is not None and path.is_dir():
        return b""
    if path is None or path.suffix != ".py":
        raise UntoldError(f"a function of {name}, which is in no file")
    return _read(path) if name in sys.modules else path.read_bytes()


def _read(path: Path) -> bytes:
    status = path.stat()
    if max(status.st_mtime, status.st_ctime) > STARTED:  # the second one cannot be set
        raise UntoldError(f"a function of {path.name}, which has changed since this process began")
    return path.read_bytes()


# What a text reads, by the names of functions. What it names in texts of its own is described.

IMPORTS = {"import_module", "__import__"}
VARIABLES = {"environ", "getenv"}
READS = {"open", "load", "read_text", "read_bytes", "loadtxt", "genfromtxt", "fromfile", "memmap"}
READS |= {"load_file", "safe_open", "read_csv", "imread", "iterdir", "glob", "rglob", "listdir"}
READS |= {"scandir", "urlopen", "urlretrieve", "spec_from_file_location", "run_path"}
RUN = "run.json"
"""Stamp of a run, next to its records. A file beside it is a result, and not an input."""


def _read_by(name: str, tree: ast.AST) -> list[Any]:
    """Describe the files and the variables of the environment that a text names.

    Raises:
        UntoldError: If it reads, and names nothing that is there.
    """
    found, used = list[Any](), {_called(node) for node in ast.walk(tree)}
    if used & VARIABLES:
        inner = [n for n in ast.walk(tree) if isinstance(n, ast.Call | ast.Subscript)]
        near = [n for n in inner if VARIABLES & {_called(part) for part in ast.walk(n)}]
        found += [[word, os.environ.get(word)] for word in sorted({*_words(near)})]
    if used & READS and (place := _place(name)) is not None:
        joined = [n for n in ast.walk(tree) if isinstance(n, ast.Call | ast.BinOp | ast.Constant)]
        files = {folder / word for word in _words(joined) for folder in (Path(), place.parent)}
        found += sorted(
            [str(file.name), hashed(file.read_bytes())] for file in filter(_is_input, files)
        )
    if used & (READS | VARIABLES) and not found:
        raise UntoldError(f"a function of {_plain_name(name)}, which reads what it does not name")
    return found


def _called(node: ast.AST) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "") or ""


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Return the texts of each node, the first one and all of them as a path."""
    for node in nodes:
        parts = [part for part in ast.walk(node) if isinstance(part, ast.Constant)]
        parts.sort(key=lambda part: (part.lineno, part.col_offset))
        texts = [part.value for part in parts if isinstance(part.value, str)]
        if texts:
            inner = [text.strip("/") for text in texts[1:]]
            yield from (texts[0], texts[0].lstrip("/"), "/".join([texts[0].rstrip("/"), *inner]))


def _is_input(file: Path) -> bool:
    """Return whether a name is one of a file that is no result of a run."""
    try:
        return file.is_file() and not file.with_name(RUN).exists()
    except (OSError, ValueError):  # no name of a file
        return False


# What a program may have changed in a module since its text was run.


def _globals(values: Mapping[str, Any]) -> list[Any]:
    """Describe the values at the top of a module, as far as they can be told."""
    of, found = partial(_state, seen={}), list[Any]()
    for name, value in sorted(values.items()):
        if not name.startswith("__") and not inspect.ismodule(value):
            with suppress(UntoldError, RecursionError):  # made by the text, or by another module
                found.append([name, told(value, of=of, other=of)])
    return found


def _state(value: Any, seen: dict[int, Any]) -> list[Any]:
    """Describe a function, a class or an object by its name, and by what a program can change."""
    has_name = isinstance(getattr(value, "__qualname__", None), str)  # not a cached property
    kind = value if has_name else type(value)
    module = str(getattr(kind, "__module__", None))
    where: list[Any] = [_plain_name(module), kind.__qualname__]
    parts: Any = None
    if id(value) in seen:
        return where
    seen[id(value)] = value  # which keeps its id
    if isinstance(value, nn.Module):
        plain = {name: each for name, each in vars(value).items() if not name.startswith("_")}
        parts = [dict(value.state_dict()), plain]
    elif inspect.ismethod(value):
        parts = [value.__func__, value.__self__]
    elif module in ("types", "argparse", "functools") and not isinstance(value, type):
        parts = dict(getattr(value, "__dict__", {}))
    elif installed(module) is not None or not hasattr(value, "__dict__"):
        return where
    elif inspect.isfunction(value):
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        line = value.__code__.co_firstlineno
        parts = [line, value.__defaults__, value.__kwdefaults__, cells, dict(vars(value))]
    else:
        parts = {name: each for name, each in vars(value).items() if not name.startswith("__")}
    of = partial(_state, seen=seen)
    return [*where, told(parts, of=of, other=of)]


def _imported(name: str, values: Mapping[str, Any], tree: ast.AST) -> list[str]:
    """Return the names of the modules that a module imports or names, with their packages.

    Raises:
        UntoldError: If it imports by a name that it does not have in a text.
    """
    package = str(values.get("__package__") or name.rpartition(".")[0]).split(".")
    names = {str(getattr(value, "__module__", "")) for value in values.values()}
    names |= {value.__name__ for value in values.values() if inspect.ismodule(value)}
    words = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    later = {word for word in words if isinstance(word, str) and re.fullmatch(r"[\w.]+", word)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    if IMPORTS & {_called(node) for node in ast.walk(tree)}:
        later = {".".join(package) + word if word[0] == "." else word for word in later}
        known = {word for word in later if word in sys.modules or _is_own(word)}
        if not known:
            raise UntoldError(f"a function of {name}, which imports what it does not name")
        names |= known - {"__main__"}
    parts = [each.split(".") for each in names if each]
    every = {".".join(each[:size]) for each in parts for size in range(1, len(each) + 1)}
    return sorted(each for each in every if each in sys.modules or _is_own(each))


def _is_own(name: str) -> bool:
    """Return whether there is a module of the user, which is imported later."""
    try:
        return find_spec(name) is not None and installed(name) is None
    except (ImportError, ValueError, AttributeError):
        return False


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
    found: dict[str, Any] = {"kind": named(type(setting))}
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
