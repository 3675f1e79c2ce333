"""Every other blob is refused with a reason."""

import os
import pickle
import re
import struct

import pytest
import torch

from blobs import content, flipped, mended
from fedprompt.wire import Expected, Header, decode_payload, encode_payload
from refusals import refused
from same import assert_identical
from wired import (
    BLOB,
    ENTRY_ROWS,
    HEADER,
    HEADER_TEXT,
    MESSAGE,
    PARTS,
    as_received,
    attempt,
    decode,
    edit,
    forged,
    form,
    with_number,
)


def metadata(field, value):
    """Change one field of the metadata of `BLOB`."""
    return edit("__metadata__", field, value)


def without_metadata(field):
    """Remove one field of the metadata of `BLOB`."""
    return forged(lambda entries: entries["__metadata__"].pop(field) and None)


def text(change):
    """Change the text of the header of `BLOB`."""
    return forged(lambda entries: change(HEADER_TEXT))


# One row for each blob: an expression, and the start of the rule that it breaks.
BAD_BLOBS = r"""
b'' -> start with the length of its header in 8 bytes; got 0 bytes
BLOB[:7] -> start with the length of its header in 8 bytes; got 7 bytes
BLOB[:8] -> hold the
b'\xff' * 8 -> hold the 18446744073709551615 bytes of header that it announces; got 0 bytes
BLOB[:content(BLOB) - 1] -> hold the
b'\xff' * 8 + BLOB[8:] -> hold the 18446744073709551615 bytes of header that it announces
metadata('meta:x', 'y' * 20_000) -> have a header of at most
BLOB + bytes(2000) -> be at most 2000 bytes long; got
BLOB[:-1] -> hold 50 bytes of tensors; got 49
BLOB + b'!' -> hold 50 bytes of tensors; got 51
BLOB[:10] + b'\xff' + BLOB[11:] -> have a header of JSON; got 'utf-8' codec
text(lambda header: "{'a': 1}") -> have a header of JSON; got Expecting property name
text(lambda header: '[1]') -> have a JSON object as header; got list
text(lambda header: '[' * 16_000) -> have a header of JSON; got
text(lambda header: '1' * 5_000) -> have a header of JSON; got
text(lambda header: '1' * 20) -> have a JSON object as header; got int
text(lambda header: header.rstrip()[:-1] + ',"scale":{}}') -> hold 'scale' as F32; got None
text(lambda header: header.replace('"shape":[]', '"shape":[],"shape":[]')) -> have a header as
forged(lambda entries: entries.pop('__metadata__') and None) -> have an entry '__metadata__' of
metadata('meta:x', 1) -> have an entry '__metadata__' of strings
metadata('format', 'fedprompt-1') -> have the format 'fedprompt-2'; got 'fedprompt-1'
metadata('server_round', '-1') -> have a count as 'server_round'; got '-1'
metadata('server_round', '³') -> have a count as 'server_round'; got '³'
metadata('server_round', '9' * 19) -> have a count as 'server_round'
metadata('server_round', '03') -> have a header as `encode_payload` writes it
without_metadata('client_id') -> have a 'client_id'; got none
without_metadata('sha256') -> have a 'sha256'; got none
metadata('sha256', 'c0ffee') -> have the SHA-256 c0ffee
re.sub(b'"[0-9a-f]{64}"', lambda found: found[0].upper(), BLOB) -> have the SHA-256
BLOB.replace(struct.pack('<f', 4.5), struct.pack('<f', 4.25)) -> have the SHA-256
metadata('extra', 'x') -> have a header as `encode_payload` writes it
metadata('fingerprint:backbone', 'swin') \
-> come from the same backbone, {'backbone': 'vit'}; got {'backbone': 'swin'}
without_metadata('fingerprint:classes') \
-> come from the same classes, {'classes': 'cat, dog'}; got {'classes': None}
forged(lambda entries: entries.update(x=entries['scale'])) -> have no other tensors than expected; g
forged(lambda entries: entries.pop('scale') and None) -> have all tensors that are expected; got
forged(lambda entries: entries.update(scale=1)) -> describe 'scale' by an object; got int
edit('scale', 'dtype', 'I32') -> hold 'scale' as F32; got 'I32'
edit('scale', 'dtype', ['F32']) -> hold 'scale' as F32; got ['F32']
edit('steps', 'shape', [1, 2]) -> hold 'steps' in the shape (2,); got (1, 2)
encode_payload(MESSAGE | {'steps': torch.tensor([3, 4, 5])}, header=HEADER) \
-> hold 'steps' in the shape (2,); got (3,)
edit('keys:weight', 'shape', [2]) -> hold 'keys:weight' in the shape (3,); got (2,)
edit('keys:value', 'shape', [2**62, 2]) -> hold 'keys:value' in the shape with at most as many rows
edit('keys:value', 'shape', [4, 2]) -> hold 'keys:value' in the shape with at most as many rows as
edit('keys:value', 'shape', [-1, 2]) -> hold 'keys:value' in the shape with at most as many rows as
edit('keys:value', 'shape', [2, 3]) -> hold 'keys:value' in the shape with at most as many rows as
edit('keys:value', 'shape', []) -> hold 'keys:value' in the shape with at most as many rows as in (3
edit('keys:value', 'shape', [2.0, 2]) -> give 'keys:value' a shape of integers; got [2.0, 2]
edit('keys:value', 'shape', [True, 2]) -> give 'keys:value' a shape of integers; got [True, 2]
edit('steps', 'shape', 'two') -> give 'steps' a shape of integers; got two
edit('scale', 'data_offsets', [0, 4]) -> have a header as `encode_payload` writes it
edit('scale', 'data_offsets', [2**60, 2**60 + 4]) -> have a header as `encode_payload` writes it
edit('scale', 'code', 'import os') -> have a header as `encode_payload` writes it
text(lambda header: header.replace('"dtype"', ' "dtype"')) -> have a header as `encode_payload`
text(lambda header: header.replace('"scale"', '"sc\\u0061le"')) -> have a header as `encode_payload`
text(lambda header: header.replace('quoted', '\\ud800')) -> have a header as `encode_payload` writes
with_number(0.0, 32) -> hold the 1 value rows of 'keys' whose weight is above 0; got 2
with_number(1.0, 36) -> hold the 3 value rows of 'keys' whose weight is above 0; got 2
with_number(-1.0, 32) -> hold finite numbers of at least 0 in 'keys:weight'; got numbers from -1 to
with_number(torch.nan, 36) -> hold finite numbers of at least 0 in 'keys:weight'; got numbers from n
with_number(torch.inf, 40) -> hold finite numbers of at least 0 in 'keys:weight'; got numbers from 0
with_number(torch.nan, 16) -> hold finite numbers in 'keys:value'; got numbers from nan to nan
with_number(-torch.inf, 28) -> hold finite numbers in 'keys:value'; got numbers from -inf
with_number(torch.inf, 44) -> hold finite numbers in 'scale'; got numbers from inf to inf
with_number(2, 49, 'B') -> hold booleans as 0 or 1; got 2
""".replace("\\\n", "")


def test_the_original_of_all_forged_blobs_is_accepted():
    assert forged(lambda entries: None) == BLOB
    assert_identical(
        attempt(BLOB, len(BLOB))[0], {name: as_received(entry) for name, entry in MESSAGE.items()}
    )
    assert attempt(with_number(7.0, 16))[0]["keys"].value[0].tolist() == [7.0, 2.0]


def test_an_empty_shape_is_refused_where_rows_are_numbers():
    """One bit of `"shape":[0]` makes `"shape":[ ]`."""
    blob = encode_payload(ENTRY_ROWS, header=HEADER)
    assert blob.count(b'"shape":[0]') == 1
    with pytest.raises(ValueError, match=r"hold 'spread:value' in the shape .* \(2,\); got \(\)"):
        decode(mended(blob.replace(b'"shape":[0]', b'"shape":[ ]')), ENTRY_ROWS)


@pytest.mark.bad_input
@pytest.mark.parametrize("row", BAD_BLOBS.strip().splitlines())
def test_a_forged_blob_is_refused_with_a_reason(row):
    blob, reason = row.split(" -> ")
    max_bytes = 2000 if "2000" in reason else 40_000
    with pytest.raises(ValueError, match=f"^`blob` must {re.escape(reason)}") as refused:
        attempt(eval(blob), max_bytes)
    assert type(refused.value) is ValueError
    assert len(str(refused.value)) < 400


def sent_by(client, server_round):
    return encode_payload(MESSAGE, header=Header(PARTS, server_round, client))


def received(blob, **expected):
    return decode_payload(blob, expect=Expected(form(MESSAGE), PARTS, **expected), max_bytes=2**20)


def test_rounds_and_senders_are_accepted_if_they_are_equal_or_not_checked():
    for last in (3, 10**18 - 1):
        blob = sent_by("7", last)
        for expected in ({}, {"server_round": last}, {"client_id": "7"}):
            assert received(blob, **expected)[1] == Header(PARTS, last, "7")


SLOW = pytest.param(MESSAGE, id="rows", marks=pytest.mark.slow)


@pytest.mark.parametrize("message", [SLOW, pytest.param(ENTRY_ROWS, id="entries")])
@pytest.mark.unhooked  # the hook would take four times as long as the library
def test_every_change_of_a_single_bit_is_detected(message):
    """This holds for the length, the header and the numbers."""
    blob = encode_payload(message, header=Header(PARTS))
    expect = Expected(form(message), PARTS)
    for bit in range(8 * len(blob)):
        with pytest.raises(ValueError, match=r"^`blob` must "):
            decode_payload(flipped(blob, bit), expect=expect, max_bytes=2000)


class Bomb:
    def __reduce__(self):
        return os.abort, ()


@pytest.mark.parametrize(
    "write", [lambda: pickle.dumps(Bomb()), lambda: pickle.dumps({"scale": Bomb()}, protocol=0)]
)
def test_code_in_a_blob_is_not_run(write):
    """Unpickling would abort this process."""
    bomb = write()
    framed = struct.pack("<Q", len(bomb)) + bomb
    for blob in (bomb, framed, BLOB[: content(BLOB)] + bomb, bomb + BLOB):
        with pytest.raises(ValueError, match=r"^`blob` must "):
            attempt(blob)


test_wrong_calls_are_refused_by_name = refused(globals())("""
received(sent_by('7', 2), server_round=3) -> ValueError: `blob` must be of round 3; got one of round
received(sent_by('7', 3), server_round=0) -> ValueError: `blob` must be of round 0; got one of round
received(sent_by('8', 3), client_id='7') -> ValueError: `blob` must have the client_id '7'; got '8'.
received(sent_by('8', 3), client_id='') -> ValueError: `blob` must have the client_id ''; got '8'.
decode_payload(bytearray(BLOB), expect=Expected(MESSAGE), max_bytes=2000) \
-> TypeError: `blob` must be bytes; got a bytearray
decode(BLOB, MESSAGE, max_bytes=57) -> ValueError: `max_bytes` must be at least 58, the size of `exp
decode(BLOB, MESSAGE, max_bytes=58) -> ValueError: `blob` must be at most 58 bytes long; got
decode(BLOB, {}, max_bytes=0) -> ValueError: `max_bytes` must be at least 1; got 0
decode(BLOB, MESSAGE, max_bytes=1e6) -> TypeError: `max_bytes` must be an integer; got 1000000.0
decode(BLOB, MESSAGE, parts={'a': 1}) -> TypeError: `expect.fingerprint` must map strings to strings
decode_payload(BLOB, expect=MESSAGE, max_bytes=2000) -> TypeError: `expect` must be Expected(message
decode_payload(BLOB, expect=Expected({'a': torch.eye(2).to_sparse()}), max_bytes=2000) \
-> TypeError: `expect.message['a']` must be a dense tensor; got
decode_payload(BLOB, expect=Expected([1]), max_bytes=2000) -> TypeError: `expect.message` must map
received(BLOB, server_round='') -> TypeError: `expect.server_round` must be an integer; got '' (str)
received(BLOB, server_round=-1) -> ValueError: `expect.server_round` must be at least 0; got -1
received(BLOB, client_id=7) -> TypeError: `expect.client_id` must be a string or None; got 7 (int)
""")


def test_refusals_contain_printable_characters_only():
    message = {"scale": torch.tensor(1.0)}
    blob = encode_payload(message, header=Header(client_id="1\x1b[2J\n\u202e"))
    spaced = (int.from_bytes(blob[:8], "little") + 1).to_bytes(8, "little")
    spaced += blob[8:].replace(b",", b", ", 1)
    for sent, client in ((spaced, None), (blob, "2")):
        with pytest.raises(ValueError, match="`blob` must have") as caught:
            decode_payload(sent, expect=Expected(message, client_id=client), max_bytes=1000)
        assert str(caught.value).isprintable()
