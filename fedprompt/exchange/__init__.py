"""What crosses the wire: messages of modules, their bytes, who takes part, and what a run remembers."""

from fedprompt.exchange._frame import Expected, Header
from fedprompt.exchange.checkpoint import load_checkpoint, save_checkpoint
from fedprompt.exchange.codecs import Codec, float16_codec, int8_codec, top_k_codec
from fedprompt.exchange.cohort import cohort
from fedprompt.exchange.gather import gather_messages
from fedprompt.exchange.ledger import Ledger
from fedprompt.exchange.payload import collect, load, num_bytes, snapshot
from fedprompt.exchange.receiving import receive
from fedprompt.exchange.seeds import stream_generator
from fedprompt.exchange.transforms import cap_weight, clip_norm, gaussian_noise
from fedprompt.exchange.vectors import flatten, unflatten
from fedprompt.exchange.wire import decode_payload, encode_payload, open_payload, save_payload

__all__ = [
    "Codec",
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
    "float16_codec",
    "gather_messages",
    "gaussian_noise",
    "int8_codec",
    "load",
    "load_checkpoint",
    "num_bytes",
    "open_payload",
    "receive",
    "save_checkpoint",
    "save_payload",
    "snapshot",
    "stream_generator",
    "top_k_codec",
    "unflatten",
]
