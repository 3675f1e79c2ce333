"""Reports on backbones of one's own: a table of claims, with a remedy for each that failed."""

from collections.abc import Callable
from typing import NamedTuple


class Line(NamedTuple):
    """One claim about a backbone.

    Attributes:
        name: The claim.
        passed: Whether it holds; None if it could not be judged.
        measured: What was measured, as text.
        remedy: What to do if it does not hold, or how to have it judged.
    """

    name: str
    passed: bool | None
    measured: str
    remedy: str = ""

    @property
    def verdict(self) -> str:
        """Return the claim's verdict in one word."""
        return {True: "ok", False: "FAILED", None: "not judged"}[self.passed]


class Report(NamedTuple):
    """Claims about a backbone, which print as a table.

    Attributes:
        title: The class of the backbone.
        lines: The claims, in the order in which they were checked.
    """

    title: str
    lines: tuple[Line, ...]

    @property
    def passed(self) -> bool:
        """Whether no claim failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """Names of the claims that failed."""
        return tuple(line.name for line in self.lines if line.passed is False)

    def __str__(self) -> str:
        names = max(len(line.name) for line in self.lines)
        verdicts = max(len(line.verdict) for line in self.lines)
        rows = [self.title]
        for line in self.lines:
            rows.append(f"{line.verdict:{verdicts}}  {line.name:{names}}  {line.measured}".rstrip())
            if line.passed is not True and line.remedy:
                rows.append(f"{'':{verdicts}}  -> {line.remedy}")
        return "\n".join(rows)


def judged(name: str, remedy: str, check: Callable[[], tuple[bool | None, str]]) -> Line:
    """Return the line of a check; an exception of the backbone is a failure with its text."""
    try:
        passed, measured = check()
    except Exception as error:  # the code of a stranger may raise anything, and the table shows it
        text = " ".join(str(error).split())
        passed = False
        measured = f"{type(error).__name__}: {text[:LONGEST]}"
    return Line(name, passed, measured, remedy)


LONGEST = 100
"""Longest text of an exception in a table, in characters."""
