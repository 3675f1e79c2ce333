"""What crosses the wire: messages of modules, their bytes, and who takes part."""

from fedprompt.exchange.cohort import cohort
from fedprompt.exchange.ledger import Ledger
from fedprompt.exchange.payload import collect, load, num_bytes, snapshot
from fedprompt.exchange.seeds import stream_seed

__all__ = ["Ledger", "cohort", "collect", "load", "num_bytes", "snapshot", "stream_seed"]
