"""Every rank receives bitwise identical messages, or every rank raises an error."""

import pytest
import torch
import torch.distributed as dist

import gathered
import two_processes
from federations import FEDERATIONS, Outcome, assert_bitwise_identical, in_process
from fedprompt.wire import (
    Expected,
    Header,
    decode_payload,
    encode_payload,
    gather,
    gather_messages,
    gather_trees,
)

pytestmark = pytest.mark.slow  # two processes import everything
LONGEST = len(encode_payload(gathered.messages()[1], header=gathered.ROUND_3))
ELSEWHERE = (
    "ValueError: `message` must be sent and accepted by every rank; "
    "the error messages of ranks [{}] give the reason."
)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of every step in each of two processes."""
    folder = tmp_path_factory.mktemp("ranks")
    two_processes.run(gathered.run_steps, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.fixture
def alone():
    """A group of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("wire", [lambda blob: blob[:-1], lambda blob: blob[:-1] + b"!"])
def test_a_tree_that_arrives_truncated_or_changed_is_refused(alone, monkeypatch, wire):
    tree = {"own": [1.5, None, (gathered.messages()[0], True)]}
    assert_bitwise_identical(gather_trees(tree, server_round=3), [tree])
    monkeypatch.setattr(gather, "_gather_blobs", lambda blob, *_: [wire(blob)])
    with pytest.raises(ValueError, match="`tree` must arrive as rank 0 sent it; got other bytes"):
        gather_trees(tree, server_round=3)


def test_what_is_no_tree_is_not_sent(alone):
    with pytest.raises(TypeError, match=r"`tree\['own'\]` must be a dict, list"):
        gather_trees({"own": object()}, server_round=0)


def arrived():
    """Encode and decode the messages in this process."""
    pairs = zip(gathered.messages(), gathered.forms(), strict=True)
    return [
        decode_payload(
            encode_payload(message, header=gathered.ROUND_3), expect=form, max_bytes=10_000
        )[0]
        for message, form in pairs
    ]


@pytest.mark.parametrize(
    ("step", "senders"),
    [
        ("ragged", [0, 1]),
        ("ragged, after all errors", [0, 1]),
        ("a limit beyond any integer", [0, 1]),
        ("rank 1 sends nothing", [0]),
        ("no rank sends", []),
    ],
)
def test_every_rank_receives_all_messages_in_the_order_of_ranks(ranks, step, senders):
    expected = [message if rank in senders else None for rank, message in enumerate(arrived())]
    for seen in ranks:
        assert_bitwise_identical(seen[step], expected)


def test_a_group_contains_its_own_ranks_alone(ranks):
    for seen, message in zip(ranks, arrived(), strict=True):
        own, error = seen["in groups of one"]
        assert_bitwise_identical(own, [message])
        assert error == "`group` must contain this process; got a group without it."


@pytest.mark.parametrize(
    ("step", "on_rank_0", "on_rank_1"),
    [
        (
            "NaN on rank 1",
            ELSEWHERE.format(1),
            "ValueError: `message['a']` must be finite; got 1 entries of 1",
        ),
        (
            "no message on rank 0",
            "TypeError: `message` must map names to tensors or Weighted; got a list of length 1",
            ELSEWHERE.format(0),
        ),
        (
            "too few expected on rank 1",
            ELSEWHERE.format(1),
            "ValueError: `expect` must have one item for each of 2 ranks; got 1",
        ),
        (
            "no limit on rank 0",
            "TypeError: `max_bytes` must be an integer; got 'many'",
            ELSEWHERE.format(0),
        ),
        (
            "no header on rank 1, which sends nothing",
            ELSEWHERE.format(1),
            "TypeError: `header` must be a Header; got '3'",
        ),
        (
            "too long for rank 0",
            "ValueError: `message` must be a blob of at most 5000 bytes on every rank; "
            f"got {LONGEST} on rank 1.",
            "the same",
        ),
        (
            "another round on rank 1",
            "ValueError: `header.server_round` must be the same on every rank; got [3, 4]",
            "the same",
        ),
        (
            "another backbone on rank 1",
            "ValueError: rank 1: `blob` must come from the same backbone, {'backbone': 'tiny'}",
            "the same",
        ),
        (
            "rank 0 expects another backbone",
            "ValueError: rank 0: `blob` must come from the same backbone",
            ELSEWHERE.format(0),
        ),
        (
            "rank 0 expects nothing of rank 1",
            "ValueError: `expect[1]` must be given because rank 1 sends a message; got None",
            ELSEWHERE.format(0),
        ),
        (
            "rank 1 expects another form",
            ELSEWHERE.format(1),
            "ValueError: rank 0: `blob` must have no other tensors than expected; got also [",
        ),
    ],
)
def test_an_error_on_one_rank_is_an_error_on_every_rank(ranks, step, on_rank_0, on_rank_1):
    errors = [f"{type(seen[step]).__name__}: {seen[step]}" for seen in ranks]
    assert errors[0].startswith(on_rank_0)
    if on_rank_1 == "the same":
        assert errors[1] == errors[0]
    else:
        assert errors[1].startswith(on_rank_1)


def test_a_rank_that_has_left_or_never_calls_causes_an_error_of_torch(ranks):
    """It is raised after the timeout of the group, here a second, or at once."""
    for step in ("rank 1 never calls", "rank 1 is gone"):
        assert isinstance(ranks[0][step], RuntimeError)


@pytest.mark.parametrize("name", FEDERATIONS)
def test_every_rank_computes_the_answers_of_a_plain_loop_without_a_server(ranks, name):
    expected = in_process(FEDERATIONS[name]())
    for rank, seen in enumerate(ranks):
        clients = {
            client: state for client, state in expected.clients.items() if client % 2 == rank
        }
        assert_bitwise_identical(seen[name], Outcome(expected.answers, expected.server, clients))


# In a group of one process.


@pytest.fixture
def group_of_one():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


ONE = {"a": torch.ones(2)}


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"expect": Expected(ONE)},
            TypeError,
            r"`expect` must be a sequence with an Expected or None for each rank; got a Expected",
        ),
        ({"expect": 3}, TypeError, r"`expect` must be a sequence .*; got 3"),
        ({"expect": []}, ValueError, r"`expect` must have one item for each of 1 ranks; got 0"),
        (
            {"expect": [ONE]},
            TypeError,
            r"`expect\[0\]` must be Expected\(message, \.\.\.\) or None; got a dict of length",
        ),
        ({"max_bytes": 0}, ValueError, r"`max_bytes` must be at least 1; got 0"),
        (
            {"max_bytes": 7},
            ValueError,
            r"`message` must be a blob of at most 7 bytes on every rank; got \d+ on rank 0",
        ),
        (
            {"message": {"a": torch.ones(2, dtype=torch.complex64)}},
            TypeError,
            r"`message\['a'\]` must have a dtype of",
        ),
        ({"header": {}}, TypeError, r"`header` must be a Header; got a dict of length 0"),
        (
            {"header": Header(server_round=-1)},
            ValueError,
            r"`header.server_round` must be at least 0; got -1",
        ),
    ],
)
def test_bad_arguments_are_refused_by_name_and_the_group_goes_on(
    group_of_one, changes, error, message
):
    good = {"message": ONE, "expect": [Expected(ONE)], "max_bytes": 1000, "header": Header()}
    arguments = good | changes
    with pytest.raises(error, match=message):
        gather_messages(arguments.pop("message"), **arguments)
    assert_bitwise_identical(gather_messages(good.pop("message"), **good), [ONE])


@pytest.mark.bad_input
def test_the_error_without_a_process_group_names_the_function_to_call():
    with pytest.raises(
        ValueError,
        match=r"`group` must be a process group of torch\.distributed; got none \(call init_",
    ):
        gather_messages(ONE, expect=[Expected(ONE)], max_bytes=1000, header=Header())
