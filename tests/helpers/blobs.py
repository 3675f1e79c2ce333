"""Damaged blobs of `encode_payload`, with or without a matching digest."""

import hashlib
import re

DIGEST = re.compile(rb'(?<="sha256":")[0-9a-f]{64}(?=")')


def content(blob: bytes) -> int:
    """Position of the first byte after the header."""
    return 8 + int.from_bytes(blob[:8], "little")


def unsigned(blob: bytes) -> bytes:
    """Bytes that the digest covers: all but the length prefix, with zeros for the digest."""
    return DIGEST.sub(64 * b"0", blob[8:], count=1)


def mended(blob: bytes) -> bytes:
    """Update the digest of a damaged blob, as a malicious sender would.

    The digest is then correct, so that the checks after it are tested.
    """
    return blob[:8] + DIGEST.sub(
        hashlib.sha256(unsigned(blob)).hexdigest().encode(), blob[8:], count=1
    )


def overwritten(blob: bytes, place: int, raw: bytes) -> bytes:
    """Replace bytes after the header, and update the digest."""
    start = content(blob) + place
    return mended(blob[:start] + raw + blob[start + len(raw) :])


def flipped(blob: bytes, bit: int) -> bytes:
    """Flip one bit, as a noisy connection would."""
    damaged = bytearray(blob)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)
