"""Autocast around the batches of a client, which ends with the client."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class _Casts(threading.local):
    """Autocast of a thread. Iterators of batches may take turns, so the last one ends it."""

    depth = 0
    context: torch.autocast | None = None


_CASTS = _Casts()


@contextmanager
def entered(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Turn autocast on, without its cache, until its last user leaves or it is ended."""
    if _CASTS.context is None:
        _CASTS.context = torch.autocast(device, dtype, cache_enabled=False)
        _CASTS.context.__enter__()  # type: ignore[no-untyped-call]
    context = _CASTS.context
    _CASTS.depth += 1
    try:
        yield
    finally:
        if context is _CASTS.context:
            _CASTS.depth -= 1
            if not _CASTS.depth:
                _end()


@contextmanager
def ended() -> Iterator[None]:
    """Turn autocast off at the end, also if an iterator of batches is kept that did not end."""
    try:
        yield
    finally:
        _end()


def _end() -> None:
    context, _CASTS.context, _CASTS.depth = _CASTS.context, None, 0
    if context is not None:
        context.__exit__(None, None, None)
