"""What crosses the wire: messages of modules, their bytes, and who takes part."""

from fedprompt.exchange._frame import Header
from fedprompt.exchange.cohort import cohort
from fedprompt.exchange.ledger import Ledger
from fedprompt.exchange.payload import collect, load, num_bytes, snapshot
from fedprompt.exchange.seeds import stream_seed
from fedprompt.exchange.transforms import cap_weight, clip_norm, gaussian_noise
from fedprompt.exchange.vectors import flatten, unflatten
from fedprompt.exchange.wire import Expected, decode_payload, encode_payload, open_payload, save_payload

__all__ = [
    "Expected",
    "Header",
    "Ledger",
    "cap_weight",
    "clip_norm",
    "cohort",
    "collect",
    "decode_payload",
    "encode_payload",
    "flatten",
    "gaussian_noise",
    "load",
    "num_bytes",
    "open_payload",
    "save_payload",
    "snapshot",
    "stream_seed",
    "unflatten",
]
