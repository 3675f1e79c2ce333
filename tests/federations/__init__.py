"""The four algorithms, each cut where the wire runs: one client's round and the server's step, for any engine.

Tiny random models and random data. All that a client remembers goes through its state, and all that it learns of others through the
broadcast, so an engine may rebuild its process for every message.
"""

from collections.abc import Callable

from federations.drivers import Outcome, assert_same_bits, distributed, in_process, through_bytes
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
    "assert_same_bits",
    "distributed",
    "in_process",
    "through_bytes",
]
