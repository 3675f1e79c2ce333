"""Fixtures of the tests of Flower."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the sender, as Flower's launchers do for a process."""
    from flwr.supercore.task_identity import TaskIdentity  # also read where flwr is not installed

    for part in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, part, 1)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """Return the list to which the lines of the adapter's log are appended."""
    lines: list[str] = []
    handler, logger = logging.Handler(logging.WARNING), logging.getLogger("flwr.fedprompt")
    handler.emit = lambda record: lines.append(record.getMessage())
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)
