"""Messages as bytes: one safetensors blob each, checked completely before any of it is used."""

from fedprompt.wire._decode import decode_payload
from fedprompt.wire._format import Expected, Header
from fedprompt.wire.encode import encode_payload
from fedprompt.wire.files import open_payload, save_payload
from fedprompt.wire.gather import gather_trees
from fedprompt.wire.receive import receive

__all__ = [
    "Expected",
    "Header",
    "decode_payload",
    "encode_payload",
    "gather_trees",
    "open_payload",
    "receive",
    "save_payload",
]
