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
from refusals import check_refused, refusals
from same import assert_identical
from wired import HEADER, messages


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
    entry = Weighted(torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 3.0]))
    blob = encode_payload({"a": entry}, header=Header(client_id="7"))
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
    again = encode_payload(dict(reversed(message.items())), header=header)
    assert again == encode_payload(message, header=HEADER)
    strided = torch.randn(3, 4, generator=generator)
    for view in (strided.T, strided[0, ::2]):
        plain = encode_payload({"a": view.contiguous()}, header=HEADER)
        assert encode_payload({"a": view}, header=HEADER) == plain


SPARSE, META = torch.ones(2).to_sparse(), torch.ones(2, device="meta")
ONE, PLAIN, SENT = torch.ones(1), Header(), {"a": torch.ones(1)}
REFUSED = r"""
[ONE], PLAIN -> TypeError: `message` must map names to tensors or Weighted; got a list of length
{'a': [1.0]}, PLAIN -> TypeError: `message['a']` must be a tensor or a Weighted; got a list of
{1: ONE}, PLAIN -> TypeError: `message` must have strings as names; got 1 (int)
{'a:value': ONE}, PLAIN -> ValueError: `message` must have no name '__metadata__', nor one that ends
{'a:weight': ONE}, PLAIN -> ValueError: `message` must have no name '__metadata__', nor one that
{'__metadata__': ONE}, PLAIN -> ValueError: `message` must have no name '__metadata__', nor one that
{'\ud800': ONE}, PLAIN -> ValueError: `message` must be text that UTF-8 can represent; got '\ud800'
{'a': ONE.to(torch.complex64)}, PLAIN -> TypeError: `message['a']` must have a dtype of F64, F32
{'a': SPARSE}, PLAIN -> TypeError: `message['a']` must be a dense tensor
{'a': META}, PLAIN -> TypeError: `message['a']` must be a dense tensor
{'a': Weighted(META, META)}, PLAIN -> TypeError: `message['a'].value` must be a dense tensor
{'a': torch.tensor([1.0, torch.nan])}, PLAIN -> ValueError: `message['a']` must be finite; got 1
{'a': Weighted(torch.tensor([torch.inf]), ONE)}, PLAIN -> ValueError: `message['a'].value` must be
{'a': Weighted(ONE, -ONE)}, PLAIN -> ValueError: `message['a'].weight` must be finite and at least 0
SENT, {} -> TypeError: `header` must be a Header; got a dict of length 0
SENT, Header({'a': 1}) -> TypeError: `header.fingerprint` must map strings to strings; got a dict
SENT, Header(meta=[('a', 'b')]) -> TypeError: `header.meta` must map strings to strings; got a
SENT, Header(client_id=7) -> TypeError: `header.client_id` must be a string; got 7 (int)
SENT, Header(server_round=-1) -> ValueError: `header.server_round` must be at least 0; got -1
SENT, Header(server_round=10**18) -> ValueError: `header.server_round` must be below 10^18; got
SENT, Header(client_id='\udfff') -> ValueError: `header` must be text that UTF-8 can represent
SENT, Header(meta={'a': 'b' * 17_000}) -> ValueError: `header` must be at most 16384 bytes long
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("arguments", "error", "reason"), refusals(REFUSED))
def test_messages_and_headers_that_cannot_be_encoded_are_refused_by_name(
    arguments, error, reason, tmp_path
):
    path = tmp_path / "kept"
    path.write_text("old")
    for call in ("encode(*({}))", "save(*({}))"):
        save = lambda message, header: save_payload(message, path, header=header)  # noqa: E731
        encode = lambda message, header: encode_payload(message, header=header)  # noqa: E731
        bound = {"save": save, "encode": encode}
        check_refused(call.format(arguments), error, reason, globals() | bound)
    assert path.read_text() == "old"
