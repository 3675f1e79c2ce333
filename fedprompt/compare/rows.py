"""Rows of a table: methods of the gallery, of a user, and controls, with their hyperparameters."""

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

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
"""Methods that are not in the gallery, by name: controls, and functions of a user."""


@dataclass(frozen=True)
class Row:
    """A method with its hyperparameters.

    Attributes:
        title: Name in tables.
        method: Name in :data:`fedprompt.methods.METHODS` or `FURTHER`. If None, it cannot run.
        values: Hyperparameters. The others have their defaults. `HEAD_RATE` belongs to the setting.
    """

    title: str
    method: str | None
    values: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(name: str, **values: Any) -> "Row":
        """Make the row of a method, with its default hyperparameters where none are given."""
        entry = (METHODS | FURTHER)[name]
        return Row(entry.title, name, entry.defaults | values)

    @property
    def personalized(self) -> bool:
        """Whether the method has a model for each client."""
        return "personalized" in self.entry.traits

    @property
    def entry(self) -> Entry:
        """The method of the gallery, or the further one."""
        return (METHODS | FURTHER)[str(self.method)]


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
    names = [_name(method) for method in methods if method]
    if not names:
        raise CompareError("`--methods` must name at least one method.")
    for name in names:
        if names.count(name) > 1:
            raise CompareError(f"`--methods` must name each once; got {name!r} twice.")
    wrong = [
        f"{name} is for {' or '.join(METHODS[name].families)}"
        for name in names
        if not fits(METHODS[name], family)
    ]
    if wrong:
        raise CompareError(f"`--methods` must be for {family}; {'; '.join(wrong)}.")
    return [Row.of(name) for name in names]


def files(methods: Sequence[str | Callable[..., Method]]) -> list[Path]:
    """Return the files of methods that are given as FILE:NAME."""
    listed = [method.rpartition(":")[0] for method in methods if isinstance(method, str)]
    return [Path(path) for path in dict.fromkeys(listed) if path]


def _name(method: str | Callable[..., Method]) -> str:
    """Return the name of a method, which is registered if it is new."""
    if not isinstance(method, str):
        known = [entry.name for entry in METHODS.values() if entry.make is method]
        return known[0] if known else _registered(method)
    path, _, name = method.rpartition(":")
    found = read_methods(Path(path)) if path else METHODS
    if name not in found:
        near = get_close_matches(name, found) or sorted(found)
        where = path or "the gallery"
        raise CompareError(f"{name!r} is no method of {where}; there are {', '.join(near)}.")
    return name


def _registered(make: Callable[..., Method]) -> str:
    title = make.__name__.replace("_", " ").capitalize()
    rates = [name for name in ("learning_rate",) if name in inspect.signature(make).parameters]
    search = {name: LEARNING_RATE[name] for name in rates}
    try:
        register(title, families=FAMILIES, traits=("personalized",), search=search)(make)
    except ValueError as error:
        raise CompareError(f"{make.__name__} cannot be a method: {error}") from error
    return make.__name__


SOURCES: dict[str, bytes] = {}
"""Text of each imported file of methods, by the name of its module."""


def code(row: Row) -> str | None:
    """Return a hash of a method of a user, so that an edit is another run.

    Of a file it is the whole file, but not what it imports. Of another function, it is its code
    with the values around it (:func:`fedprompt.compare.identity.told`).
    """
    if row.method is None or row.method in FURTHER:
        return None
    make = inspect.unwrap(row.entry.make)
    if make.__module__.startswith("fedprompt."):
        return None
    text = SOURCES.get(make.__module__)
    return stamp(json.dumps(told(row.entry.make)) if text is None else text)


def read_methods(path: Path) -> dict[str, Entry]:
    """Import a file, which may import modules of its folder, and return its methods.

    They are the functions that it registers, and all others whose first argument is `setting`.

    Raises:
        CompareError: If there is no such file, or it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise CompareError(f"`--methods` must name an existing Python file; got {path}.")
    module, text = sys.modules.get(path.stem), path.read_bytes()
    if getattr(module, "__file__", None) != spec.origin:
        if (folder := str(path.parent.resolve())) not in sys.path:
            sys.path.insert(0, folder)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[path.stem]
            line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            said = f"{path}{line} cannot be imported: {type(error).__name__}: {error}"
            raise CompareError(said) from error
        SOURCES[path.stem] = text
    elif SOURCES.setdefault(path.stem, text) != text:
        raise CompareError(f"{path} changed after it was imported. Start Python again.")
    for make in list(vars(module).values()):
        own = inspect.isfunction(make) and make.__module__ == path.stem
        known = METHODS.get(getattr(make, "__name__", ""))
        new = own and (known is None or known.make.__module__ != path.stem)
        if new and next(iter(inspect.signature(make).parameters), "") == "setting":
            _registered(make)
    return {name: entry for name, entry in METHODS.items() if entry.make.__module__ == path.stem}
