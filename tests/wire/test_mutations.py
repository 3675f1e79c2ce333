"""Seeded mutations of a blob are refused or canonical.

The default suite runs a part of them; ``pytest -m slow`` runs all.
"""

import copy
import json
import random
import re
import struct
import time
import tracemalloc
from functools import partial

import pytest
import torch

from blobs import content, mended
from fedprompt import Weighted, codecs, weighted_mean
from fedprompt.robust import weighted_median
from fedprompt.wire import Expected, Header, decode_payload, encode_payload, receive
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

REACHED = """
have a header of JSON
hold the N bytes of header that
hold N bytes of tensors
have the SHA-N
have a header as `encode_payload` writes it
hold 'scale' as F
hold 'steps' in the shape
a shape of integers
hold the N value rows
hold finite numbers in 'keys:value'
hold finite numbers of at least N in 'keys:weight'
hold finite numbers in 'scale'
hold booleans
come from the same backbone
have a count as 'server_round'
have an entry '__metadata__' of strings
"""


def survives(count, *, seed, max_bytes=2**14):
    """Decode mutated blobs: each is refused with a reason, or encodes to the same bytes again.

    Returns the number of accepted blobs and the largest memory that one of them took.
    """
    draw, read, most, expect = random.Random(seed), 0, 0, Expected(MESSAGE, PARTS)
    before, reasons = copy.deepcopy(MESSAGE), set()
    for _ in range(count):
        blob, refusal = mutated(draw), None
        before_it = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            message, header = decode_payload(blob, expect=expect, max_bytes=max_bytes)
        except ValueError as error:
            kind, refusal = type(error), str(error)
        most = max(most, tracemalloc.get_traced_memory()[1] - before_it)
        if refusal is None:
            read += 1
            assert encode_payload(message, header=header) == blob
            continue
        assert kind is ValueError, f"{kind}, {refusal} of {blob!r}"
        assert refusal.startswith("`blob` must "), f"{refusal} of {blob!r}"
        reasons.add(re.sub(r"\d+", "N", refusal))
    assert_identical(MESSAGE, before)
    reached = "\n".join(reasons)
    assert not [rule for rule in REACHED.strip().splitlines() if rule not in reached]
    return read, most


def test_mutated_blobs_are_refused_or_canonical():
    started = time.process_time()
    read, _ = survives(1200, seed=0)
    assert 0 < read < 600
    assert time.process_time() - started < 10


CODECS = {"float16": codecs.float16(), "int8": codecs.int8(), "top_k": codecs.top_k(fraction=0.5)}


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_a_mutated_blob_of_a_codec_is_that_clients_refusal_and_aggregates_if_accepted(codec):
    form = {"h": Weighted(torch.zeros(2, 3), torch.zeros(2))}
    entry = Weighted(torch.arange(6.0).reshape(2, 3), torch.tensor([5.0, 1.0]))
    sent, _ = codec.encode({"h": entry}, codec.init(form))
    evil, good = (encode_payload(sent, header=Header(client_id=each)) for each in "12")
    draw, accepted = random.Random(0), 0
    for _ in range(300):
        blob = bytearray(evil)
        _recount(blob, draw)
        arrivals, restore = [(1, mended(bytes(blob))), (2, good)], partial(codec.decode, like=form)
        got, refused = receive(arrivals, expect=Expected(sent), max_bytes=2000, restore=restore)
        assert 2 in got
        assert [client for client, _ in refused] == ([] if 1 in got else [1])
        weighted_mean(list(got.values()))
        weighted_median(list(got.values()))
        accepted += 1 in got
    assert 0 < accepted < 300


@pytest.mark.slow
@pytest.mark.unhooked  # memory is measured here
def test_twenty_thousand_mutated_blobs_take_at_most_twice_the_limit():
    limit = 2**20
    tracemalloc.start()
    try:
        read, most = survives(20_000, seed=1, max_bytes=limit)
        assert 0 < read < 10_000
        assert 0 < most < 2 * limit
    finally:
        tracemalloc.stop()
