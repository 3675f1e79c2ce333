"""Rows of a table: methods of the gallery and of a user with their values, and the references."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.compare import stamps
from fedprompt.compare.trials import CompareError
from fedprompt.interfaces import Method
from fedprompt.methods import (
    METHODS,
    ClientData,
    ClipSetting,
    Entry,
    Setting,
    coop,
    local,
    register,
)
from fedprompt.methods.registry import LEARNING_RATE
from fedprompt.methods.steps import train

FAMILIES = ("one model", "mixed models", "CLIP")
KINDS = {"one model": ("one model", "mixed models")}
"""Families that can run where clients have the models of one: others are for that family alone."""
ENTRIES: dict[Callable[..., Method], Entry] = {}
"""Entries of functions of a user that are not registered, or that a file registers."""
CONSTANT = "Most frequent class"
"""Title of the row that is not trained."""


@dataclass(frozen=True)
class Row:
    """A method with its hyperparameters, and a title.

    Attributes:
        title: Name in tables.
        method: Name in :data:`fedprompt.methods.METHODS`, or of the function of a user; "longer"
            for training alone, "" for the most frequent class.
        values: Hyperparameters. The others have their defaults.
        make: Function of a user, or None for another method.
        given: Names of the values that the user gave, which are not tuned.
        family: Family of models with which the method runs. If empty, it is the first one of the
            problem that the method fits.

    Example:
        >>> row = Row("LoRA of rank 4", "fedlora", {"learning_rate": 0.003, "rank": 4})
        >>> row.entry.title, row.personalized
        ('FedLoRA', False)
    """

    title: str
    method: str
    values: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Method] | None = field(default=None, kw_only=True)
    given: tuple[str, ...] = field(default=(), kw_only=True)
    family: str = field(default="", kw_only=True)

    @property
    def entry(self) -> Entry:
        """The method of the gallery, of a user, or training alone."""
        if self.make is not None:
            return entry_of(self.make)
        return ALONE if self.method == ALONE.name else METHODS[self.method]

    @property
    def inputs(self) -> str:
        """Kind of the inputs: "images" in place of the tokens of a CLIP, or ""."""
        return self.entry.inputs if self.method else ""

    @property
    def personalized(self) -> bool:
        """Whether the method has a model for each client, of its own or of its size."""
        traits = self.entry.traits if self.method else ()
        return "personalized" in traits or bool(self.values.get("sizes"))

    def stamp(self, *more: Any) -> str:
        """Return a digest of the values, of the source of the method, and of more.

        Raises:
            UntoldError: If the method cannot be told from others.
        """
        make = self.make or (self.entry.make if self.method else None)
        known = stamps.told(dict(self.values)), self.family
        return stamps.digest(known, None if make is None else stamps.told(make), more)

    def __reduce__(self) -> Any:
        """Send the text of a file, because another process cannot import its module by name."""
        if (text := stamps.TEXTS.get(getattr(self.make, "__module__", ""))) is None:
            return super().__reduce__()
        return _received, (*text, self.title, self.method, self.values, self.given, self.family)


def _received(path: Path, text: bytes, title: str, name: str, *rest: Any) -> Row:
    values, given, family = rest
    make = read_methods(path, text)[name]
    return Row(title, name, values, make=make, given=given, family=family)


def chosen(
    methods: Sequence[str | Callable[..., Method] | Row], families: Sequence[str]
) -> list[Row]:
    """Return the rows of methods: names of the gallery, FILE:NAME, functions, or rows.

    ``NAME:learning_rate=0.003,rank=8`` gives values.

    Args:
        methods: Methods.
        families: Families of models of the problem; a method runs with the first that it fits.

    Raises:
        CompareError: If a name is not known or occurs twice, or a method is for other models.
    """
    check.sequence("methods", methods, "names or functions")
    listed = [
        _fitted(each, families) if isinstance(each, Row) else _row(each, families)
        for each in methods
        if each != ""
    ]
    if not listed:
        raise CompareError("`methods` must name at least one method.")
    titles = [row.title.casefold() for row in listed]
    for row, title in zip(listed, titles, strict=True):
        if titles.count(title) > 1:
            raise CompareError(f"`methods` must name each once; got {row.method!r} twice.")
    return listed


def _fitted(row: Row, families: Sequence[str]) -> Row:
    family = next((each for each in families if fits(row.entry, each)), families[0])
    return row if row.family else replace(row, family=family)


def files(methods: Sequence[Any]) -> list[Path]:
    """Return the files of methods that are given as FILE:NAME."""
    listed = [_split(method)[0] for method in methods if isinstance(method, str)]
    return [Path(path) for path in dict.fromkeys(listed) if path]


def _split(method: str) -> tuple[str, str, str]:
    """Return file, name and values of FILE:NAME:VALUES, of which each but the name may be empty."""
    values = re.search(r":([A-Za-z_]\w*=.*)$", method, re.DOTALL)
    text = method[: values.start()] if values else method
    path, _, name = (f"{text}:" if text.endswith(".py") else text).rpartition(":")
    return path, name, values[1] if values else ""


def _row(method: str | Callable[..., Method], families: Sequence[str]) -> Row:
    text, make = "", method
    if isinstance(method, str):
        path, name, text = _split(method)
        found: Mapping[str, Any] = read_methods(Path(path)) if path else METHODS
        if name not in found:
            raise _unknown(method, path, name, found)
        make = found[name] if path else METHODS[name].make
    plain = inspect.isfunction(make) or inspect.ismethod(make)
    check.typed(plain, "methods", "be names or functions; write a function around an object", make)
    entry = entry_of(cast(Any, make))
    family = next((each for each in families if fits(entry, each)), None)
    if family is None:
        got = f"{entry.name}, which is for {' or '.join(entry.families)}"
        raise CompareError(f"`methods` must be for {' or '.join(families)}; got {got}.")
    values = _values(entry, text)
    told = ", ".join(f"{key} {value}" for key, value in values.items())
    title = f"{entry.title} ({told})" if values else entry.title
    gallery = METHODS.get(entry.name) is entry and entry.make.__module__.startswith("fedprompt.")
    own: Any = None if gallery else make
    every = {**entry.defaults, **values}
    return Row(title, entry.name, every, make=own, given=tuple(values), family=family)


def _unknown(method: str, path: str, name: str, found: Mapping[str, Any]) -> CompareError:
    near = ", ".join(get_close_matches(name, found) or sorted(found))
    there = f"there are {near}" if near else "no function of it begins with `setting`"
    if not name:
        return CompareError(f"`methods` must be FILE:NAME for a file; got {method}: {there}.")
    return CompareError(f"{name!r} is no method of {path or 'the gallery'}; {there}.")


def _values(entry: Entry, text: str) -> dict[str, Any]:
    """Read ``learning_rate=0.003,rank=8``."""
    found = dict[str, Any]()
    for pair in re.split(r",(?=[A-Za-z_]\w*=)", text) if text else ():
        name, _, value = pair.partition("=")
        if name not in entry.defaults:
            known = ", ".join(entry.defaults) or "none"
            raise CompareError(f"`methods` must give values of {entry.name}: {known}; got {name}.")
        if name in found:
            raise CompareError(f"`methods` must give a value of {entry.name} once; got {pair}.")
        try:
            read = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            read = value
        usual, kind = entry.defaults[name], type(entry.defaults[name])
        if isinstance(usual, int | float) and type(read) not in {
            int if kind is float else kind,
            kind,
        }:
            rule = f"be of type {kind.__name__}, as {usual}"
            raise CompareError(f"`methods`: {name} of {entry.name} must {rule}; got {value!r}.")
        found[name] = read
    return found


def fits(entry: Entry, family: str) -> bool:
    """Return whether a method can run with the models of a family."""
    return any(kind in entry.families for kind in KINDS.get(family, (family,)))


def entry_of(make: Callable[..., Method]) -> Entry:
    """Return the entry of a function. That of a new function is not registered."""
    known = [entry for entry in METHODS.values() if entry.make is make]
    if not known and make not in ENTRIES:
        ENTRIES[make] = _made(make)
    return known[0] if known else ENTRIES[make]


def _made(make: Callable[..., Method]) -> Entry:
    title = make.__name__.replace("_", " ").capitalize()
    if title.casefold() in {entry.title.casefold() for entry in METHODS.values()}:
        raise CompareError(f"`methods` must have new names; got {make.__name__}.")
    rate = inspect.signature(make).parameters.get("learning_rate")
    if rate is not None and (rate.kind is not rate.KEYWORD_ONLY or rate.default is rate.empty):
        rule = "be a keyword with a default, as in `(setting, *, learning_rate=0.01)`"
        raise CompareError(f"`learning_rate` of {make.__name__} must {rule}.")
    search = {} if rate is None else LEARNING_RATE
    try:
        register(title, families=FAMILIES, traits=("personalized",), search=search)(make)
    except ValueError as error:
        raise CompareError(f"{make.__name__} cannot be a method: {error}") from error
    return METHODS.pop(make.__name__)


# Files of methods.


def read_methods(path: Path, text: bytes | None = None) -> dict[str, Callable[..., Method]]:
    """Import a file, which may import modules of its folder, and return its methods.

    They are the functions that it registers, and all others whose first argument is `setting`.
    Each text of each file is a module of its own.

    Args:
        path: Path of the file.
        text: Text that another process read. If None, it is read.

    Raises:
        CompareError: If there is no such file, or it cannot be imported.
    """
    if text is None:
        if path.suffix != ".py" or not path.is_file():
            raise CompareError(f"`methods` must name an existing Python file; got {path}.")
        path, text = path.resolve(), path.read_bytes()
    name = f"{path.stem}-{stamps.hashed(bytes(path) + text)}"
    if name not in stamps.TEXTS:
        _import(name, path, text)
    functions = [each for each in vars(sys.modules[name]).values() if inspect.isfunction(each)]
    found: list[Any] = [
        each
        for each in functions
        if each.__module__ == name and [*inspect.signature(each).parameters][:1] == ["setting"]
    ]
    found += [each for each in ENTRIES if each.__module__ == name]
    return {each.__name__: each for each in found}


def _import(name: str, path: Path, text: bytes) -> None:
    """Import a file. Installed packages come before modules of its folder.

    Python has one module of a name, so a file is refused if a module of its folder has the name of
    one that a file of another folder has imported.
    """
    module = ModuleType(name)
    module.__file__, sys.modules[name] = str(path), module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    try:
        exec(compile(text, str(path), "exec"), vars(module))
        others = {source.parent for source, _ in stamps.TEXTS.values()} - {path.parent}
        for stem in {each.stem for each in path.parent.iterdir()} & sys.modules.keys():
            if (folder := _folder_of(sys.modules[stem])) in others:
                raise ImportError(f"`{stem}` is a module of {folder}, too; rename one of them")
        stamps.TEXTS[name] = path, text
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        said = f"{path}{line} cannot be imported: {type(error).__name__}: {error}"
        raise CompareError(said) from error
    finally:
        for entry in [each for each in METHODS.values() if each.make.__module__ == name]:
            ENTRIES[entry.make] = METHODS.pop(entry.name)


def _folder_of(module: ModuleType) -> Path | None:
    """Return the folder that has the file of a module, or the folder of a package."""
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None)]
    return Path(places[0]).parent if places[0] else None


# References: training alone, with as many passes as a method takes, and the most frequent class.


def longer(setting: Setting, *, learning_rate: float = 1e-2, times: int = 1) -> Method:
    """Train each client alone, with several times the batches."""

    def client(data: ClientData, answer: Any, state: Any) -> Any:
        model = setting.model(data.id, state)
        train(model, data, learning_rate, times=times)
        return {}, fp.snapshot(model, buffers=True)

    if isinstance(setting, ClipSetting):
        return coop(setting, learning_rate=learning_rate)._replace(client=client)
    return local(cast(Any, setting), learning_rate=learning_rate)._replace(client=client)


ALONE = Entry("longer", "Training alone", longer, FAMILIES, ("personalized",), LEARNING_RATE, "")
TOWER = ", image tower"
"""End of the title of training alone of the image tower of a CLIP."""


def alone(family: str, times: int = 1, *, tower: bool = False, **values: Any) -> Row:
    """Make the row of training alone, with the default values of the family of models."""
    values = {**METHODS[usual(family)].defaults, **values, "times": times}
    title = f"{ALONE.title}{TOWER if tower else ''}"
    title += f", {times} times as long" if times > 1 else ""
    return Row(title, ALONE.name, values, family=family)


def usual(family: str) -> str:
    """Return the method of the gallery that is training alone."""
    return "coop" if family == "CLIP" else "local"
