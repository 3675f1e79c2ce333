"""Rows of a table: methods of the gallery, of a user, and controls, with their hyperparameters."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

import fedprompt._refusals as check
from fedprompt.compare.identity import stamp, told
from fedprompt.compare.trials import CompareError, Trial
from fedprompt.interfaces import Method
from fedprompt.methods import METHODS, Entry, register
from fedprompt.methods.registry import LEARNING_RATE

HEAD_RATE = "head_rate"
"""Learning rate of projections and heads, a hyperparameter of the setting of a row."""

FAMILIES = ("one model", "mixed models", "CLIP")

KINDS = {"one model": ("one model", "mixed models")}
"""Families that can run where clients have the models of one: others are for that family alone."""

FURTHER: dict[str, Entry] = {}
"""Controls, which are not in the gallery, by name."""

ENTRIES: dict[Callable[..., Method], Entry] = {}
"""Entries of functions of a user that are not registered, or that a file registers."""

SOURCES: dict[str, tuple[Path, bytes]] = {}
"""Path and text of each imported file of methods, by the name of its module."""


@dataclass(frozen=True)
class Row:
    """A method with its hyperparameters.

    Attributes:
        title: Name in tables.
        method: Name in :data:`fedprompt.methods.METHODS` or `FURTHER`, or that of the function of
            a user. If None, it cannot run.
        values: Hyperparameters. The others have their defaults. `HEAD_RATE` belongs to the setting.
        make: Function of a user, or None for another method.
    """

    title: str
    method: str | None
    values: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[..., Method] | None = field(default=None, kw_only=True)

    @staticmethod
    def of(method: str | Callable[..., Method], **values: Any) -> "Row":
        """Make the row of a method, with its default hyperparameters where none are given."""
        entry = (METHODS | FURTHER)[method] if isinstance(method, str) else entry_of(method)
        given = entry.make if isinstance(method, str) else method
        ours = entry.name in FURTHER or entry.make.__module__.startswith("fedprompt.")
        make = None if ours and (METHODS | FURTHER).get(entry.name) is entry else given
        return Row(entry.title, entry.name, entry.defaults | values, make=make)

    @property
    def personalized(self) -> bool:
        """Whether the method has a model for each client."""
        return "personalized" in self.entry.traits

    @property
    def entry(self) -> Entry:
        """The method of the gallery, the further one, or that of a user."""
        return (METHODS | FURTHER)[str(self.method)] if self.make is None else entry_of(self.make)

    def __reduce__(self) -> Any:
        """Send the text of a file, because another process cannot import its module by name."""
        if (source := SOURCES.get(getattr(self.make, "__module__", ""))) is None:
            return super().__reduce__()
        return _received, (*source, self.title, self.method, self.values)


def _received(path: Path, text: bytes, title: str, name: str, values: Mapping[str, Any]) -> Row:
    return Row(title, name, values, make=read_methods(path, text)[name])


def plain_method(row: Row, trial: Trial) -> Method:
    """Make the method of a row for a trial."""
    values = {name: value for name, value in row.values.items() if name != HEAD_RATE}
    return row.entry.make(trial.setting, **values)


def fits(entry: Entry, family: str) -> bool:
    """Return whether a method can run with the models of a family."""
    return any(kind in entry.families for kind in KINDS.get(family, (family,)))


def chosen(methods: Sequence[str | Callable[..., Method]], family: str) -> list[Row]:
    """Return the rows of methods: names of the gallery, FILE:NAME, or functions.

    Raises:
        CompareError: If a name is not known or occurs twice, or a method is for other models.
    """
    check.sequence("methods", methods, "names or functions")
    listed = [_row(method) for method in methods if method != ""]
    if not listed:
        raise CompareError("`--methods` must name at least one method.")
    titles = [row.title.casefold() for row in listed]
    for row, title in zip(listed, titles, strict=True):
        if titles.count(title) > 1:
            raise CompareError(f"`--methods` must name each once; got {row.method!r} twice.")
    wrong = [
        f"{row.method} is for {' or '.join(row.entry.families)}"
        for row in listed
        if not fits(row.entry, family)
    ]
    if wrong:
        raise CompareError(f"`--methods` must be for {family}; {'; '.join(wrong)}.")
    return listed


def files(methods: Sequence[str | Callable[..., Method]]) -> list[Path]:
    """Return the files of methods that are given as FILE:NAME."""
    listed = [method.rpartition(":")[0] for method in methods if isinstance(method, str)]
    return [Path(path) for path in dict.fromkeys(listed) if path]


def _row(method: str | Callable[..., Method]) -> Row:
    if not isinstance(method, str):
        rule = "be names or functions; write a function around another object"
        plain = inspect.isfunction(method) or inspect.ismethod(method)
        check.typed(plain, "methods", rule, method)
        return Row.of(method)
    path, _, name = (f"{method}:" if method.endswith(".py") else method).rpartition(":")
    found: Mapping[str, Any] = read_methods(Path(path)) if path else METHODS
    if name not in found:
        near = ", ".join(get_close_matches(name, found) or sorted(found))
        there = f"there are {near}" if near else "no function of it begins with `setting`"
        if not name:
            raise CompareError(f"`--methods` must be FILE:NAME for a file; got {method}: {there}.")
        where = path or "the gallery"
        raise CompareError(f"{name!r} is no method of {where}; {there}.")
    return Row.of(found[name] if path else name)


def entry_of(make: Callable[..., Method]) -> Entry:
    """Return the entry of a function. That of a new function is not registered."""
    known = [entry for entry in (METHODS | FURTHER).values() if entry.make is make]
    if not known and make not in ENTRIES:
        ENTRIES[make] = _made(make)
    return known[0] if known else ENTRIES[make]


def _made(make: Callable[..., Method]) -> Entry:
    title = make.__name__.replace("_", " ").capitalize()
    if title.casefold() in {entry.title.casefold() for entry in (METHODS | FURTHER).values()}:
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


def code(row: Row) -> str | None:
    """Return a hash of a method of a user, so that an edit is another run.

    Of a file it is the whole file, but not what it imports. Of another function, it is its code
    with the values around it (:func:`fedprompt.compare.identity.told`).
    """
    if row.make is None:
        return None
    _, text = SOURCES.get(row.make.__module__, (None, None))
    return stamp(json.dumps(told(row.entry.make)) if text is None else text)


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
            raise CompareError(f"`--methods` must name an existing Python file; got {path}.")
        path, text = path.resolve(), path.read_bytes()
    name = f"{path.stem}-{stamp(bytes(path) + text)}"
    if name not in SOURCES:
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
        others = {source.parent for source, _ in SOURCES.values()} - {path.parent}
        for stem in {each.stem for each in path.parent.iterdir()} & sys.modules.keys():
            if (folder := _folder_of(sys.modules[stem])) in others:
                raise ImportError(f"`{stem}` is a module of {folder}, too; rename one of them")
        SOURCES[name] = path, text
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
