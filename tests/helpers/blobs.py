"""Damage done on purpose to what `encode_payload` writes, with or without a digest that matches."""

import hashlib
import re

DIGEST = re.compile(rb'(?<="sha256":")[0-9a-f]{64}(?=")')


def content(blob: bytes) -> int:
    """Where the tensors start."""
    return 8 + int.from_bytes(blob[:8], "little")


def unsigned(blob: bytes) -> bytes:
    """What the digest is made of: all but the length in front, with zeros in place of the digest itself."""
    return DIGEST.sub(64 * b"0", blob[8:], count=1)


def mended(blob: bytes) -> bytes:
    """The same damage with a digest to match, as a sender would write it who means it; past the digest, the other checks are met."""
    return blob[:8] + DIGEST.sub(
        hashlib.sha256(unsigned(blob)).hexdigest().encode(), blob[8:], count=1
    )


def overwritten(blob: bytes, place: int, raw: bytes) -> bytes:
    """Other bytes at a place behind the header, and the digest to match."""
    start = content(blob) + place
    return mended(blob[:start] + raw + blob[start + len(raw) :])


def flipped(blob: bytes, bit: int) -> bytes:
    """One bit changed, as on a noisy wire."""
    damaged = bytearray(blob)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
