"""Every other blob is refused with a reason."""

import os
import pickle
import struct

import pytest
import safetensors
import safetensors.torch
import torch

from blobs import DIGEST, content, flipped, mended
from fedprompt import Weighted
from fedprompt.wire import Expected, Header, decode_payload, encode_payload
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


NOT_CANONICAL = r"have a header as `encode_payload` writes it"
DAMAGED = r"of its header; got [0-9a-f]{12} \(damaged content\)"
ROWS = r"hold 'keys:value' in the shape with at most as many rows as in \(3, 2\); got "

BAD_BLOBS = {
    "nothing": (b"", r"start with the length of its header in 8 bytes; got 0 bytes"),
    "seven bytes": (BLOB[:7], r"start with the length of its header in 8 bytes; got 7 bytes"),
    "all but a byte of a header": (
        BLOB[: content(BLOB) - 1],
        r"hold the \d+ bytes of header that it announces; got \d+ bytes",
    ),
    "half a header": (BLOB[:90], r"hold the \d+ bytes of header that it announces; got 82 bytes"),
    "the largest length": (
        b"\xff" * 8 + BLOB[8:],
        r"hold the 18446744073709551615 bytes of header that it announces",
    ),
    "a header of 20 kB": (
        forged(lambda entries: entries["__metadata__"].update({"meta:x": "y" * 20_000})),
        r"have a header of at most \d+ bytes",
    ),
    "too long": (BLOB + bytes(2000), r"be at most 2000 bytes long; got \d+"),
    "one byte less": (BLOB[:-1], r"hold 50 bytes of tensors; got 49"),
    "one byte more": (BLOB + b"\0", r"hold 50 bytes of tensors; got 51"),
    "no UTF-8": (BLOB[:10] + b"\xff" + BLOB[11:], r"have a header of JSON; got 'utf-8' codec"),
    "no JSON": (
        text(lambda header: "{'a': 1}"),
        r"have a header of JSON; got Expecting property name",
    ),
    "a list": (text(lambda header: "[1]"), r"have a JSON object as header; got list"),
    "a million brackets": (
        text(lambda header: "[" * 16_000),
        r"have a header of JSON that is three levels deep",
    ),
    "a number of 5000 digits": (
        text(lambda header: "9" * 5000),
        r"write numbers in at most 20 digits; got 5000 of them",
    ),
    "a key twice": (
        text(lambda header: header.rstrip()[:-1] + ',"scale":{}}'),
        r"name every key once; got two of 'scale'",
    ),
    "a shape twice": (
        text(lambda header: header.replace('"shape":[]', '"shape":[],"shape":[]')),
        r"name every key once; got two of 'shape'",
    ),
    "no metadata": (
        forged(lambda entries: entries.pop("__metadata__") and None),
        r"have an entry '__metadata__' of strings; got None",
    ),
    "metadata of numbers": (metadata("meta:x", 1), r"have an entry '__metadata__' of strings"),
    "another format": (
        metadata("format", "fedprompt-9"),
        r"have the format 'fedprompt-2'; got 'fedprompt-9'",
    ),
    "the format of before": (
        metadata("format", "fedprompt-1"),
        r"have the format 'fedprompt-2'; got 'fedprompt-1'",
    ),
    "a plain safetensors file": (
        safetensors.torch.save({"scale": torch.ones(1)}),
        r"have an entry '__metadata__' of strings; got None",
    ),
    "a negative round": (
        metadata("server_round", "-1"),
        r"have a count as 'server_round'; got '-1'",
    ),
    "a round in another script": (
        metadata("server_round", "³"),
        r"have a count as 'server_round'; got '³'",
    ),
    "an endless round": (metadata("server_round", "9" * 5000), r"have a count as 'server_round'"),
    "another way to write 3": (metadata("server_round", "03"), NOT_CANONICAL),
    "no sender": (without_metadata("client_id"), r"have a 'client_id'; got none"),
    "no digest": (without_metadata("sha256"), r"have a 'sha256'; got none"),
    "a digest of something else": (
        metadata("sha256", "c0ffee"),
        r"have the SHA-256 c0ffee " + DAMAGED,
    ),
    "a digest in other letters": (
        BLOB.replace(DIGEST.search(BLOB)[0], DIGEST.search(BLOB)[0].upper()),
        r"have the SHA-256 [0-9A-F]{12} " + DAMAGED,
    ),
    "another number": (
        BLOB.replace(struct.pack("<f", 4.5), struct.pack("<f", 4.25)),
        r"have the SHA-256 [0-9a-f]{12} " + DAMAGED,
    ),
    "an unknown field": (metadata("extra", "x"), NOT_CANONICAL),
    "another backbone": (
        metadata("fingerprint:backbone", "swin"),
        r"come from the same backbone, \{'backbone': 'vit'\}; got \{'backbone': 'swin'\}",
    ),
    "no class names": (
        without_metadata("fingerprint:classes"),
        r"come from the same classes, \{'classes': 'cat, dog'\}; got \{'classes': None\}",
    ),
    "a name more": (
        forged(lambda entries: entries.update(x=entries["scale"])),
        r"have no other tensors than expected; got also \['x'\]",
    ),
    "a name less": (
        forged(lambda entries: entries.pop("scale") and None),
        r"have all tensors that are expected; got none named \['scale'\]",
    ),
    "a number as an entry": (
        forged(lambda entries: entries.update(scale=1)),
        r"describe 'scale' by an object; got int",
    ),
    "another dtype": (edit("scale", "dtype", "I32"), r"hold 'scale' as F32; got 'I32'"),
    "an unknown dtype": (edit("scale", "dtype", ["F32"]), r"hold 'scale' as F32; got \['F32'\]"),
    "another shape": (
        edit("steps", "shape", [1, 2]),
        r"hold 'steps' in the shape \(2,\); got \(1, 2\)",
    ),
    "a longer tensor": (
        encode_payload(MESSAGE | {"steps": torch.tensor([3, 4, 5])}, header=HEADER),
        r"hold 'steps' in the shape \(2,\); got \(3,\)",
    ),
    "more weights": (
        encode_payload(
            MESSAGE | {"keys": Weighted(torch.ones(4, 2), torch.tensor([1.0, 0.0, 1.0, 1.0]))},
            header=HEADER,
        ),
        r"hold 'keys:weight' in the shape \(3,\); got \(4,\)",
    ),
    "a huge shape": (edit("keys:value", "shape", [2**62, 2]), ROWS + r"\(46"),
    "a row too many": (edit("keys:value", "shape", [4, 2]), ROWS + r"\(4, 2\)"),
    "fewer than no rows": (edit("keys:value", "shape", [-1, 2]), ROWS + r"\(-1, 2\)"),
    "wider rows": (edit("keys:value", "shape", [2, 3]), ROWS + r"\(2, 3\)"),
    "no rows": (edit("keys:value", "shape", []), ROWS + r"\(\)"),
    "a fraction of a row": (
        edit("keys:value", "shape", [2.0, 2]),
        r"give 'keys:value' a shape of integers; got \[2\.0, 2\]",
    ),
    "true rows": (
        edit("keys:value", "shape", [True, 2]),
        r"give 'keys:value' a shape of integers; got \[True, 2\]",
    ),
    "a shape in words": (
        edit("steps", "shape", "two"),
        r"give 'steps' a shape of integers; got two",
    ),
    "offsets that overlap": (edit("scale", "data_offsets", [0, 4]), NOT_CANONICAL),
    "offsets behind the end": (edit("scale", "data_offsets", [2**60, 2**60 + 4]), NOT_CANONICAL),
    "a field more": (edit("scale", "code", "import os"), NOT_CANONICAL),
    "spaces": (text(lambda header: header.replace('"dtype"', ' "dtype"')), NOT_CANONICAL),
    "another way to write a name": (
        text(lambda header: header.replace('"scale"', '"sc\\u0061le"')),
        NOT_CANONICAL,
    ),
    "half a character": (text(lambda header: header.replace("quoted", "\\ud800")), NOT_CANONICAL),
    "a known row less": (
        with_number(0.0, 32),
        r"hold the 1 value rows of 'keys' whose weight is above 0; got 2",
    ),
    "a known row more": (
        with_number(1.0, 36),
        r"hold the 3 value rows of 'keys' whose weight is above 0; got 2",
    ),
    "a negative weight": (
        with_number(-1.0, 32),
        r"hold finite numbers of at least 0 in 'keys:weight'; got numbers from -1 to 1",
    ),
    "a NaN weight": (
        with_number(torch.nan, 36),
        r"hold finite numbers of at least 0 in 'keys:weight'; got numbers from nan to nan",
    ),
    "an infinite weight": (
        with_number(torch.inf, 40),
        r"hold finite numbers of at least 0 in 'keys:weight'; got numbers from 0 to inf",
    ),
    "a NaN value": (
        with_number(torch.nan, 16),
        r"hold finite numbers in 'keys:value'; got numbers from nan to nan",
    ),
    "an infinite value": (
        with_number(-torch.inf, 28),
        r"hold finite numbers in 'keys:value'; got numbers from -inf",
    ),
    "an infinite tensor": (
        with_number(torch.inf, 44),
        r"hold finite numbers in 'scale'; got numbers from inf to inf",
    ),
    "a boolean of 2": (with_number(2, 49, "B"), r"hold booleans as 0 or 1; got 2"),
}


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
    with pytest.raises(
        ValueError,
        match=r"hold 'spread:value' in the shape with at most as many rows as in \(2,\); got \(\)",
    ):
        decode(mended(blob.replace(b'"shape":[0]', b'"shape":[ ]')), ENTRY_ROWS)


@pytest.mark.bad_input
@pytest.mark.parametrize(("blob", "reason"), BAD_BLOBS.values(), ids=BAD_BLOBS)
def test_a_forged_blob_is_refused_with_a_reason(blob, reason):
    max_bytes = 2000 if "2000" in reason else 40_000
    with pytest.raises(ValueError, match=f"^`blob` must {reason}") as refused:
        attempt(blob, max_bytes)
    assert type(refused.value) is ValueError
    assert len(str(refused.value)) < 400


ONE_ROUND = Header({"backbone": "vit"}, 3, "7")


@pytest.mark.parametrize(
    ("late", "part"),
    [
        (ONE_ROUND._replace(server_round=2), r"be of round 3; got one of round 2"),
        (ONE_ROUND._replace(server_round=0), r"be of round 3; got one of round 0"),
        (ONE_ROUND._replace(client_id="8"), r"have the client_id '7'; got '8'"),
        (ONE_ROUND._replace(client_id=""), r"have the client_id '7'; got ''"),
        (ONE_ROUND._replace(client_id="y" * 10_000), r"have the client_id '7'; got 'y{119}"),
    ],
)
def test_another_round_or_sender_is_refused_if_it_is_checked(late, part):
    expect = Expected(form(MESSAGE), ONE_ROUND.fingerprint, server_round=3, client_id="7")
    assert (
        decode_payload(encode_payload(MESSAGE, header=ONE_ROUND), expect=expect, max_bytes=2**20)[1]
        == ONE_ROUND
    )
    blob = encode_payload(MESSAGE, header=late)
    with pytest.raises(ValueError, match=rf"^`blob` must {part}\.$"):
        decode_payload(blob, expect=expect, max_bytes=2**20)
    assert decode_payload(blob, expect=Expected(form(MESSAGE)), max_bytes=2**20)[1] == late


def test_round_0_and_an_empty_client_id_are_checked():
    """Both are false in Python, but they are not None."""
    blob = encode_payload(MESSAGE, header=ONE_ROUND)
    for expect, part in (
        (Expected(form(MESSAGE), server_round=0), "be of round 0"),
        (Expected(form(MESSAGE), client_id=""), "have the client_id ''"),
    ):
        with pytest.raises(ValueError, match=f"^`blob` must {part}; got "):
            decode_payload(blob, expect=expect, max_bytes=2**20)


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(MESSAGE, id="rows", marks=pytest.mark.slow),
        pytest.param(ENTRY_ROWS, id="entries"),
    ],
)
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
    for blob in (
        bomb,
        struct.pack("<Q", len(bomb)) + bomb,
        BLOB[: content(BLOB)] + bomb,
        bomb + BLOB,
    ):
        with pytest.raises(ValueError, match=r"^`blob` must "):
            attempt(blob)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arguments", "error", "reason"),
    [
        ({"blob": bytearray(BLOB)}, TypeError, r"`blob` must be bytes; got a bytearray"),
        (
            {"max_bytes": 49},
            ValueError,
            r"`max_bytes` must be at least 58, the size of `expect\.message`; got 49",
        ),
        ({"max_bytes": 58}, ValueError, r"`blob` must be at most 58 bytes long; got \d+"),
        ({"max_bytes": 0}, ValueError, r"`max_bytes` must be at least 1; got 0"),
        ({"max_bytes": 1e6}, TypeError, r"`max_bytes` must be an integer; got 1000000\.0"),
        (
            {"expect": MESSAGE},
            TypeError,
            r"`expect` must be Expected\(message, \.\.\.\); got a dict of length 4",
        ),
        (
            {"expect": Expected([1])},
            TypeError,
            r"`expect\.message` must map names to tensors or Weighted; got a list of length 1",
        ),
        (
            {"expect": Expected(MESSAGE, {"a": 1})},
            TypeError,
            r"`expect\.fingerprint` must map strings to strings; got a dict of length 1",
        ),
        (
            {"expect": Expected(MESSAGE, server_round="3")},
            TypeError,
            r"`expect\.server_round` must be an integer; got '3' \(str\)",
        ),
        (
            {"expect": Expected(MESSAGE, server_round="")},
            TypeError,
            r"`expect\.server_round` must be an integer; got '' \(str\)",
        ),
        (
            {"expect": Expected(MESSAGE, server_round=-1)},
            ValueError,
            r"`expect\.server_round` must be at least 0; got -1",
        ),
        (
            {"expect": Expected(MESSAGE, client_id=7)},
            TypeError,
            r"`expect\.client_id` must be a string or None; got 7 \(int\)",
        ),
    ],
)
def test_bad_arguments_of_a_receiver_are_refused_by_name(arguments, error, reason):
    with pytest.raises(error, match=reason):
        decode_payload(
            **{"blob": BLOB, "expect": Expected(MESSAGE, PARTS), "max_bytes": 2000, **arguments}
        )


def test_refusals_contain_printable_characters_only():
    blob = encode_payload({"scale": torch.tensor(1.0)}, header=Header(client_id="1\x1b[2J\n\u202e"))
    spaced = (int.from_bytes(blob[:8], "little") + 1).to_bytes(8, "little") + blob[8:].replace(
        b",", b", ", 1
    )
    with pytest.raises(ValueError, match="`blob` must have a header as") as caught:
        decode_payload(spaced, expect=Expected({"scale": torch.tensor(1.0)}), max_bytes=1000)
    with pytest.raises(ValueError, match="`blob` must have the client_id") as named:
        decode_payload(
            blob, expect=Expected({"scale": torch.tensor(1.0)}, client_id="2"), max_bytes=1000
        )
    assert str(caught.value).isprintable()
    assert str(named.value).isprintable()
