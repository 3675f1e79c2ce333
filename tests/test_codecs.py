"""What codecs refuse, the width of indices, and rows that are unknown or empty."""

import pytest
import torch

from fedprompt import Weighted
from fedprompt.codecs import float16, int8, top_k
from refusals import refused
from same import assert_identical

HALF, BYTE, TOP = float16(), int8(), top_k(fraction=0.25)
ONE = {"a": Weighted(torch.ones(2, 3), torch.ones(2))}

SENT, _ = TOP.encode(ONE, TOP.init(ONE))


@pytest.mark.bad_input
@pytest.mark.parametrize("indices", [[0, 6], [-1, 2], [3, 3], [4, 1], [32767, -32768], [3, -32768]])
def test_received_indices_are_checked(indices):
    message, _ = TOP.encode(ONE, TOP.init(ONE))
    assert message["a/indices"].shape == (2,)
    wrong = message | {"a/indices": torch.tensor(indices, dtype=torch.int16)}
    with pytest.raises(ValueError, match=r"indices'\]` must increase within \[0, 6\); got \["):
        TOP.decode(wrong, like=ONE)


@pytest.mark.parametrize(("size", "dtype"), [(32767, torch.int16), (32768, torch.int32)])
def test_indices_are_as_narrow_as_the_largest_of_them_allows(size, dtype):
    value = torch.zeros(size).index_fill(0, torch.tensor([size - 1]), 2.0)
    payload = {"a": Weighted(value, torch.tensor(1.0))}
    codec = top_k(fraction=1 / size)
    message, _ = codec.encode(payload, codec.init(payload))
    assert message["a/indices"].dtype == dtype
    assert codec.decode(message, like=payload)["a"].value.equal(payload["a"].value)


@pytest.mark.parametrize("fraction", [0.5, 0.75, 1.0])
def test_the_state_of_an_unknown_row_is_neither_sent_nor_lost(fraction):
    """Two numbers are known. Up to two unknown ones are also sent, as zeros."""
    codec, waiting = top_k(fraction=fraction), torch.tensor([[10.0, 20.0], [0.0, 0.0]]).double()
    payload = {"head": Weighted(torch.tensor([[7.0, 7.0], [0.5, 0.25]]), torch.tensor([0.0, 1.0]))}
    message, state = codec.encode(payload, {"head": waiting})
    decoded = codec.decode(message, like=payload)["head"].value
    assert decoded.tolist() == [[0.0, 0.0], [0.5, 0.25]]
    assert message["head/values"].abs().sum() == 0.75
    assert_identical(state["head"], waiting)


def test_a_scale_that_float32_rounds_down_leaves_the_codes_within_127():
    """2.6e-43 / 127 is 1.46 times the smallest float32."""
    value = torch.tensor([-2.6e-43, 2.6e-43], dtype=torch.float64)
    codec, payload = int8(), {"head": Weighted(value, torch.tensor(1.0))}
    message, _ = codec.encode(payload, codec.init(payload))
    assert message["head/codes"].tolist() == [-127, 127]


def test_unknown_rows_of_a_message_are_decoded_as_zeros():
    codec, like = top_k(fraction=0.5), {"a": Weighted(torch.zeros(2, 2), torch.zeros(2))}
    sent = {"a": Weighted(torch.ones(2, 2), torch.tensor([1.0, 0.0]))}
    message, _ = codec.encode(sent, codec.init(like))
    forged = message | {"a/indices": torch.tensor([1, 2], dtype=message["a/indices"].dtype)}
    assert codec.decode(forged, like=like)["a"].value.tolist() == [[0.0, 1.0], [0.0, 0.0]]


@pytest.mark.bad_input
def test_a_number_that_overflows_with_its_state_is_refused():
    codec, state = top_k(fraction=1.0), {"a": torch.tensor([3e38]).double()}
    with pytest.raises(ValueError, match=r"`payload\['a'\] with its state` must be finite"):
        codec.encode({"a": Weighted(torch.tensor([3e38]), torch.tensor(1.0))}, state)
    assert state["a"].item() == pytest.approx(3e38)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_without_numbers_or_of_zeros_have_a_scale_of_zero(dtype):
    for value in (torch.zeros(2, 0, dtype=dtype), torch.zeros(2, 3, dtype=dtype)):
        codec, payload = int8(), {"head": Weighted(value, torch.tensor([3.0, 0.0]))}
        message, _ = codec.encode(payload, codec.init(payload))
        assert message["head/scale"].value.dtype == torch.float32
        assert message["head/scale"].value.tolist() == [0.0, 0.0]
        assert message["head/scale"].weight.tolist() == [3.0, 0.0]
        assert codec.decode(message, like=payload)["head"].value.equal(value)


@pytest.mark.parametrize("codec", [HALF, BYTE, TOP], ids=["16", "8", "top"])
def test_no_message_and_no_state_has_a_graph(codec):
    payload = {"a": Weighted(*(part.clone().requires_grad_() for part in ONE["a"]))}
    message, state = codec.encode(payload, codec.init(payload))
    entries = [entry if isinstance(entry, Weighted) else (entry,) for entry in message.values()]
    assert not any(part.requires_grad for entry in [*entries, state.values()] for part in entry)


test_wrong_calls_are_refused_by_name = refused(globals())("""
top_k(fraction=0) -> ValueError: `fraction` must be above 0; got 0
top_k(fraction=1.5) -> ValueError: `fraction` must be at most 1; got 1.5
HALF.encode({'a': Weighted(tensor([70000.0]), ones(1))}, {}) -> ValueError: in float16` must be fini
BYTE.encode({'a': Weighted(torch.tensor([1e+300]).double() * 1e+300, torch.ones(1))}, {}) \
-> ValueError: `payload['a'].value` must be finite wherever
BYTE.encode({'a': Weighted(torch.tensor([1e+300], dtype=torch.float64), torch.ones(1))}, {}) \
-> ValueError: `payload['a'] over 127, in float32` must be finite
TOP.encode(ONE, {}) -> ValueError: `state` must come from `init` or the last `encode` of ['a']; got
TOP.encode(ONE, {'a': torch.ones(3).double()}) -> ValueError: `state['a']` must have shape (2, 3)
TOP.encode(ONE, {'a': 1}) -> TypeError: `state['a']` must be a tensor of torch.float64; got 1
HALF.decode([], like=ONE) -> TypeError: `message` must map names to tensors or Weighted; got a list
HALF.decode({}, like=ONE) -> ValueError: `message` must have the names ['a']; got []
HALF.decode(ONE, like=ONE) -> TypeError: `message['a'].value` must be a tensor of torch.float16
HALF.decode({'a': torch.ones(1)}, like=ONE) -> TypeError: `message['a']` must be a Weighted
BYTE.decode({'a/codes': torch.ones(2, 3), 'a/scale': ONE['a']}, like=ONE) \
-> TypeError: `message['a/codes']` must be a tensor of torch.int8; got a float32
BYTE.decode({'a/codes': torch.ones(2, 3, dtype=torch.int8), 'a/scale': ONE['a']}, like=ONE) \
-> ValueError: `message['a/scale'].value` must have shape (2,); got (2, 3)
BYTE.decode({'a': torch.ones(2)}, like=ONE) -> ValueError: `message` must have the names
TOP.decode(SENT | {'a/weight': ones(3)}, like=ONE) -> ValueError: ['a/weight']` must have shape (2,)
TOP.decode(SENT | {'a/weight': tensor([1.0, -1.0])}, like=ONE) -> ValueError: ['a'].weight` must be
""")
