"""One sentence of advice, if enough seeds were run."""

from collections.abc import Mapping, Sequence

import numpy as np

from fedprompt.compare.problems import Record
from fedprompt.compare.tables import FEWEST, gains, grouped, interval, mean, percent


def advice(found: Sequence[Record], partition: str, reference: str) -> str:
    """Recommend a row for the clients' images, and a row for one model of all test images."""
    by_row = grouped(found, partition)
    if reference not in by_row or min(map(len, by_row.values())) < FEWEST:
        return f"This run recommends nothing: it takes {FEWEST} seeds, and the row {reference}."
    own, full = (chosen(by_row, column, reference) for column in ("own", "full"))
    return f"**Use** {own} for a client's images, and {full} for the images of all clients."


def chosen(by_row: Mapping[str, Sequence[Record]], column: str, reference: str) -> str:
    """Return the cheapest row that is not shown to be less accurate than the best one."""
    best = max(by_row, key=lambda title: mean(by_row[title], column))
    for title in sorted(by_row, key=lambda title: mean(by_row[title], "bytes_up")):
        lost = gains(column, by_row[best], by_row[title])
        if title == best or (len(lost) > 1 and np.mean(lost) <= interval(lost)):
            break
    gain = percent(gains(column, by_row[title], by_row[reference]), signed=True)
    return title if title == reference else f"{title} ({gain} points to local training)"
