"""Protection from other threads: of a model's parameters, and of state of the whole process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn

PROCESS_STATE = threading.RLock()
"""Held while a call uses forward mode, sets attention kernels or replays random streams."""

_registry = threading.Lock()
_replacing: dict[nn.Module, int] = {}
"""Modules whose parameters are replaced at present, with the id of the thread that does so."""


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, so that sums are rounded the same in every process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def reading(model: nn.Module) -> Iterator[None]:
    """Refuse a model whose parameters another thread replaces, and let none begin."""
    with _registry:
        here = threading.get_ident()
        others = {module for module, thread in _replacing.items() if thread != here}
        for name, module in model.named_modules() if others else ():
            if module in others:
                where = f" (module {name!r})" if name else ""
                raise RuntimeError(
                    f"Another thread replaces parameters of this {type(model).__name__}{where}, "
                    "because it runs guide_gradient or per_sample. "
                    "Use a separate model in each thread. Threads may share a frozen trunk."
                )
        yield


@contextmanager
def replacing(model: nn.Module) -> Iterator[None]:
    """Reserve the modules that own trainable parameters of a model for this thread.

    Nested calls in one thread are allowed, because they restore parameters in reverse order.
    """
    new = list[nn.Module]()
    try:
        with reading(model):
            free = (module for module in model.modules() if module not in _replacing)
            new += filter(_owns_trainable, free)
            _replacing.update(dict.fromkeys(new, threading.get_ident()))
        yield
    finally:
        with _registry:
            for module in new:
                del _replacing[module]


def _owns_trainable(module: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in module._parameters.values())
