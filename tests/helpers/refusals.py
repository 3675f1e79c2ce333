"""Tables of refused calls: one line a row, ``call -> ErrorType: start of the message``."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fedprompt

TORCH = {name: getattr(torch, name) for name in ("eye", "full", "nan", "ones", "tensor", "zeros")}


def refusals(table: str) -> list[Any]:
    """Split a table into parameters: call, name of the error, and the start of its message."""
    rows = []
    for line in table.strip().splitlines():
        call, expected = line.rsplit(" -> ", 1)
        error, message = expected.split(": ", 1)
        rows.append(pytest.param(call.strip(), error, message.strip(), id=call.strip()))
    return rows


def check_refused(call: str, error: str, message: str, namespace: dict[str, Any]) -> None:
    """Evaluate a call with names of torch, fedprompt and a test file, and expect its error."""
    names = TORCH | vars(fedprompt.robust) | vars(fedprompt.data) | vars(fedprompt)
    namespace = names | namespace
    with pytest.raises(eval(error, namespace), match=re.escape(message)):
        eval(call, namespace)


def refused(names: dict[str, Any]) -> Callable[[str], Callable[..., None]]:
    """Return a function that makes the test of a table, with the names of a test file."""

    def test_of(table: str) -> Callable[..., None]:
        @pytest.mark.bad_input
        @pytest.mark.parametrize(("call", "error", "message"), refusals(table))
        def test(call: str, error: str, message: str) -> None:
            check_refused(call, error, message, names)

        return test

    return test_of
