"""One sentence of advice, if enough seeds were run."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedprompt.compare.problems import Record
from fedprompt.compare.tables import FEWEST, gains, grouped, interval, mean, percent, reference_of


def advice(found: Sequence[Record], partition: str, references: Sequence[str], words: str) -> str:
    """Recommend a row for the clients' images, and a row for one model of all test images.

    Args:
        found: Records.
        partition: Name of a partition.
        references: Titles of the rows without a federation, the first of which must have run.
        words: Words for them.
    """
    by_row = grouped(found, partition)
    if references[0] not in by_row or min(map(len, by_row.values())) < FEWEST:
        return f"This run recommends nothing: it takes {FEWEST} seeds, and the row {references[0]}."
    own, full = (chosen(by_row, column, references, words) for column in ("own", "full"))
    return f"**Use** {own} for a client's images, and {full} for the images of all clients."


def chosen(
    by_row: Mapping[str, Sequence[Record]], column: str, references: Sequence[str], words: str
) -> str:
    """Return the cheapest row that is not shown to be less accurate than the best one."""
    best = max(by_row, key=lambda title: mean(by_row[title], column))
    for title in sorted(by_row, key=lambda title: mean(by_row[title], "bytes_up")):
        lost = gains(column, by_row[best], by_row[title])
        if title == best or (len(lost) > 1 and np.mean(lost) <= interval(lost)):
            break
    if (reference := reference_of(by_row, references, title)) is None:
        return title
    gain = percent(gains(column, by_row[title], by_row[reference]), signed=True)
    return f"{title} ({gain} points to {words})"
