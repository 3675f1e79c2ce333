"""A problem: data, models and a budget in which methods are compared."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedprompt.compare.rows import Row, plain_method
from fedprompt.compare.trials import Machine, Trial
from fedprompt.interfaces import Method, Round

Record = dict[str, Any]
"""Figures of a finished run, and what tells it from the others."""

Causes = Callable[[Trial, Method, Round], Mapping[str, float]]
"""Function from a finished run to further figures."""

COLUMNS = {"full": "all test images", "own": "own mix", "worst": "worst client"}
NEWCOMERS = {"received": "new clients", "after": "after 10 steps"}
COSTS = {
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "trained": "trained",
    "backward": "backward",
    "kept": "bytes kept",
}


def no_notes(problem: "Problem", found: Sequence[Record], partition: str) -> Sequence[str]:
    """Write nothing below a table."""
    return ()


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Data, models and a budget, in one or several partitions.

    Attributes:
        name: Name in records.
        title: Name in tables.
        partitions: Words for each partition.
        family: Function from a partition to the family of the methods that can take part.
        rows: Function from a partition to its rows.
        make: Function (partition, row, seed, machine, validate) -> trial. With `validate`, a part
            of the training images is for testing, and does not train.
        trials: Function (partition, row) -> hyperparameters of the tuning trials, the first with
            the defaults. If None, the values of a row are fixed.
        tuned_on: Partition of the tuning trials. If None, each partition has its own.
        method: Function (row, trial) -> method.
        columns: Words for each column of a table, by its name in records.
        references: Titles of the rows with which a table compares, by the word for them. Of
            several, a row is compared with the one that takes as many backward passes.
        compared: Columns of the differences to the references.
        every: Whether tables have all columns, also those of wide intervals.
        causes: Function (partition, row) -> function (trial, method, last round) -> further
            figures, or None.
        last_rounds: Function (partition, row) -> number of last rounds that are averaged.
        notes: Function (problem, records, partition) -> paragraphs below a table.
        inputs: Function (partition, machine) -> fields of a record that tell its data from others.
        again: Function without arguments that makes the problem in another process. If None, it is
            pickled.

    Example:
        A problem of our own pages is made from its functions. For your data, see
        :func:`fedprompt.compare.problem`.

        >>> problem = Problem(
        ...     title="Digits", partitions={"iid": "60 images"},
        ...     rows=lambda partition: [Row.of("local")], make=lambda *_, **where: None,
        ... )
        >>> [row.title for row in problem.rows("iid")]
        ['Local training']
    """

    name: str = ""
    title: str
    partitions: Mapping[str, str]
    rows: Callable[[str], Sequence[Row]]
    make: Callable[..., Trial]
    family: Callable[[str], str] = lambda partition: "one model"
    trials: Callable[[str, Row], list[dict[str, Any]]] | None = None
    tuned_on: str | None = None
    method: Callable[[Row, Trial], Method] = plain_method
    columns: Mapping[str, str] = field(default_factory=lambda: COLUMNS)
    references: Mapping[str, Sequence[str]] = field(default_factory=dict)
    compared: Sequence[str] = ("own",)
    every: bool = False
    causes: Callable[[str, Row], Causes | None] = lambda partition, row: None
    last_rounds: Callable[[str, Row], int] = lambda partition, row: 1
    notes: Callable[["Problem", Sequence[Record], str], Sequence[str]] = no_notes
    inputs: Callable[[str, Machine], Mapping[str, Any]] = lambda partition, machine: {}
    again: Callable[[], "Problem"] | None = None

    def __reduce__(self) -> Any:
        """Send how the problem is made, because its functions may not be sent."""
        return super().__reduce__() if self.again is None else (self.again, ())
