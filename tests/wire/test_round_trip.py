"""Decoding restores the message that was encoded."""

import json
import re

import pytest
import torch
from hypothesis import given, settings

from blobs import content
from fedprompt import Weighted
from fedprompt.wire import Header, encode_payload
from same import assert_identical
from wired import HEADER, MESSAGE, as_received, decode, messages


@settings(deadline=None, max_examples=60)
@given(message=messages())
def test_a_message_comes_back_with_rows_of_weight_zero_as_zeros(message):
    blob = encode_payload(message, header=HEADER)
    received, header = decode(blob, message)
    assert header == HEADER
    assert list(received) == list(message)
    for name, entry in message.items():
        assert isinstance(received[name], Weighted) == isinstance(entry, Weighted)
        assert_identical(received[name], as_received(entry))
    assert encode_payload(received, header=header) == blob


def test_decoded_tensors_share_no_memory_with_the_blob():
    sent = {"a": torch.ones(2), "w": Weighted(torch.ones(2), torch.ones(2))}
    blob = encode_payload(sent, header=HEADER)
    before = bytes(bytearray(blob))
    message, _ = decode(blob, sent)
    for tensor in (message["a"], *message["w"]):
        tensor.fill_(5)
    assert blob == before


def test_gradients_are_not_sent():
    value = torch.ones(2, requires_grad=True)
    sent = {"a": value, "w": Weighted(value * 2, value.sum() / 2)}
    received, _ = decode(encode_payload(sent, header=HEADER), sent)
    assert not received["a"].requires_grad
    assert received["w"].value.tolist() == [2.0, 2.0]


def test_the_longest_header_that_can_be_encoded_can_be_decoded():
    rule = r"at most 16384 bytes long as text; got 2\d{4}"
    with pytest.raises(ValueError, match=rule) as refused:
        encode_payload(MESSAGE, header=Header(meta={"a": "b" * 20_000}))
    longest = 20_000 + 16_384 - int(re.search(r"got (\d+)", str(refused.value))[1])
    header = Header(meta={"a": "b" * longest})
    blob = encode_payload(MESSAGE, header=header)
    assert len(json.dumps(json.loads(blob[8 : content(blob)])["__metadata__"]).encode()) == 16_384
    assert decode(blob, MESSAGE, parts={})[1] == header
    with pytest.raises(ValueError, match="got 16385"):
        encode_payload(MESSAGE, header=Header(meta={"a": "b" * (longest + 1)}))


def test_the_largest_round_is_accepted():
    blob = encode_payload(MESSAGE, header=Header(server_round=10**18 - 1))
    assert decode(blob, MESSAGE, parts={})[1].server_round == 10**18 - 1
