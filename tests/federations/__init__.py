"""The four algorithms as functions of a client's round and a server's step, for any engine.

Models and data are tiny and random. A client's function depends only on its state and on the
broadcast, so an engine may start a new process for each message.
"""

from collections.abc import Callable

from federations.drivers import (
    Outcome,
    assert_bitwise_identical,
    distributed,
    in_process,
    through_bytes,
)
from federations.fedhpl import fedhpl
from federations.fedl2g import fedl2g
from federations.fedotp import fedotp
from federations.parts import Answers, Federation, Server, State
from federations.sgpt import sgpt

FEDERATIONS: dict[str, Callable[[], Federation]] = {
    "fedhpl": fedhpl,
    "sgpt": sgpt,
    "fedl2g": fedl2g,
    "fedotp": fedotp,
}

__all__ = [
    "FEDERATIONS",
    "Answers",
    "Federation",
    "Outcome",
    "Server",
    "State",
    "assert_bitwise_identical",
    "distributed",
    "in_process",
    "through_bytes",
]
