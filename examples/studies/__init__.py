"""Tasks of `compare.py`: problems of real images, and the rows that run on them."""

from dataclasses import replace
from functools import partial

from studies import ablations, codecs, digits, emoji, patches, photos, privacy, reproduction, sizes
from studies.core import Task

MODULES = (digits, emoji, photos, patches, ablations, codecs, privacy, reproduction, sizes)


def named(name: str) -> Task:
    """Return a task; another process finds it in the same way."""
    return TASKS[name]


TASKS: dict[str, Task] = {
    name: replace(task, name=name, again=partial(named, name))
    for module in MODULES
    for name, task in module.TASKS.items()
}
"""All tasks by name."""
