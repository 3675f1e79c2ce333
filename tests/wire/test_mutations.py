"""Seeded mutations of a blob are refused or canonical.

The default suite runs a part of them, and ``pytest -m slow`` all.
"""

import copy
import json
import random
import struct

import pytest
import torch

from blobs import content, mended
from fedprompt.wire import Expected, decode_payload, encode_payload
from same import assert_identical
from wired import BLOB, MESSAGE, PARTS


def mutated(draw: random.Random) -> bytes:
    """Damage a blob in a few places; in most cases the digest is corrected."""
    blob = bytearray(BLOB)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        draw.choice(MUTATIONS)(blob, draw)
    return mended(bytes(blob)) if draw.random() < 0.8 else bytes(blob)


def _flip(blob, draw):
    if blob:
        blob[draw.randrange(len(blob))] ^= 1 << draw.randrange(8)


def _cut(blob, draw):
    del blob[draw.randrange(len(blob) + 1) :]


def _replace(blob, draw):
    """Replace up to nine bytes by others, or by a part of the blob."""
    start, place = draw.randrange(len(blob) + 1), draw.randrange(len(blob) + 1)
    new = draw.randbytes(draw.choice([1, 2, 8, 500])), blob[start : start + draw.choice([1, 8, 60])]
    blob[place : place + draw.choice([0, draw.randint(1, 9)])] = draw.choice([b"", *new])


def _lengthen(blob, draw):
    near = len(blob), content(BLOB), draw.randrange(len(blob) + 9)
    blob[:8] = struct.pack("<Q", draw.choice([0, 1, 2, *near, 2**31, 2**63, 2**64 - 1]))


def _reword(blob, draw):
    """Replace a piece of the header and correct its length."""
    end = min(content(bytes(blob)), len(blob)) if len(blob) >= 8 else 0
    text = bytes(blob[8:end])
    old = draw.choice([b" ", *b'0 2 3 [ ] F32 " { } : , shape scale value vit'.split()])
    new = draw.choice([*REPLACEMENTS, old + old])
    places = [place for place in range(len(text)) if text.startswith(old, place)]
    if places:
        place = draw.choice(places)
        text = text[:place] + new + text[place + len(old) :]
        blob[:end] = struct.pack("<Q", len(text)) + text


def _recount(blob, draw):
    """Write an unusual number after the header, or a byte that is not a boolean."""
    numbers = *NUMBERS, draw.uniform(-9, 9)
    raw = draw.choice([*(struct.pack("<f", number) for number in numbers), b"\2"])
    start = content(bytes(blob)) if len(blob) >= 8 else 0
    if places := range(start, len(blob) + 1 - len(raw), len(raw)):
        place = draw.choice(places)
        blob[place : place + len(raw)] = raw


def _reform(blob, draw):
    """Change one field of an entry of the header, in well-formed JSON."""
    end = min(content(bytes(blob)), len(blob)) if len(blob) >= 8 else 0
    try:
        entries = json.loads(blob[8:end])
        entry = entries[draw.choice(list(entries))]
        entry[draw.choice([*entry, "more"])] = draw.choice(FIELDS)
    except (ValueError, TypeError, IndexError, RecursionError):
        return  # was damaged before
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":"))
    text = text.encode(errors="surrogatepass")
    text += b" " * (-len(text) % 8)
    blob[:end] = struct.pack("<Q", len(text)) + text


REPLACEMENTS = [
    *(b"", b"-1", b"99999999999999999999", b"1e400", b"NaN", b"true", b"null", b"[", b"{", b'"'),
    *(b"\\ud800", b"F64", b"I8", b"BF16", b"{}", b"[[]]", b"\x00", b"\xff", "ü".encode()),
    b"[" * 3000,
]
FIELDS = [0, -1, 2**70, 1.0, True, None, "F32", "", "vit", [], {}, [2, 2], [2], [1, 2], [3, 2]]
FIELDS += [[2**40, 2], [0, 4], [[2]], [True, 2]]
NUMBERS = [torch.nan, torch.inf, -torch.inf, -1.0, -0.0, 0.0, 1e-45, 3.4e38]
MUTATIONS = [_flip, _cut, _replace, _replace, _replace, _lengthen]
MUTATIONS += 2 * [_reword] + 3 * [_reform, _recount]


@pytest.mark.parametrize("count", [1200, pytest.param(20_000, marks=pytest.mark.slow)])
def test_mutated_blobs_are_refused_or_encode_to_the_same_bytes(count):
    draw, expect, accepted = random.Random(0), Expected(MESSAGE, PARTS), 0
    before, refused = copy.deepcopy(MESSAGE), []
    for _ in range(count):
        blob = mutated(draw)
        try:
            message, header = decode_payload(blob, expect=expect, max_bytes=2**14)
        except ValueError as error:
            refused.append((type(error), str(error)[:12]))
        else:
            accepted += 1
            assert encode_payload(message, header=header) == blob
    assert_identical(MESSAGE, before)
    assert set(refused) == {(ValueError, "`blob` must ")}
    assert 0 < accepted < count / 2
