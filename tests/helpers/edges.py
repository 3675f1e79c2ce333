"""Tables of arguments: values that are refused by name, and edges that are taken."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

Values = tuple[Sequence[Any], Sequence[Any]]
Row = tuple[Callable[..., Any], Mapping[str, Any], Mapping[str, Values]]


def number(low: int, high: int | None = None) -> Values:
    """Integers: what is refused, and the edges."""
    top = [] if high is None else [high]
    return [low - 1, float(low), str(low), None, *(each + 1 for each in top)], [low, *top]


def call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Call a function; arguments without a name are passed by position."""
    parameters = inspect.signature(function).parameters
    plain = [name for name in arguments if name in parameters and parameters[name].kind == 0]
    named = {name: value for name, value in arguments.items() if name not in plain}
    function(*(arguments[name] for name in plain), **named)


def table(rows: Sequence[Row]) -> Callable[..., None]:
    """Return the test of a table.

    A row is a function, the arguments of a call that works, and for each argument the values that
    are refused and those that are taken. An error begins with the argument, or with the longer
    place that is given, such as ``entries[1].weight``, and after "'name': " of a single name. A
    place that begins with no argument belongs to the first one.
    """

    @pytest.mark.bad_input
    @pytest.mark.unhooked
    @pytest.mark.parametrize(("row", "place"), [(row, place) for row in rows for place in row[2]])
    def test(row: Row, place: str) -> None:
        function, good, spoiled = row
        wrong, edges = spoiled[place]
        word = re.match(r"\w+", place)[0]
        argument = word if word in good else next(iter(good))
        for value in wrong:
            with pytest.raises((TypeError, ValueError)) as error:
                call(function, {**good, argument: value})
            start = rf"^('[^']+'( \(.*\))?: )?`{re.escape(place)}[`\[.(]"
            assert re.search(start, str(error.value)), (value, str(error.value))
            assert " must " in str(error.value), value
        for value in edges:
            call(function, {**good, argument: value})

    return test
