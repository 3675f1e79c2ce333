"""Receiving keeps the first valid message of each client, and a reason for every other blob."""

import tracemalloc
from functools import partial
from itertools import permutations

import pytest
import torch

from blobs import flipped, overwritten
from fedprompt import Weighted
from fedprompt.codecs import top_k
from fedprompt.wire import Expected, Header, decode_payload, encode_payload, receive
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
            assert_identical(
                own["head"].value, message(client)["head"].value * torch.tensor([[1.0], [0.0]])
            )
            assert_identical(own["scale"], message(client)["scale"])


def test_an_accepted_message_is_the_decoded_one():
    client, blob = sent(3)
    accepted, refused = taken([(client, blob)])
    assert_identical(accepted[3], decode_payload(blob, expect=EXPECT, max_bytes=2000)[0])
    assert refused == []


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


@pytest.mark.parametrize(
    ("arrival", "reason"),
    [
        (sent(1, server_round=3), "be of round 4; got one of round 3"),
        (sent(1, server_round=5), "be of round 4; got one of round 5"),
        (sent(1, claim="2"), "have the client_id '1'; got '2'"),
        (sent(1, claim=""), "have the client_id '1'; got ''"),
        (sent(1, claim="01"), "have the client_id '1'; got '01'"),
        (sent(1, parts={"backbone": "swin"}), "come from the same backbone"),
        (
            (1, encode_payload({"head": FORM["head"]}, header=Header(EXPECT.fingerprint, 4, "1"))),
            "have all tensors that are expected",
        ),
        ((1, b""), "start with the length of its header"),
        ((1, sent(1)[1][:-1]), "hold 24 bytes of tensors; got 23"),
        ((1, bytes(3000)), "be at most 2000 bytes long; got 3000"),
        ((1, overwritten(sent(1)[1], 0, b"\0\0\xc0\x7f")), "hold finite numbers in 'head:value'"),
    ],
)
def test_an_invalid_blob_is_dropped_and_the_other_clients_are_unaffected(arrival, reason):
    accepted, refused = taken([arrival, sent(2), sent(0)])
    assert list(accepted) == [0, 2]
    assert len(refused) == 1
    assert refused[0][0] == 1
    assert refused[0][1].startswith(f"`blob` must {reason}")
    assert list(taken([arrival, sent(1)])[0]) == [1]


def test_the_id_of_the_channel_decides():
    """Client 1 sends the blob of client 2, which counts for neither."""
    accepted, refused = taken([(1, sent(2)[1])])
    assert accepted == {}
    assert refused == [(1, "`blob` must have the client_id '1'; got '2'.")]


def test_each_client_can_have_another_form():
    """Client 2 first sends a message of the form of client 1."""
    forms = {
        client: Expected({"head": torch.zeros(width)}, server_round=4)
        for client, width in ((1, 2), (2, 3), (3, 2))
    }
    arrivals = [
        (
            client,
            encode_payload(
                {"head": torch.full((width,), float(client))}, header=Header({}, 4, str(client))
            ),
        )
        for client, width in ((3, 2), (2, 2), (1, 2), (2, 3))
    ]
    accepted, refused = receive(arrivals, expect=forms, max_bytes=2000)
    assert {client: message["head"].tolist() for client, message in accepted.items()} == {
        1: [1.0] * 2,
        2: [2.0] * 3,
        3: [3.0] * 2,
    }
    assert len(refused) == 1
    assert refused[0][0] == 2
    assert "'head'" in refused[0][1]


def test_a_client_that_was_not_asked_is_refused():
    accepted, refused = taken([sent(2), sent(1)], expect={1: EXPECT})
    assert list(accepted) == [1]
    assert refused == [(2, "Client 2 was not asked in this round; its blob is ignored.")]


@pytest.mark.parametrize(
    "thing", [None, bytearray(b"blob"), memoryview(b"blob"), "blob", 5, [b"blob"], torch.zeros(3)]
)
def test_another_type_than_bytes_is_refused_for_its_client_alone(thing):
    accepted, refused = taken([sent(3), (2, thing), sent(1), sent(2)])
    assert list(accepted) == [1, 2, 3]  # a valid blob may follow
    assert refused == [(2, f"`blob` must be bytes; got a {type(thing).__name__}.")]


@pytest.mark.parametrize("number", [1e300, -1e300, 5.5, -5.5])
@pytest.mark.parametrize("place", ["head", "scale"])
def test_a_number_beyond_the_bound_is_refused_for_its_client_alone(number, place):
    """The bound is inclusive, and it does not hold for weights."""

    def blob(client, value):
        numbers = {"head": 1.0, "scale": 1.0, place: value}
        head = Weighted(
            torch.tensor([[5.0, numbers["head"]], [9.0, 9.0]], dtype=torch.float64),
            torch.tensor([4000.0, 0.0]).double(),
        )
        payload = {
            "head": head,
            "scale": torch.tensor(numbers["scale"], dtype=torch.float64),
            "steps": torch.tensor([100]),
        }
        return client, encode_payload(payload, header=Header(client_id=str(client)))

    form = {
        "head": Weighted(torch.zeros(2, 2).double(), torch.zeros(2).double()),
        "scale": torch.tensor(0.0).double(),
        "steps": torch.tensor([0]),
    }
    arrivals = [blob(1, -5.0), blob(2, number), blob(3, 5.0)]
    accepted, refused = receive(arrivals, expect=Expected(form, max_abs=5), max_bytes=2000)
    assert list(accepted) == [1, 3]
    key = "head:value" if place == "head" else "scale"
    ((client, reason),) = refused
    assert client == 2
    assert reason.startswith(
        f"`blob` must hold numbers of magnitude 5 or less in '{key}'; got numbers from "
    )
    assert list(receive(arrivals, expect=Expected(form), max_bytes=2000)[0]) == [1, 2, 3]


def test_integers_and_empty_tensors_have_no_bound():
    message = {
        "codes": torch.tensor([-128, 127], dtype=torch.int8),
        "none": torch.zeros(0, 3),
        "rows": Weighted(torch.ones(2), torch.zeros(2)),
    }
    expect = Expected(message, max_abs=0.5)
    accepted, refused = receive(
        [(1, encode_payload(message, header=Header(client_id="1")))], expect=expect, max_bytes=2000
    )
    assert not refused
    assert_identical(accepted[1]["codes"], message["codes"])


def test_a_round_without_arrivals_is_empty():
    assert taken([]) == ({}, [])


def test_a_message_that_cannot_be_restored_is_refused():
    """The codec finds an error that the form does not show. A valid blob may follow."""
    codec, like = top_k(fraction=0.5), {"head": Weighted(torch.zeros(4), torch.tensor(0.0))}
    short, _ = codec.encode(
        {"head": Weighted(torch.tensor([1.0, 4.0, 2.0, 3.0]), torch.tensor(5.0))}, codec.init(like)
    )
    expect = Expected(codec.encode(like, codec.init(like))[0])
    wrong = short | {"head/indices": torch.tensor([3, 1], dtype=torch.int16)}
    arrivals = [(1, encode_payload(one, header=Header(client_id="1"))) for one in (wrong, short)]
    accepted, refused = receive(
        arrivals, expect=expect, max_bytes=2000, restore=partial(codec.decode, like=like)
    )
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


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"expect": FORM}, TypeError, r"`expect` must be Expected\(message, \.\.\.\); got "),
        ({"expect": {1: EXPECT, 2: None}}, TypeError, r"`expect` must be Expected\(message,"),
        ({"expect": {1: EXPECT._replace(client_id="1")}}, ValueError, r"`expect\.client_id`"),
        ({"expect": EXPECT._replace(client_id="1")}, ValueError, r"`expect\.client_id` must be"),
        ({"expect": EXPECT._replace(client_id="")}, ValueError, r"`expect\.client_id` must be"),
        ({"expect": EXPECT._replace(max_abs=0)}, ValueError, r"`expect\.max_abs` must be above"),
        ({"expect": EXPECT._replace(max_abs=torch.nan)}, ValueError, r"`expect\.max_abs` must"),
        ({"expect": EXPECT._replace(max_abs="5")}, TypeError, r"`expect\.max_abs` must be a"),
        ({"max_bytes": 20}, ValueError, "`max_bytes` must be at least 36, the size of `"),
        ({"restore": "codec"}, TypeError, "`restore` must be a function of a message; got"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_taken(options, error, reason):
    arrivals = iter([sent(1)])
    with pytest.raises(error, match=reason):
        taken(arrivals, **options)
    assert next(arrivals)[0] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arrivals", "reason"),
    [
        ([(1.0, b"")], r"`arrivals` must name clients by integers alone or by .*; got 1\.0"),
        ([(True, b"")], "`arrivals` must name clients by integers alone or by .*; got True"),
        ([sent(1), ("2", b"")], "`arrivals` must name clients by integers alone or by strings"),
        ([sent("1", 1), (2, b"")], "`arrivals` must name clients by integers alone or by"),
    ],
)
def test_other_types_of_ids_are_refused(arrivals, reason):
    with pytest.raises(TypeError, match=reason):
        taken(arrivals)
