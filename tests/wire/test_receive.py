"""A round's uploads: what is accepted is what honest clients sent, in the order of ids; of all else a reason is left."""

import tracemalloc
from functools import partial
from itertools import permutations

import pytest
import torch

from blobs import flipped, overwritten
from fedprompt import Weighted
from fedprompt.codecs import top_k
from fedprompt.wire import Expected, Header, decode_payload, encode_payload, receive

assert_identical = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)

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


def test_every_order_of_arrival_gives_the_uploads_in_the_order_of_ids():
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


def test_what_is_accepted_is_what_a_single_decoding_gives():
    client, blob = sent(3)
    accepted, refused = taken([(client, blob)])
    assert_identical(accepted[3], decode_payload(blob, expect=EXPECT, max_bytes=2000)[0])
    assert refused == []


def test_names_are_ordered_as_text():
    accepted, _ = taken([sent(name, 1) for name in ("b", "a", "10", "9")])
    assert list(accepted) == ["10", "9", "a", "b"]


def test_of_several_good_ones_the_first_counts_and_a_bad_one_before_it_does_not():
    accepted, refused = taken([damaged(1), sent(1, 5), sent(1, 6), damaged(1)])
    assert accepted[1]["scale"].item() == pytest.approx(5 / 3)
    assert [client for client, _ in refused] == [1, 1, 1]
    assert "SHA-256" in refused[0][1]
    assert [reason for _, reason in refused[1:]] == [
        "`blob` must be the first good one of client 1; got another."
    ] * 2


@pytest.mark.parametrize(
    ("arrival", "reason"),
    [
        (sent(1, server_round=3), "have the server_round 4; got 3"),
        (sent(1, server_round=5), "have the server_round 4; got 5"),
        (sent(1, claim="2"), "have the client_id '1'; got '2'"),
        (sent(1, claim=""), "have the client_id '1'; got ''"),
        (sent(1, claim="01"), "have the client_id '1'; got '01'"),
        (sent(1, parts={"backbone": "swin"}), "come from the same backbone"),
        (
            (1, encode_payload({"head": FORM["head"]}, header=Header(EXPECT.fingerprint, 4, "1"))),
            "hold all that is expected",
        ),
        ((1, b""), "start with the length of its header"),
        ((1, sent(1)[1][:-1]), "hold 24 bytes of tensors; got 23"),
        ((1, bytes(3000)), "be at most 2000 bytes long; got 3000"),
        ((1, overwritten(sent(1)[1], 0, b"\0\0\xc0\x7f")), "hold finite numbers in 'head:value'"),
    ],
)
def test_whatever_is_wrong_costs_its_sender_and_nobody_else(arrival, reason):
    """Least of all the client whose name was taken in vain."""
    accepted, refused = taken([arrival, sent(2), sent(0)])
    assert list(accepted) == [0, 2]
    assert len(refused) == 1
    assert refused[0][0] == 1
    assert refused[0][1].startswith(f"`blob` must {reason}")
    assert list(taken([arrival, sent(1)])[0]) == [1]


def test_a_name_is_the_channels_and_not_the_blobs():
    """Client 1 hands in client 2's own blob: it is neither client 1's nor client 2's."""
    accepted, refused = taken([(1, sent(2)[1])])
    assert accepted == {}
    assert refused == [(1, "`blob` must have the client_id '1'; got '2'.")]


def test_clients_that_send_different_things_are_each_held_to_their_own():
    """Two widths; client 2 sends what client 1 would, and nobody else pays for it."""
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


def test_whoever_was_not_asked_is_refused():
    accepted, refused = taken([sent(2), sent(1)], expect={1: EXPECT})
    assert list(accepted) == [1]
    assert refused == [(2, "`blob` must come from a client that was asked; got 2.")]


@pytest.mark.parametrize(
    "thing", [None, bytearray(b"blob"), memoryview(b"blob"), "blob", 5, [b"blob"], torch.zeros(3)]
)
def test_what_is_not_bytes_is_the_refusal_of_its_client_alone(thing):
    accepted, refused = taken([sent(3), (2, thing), sent(1), sent(2)])
    assert list(accepted) == [1, 2, 3]  # a good one may follow
    assert refused == [(2, f"`blob` must be bytes; got a {type(thing).__name__}.")]


@pytest.mark.parametrize("number", [1e300, -1e300, 5.5, -5.5])
@pytest.mark.parametrize("place", ["head", "scale"])
def test_a_number_beyond_the_bound_is_the_refusal_of_its_client_alone(number, place):
    """Finite numbers of float64 of which a mean can overflow; 5 itself is within the bound, and a weight is of another scale."""

    def blob(client, value):
        numbers = {"head": 1.0, "scale": 1.0, place: value}
        head = Weighted(
            torch.tensor([[5.0, numbers["head"]], [9.0, 9.0]], dtype=torch.float64),
            torch.tensor([4000.0, 0.0]).double(),
        )
        upload = {
            "head": head,
            "scale": torch.tensor(numbers["scale"], dtype=torch.float64),
            "steps": torch.tensor([100]),
        }
        return client, encode_payload(upload, header=Header(client_id=str(client)))

    form = {"head": Weighted(torch.zeros(2, 2).double(), torch.zeros(2).double()), "scale": torch.tensor(0.0).double(),
            "steps": torch.tensor([0])}  # fmt: skip
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


def test_the_bound_holds_for_no_integer_and_for_nothing_that_is_empty():
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


def test_restoring_belongs_to_reading():
    """A codec finds what the form does not show; such an upload is refused, and a good one after it is the first."""
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
    assert refused == [
        (1, "`message['head/indices']` must rise, from 0 or more to below 4; got [3, 1].")
    ]


def test_arrivals_are_taken_one_by_one_and_a_refused_one_is_not_kept():
    """Forty of a megabyte each pass through the memory of a few."""
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


# Bad input: the receiver's own mistakes are no refusals.


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "reason"),
    [
        ({"expect": FORM}, TypeError, r"`expect` must be Expected\(message, \.\.\.\); got "),
        (
            {"expect": {1: EXPECT, 2: None}},
            TypeError,
            r"`expect` must be Expected\(message, \.\.\.\); got None",
        ),
        (
            {"expect": {1: EXPECT._replace(client_id="1")}},
            ValueError,
            r"`expect\.client_id` must be None, as `arrivals` say who sends",
        ),
        (
            {"expect": EXPECT._replace(client_id="1")},
            ValueError,
            r"`expect\.client_id` must be None, as `arrivals` say who sends; got '1'",
        ),
        (
            {"expect": EXPECT._replace(client_id="")},
            ValueError,
            r"`expect\.client_id` must be None, as `arrivals` say who sends; got ''",
        ),
        (
            {"expect": EXPECT._replace(max_abs=0)},
            ValueError,
            r"`expect\.max_abs` must be above 0; got 0",
        ),
        (
            {"expect": EXPECT._replace(max_abs=torch.nan)},
            ValueError,
            r"`expect\.max_abs` must be finite; got nan",
        ),
        (
            {"expect": EXPECT._replace(max_abs="5")},
            TypeError,
            r"`expect\.max_abs` must be a number; got '5' \(str\)",
        ),
        (
            {"max_bytes": 20},
            ValueError,
            r"`max_bytes` must leave room for the 36 bytes of `expect\.message`; got 20",
        ),
        (
            {"restore": "codec"},
            TypeError,
            r"`restore` must be a function of a message; got 'codec' \(str\)",
        ),
    ],
)
def test_a_receiver_that_errs_is_told_before_anything_is_taken(options, error, reason):
    arrivals = iter([sent(1)])
    with pytest.raises(error, match=reason):
        taken(arrivals, **options)
    assert next(arrivals)[0] == 1


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("arrivals", "reason"),
    [
        (
            [(1.0, b"")],
            r"`arrivals` must name clients by integers or strings, of one kind; got 1\.0 \(float\)",
        ),
        (
            [(True, b"")],
            r"`arrivals` must name clients by integers or strings, of one kind; got True \(bool\)",
        ),
        (
            [sent(1), ("2", b"")],
            r"`arrivals` must name clients by integers or strings, of one kind; got '2' \(str\)",
        ),
        (
            [sent("1", 1), (2, b"")],
            r"`arrivals` must name clients by integers or strings, of one kind; got 2 \(int\)",
        ),
    ],
)
def test_what_is_no_client_is_an_error_of_the_caller(arrivals, reason):
    with pytest.raises(TypeError, match=reason):
        taken(arrivals)
