"""Rows of a setting, from the lines of a table as the paper prints them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from studies.papers.setting import Row

Methods = Mapping[str, tuple[str | None, Mapping[str, Any]]]


class Cell(NamedTuple):
    """Printed figure, and its standard deviation or None."""

    figure: float
    spread: float | None


def cells(line: str) -> tuple[Cell | None, ...]:
    """Read the cells of a line.

    Args:
        line: Cells such as ``"75.27±0.05"`` or ``"100"``, separated by spaces. A hyphen is an empty
            cell.

    Returns:
        The cells; None for an empty cell.
    """
    return tuple(None if text == "-" else _cell(text) for text in line.split())


def _cell(text: str) -> Cell:
    figure, _, spread = text.partition("±")
    return Cell(float(figure), float(spread) if spread else None)


def rows(
    table: Mapping[str, str], methods: Methods, positions: Mapping[str, int]
) -> tuple[Row, ...]:
    """Make the rows of a setting.

    Args:
        table: Printed line of each row, by the row's title.
        methods: Function of the gallery and its hyperparameters, by title.
        positions: Position of the cell in the line, by column of the setting.

    Returns:
        The rows in the order of the table, without those whose cells are all empty.
    """
    made = []
    for title, line in table.items():
        printed, (method, values) = cells(line), methods[title]
        found = {name: printed[position] for name, position in positions.items()}
        figures = {name: cell.figure for name, cell in found.items() if cell}
        spread = {
            name: cell.spread for name, cell in found.items() if cell and cell.spread is not None
        }
        if figures:
            row = Row(title=title, method=method, figures=figures, spread=spread, values=values)
            made.append(row)
    return tuple(made)
