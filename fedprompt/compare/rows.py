"""Rows of a table: methods of the gallery, of a user, and controls, with their hyperparameters."""

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedprompt.compare.trials import CompareError, Trial
from fedprompt.interfaces import Method
from fedprompt.methods import METHODS, Entry

HEAD_RATE = "head_rate"
"""Learning rate of projections and heads, a hyperparameter of the setting of a row."""

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


def read_methods(path: Path) -> dict[str, Entry]:
    """Import a file, which may import modules of its folder, and return the methods it registers.

    Raises:
        CompareError: If there is no such file.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise CompareError(f"`--methods` must name an existing Python file; got {path}.")
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != spec.origin:
        if (folder := str(path.parent.resolve())) not in sys.path:
            sys.path.insert(0, folder)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return {name: entry for name, entry in METHODS.items() if entry.make.__module__ == path.stem}
