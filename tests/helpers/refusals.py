"""Tables of refused calls: one line a row, ``call -> ErrorType: start of the message``."""

import inspect
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


REFUSALS = (TypeError, ValueError, IndexError)
Rows = list[tuple[Callable[..., Any], dict[str, Any], dict[str, tuple[Any, Any]]]]


def refused_and_taken(rows: Rows) -> Callable[..., None]:
    """Return the test of a table: functions, a good call of each, and edges of its arguments.

    For each argument, there are values that are refused by its name, and others that are taken.
    The refused ones may be a function of the good value. In place of an argument, a longer place
    of the error may be given, such as ``entries[1].weight``. If the function has no such argument,
    the first one of the good call is changed.
    """
    cases = [
        pytest.param(function, good, name, *both, id=f"{place}-{name}")
        for place, (function, good, arguments) in enumerate(rows)
        for name, both in arguments.items()
    ]

    @pytest.mark.bad_input
    @pytest.mark.parametrize(("function", "good", "name", "wrong", "edges"), cases)
    def test(function: Callable[..., Any], good: dict[str, Any], name: str, wrong: Any, edges: Any):
        parameters = inspect.signature(function).parameters
        word = re.match(r"\w+", name)[0]
        others = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        changed = word if others or word in {*good, *parameters} else next(iter(good))
        positional = {n for n, each in parameters.items() if each.kind is each.POSITIONAL_ONLY}

        def call(value: Any) -> None:
            options = {**good, changed: value}
            given = [options.pop(argument) for argument in list(options) if argument in positional]
            function(*given, **options)

        for value in wrong(good.get(name)) if callable(wrong) else wrong:
            with pytest.raises(REFUSALS) as error:
                call(value)
            start = rf"^('[^']+'( \(.*\))?: )?`{re.escape(name)}[`\[.( ]"
            assert re.search(start, str(error.value)), (value, str(error.value))
            assert " must " in str(error.value), value
        for value in edges:
            call(value)

    return test


def number(low: int, high: int | None = None) -> tuple[list[Any], list[int]]:
    """Return wrong integers, and the edges, which are taken."""
    top = [] if high is None else [high]
    return [low - 1, float(low), str(low), *(each + 1 for each in top)], [low, *top]
