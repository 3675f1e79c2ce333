"""Encoding writes one canonical safetensors blob."""

import hashlib
import struct

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings

from blobs import content
from fedprompt import Ledger, Weighted, num_bytes
from fedprompt.wire import Header, encode_payload, save_payload
from same import assert_identical
from wired import HEADER, MESSAGE, messages


@settings(deadline=None, max_examples=30)
@given(message=messages())
def test_the_bytes_after_the_header_are_those_that_are_counted(message):
    blob = encode_payload(message, header=HEADER)
    assert len(blob) - content(blob) == num_bytes(message)
    ledger = Ledger()
    ledger.record(message, direction="up", client=0, server_round=0, framed=len(blob))
    assert ledger.total() == len(blob) - content(blob)
    assert ledger.total(framed=True) == len(blob)


@settings(deadline=None, max_examples=30)
@given(message=messages())
def test_safetensors_reads_the_same_tensors(message):
    read = safetensors.torch.load(encode_payload(message, header=HEADER))
    for name, entry in message.items():
        if isinstance(entry, Weighted):
            assert_identical(read.pop(f"{name}:weight"), entry.weight)
            assert_identical(read.pop(f"{name}:value"), entry.value[entry.weight > 0])
        else:
            assert_identical(read.pop(name), entry)
    assert not read


def test_the_bytes_are_those_written_by_hand():
    blob = encode_payload(
        {"a": Weighted(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 3.0]))},
        header=Header(client_id="7"),
    )
    text = (
        b'{"__metadata__":{"client_id":"7","format":"fedprompt-2","server_round":"0",'
        b'"sha256":"%s"},'
        b'"a:value":{"dtype":"F32","shape":[1,1],"data_offsets":[0,4]},'
        b'"a:weight":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}'
    )
    text += b" " * (-len(text % (64 * b"0")) % 8)
    numbers = struct.pack("<3f", 2.0, 0.0, 3.0)
    digest = hashlib.sha256(text % (64 * b"0") + numbers).hexdigest().encode()
    assert blob == struct.pack("<Q", len(text % digest)) + text % digest + numbers


def test_equal_messages_give_equal_bytes_in_any_order(generator):
    message = {
        "b": torch.zeros(2, dtype=torch.int8),
        "a": torch.ones(3),
        "c": torch.ones(1, dtype=torch.float64),
        "d": torch.zeros(2),
    }
    header = HEADER._replace(meta=dict(reversed(HEADER.meta.items())))
    assert encode_payload(dict(reversed(message.items())), header=header) == encode_payload(
        message, header=HEADER
    )
    strided = torch.randn(3, 4, generator=generator)
    for view in (strided.T, strided[0, ::2]):
        assert encode_payload({"a": view}, header=HEADER) == encode_payload(
            {"a": view.contiguous()}, header=HEADER
        )


SPARSE, META = torch.ones(2).to_sparse(), torch.ones(2, device="meta")


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("message", "header", "error", "reason"),
    [
        (
            [torch.ones(1)],
            Header(),
            TypeError,
            r"`message` must map names to tensors or Weighted; got a list of length",
        ),
        (
            {"a": [1.0]},
            Header(),
            TypeError,
            r"`message\['a'\]` must be a tensor or a Weighted; got a list of length 1",
        ),
        (
            {1: torch.ones(1)},
            Header(),
            TypeError,
            r"`message` must have strings as names; got 1 \(int\)",
        ),
        (
            {"a:value": torch.ones(1)},
            Header(),
            ValueError,
            r"`message` must have no name '__metadata__'.*; got 'a:value'",
        ),
        (
            {"a:weight": torch.ones(1)},
            Header(),
            ValueError,
            r"`message` must have no name '__metadata__'.*; got 'a:weight'",
        ),
        (
            {"__metadata__": torch.ones(1)},
            Header(),
            ValueError,
            r"`message` must have no name '__metadata__'.*; got '__metadata__'",
        ),
        (
            {"\ud800": torch.ones(1)},
            Header(),
            ValueError,
            r"`message` must be text that UTF-8 can represent; got '\\ud800'",
        ),
        (
            {"a": torch.ones(1, dtype=torch.complex64)},
            Header(),
            TypeError,
            r"`message\['a'\]` must have a dtype of F64, .*complex64",
        ),
        *(
            (
                message,
                Header(),
                TypeError,
                rf"`message\['a'\]{field}` must be a dense tensor.*; got",
            )
            for message, field in (
                ({"a": SPARSE}, ""),
                ({"a": META}, ""),
                ({"a": Weighted(SPARSE, torch.ones(2))}, r"\.value"),
                ({"a": Weighted(torch.ones(2), SPARSE)}, r"\.weight"),
                ({"a": Weighted(META, META)}, r"\.value"),
            )
        ),
        (
            {"a": torch.tensor([1.0, torch.nan])},
            Header(),
            ValueError,
            r"`message\['a'\]` must be finite; got 1 entries of 2",
        ),
        (
            {"a": Weighted(torch.tensor([torch.inf]), torch.ones(1))},
            Header(),
            ValueError,
            r"`message\['a'\]\.value` must be finite wherever its weight is positive",
        ),
        (
            {"a": Weighted(torch.ones(1), -torch.ones(1))},
            Header(),
            ValueError,
            r"`message\['a'\]\.weight` must be finite and at least 0; got -1\.0",
        ),
        (
            {"a": Weighted(torch.ones(2), torch.ones(3))},
            Header(),
            ValueError,
            r"`message\['a'\]\.weight` must have the leading shape of `value` \(2,\); got \(3,\)",
        ),
        (MESSAGE, {}, TypeError, r"`header` must be a Header; got a dict of length 0"),
        (
            MESSAGE,
            Header({"a": 1}),
            TypeError,
            r"`header\.fingerprint` must map strings to strings; got a dict of length 1",
        ),
        (
            MESSAGE,
            Header(meta=[("a", "b")]),
            TypeError,
            r"`header\.meta` must map strings to strings; got a list of length 1",
        ),
        (
            MESSAGE,
            Header(client_id=7),
            TypeError,
            r"`header\.client_id` must be a string; got 7 \(int\)",
        ),
        (
            MESSAGE,
            Header(server_round=-1),
            ValueError,
            r"`header\.server_round` must be at least 0; got -1",
        ),
        (
            MESSAGE,
            Header(server_round=10**18),
            ValueError,
            r"`header\.server_round` must be below 10\^18; got 1000",
        ),
        (
            MESSAGE,
            Header(client_id="\udfff"),
            ValueError,
            r"`header` must be text that UTF-8 can represent",
        ),
        (
            MESSAGE,
            Header(meta={"a": "b" * 17_000}),
            ValueError,
            r"`header` must be at most 16384 bytes long as text; got 17\d\d\d",
        ),
    ],
)
def test_messages_and_headers_that_cannot_be_encoded_are_refused_by_name(
    message, header, error, reason, tmp_path
):
    path = tmp_path / "kept"
    path.write_text("old")
    with pytest.raises(error, match=reason):
        encode_payload(message, header=header)
    with pytest.raises(error, match=reason):
        save_payload(message, path, header=header)
    assert path.read_text() == "old"
