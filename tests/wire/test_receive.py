"""Receiving keeps the first valid message of each client, and a reason for every other blob."""

import tracemalloc
from functools import partial
from itertools import permutations

import pytest
import torch

from blobs import flipped, overwritten
from fedprompt import Weighted
from fedprompt.codecs import top_k
from fedprompt.wire import Expected, Header, encode_payload, receive
from refusals import check_refused, refusals
from same import assert_identical

FORM = {"head": Weighted(torch.zeros(2, 3), torch.zeros(2)), "scale": torch.tensor(0.0)}
EXPECT = Expected(FORM, {"backbone": "vit"}, server_round=4)


def message(number):
    return {
        "head": Weighted(torch.full((2, 3), float(number)), torch.tensor([1.0, 0.0])),
        "scale": torch.tensor(number / 3),
    }


def sent(client, number=None, *, server_round=4, claim=None, parts=EXPECT.fingerprint):
    header = Header(parts, server_round, str(client) if claim is None else claim)
    return client, encode_payload(message(client if number is None else number), header=header)


def damaged(client):
    return client, flipped(sent(client)[1], -9)


taken = partial(receive, expect=EXPECT, max_bytes=2000)


def test_messages_are_in_the_order_of_ids_for_every_order_of_arrival():
    arrivals = [sent(10), sent(2), sent(0), damaged(7)]
    for order in permutations(arrivals):
        accepted, refused = taken(order)
        assert list(accepted) == [0, 2, 10]
        assert [client for client, _ in refused] == [7]
        for client, own in accepted.items():
            head = message(client)["head"].value * torch.tensor([[1.0], [0.0]])
            assert_identical(own["head"].value, head)
            assert_identical(own["scale"], message(client)["scale"])
    assert taken([]) == ({}, [])


def test_ids_that_are_strings_are_ordered_as_text():
    accepted, _ = taken([sent(name, 1) for name in ("b", "a", "10", "9")])
    assert list(accepted) == ["10", "9", "a", "b"]


def test_the_first_valid_blob_of_a_client_counts():
    accepted, refused = taken([damaged(1), sent(1, 5), sent(1, 6), damaged(1)])
    assert accepted[1]["scale"].item() == pytest.approx(5 / 3)
    assert [client for client, _ in refused] == [1, 1, 1]
    assert "SHA-256" in refused[0][1]
    assert [reason for _, reason in refused[1:]] == [
        "Client 1 already sent a valid blob for this round; this one is ignored."
    ] * 2


NAN = overwritten(sent(1)[1], 0, b"\0\0\xc0\x7f")
# One row for each arrival of client 1, and the start of the rule that it breaks.
INVALID = r"""
sent(1, server_round=3) -> be of round 4; got one of round 3
sent(1, server_round=5) -> be of round 4; got one of round 5
sent(2) -> have the client_id '1'; got '2'
sent(1, claim='') -> have the client_id '1'; got ''
sent(1, claim='01') -> have the client_id '1'; got '01'
sent(1, parts={'backbone': 'swin'}) -> come from the same backbone
(1, encode_payload({'head': FORM['head']}, header=Header(EXPECT.fingerprint, 4, '1'))) \
-> have all tensors that are expected
(1, b'') -> start with the length of its header
(1, sent(1)[1][:-1]) -> hold 24 bytes of tensors; got 23
(1, bytes(3000)) -> be at most 2000 bytes long; got 3000
(1, NAN) -> hold finite numbers in 'head:value'
(1, None) -> be bytes; got a NoneType
(1, bytearray(b'blob')) -> be bytes; got a bytearray
""".replace("\\\n", "")


@pytest.mark.parametrize("row", INVALID.strip().splitlines())
def test_an_invalid_blob_is_dropped_and_the_other_clients_are_unaffected(row):
    """The id of the channel decides who sent a blob."""
    call, reason = row.split(" -> ")
    arrival = (1, eval(call)[1])
    accepted, refused = taken([arrival, sent(2), sent(0)])
    assert list(accepted) == [0, 2]
    ((client, why),) = refused
    assert client == 1
    assert why.startswith(f"`blob` must {reason}")
    assert list(taken([arrival, sent(1)])[0]) == [1]  # a valid blob may follow


def test_each_client_can_have_another_form():
    """Client 2 first sends a message of the form of client 1."""

    def blob(client, width):
        message = {"head": torch.full((width,), float(client))}
        return client, encode_payload(message, header=Header({}, 4, str(client)))

    forms = {
        client: Expected({"head": torch.zeros(width)}, server_round=4)
        for client, width in ((1, 2), (2, 3), (3, 2))
    }
    arrivals = [blob(3, 2), blob(2, 2), blob(1, 2), blob(2, 3), blob(4, 2)]
    accepted, refused = receive(arrivals, expect=forms, max_bytes=2000)
    heads = {client: message["head"].tolist() for client, message in accepted.items()}
    assert heads == {1: [1.0] * 2, 2: [2.0] * 3, 3: [3.0] * 2}
    assert refused == [
        (2, "`blob` must hold 'head' in the shape (3,); got (2,)."),
        (4, "Client 4 was not asked in this round; its blob is ignored."),
    ]


@pytest.mark.parametrize("number", [1e30, 5.5, -5.5])
@pytest.mark.parametrize("place", ["head", "scale"])
def test_a_number_beyond_the_bound_is_refused_for_its_client_alone(number, place):
    """The bound is inclusive, and it does not hold for weights."""

    def payload(value):
        head, scale = (value, 1.0) if place == "head" else (1.0, value)
        head = Weighted(torch.tensor([[5.0, head], [9.0, 9.0]]), torch.tensor([4000.0, 0.0]))
        return {"head": head, "scale": torch.tensor(scale), "steps": torch.tensor([100])}

    def blob(client, value):
        return client, encode_payload(payload(value), header=Header(client_id=str(client)))

    form = payload(0.0)
    arrivals = [blob(1, -5.0), blob(2, number), blob(3, 5.0)]
    accepted, refused = receive(arrivals, expect=Expected(form, max_abs=5), max_bytes=2000)
    assert list(accepted) == [1, 3]
    key = "head:value" if place == "head" else "scale"
    ((client, reason),) = refused
    assert client == 2
    assert f"must hold numbers of magnitude 5 or less in '{key}'; got numbers from" in reason
    assert list(receive(arrivals, expect=Expected(form), max_bytes=2000)[0]) == [1, 2, 3]


def test_integers_and_empty_tensors_have_no_bound():
    message = {
        "codes": torch.tensor([-128, 127], dtype=torch.int8),
        "none": torch.zeros(0, 3),
        "rows": Weighted(torch.ones(2), torch.zeros(2)),
    }
    expect = Expected(message, max_abs=0.5)
    blob = encode_payload(message, header=Header(client_id="1"))
    accepted, refused = receive([(1, blob)], expect=expect, max_bytes=2000)
    assert not refused
    assert_identical(accepted[1]["codes"], message["codes"])


def test_a_message_that_cannot_be_restored_is_refused():
    """The codec finds an error that the form does not show. A valid blob may follow."""
    codec, like = top_k(fraction=0.5), {"head": Weighted(torch.zeros(4), torch.tensor(0.0))}
    full = {"head": Weighted(torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.tensor(5.0))}
    short, _ = codec.encode(full, codec.init(like))
    expect = Expected(codec.encode(like, codec.init(like))[0])
    wrong = short | {"head/indices": torch.tensor([3, 1], dtype=torch.int16)}
    arrivals = [(1, encode_payload(one, header=Header(client_id="1"))) for one in (wrong, short)]
    restore = partial(codec.decode, like=like)
    accepted, refused = receive(arrivals, expect=expect, max_bytes=2000, restore=restore)
    assert accepted[1]["head"].value.tolist() == [0.0, 4.0, 0.0, 3.0]
    assert refused == [(1, "`message['head/indices']` must increase within [0, 4); got [3, 1].")]


def test_arrivals_are_read_one_by_one_and_refused_ones_are_not_kept():
    """Forty blobs of a megabyte each need the memory of a few."""
    large = {"head": torch.zeros(2**18)}
    blob = encode_payload(large, header=Header(client_id="1"))
    arrivals = ((1, blob if place % 2 else flipped(blob, -place)) for place in range(1, 41))
    tracemalloc.start()
    try:
        accepted, refused = receive(arrivals, expect=Expected(large), max_bytes=2**21)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (list(accepted), len(refused)) == ([1], 39)
    assert most < 6 * 2**20


# Mistakes of the receiver are errors, not refusals.
REFUSED = """
taken(arrivals, expect=FORM) -> TypeError: `expect` must be Expected(message, ...); got
taken(arrivals, expect={1: EXPECT, 2: None}) -> TypeError: `expect` must be Expected(message, ...);
taken(arrivals, expect={1: EXPECT._replace(client_id='1')}) -> ValueError: `expect.client_id` must
taken(arrivals, expect=EXPECT._replace(client_id='')) -> ValueError: `expect.client_id` must be None
taken(arrivals, expect=EXPECT._replace(max_abs=0)) -> ValueError: `expect.max_abs` must be above 0
taken(arrivals, expect=EXPECT._replace(max_abs=torch.nan)) -> ValueError: `expect.max_abs` must be
taken(arrivals, max_bytes=20) -> ValueError: `max_bytes` must be at least 36, the size of
taken(arrivals, restore='codec') -> TypeError: `restore` must be a function of a message; got
taken(5) -> TypeError: `arrivals` must be an iterable of pairs (client, blob); got 5 (int)
taken([(1, b'', 3)]) -> TypeError: `arrivals` must contain pairs (client, blob); got a tuple of
taken([(1.0, b'')]) -> TypeError: `arrivals` must name clients by integers alone or by strings alone
taken([(True, b'')]) -> TypeError: `arrivals` must name clients by integers alone or by strings
taken([sent(1), ('2', b'')]) -> TypeError: `arrivals` must name clients by integers alone or by
taken([sent('1', 1), (2, b'')]) -> TypeError: `arrivals` must name clients by integers alone or by
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_before_anything_is_taken(call, error, message):
    arrivals = iter([sent(1)])
    check_refused(call, error, message, globals() | {"arrivals": arrivals})
    assert next(arrivals)[0] == 1
