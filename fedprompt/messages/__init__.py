"""Messages between clients and server: from modules to payloads, back, and their bytes."""

from fedprompt.messages.change import delta
from fedprompt.messages.describe import describe
from fedprompt.messages.ledger import Ledger
from fedprompt.messages.parts import named, part
from fedprompt.messages.payload import collect, load_values, num_bytes, snapshot

__all__ = [
    "Ledger",
    "collect",
    "delta",
    "describe",
    "load_values",
    "named",
    "num_bytes",
    "part",
    "snapshot",
]
