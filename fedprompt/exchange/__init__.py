"""What crosses the wire: messages of modules, their bytes, who takes part, and what a run remembers."""

from fedprompt.exchange.checkpoint import load_checkpoint, save_checkpoint
from fedprompt.exchange.cohort import cohort
from fedprompt.exchange.ledger import Ledger
from fedprompt.exchange.payload import collect, load, num_bytes, snapshot
from fedprompt.exchange.seeds import stream_seed

__all__ = ["Ledger", "cohort", "collect", "load", "load_checkpoint", "num_bytes", "save_checkpoint", "snapshot", "stream_seed"]
