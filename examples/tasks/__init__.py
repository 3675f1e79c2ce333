"""Tasks of `compare.py`: federations of real images, and the rows that run on them."""

import importlib.util
import sys
from pathlib import Path

from fedprompt.methods import METHODS, Entry
from tasks import (
    ablations,
    codecs,
    digits,
    emoji,
    patches,
    photos,
    privacy,
    reproduction,
    whichwhen,
)
from tasks.core import Task, TaskError

MODULES = (digits, emoji, photos, patches, ablations, codecs, privacy, reproduction, whichwhen)
TASKS: dict[str, Task] = {name: task for module in MODULES for name, task in module.TASKS.items()}
"""All tasks by name."""


def read_methods(path: Path) -> dict[str, Entry]:
    """Import a file, which may import modules of its folder, and return the methods it registers.

    Raises:
        TaskError: If there is no such file.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.exists():
        raise TaskError(f"`--methods` must name an existing Python file; got {path}.")
    module = sys.modules.get(path.stem)
    if getattr(module, "__file__", None) != spec.origin:
        if (folder := str(path.parent.resolve())) not in sys.path:
            sys.path.insert(0, folder)
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    return {name: entry for name, entry in METHODS.items() if entry.make.__module__ == path.stem}
