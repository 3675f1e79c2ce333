"""What crosses the wire: messages written and read, their bytes, who takes part, and the random streams."""

import csv
import hashlib
import os
import random
import subprocess
import sys
import tracemalloc
from functools import partial
from itertools import combinations, product

import numpy as np
import pytest
import torch
import torch.nn as nn
from scipy.stats import binom, chi2

from fedprompt import (
    Ledger,
    Weighted,
    cohort,
    collect,
    load_checkpoint,
    load_values,
    num_bytes,
    save_checkpoint,
    snapshot,
    stream_generator,
)

assert_identical = partial(torch.testing.assert_close, rtol=0, atol=0, equal_nan=True)


class Model(nn.Module):
    """Frozen and trainable parameters, one without axes, a tied one, buffers of two dtypes, and names that share a beginning."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.keys = nn.Parameter(torch.randn(3, 2))
            self.scale = nn.Parameter(torch.randn(()))
            self.head, self.header = nn.Linear(2, 4), nn.Linear(2, 1, bias=False)
            self.encode, self.decode = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.decode.weight = self.encode.weight
            self.norm = nn.BatchNorm1d(2)
            self.norm.running_mean.normal_()
        self.header.requires_grad_(False)
        self.to(dtype)


NAMES = [
    "keys",
    "scale",
    "head.weight",
    "head.bias",
    "header.weight",
    "encode.weight",
    "norm.weight",
    "norm.bias",
]


def bits(module):
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


# Collect, snapshot, load.


def test_all_parameters_travel_once_by_their_names_and_buffers_never():
    model = Model()
    assert (
        list(snapshot(model)) == NAMES
    )  # the frozen header is there, the tied decode.weight is not, nor are statistics
    assert list(collect(model, weight=3)) == NAMES


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_round_trip_makes_an_equal_model(dtype):
    sender = Model(seed=1, dtype=dtype)
    for message in (snapshot(sender), collect(sender, weight=7)):
        receiver = Model(seed=2, dtype=dtype)
        statistics = bits(receiver.norm)
        load_values(receiver, message)
        assert_identical(dict(receiver.named_parameters()), dict(sender.named_parameters()))
        assert receiver.decode.weight is receiver.encode.weight
        assert_identical(receiver.norm.running_mean, statistics["running_mean"])
        assert [
            name for name, parameter in receiver.named_parameters() if not parameter.requires_grad
        ] == ["header.weight"]


def test_weights_are_float32_and_values_keep_their_dtype():
    payload = collect(
        Model(dtype=torch.bfloat16), weight=1001, rows={"keys": torch.tensor([1, 2, 1001])}
    )
    assert {upload.value.dtype for upload in payload.values()} == {torch.bfloat16}
    assert {upload.weight.dtype for upload in payload.values()} == {torch.float32}
    assert payload["scale"].weight.item() == 1001.0  # bfloat16 would have made it 1000
    assert payload["keys"].weight.tolist() == [1.0, 2.0, 1001.0]


def test_copies_are_detached_from_the_module_in_both_directions():
    model = Model()
    counts = torch.tensor([1.0, 0.0, 2.0])
    payload, broadcast, before = (
        collect(model, weight=2, rows={"keys": counts}),
        snapshot(model),
        bits(model),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    counts.add_(1)
    for name in NAMES:
        assert_identical(payload[name].value, before[name])
        assert_identical(broadcast[name], before[name])
        assert not payload[name].value.requires_grad
    assert payload["keys"].weight.tolist() == [1.0, 0.0, 2.0]
    before = bits(model)
    for upload in payload.values():
        upload.value.zero_()
    for value in broadcast.values():
        value.zero_()
    assert_identical(bits(model), before)


def test_loading_copies_the_message_too():
    model, message = (
        Model(),
        {"keys": torch.ones(3, 2), "scale": Weighted(torch.tensor(4.0), torch.tensor(1.0))},
    )
    load_values(model, message)
    message["keys"].zero_()
    message["scale"].value.zero_()
    assert_identical(model.keys.detach(), torch.ones(3, 2))
    assert model.scale.item() == 4.0
    with torch.no_grad():
        model.keys.add_(1)
    assert_identical(message["keys"], torch.zeros(3, 2))


def test_rows_override_the_weight_of_single_names():
    model = Model()
    rows = {"keys": torch.tensor([4, 0, 1]), "head.weight": torch.arange(8).reshape(4, 2)}
    payload = collect(model, weight=9.5, rows=rows)
    assert payload["keys"].weight.tolist() == [4.0, 0.0, 1.0]
    assert payload["head.weight"].weight.tolist() == [
        [0.0, 1.0],
        [2.0, 3.0],
        [4.0, 5.0],
        [6.0, 7.0],
    ]
    assert {
        name: payload[name].weight.item() for name in NAMES if name not in rows
    } == dict.fromkeys(set(NAMES) - set(rows), 9.5)


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (["head"], ["head.weight", "head.bias"]),  # not header.weight
        (["head.bias", "scale"], ["scale", "head.bias"]),  # in the module's order
        (("header", "head.weight", "header.weight"), ["head.weight", "header.weight"]),
        (iter(["norm"]), ["norm.weight", "norm.bias"]),
    ],
)
def test_only_takes_names_and_dotted_prefixes(only, names):
    only = list(only)
    assert list(snapshot(Model(), only=iter(only))) == names
    assert list(collect(Model(), weight=1, only=iter(only))) == names


def test_rows_of_weight_zero_and_missing_names_keep_their_bits():
    model = Model()
    before = bits(model)
    new = torch.tensor([[1.0, 2.0], [torch.nan, torch.inf], [5.0, 6.0]])
    nothing = Weighted(torch.full((4,), torch.nan), torch.tensor(0.0))
    load_values(model, {"keys": Weighted(new, torch.tensor([1.0, 0.0, 0.5])), "head.bias": nothing})
    assert_identical(
        bits(model), before | {"keys": torch.stack([new[0], before["keys"][1], new[2]])}
    )


def test_buffers_may_be_loaded():
    model = Model()
    load_values(
        model,
        {
            "norm.running_mean": torch.tensor([3.0, 4.0]),
            "norm.num_batches_tracked": torch.tensor(17),
        },
    )
    assert model.norm.running_mean.tolist() == [3.0, 4.0]
    assert model.norm.num_batches_tracked.item() == 17
    assert model.norm.num_batches_tracked.dtype == torch.int64


def test_either_name_of_a_tied_parameter_loads_both():
    model = Model()
    for name in ("encode.weight", "decode.weight"):
        value = torch.full((2, 2), float(len(name)) + (name[0] == "d"))
        load_values(model, {name: value})
        assert_identical(model.encode.weight.detach(), value)
        assert_identical(model.decode.weight.detach(), value)


def test_values_are_cast_to_what_they_overwrite():
    model = Model(dtype=torch.bfloat16)
    load_values(
        model, {"scale": torch.tensor(1.00390625), "keys": torch.tensor([[1, 2], [3, 4], [5, 6]])}
    )
    # 1 + 2^-8 lies half-way between the bfloat16 numbers 1 and 1 + 2^-7 and is rounded to the even one.
    assert model.scale.item() == 1.0
    assert model.scale.dtype == torch.bfloat16
    assert model.keys.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_loading_leaves_no_trace_in_autograd():
    model = Model()
    load_values(
        model,
        {"keys": torch.ones(3, 2, requires_grad=True), "scale": nn.Parameter(torch.tensor(1.0))},
    )
    assert model.keys.is_leaf
    assert model.keys.requires_grad
    assert model.keys.grad_fn is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_parameters_without_an_axis_travel(dtype):
    # A symptom once seen: a 0-dim parameter, such as a logit scale, could not be collected.
    model = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(4.5, dtype=dtype))})
    payload = collect(model, weight=2)
    load_values(model, {"scale": payload["scale"]._replace(value=torch.tensor(6.0))})
    assert model["scale"].item() == 6.0


# Bytes.


def test_bytes_by_hand():
    message = {
        "dense": torch.zeros(3, 5),  # 15 x 4
        "half": torch.zeros(7, dtype=torch.bfloat16),  # 7 x 2
        "labels": torch.zeros(2, 2, dtype=torch.int64),  # 4 x 8
        "empty": torch.zeros(0, 3),  # 0
        "whole": Weighted(torch.zeros(2, 3), torch.tensor(1.0)),  # 6 x 4 + 4
        "nothing": Weighted(torch.zeros(2, 3), torch.tensor(0.0)),  # 4
        "rows": Weighted(
            torch.zeros(4, 3, dtype=torch.float16), torch.tensor([0.0, 2.0, 0.0, 0.1])
        ),  # 2 x 3 x 2 + 4 x 4
        "grid": Weighted(
            torch.zeros(2, 2, 5, dtype=torch.float64), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
        ),  # 3 x 5 x 8 + 4 x 4
        "entries": Weighted(torch.zeros(3), torch.tensor([1.0, 0.0, 0.0])),  # 1 x 4 + 3 x 4
    }
    by_hand = {
        "dense": 60,
        "half": 14,
        "labels": 32,
        "empty": 0,
        "whole": 28,
        "nothing": 4,
        "rows": 28,
        "grid": 136,
        "entries": 16,
    }
    assert {name: num_bytes({name: entry}) for name, entry in message.items()} == by_hand
    assert num_bytes(message) == sum(by_hand.values()) == 318
    assert num_bytes({}) == 0


def test_bytes_of_a_collected_module_by_hand():
    # keys 6, scale 1, head 8 + 4, header 2, encode 4, norm 2 + 2: 29 numbers; 8 weights, or 7 and 3 when keys go by rows
    model = Model()
    assert num_bytes(snapshot(model)) == 29 * 4
    assert num_bytes(collect(model, weight=5)) == (29 + 8) * 4
    assert (
        num_bytes(collect(model, weight=5, rows={"keys": torch.tensor([1.0, 0.0, 3.0])}))
        == (29 - 2 + 7 + 3) * 4
    )
    assert num_bytes(collect(Model(dtype=torch.bfloat16), weight=5)) == 29 * 2 + 8 * 4


@pytest.fixture
def ledger():
    ledger = Ledger()
    down = {"prompts": torch.zeros(10), "head": torch.zeros(5)}  # 40 and 20 bytes
    for server_round, clients in enumerate([["b", 'a, "c"'], ["b"]]):
        for client in clients:
            ledger.record(down, direction="down", client=client, server_round=server_round)
            up = {"prompts": Weighted(torch.zeros(10), torch.tensor(1.0))}  # 44 bytes
            ledger.record(up, direction="up", client=client, server_round=server_round)
    return ledger


ENTRIES = [
    (0, "b", "down", "prompts", 40, 0),
    (0, "b", "down", "head", 20, 0),
    (0, "b", "up", "prompts", 44, 0),
    (0, 'a, "c"', "down", "prompts", 40, 0),
    (0, 'a, "c"', "down", "head", 20, 0),
    (0, 'a, "c"', "up", "prompts", 44, 0),
    (1, "b", "down", "prompts", 40, 0),
    (1, "b", "down", "head", 20, 0),
    (1, "b", "up", "prompts", 44, 0),
]


def test_ledger_keeps_one_entry_for_each_name(ledger):
    assert ledger.entries == ENTRIES
    assert ledger.entries[0].num_bytes == 40


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        ({}, 3 * 104),
        ({"direction": "up"}, 3 * 44),
        ({"direction": "down", "client": "b"}, 2 * 60),
        ({"server_round": 0}, 2 * 104),  # round 0 is a round, not "any"
        ({"server_round": 1, "name": "head"}, 20),
        ({"name": "prompts", "client": 'a, "c"'}, 84),
        ({"client": "nobody"}, 0),
    ],
)
def test_totals_are_sums_over_what_is_asked_for(ledger, which, expected):
    assert ledger.total(**which) == expected


def test_table_by_hand(ledger):
    assert ledger.table() == "\n".join(
        [
            "client  rounds  bytes up  bytes down",
            "b            2        88         120",
            'a, "c"       1        44          60',
            "all          2       132         180",
        ]
    )
    assert (
        Ledger().table()
        == "client  rounds  bytes up  bytes down\nall          0         0           0"
    )


def test_csv_reads_back_as_it_was_written(ledger, tmp_path):
    path = tmp_path / "bytes.csv"
    path.write_text("old")
    ledger.to_csv(path)
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["server_round", "client", "direction", "name", "num_bytes", "framed"]
    assert [
        (int(row[0]), row[1], row[2], row[3], int(row[4]), int(row[5])) for row in rows
    ] == ENTRIES


def test_the_length_of_a_blob_stands_once_beside_its_message(ledger):
    message = {"prompts": torch.zeros(10), "head": torch.zeros(5)}
    ledger.record(message, direction="up", client="b", server_round=2, framed=200)
    ledger.record({"head": torch.zeros(5)}, direction="down", client="b", server_round=2, framed=90)
    Ledger().record(
        {"head": torch.zeros(5)}, direction="up", client=0, server_round=0, framed=20
    )  # as long as the message can be
    assert [(entry.num_bytes, entry.framed) for entry in ledger.entries[len(ENTRIES) :]] == [
        (40, 200),
        (20, 0),
        (20, 90),
    ]
    assert ledger.total(framed=True) == 290
    assert ledger.total(direction="up", client="b", server_round=2, framed=True) == 200
    assert ledger.total(direction="up") == 3 * 44 + 60
    assert ledger.table() == "\n".join(
        [
            "client  rounds  bytes up  bytes down  framed up  framed down",
            "b            3       148         140        200           90",
            'a, "c"       1        44          60          0            0',
            "all          3       192         200        200           90",
        ]
    )


def test_a_ledgers_state_by_hand():
    ledger = Ledger()
    ledger.record(
        {"a": torch.zeros(3), "b": torch.zeros(2)},
        direction="up",
        client=("site", 7),
        server_round=4,
        framed=50,
    )
    assert ledger.state_dict() == STATE
    assert list(Ledger().state_dict().values()) == [[]] * 6
    again = Ledger()
    again.load_state_dict(dict(reversed(STATE.items())))  # in whatever order they stand
    assert again.entries == ledger.entries


STATE = {
    "server_round": [4, 4],
    "client": [("site", 7), ("site", 7)],
    "direction": ["up", "up"],
    "name": ["a", "b"],
    "num_bytes": [12, 8],
    "framed": [50, 0],
}


def test_a_ledger_that_was_saved_goes_on_where_it_stood(ledger, tmp_path):
    ledger.record(
        {"head": torch.zeros(5)}, direction="up", client=("site", 7), server_round=2, framed=90
    )
    save_checkpoint(ledger.state_dict(), tmp_path)
    again = Ledger()
    again.record(
        {"other": torch.zeros(1)}, direction="up", client="other", server_round=9
    )  # goes: what is loaded takes its place
    again.load_state_dict(load_checkpoint(tmp_path))
    assert again.entries == ledger.entries
    assert again.table() == ledger.table()
    for each in (again, ledger):
        each.record({"head": torch.zeros(5)}, direction="down", client="b", server_round=3)
    assert again.entries == ledger.entries
    assert again.total(client=("site", 7), framed=True) == 90


def test_a_ledger_shares_no_list_with_its_state(ledger):
    state = ledger.state_dict()
    again = Ledger()
    again.load_state_dict(state)
    state["num_bytes"][0] = 10**6
    state["name"].clear()
    assert again.entries == ledger.entries == ENTRIES


# Who takes part.


@pytest.mark.parametrize(("size", "drawn"), [(0, 1), (1, 1), (3, 3), (10, 10)])
def test_a_cohort_is_ordered_without_replacement_and_never_empty(size, drawn, generator):
    clients = [f"client {number}" for number in range(10)]
    for _ in range(20):
        chosen = cohort(clients, size=size, generator=generator)
        assert len(chosen) == len(set(chosen)) == drawn
        assert chosen == sorted(chosen, key=clients.index)


def test_every_client_and_every_pair_is_drawn_equally_often(generator):
    num_clients, size, rounds = 8, 3, 4000
    singles, pairs = np.zeros(num_clients), dict.fromkeys(combinations(range(num_clients), 2), 0)
    for _ in range(rounds):
        chosen = cohort(range(num_clients), size=size, generator=generator)
        singles[chosen] += 1
        for pair in combinations(chosen, 2):
            pairs[pair] += 1
    # Counts of a draw without replacement have variance N p (1 - p) and correlation -1 / (n - 1): this sum is chi-square with n - 1.
    share = size / num_clients
    statistic = (
        (num_clients - 1)
        / num_clients
        * ((singles - rounds * share) ** 2 / (rounds * share * (1 - share))).sum()
    )
    assert statistic < chi2.ppf(1 - 1e-4, num_clients - 1)
    # Each of 28 pairs is binomial; consecutive clients from a random start would draw some of them never.
    share = size * (size - 1) / (num_clients * (num_clients - 1))
    assert min(pairs.values()) > binom.ppf(1e-4 / 28, rounds, share)
    assert max(pairs.values()) < binom.ppf(1 - 1e-4 / 28, rounds, share)


def test_a_cohort_follows_its_generator_only():
    draw = lambda seed: cohort(range(50), size=10, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert draw(1) == draw(1)
    assert draw(1) != draw(2)


# Random streams.


def numbers(generator):
    return tuple(torch.randint(2**62, (3,), generator=generator).tolist())


@pytest.mark.parametrize(
    ("seed", "first", "second"),
    [(0, (198, 622), (74, 734)), (0, (125, 100), (26, 840)), (1, (19, 74), (90, 404))],
)
def test_streams_of_clients_that_once_collided_differ(seed, first, second):
    # With `manual_seed`, which keeps 32 bits, each of these pairs of (round, client) drew the same numbers.
    one, other = (
        stream_generator(seed, server_round=server_round, client=client)
        for server_round, client in (first, second)
    )
    assert numbers(one) != numbers(other)
    assert not torch.equal(one.get_state(), other.get_state())


def test_streams_differ_between_arguments_and_repeat_for_equal_ones():
    ids = (0, 1, 2, 9, 2**32, 2**40, 2**64 - 1, 2 + 5 * 2**32)
    calls = [
        (seed, server_round, client, purpose)
        for seed, server_round, client, purpose in product(
            (0, 7, 2**128 - 1), ids, (None, *ids), ("", "a", "b")
        )
    ]

    def draw(call):
        seed, server_round, client, purpose = call
        return numbers(
            stream_generator(seed, server_round=server_round, client=client, purpose=purpose)
        )

    first = {call: draw(call) for call in calls}
    assert len(set(first.values())) == len(calls)
    assert {call: draw(call) for call in reversed(calls)} == first  # independent of earlier draws


def test_a_long_id_is_not_read_as_two_short_ones():
    # SeedSequence splits numbers into words of 32 bits, so that the spawn keys (1, 2 + 5 * 2**32) and (1, 2, 5) are one.
    sequences = [
        np.random.SeedSequence(0, spawn_key=key) for key in ((1, 2 + 5 * 2**32), (1, 2, 5))
    ]
    assert (sequences[0].generate_state(4) == sequences[1].generate_state(4)).all()
    assert numbers(stream_generator(0, server_round=1, client=2 + 5 * 2**32)) != numbers(
        stream_generator(0, server_round=1 + 2 * 2**32, client=5)
    )


@pytest.mark.parametrize("client", [None, 7, 2**33])
def test_streams_are_those_of_numpys_mersenne_twister(client):
    key = [3, 0, int(client is not None), (client or 0) % 2**32, (client or 0) >> 32]
    key += np.frombuffer(hashlib.sha256("noise µ".encode()).digest(), "<u4").tolist()
    twister = np.random.MT19937(np.random.SeedSequence(5, spawn_key=key))
    state = twister.state
    state["state"]["pos"] = 624  # numpy starts with the last word of the seed
    twister.state = state
    generator = stream_generator(5, server_round=3, client=client, purpose="noise µ")
    drawn = torch.randint(2**24, (1000,), generator=generator)
    assert drawn.tolist() == (twister.random_raw(1000) % 2**24).tolist()


def test_streams_do_not_depend_on_the_hash_seed_of_the_process():
    code = (
        "import torch; from fedprompt import stream_generator as s;"
        "print(torch.randint(2**62, (3,), generator=s(0, server_round=1, client=2, purpose='batches')).tolist())"
    )
    outputs = {
        subprocess.check_output(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}
        )
        for seed in ("1", "2")
    }
    expected = numbers(stream_generator(0, server_round=1, client=2, purpose="batches"))
    assert outputs == {f"{list(expected)}\n".encode()}


def test_streams_count_as_seeded():
    seeds = {
        stream_generator(0, server_round=0, client=client).initial_seed() for client in range(50)
    }
    assert torch.Generator().initial_seed() not in seeds
    assert len(seeds) == 50


@pytest.mark.slow
def test_no_two_of_a_million_streams_are_alike():
    states = {
        hashlib.blake2b(
            stream_generator(seed, server_round=server_round, client=client)
            .get_state()
            .numpy()
            .tobytes(),
            digest_size=16,
        ).digest()
        for seed, server_round, client in product(range(2), range(500), range(1000))
    }
    assert len(states) == 10**6


def test_neither_streams_nor_cohorts_touch_a_global_generator():
    def state():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002 - it must not move

    before = state()
    numbers(stream_generator(1, server_round=2, client=3))
    cohort(range(9), size=3, generator=stream_generator(0, server_round=0, client=0))
    assert state() == before


# Bad input: the error names the argument, the rule and what was got, and nothing has changed.

GOOD = {"keys": torch.full((3, 2), 7.0), "norm.running_mean": torch.ones(2)}
BAD_MESSAGES = {
    "an unknown name": (
        {"head.wieght": torch.zeros(4, 2)},
        ValueError,
        r"`message` must name parameters or buffers.*got \['head\.wieght'\]",
    ),
    "a prefix": (
        {"head": torch.zeros(4, 2)},
        ValueError,
        r"`message` must name parameters or buffers.*got \['head'\]",
    ),
    "another shape": (
        {"head.weight": torch.zeros(2, 4)},
        ValueError,
        r"`message\['head\.weight'\]` must have the shape of 'head\.weight' \(4, 2\); got \(2, 4\)",
    ),
    "a shape that would broadcast": (
        {"head.weight": torch.zeros(2)},
        ValueError,
        r"`message\['head\.weight'\]` must have the shape.*got \(2,\)",
    ),
    "another shape of rows": (
        {"head.weight": Weighted(torch.zeros(4, 3), torch.ones(4))},
        ValueError,
        r"`message\['head\.weight'\]` must have the shape of 'head\.weight' \(4, 2\); got \(4, 3\)",
    ),
    "NaN": (
        {"head.bias": torch.tensor([0.0, torch.nan, 0.0, 0.0])},
        ValueError,
        r"`message\['head\.bias'\]` must be finite; got 1 entries of 4",
    ),
    "infinity": (
        {"scale": torch.tensor(-torch.inf)},
        ValueError,
        r"`message\['scale'\]` must be finite; got 1 entries of 1",
    ),
    "infinity after the cast": (
        {"scale": torch.tensor(1e300, dtype=torch.float64)},
        ValueError,
        r"`message\['scale'\]` must be finite",
    ),
    "NaN in a known row": (
        {
            "head.bias": Weighted(
                torch.tensor([0.0, torch.nan, torch.nan, 0.0]), torch.tensor([1.0, 0.0, 1.0, 1.0])
            )
        },
        ValueError,
        r"`message\['head\.bias'\]\.value` must be finite wherever its weight is positive; got NaN or infinity in rows \[2\]",
    ),
    "a row too large for the dtype": (
        {
            "head.bias": Weighted(
                torch.tensor([0.0, 1e300, 0.0, 0.0], dtype=torch.float64), torch.ones(4)
            )
        },
        ValueError,
        r"`message\['head\.bias'\]\.value` must be finite wherever its weight is positive; got NaN or infinity in rows \[1\]",
    ),
    "a negative weight": (
        {"head.bias": Weighted(torch.zeros(4), torch.tensor([1.0, -3.0, 1.0, 1.0]))},
        ValueError,
        r"`message\['head\.bias'\]\.weight` must be finite and at least 0; got -3\.0",
    ),
    "a NaN weight": (
        {"scale": Weighted(torch.tensor(1.0), torch.tensor(torch.nan))},
        ValueError,
        r"`message\['scale'\]\.weight` must be finite and at least 0; got nan",
    ),
    "weights of other rows": (
        {"head.bias": Weighted(torch.zeros(4), torch.ones(3))},
        ValueError,
        r"`message\['head\.bias'\]\.weight` must have the leading shape of `value` \(4,\); got \(3,\)",
    ),
    "floats for a counter": (
        {"norm.num_batches_tracked": torch.tensor(1.5)},
        TypeError,
        r"`message\['norm\.num_batches_tracked'\]` must have a dtype that casts to torch\.int64; got torch\.float32",
    ),
    "integers with evidence": (
        {"keys": Weighted(torch.ones(3, 2, dtype=torch.int64), torch.ones(3))},
        TypeError,
        r"`message\['keys'\]\.value` must be a floating-point tensor; got a int64 tensor",
    ),
    "a list": (
        {"scale": 1.0},
        TypeError,
        r"`message\['scale'\]` must be a tensor or a Weighted; got 1\.0 \(float\)",
    ),
    "an array": (
        {"keys": np.zeros((3, 2))},
        TypeError,
        r"`message\['keys'\]` must be a tensor or a Weighted; got a float64 array",
    ),
}


@pytest.mark.bad_input
@pytest.mark.parametrize(("bad", "error", "message"), BAD_MESSAGES.values(), ids=BAD_MESSAGES)
def test_a_refused_message_writes_nothing(bad, error, message):
    model = Model()
    before = bits(model)
    for order in (
        {**GOOD, **bad},
        {**bad, **{name: value for name, value in GOOD.items() if name not in bad}},
    ):
        with pytest.raises(error, match=message):
            load_values(model, order)
        assert_identical(bits(model), before)


@pytest.mark.bad_input
@pytest.mark.parametrize("wrong", [None, [torch.zeros(1)], torch.zeros(1)])
def test_what_is_no_message_or_module_is_refused_by_name(wrong):
    with pytest.raises(TypeError, match=r"`message` must map names to tensors or Weighted; got "):
        load_values(Model(), wrong)
    with pytest.raises(TypeError, match=r"`message` must map names to tensors or Weighted; got "):
        num_bytes(wrong)
    for function in (
        lambda: load_values(wrong, {}),
        lambda: snapshot(wrong),
        lambda: collect(wrong, weight=1),
    ):
        with pytest.raises(TypeError, match=r"`module` must be an nn\.Module; got "):
            function()


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight": -1}, ValueError, r"`weight` must be at least 0; got -1"),
        ({"weight": torch.nan}, ValueError, r"`weight` must be finite; got nan"),
        ({"weight": torch.inf}, ValueError, r"`weight` must be finite; got inf"),
        ({"weight": "40"}, TypeError, r"`weight` must be a number; got '40' \(str\)"),
        (
            {"weight": torch.tensor(4.0)},
            TypeError,
            r"`weight` must be a number; got a float32 tensor of shape \(\)",
        ),
        (
            {"rows": {"key": torch.ones(3)}},
            ValueError,
            r"`rows` must name collected parameters .*; got \['key'\]",
        ),
        (
            {"rows": {"keys": torch.ones(3)}, "only": ["head"]},
            ValueError,
            r"`rows` must name collected parameters .*; got \['keys'\]",
        ),
        (
            {"rows": {"keys": [1.0, 1.0, 1.0]}},
            TypeError,
            r"`rows\['keys'\]` must be a tensor of real numbers; got \[1\.0, 1\.0, 1\.0\] \(list\)",
        ),
        (
            {"rows": {"keys": torch.ones(2)}},
            ValueError,
            r"`payload\['keys'\]\.weight` must have the leading shape of `value` \(3, 2\); got \(2,\)",
        ),
        (
            {"rows": {"keys": torch.tensor([1.0, -2.0, 0.0])}},
            ValueError,
            r"`payload\['keys'\]\.weight` must be finite and at least 0; got -2\.0",
        ),
        (
            {"rows": {"keys": torch.tensor([1.0, torch.nan, 0.0])}},
            ValueError,
            r"`payload\['keys'\]\.weight` must be finite and at least 0",
        ),
        (
            {"only": ["keys", "prompts"]},
            ValueError,
            r"`only` must each match a name or a dotted prefix of .*; got \['prompts'\]",
        ),
        (
            {"only": ["hea"]},
            ValueError,
            r"`only` must each match a name or a dotted prefix of .*; got \['hea'\]",
        ),
        (
            {"only": []},
            ValueError,
            r"`only` must each match a name or a dotted prefix of .*; got none",
        ),
        (
            {"only": "keys"},
            TypeError,
            r"`only` must be several names or prefixes, such as \['prompts'\]; got 'keys'",
        ),
    ],
)
def test_bad_options_of_collect_are_refused_by_name(options, error, message):
    model = Model()
    before = bits(model)
    with pytest.raises(error, match=message):
        collect(model, **{"weight": 1, **options})
    assert_identical(bits(model), before)


@pytest.mark.bad_input
def test_a_diverged_client_cannot_send_but_in_rows_of_weight_zero():
    model = Model()
    with torch.no_grad():
        model.keys[1] = torch.nan
    with pytest.raises(
        ValueError,
        match=r"`payload\['keys'\]\.value` must be finite wherever its weight is positive.*in rows \[0\]",
    ):
        collect(model, weight=1)
    with pytest.raises(
        ValueError,
        match=r"`payload\['keys'\]\.value` must be finite wherever its weight is positive.*in rows \[1\]",
    ):
        collect(model, weight=1, rows={"keys": torch.ones(3)})
    assert (
        collect(model, weight=1, rows={"keys": torch.tensor([1.0, 0.0, 1.0])})["keys"]
        .value[1]
        .isnan()
        .all()
    )


@pytest.mark.bad_input
def test_a_module_without_parameters_is_refused():
    with pytest.raises(ValueError, match=r"`module` must have parameters; got ReLU"):
        snapshot(nn.ReLU())


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("message", "options", "error", "match"),
    [
        (
            {"a": torch.zeros(1), "b": [1.0]},
            {},
            TypeError,
            r"`message\['b'\]` must be a tensor or a Weighted; got \[1\.0\] \(list\)",
        ),
        (
            [torch.zeros(1)],
            {},
            TypeError,
            r"`message` must map names to tensors or Weighted; got \[tensor",
        ),
        (
            {},
            {"direction": "sideways"},
            ValueError,
            r"`direction` must be 'up' or 'down'; got 'sideways'",
        ),
        ({}, {"server_round": -1}, ValueError, r"`server_round` must be at least 0; got -1"),
        (
            {},
            {"server_round": 0.5},
            TypeError,
            r"`server_round` must be an integer; got 0\.5 \(float\)",
        ),
        (
            {"a": torch.zeros(3)},
            {"framed": 11},
            ValueError,
            r"`framed` must be the length of a blob that holds the 12 bytes .*; got 11",
        ),
        (
            {},
            {"framed": 11},
            ValueError,
            r"`framed` must be the length of a blob that holds the 0 bytes .*; got 11",
        ),
        ({}, {"framed": -1}, ValueError, r"`framed` must be at least 0; got -1"),
    ],
)
def test_a_refused_entry_leaves_the_ledger_as_it_was(ledger, message, options, error, match):
    with pytest.raises(error, match=match):
        ledger.record(message, **{"direction": "up", "client": 0, "server_round": 0, **options})
    assert ledger.entries == ENTRIES


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("state", "error", "match"),
    [
        ([], TypeError, r"`state` must map the fields of an entry to lists; got \[\] \(list\)"),
        (
            {},
            ValueError,
            r"`state` must have the keys server_round, client, direction, name, num_bytes, framed; got none",
        ),
        ({"server_round": []}, ValueError, r"`state` must have the keys .*; got 'server_round'\."),
        (STATE | {"more": [1, 2]}, ValueError, r"`state` must have the keys .*; got .*'more'\."),
        (STATE | {"name": "ab"}, TypeError, r"`state\['name'\]` must be a list; got 'ab' \(str\)"),
        (
            STATE | {"num_bytes": None},
            TypeError,
            r"`state\['num_bytes'\]` must be a list; got None",
        ),
        (
            STATE | {"framed": [50]},
            ValueError,
            r"`state` must hold lists of equal length; got \{'server_round': 2, .*'framed': 1\}",
        ),
        (
            STATE | {"server_round": [4, -1]},
            ValueError,
            r"`state\['server_round'\]\[1\]` must be at least 0; got -1",
        ),
        (
            STATE | {"server_round": [True, 4]},
            TypeError,
            r"`state\['server_round'\]\[0\]` must be an integer; got True",
        ),
        (
            STATE | {"num_bytes": [12, 8.0]},
            TypeError,
            r"`state\['num_bytes'\]\[1\]` must be an integer; got 8\.0",
        ),
        (
            STATE | {"framed": [50, -2]},
            ValueError,
            r"`state\['framed'\]\[1\]` must be at least 0; got -2",
        ),
        (
            STATE | {"direction": ["up", "sideways"]},
            ValueError,
            r"`state\['direction'\]\[1\]` must be 'up' or 'down'; got 'sideways'",
        ),
        (
            STATE | {"name": ["a", 7]},
            TypeError,
            r"`state\['name'\]\[1\]` must be a string; got 7 \(int\)",
        ),
        (
            STATE | {"client": [0, (1, [2])]},
            TypeError,
            r"`state\['client'\]\[1\]` must be hashable; got \(1, \[2\]\) \(tuple\)",
        ),
    ],
)
def test_a_refused_state_leaves_the_ledger_as_it_was(ledger, state, error, match):
    with pytest.raises(error, match=match):
        ledger.load_state_dict(state)
    assert ledger.entries == ENTRIES


@pytest.mark.bad_input
def test_a_blob_is_not_shared_out_among_names(ledger):
    with pytest.raises(
        ValueError, match=r"`name` must be None where `framed` is asked for; got 'head'"
    ):
        ledger.total(name="head", framed=True)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("clients", "options", "error", "message"),
    [
        (
            [],
            {"size": 0},
            ValueError,
            r"`size` must be at most the number of clients, 0, of which there must be one; got 0",
        ),
        (
            [1, 2],
            {"size": 3},
            ValueError,
            r"`size` must be at most the number of clients, 2, of which there must be one; got 3",
        ),
        ([1, 2], {"size": -1}, ValueError, r"`size` must be at least 0; got -1"),
        ([1, 2], {"size": 0.5}, TypeError, r"`size` must be an integer; got 0\.5 \(float\)"),
        (
            [1, 2],
            {"generator": None},
            TypeError,
            r"`generator` must be a torch\.Generator; got None",
        ),
        (
            [1, 2],
            {"generator": np.random.default_rng(0)},
            TypeError,
            r"`generator` must be a torch\.Generator; got Generator\(PCG64\)",
        ),
    ],
)
def test_bad_cohorts_are_refused_by_name(clients, options, error, message, generator):
    with pytest.raises(error, match=message):
        cohort(clients, **{"size": 1, "generator": generator, **options})


@pytest.mark.bad_input
@pytest.mark.parametrize("name", ["seed", "server_round", "client"])
def test_bad_numbers_of_a_stream_are_refused_by_name(name):
    for wrong, error, rule in (
        (-1, ValueError, "at least 0; got -1"),
        (1.0, TypeError, r"an integer; got 1\.0"),
        (True, TypeError, "an integer"),
        (2**128, ValueError, r"below 2\*\*"),
    ):
        arguments = {"seed": 0, "server_round": 0, "client": 0} | {name: wrong}
        with pytest.raises(error, match=f"`{name}` must be {rule}"):
            stream_generator(arguments.pop("seed"), **arguments)


@pytest.mark.bad_input
def test_a_purpose_that_is_not_a_string_is_refused():
    with pytest.raises(TypeError, match="`purpose` must be a string; got 1"):
        stream_generator(0, server_round=0, purpose=1)


# Wrapped modules.


def wrapped():
    """A module inside a real data-parallel wrapper of one process, wholly and in part."""
    whole = nn.parallel.DistributedDataParallel(Model())
    part = nn.ModuleDict(
        {"trunk": nn.parallel.DistributedDataParallel(nn.Linear(2, 2)), "module": nn.Linear(2, 1)}
    )
    return whole, part, torch.compile(Model())


def test_names_are_those_of_the_module_inside_a_wrapper():
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        whole, part, compiled = wrapped()
        for module in (whole, compiled):
            assert (
                list(snapshot(module)) == list(snapshot(Model())) == list(collect(module, weight=1))
            )
        names = [
            "trunk.weight",
            "trunk.bias",
            "module.weight",
            "module.bias",
        ]  # a name of one's own
        assert list(snapshot(part)) == names
        assert list(collect(part, weight=1, only=["trunk"])) == names[:2]
        rows = collect(whole, weight=1, rows={"keys": torch.tensor([0.0, 2.0, 0.0])})["keys"].weight
        assert rows.tolist() == [0.0, 2.0, 0.0]
        for module in (whole, compiled):
            broadcast = {
                name: torch.full_like(value, 3.0) for name, value in snapshot(module).items()
            }
            load_values(module, broadcast)
            assert_identical(snapshot(module), broadcast)
    finally:
        torch.distributed.destroy_process_group()


def test_two_names_of_one_parameter_take_one_value():
    model = nn.ModuleDict(
        {"first": nn.Linear(2, 2, bias=False), "second": nn.Linear(2, 2, bias=False)}
    )
    model["second"].weight = model["first"].weight
    before = model["first"].weight.detach().clone()
    ones = torch.ones(2, 2)
    rule = "`message` must hold equal values for 'first.weight' and 'second.weight', which are one parameter; got two that differ"
    with pytest.raises(ValueError, match=rule):
        load_values(model, {"first.weight": ones, "second.weight": 2 * ones})
    assert_identical(model["first"].weight.detach(), before)
    load_values(model, {"first.weight": ones, "second.weight": ones.double()})
    assert_identical(model["first"].weight.detach(), ones)


# A ledger beside the checkpoint.


def rounds_of(path, count):
    ledger = Ledger(path)
    for server_round in range(count):
        for client in ("b", ("site", 7)):
            ledger.record(
                {"head": torch.zeros(5), "keys": torch.zeros(2)},
                direction="up",
                client=client,
                server_round=server_round,
            )
        yield ledger


def test_saving_a_ledger_costs_the_same_in_every_round(tmp_path):
    """Bytes and memory of the 10th save and of the 1500th; in the state, both grow a hundredfold."""
    costs, grown, path = {}, 0, tmp_path / "ledger.jsonl"
    for number, ledger in enumerate(rounds_of(path, 1500), 1):
        if number in (9, 1499):
            save_checkpoint(ledger.state_dict(), tmp_path)
            grown = path.stat().st_size
        if number in (10, 1500):
            tracemalloc.start()
            try:
                save_checkpoint(ledger.state_dict(), tmp_path)
                memory = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            costs[number] = (
                path.stat().st_size - grown,
                (tmp_path / "state.json").stat().st_size,
                memory,
            )
    (appended, state, memory), (late_appended, late_state, late_memory) = costs[10], costs[1500]
    assert 0 < late_appended <= appended + 4 * 3  # a round has up to three digits more
    assert late_state <= state + 8  # and so have the counts
    assert late_memory < 1.5 * memory
    again = Ledger(path)
    again.load_state_dict(load_checkpoint(tmp_path))
    assert again.entries == ledger.entries
    assert len(again.entries) == 1500 * 4


def test_a_ledger_in_a_file_goes_on_from_any_checkpoint_whatever_was_appended_after_it(tmp_path):
    """Killed after a part of a line was appended, and before the state was saved that counts it."""
    whole = list(rounds_of(tmp_path / "whole.jsonl", 6))[-1]
    expected = whole.state_dict()
    for stop in range(6):
        path, saved = tmp_path / f"{stop}.jsonl", Ledger(tmp_path / f"{stop}.jsonl").state_dict()
        for number, ledger in enumerate(rounds_of(path, 5)):
            if number < stop:
                saved = ledger.state_dict()
        ledger.state_dict()
        with path.open("ab") as file:
            file.write(b'[9, "b", "up')
        again = Ledger(path)
        again.load_state_dict(saved)
        assert again.entries == whole.entries[: 4 * stop]
        for entry in whole.entries[4 * stop :]:
            again.record(
                {entry.name: torch.zeros(entry.num_bytes // 4)},
                direction="up",
                client=entry.client,
                server_round=entry.server_round,
            )
        assert again.state_dict() == expected
        assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_file_that_is_not_what_was_saved_is_refused_and_changes_nothing(tmp_path):
    path = tmp_path / "ledger.jsonl"
    saved, good = list(rounds_of(path, 2))[-1].state_dict(), path.read_bytes()
    ledger = Ledger(path)
    ledger.load_state_dict(saved)
    before = list(ledger.entries)
    for content in (b"", good[:-1], good.replace(b"20", b"21", 1), b"\n" + good[:-1]):
        path.write_bytes(content)
        with pytest.raises(
            ValueError, match="`path` must hold the 8 entries that were saved; got "
        ):
            ledger.load_state_dict(saved)
    path.unlink()
    with pytest.raises(
        ValueError, match="`path` must hold the 8 entries that were saved; got 0 entries in 0 bytes"
    ):
        ledger.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"`state\['num_bytes'\]` must be at least 0; got -1"):
        ledger.load_state_dict(saved | {"num_bytes": -1})
    with pytest.raises(
        ValueError,
        match="`state` must hold the entries, as this ledger has no `path`; got a part of a file",
    ):
        Ledger().load_state_dict(saved)
    assert ledger.entries == before
    path.write_bytes(good)
    ledger.load_state_dict(saved)
    ledger.load_state_dict(STATE)  # of a ledger without a file: the whole file is written anew
    ledger.state_dict()
    assert path.read_bytes().count(b"\n") == len(STATE["name"])


def test_a_failed_append_is_made_good_by_the_next(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    expected = list(rounds_of(path, 2))[-1].state_dict()
    good = path.read_bytes()
    first, second = rounds_of(path, 2), None
    next(first).state_dict()
    second = next(first)
    with monkeypatch.context() as patch:
        patch.setattr(
            os, "fsync", lambda _: (_ for _ in ()).throw(OSError("No space left on device"))
        )
        with pytest.raises(OSError, match="No space"):
            second.state_dict()
    assert second.state_dict() == expected
    assert path.read_bytes() == good


# More bad input.


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("entry", "error", "match"),
    [
        (
            Weighted(torch.zeros(3, 4), torch.ones(4)),
            ValueError,
            r"leading shape of `value` \(3, 4\); got \(4,\)",
        ),
        (
            Weighted(torch.zeros(3), torch.tensor([1.0, -1.0, 0.0])),
            ValueError,
            r"finite and at least 0; got -1\.0",
        ),
        (
            Weighted(torch.zeros(3), torch.tensor([1.0, torch.nan, 0.0])),
            ValueError,
            r"finite and at least 0; got nan",
        ),
        (
            Weighted(torch.zeros(3), torch.ones(3, dtype=torch.int64)),
            TypeError,
            r"a floating-point tensor; got a int64 tensor",
        ),
        (
            Weighted(np.zeros(3), torch.ones(3)),
            TypeError,
            r"`message\['a'\]\.value` must be a floating-point tensor",
        ),
    ],
)
def test_what_is_counted_is_checked(ledger, entry, error, match):
    for count in (num_bytes, partial(ledger.record, direction="up", client=0, server_round=0)):
        with pytest.raises(error, match=match):
            count({"a": entry})
        with pytest.raises(TypeError, match=r"`message` must have strings as names; got 3 \(int\)"):
            count({3: torch.zeros(2)})
    with pytest.raises(TypeError, match=r"`client` must be hashable; got \[1\] \(list\)"):
        ledger.record({"a": torch.zeros(2)}, direction="up", client=[1], server_round=0)
    assert ledger.entries == ENTRIES


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (
            {"weight": 1e-60},
            ValueError,
            r"`weight` must be 0 or in the range of float32; got 1e-60",
        ),
        (
            {"weight": 1e60},
            ValueError,
            r"`weight` must be 0 or in the range of float32; got 1e\+60",
        ),
        (
            {"weight": 1, "rows": {"keys": torch.tensor([1.0, 1e-60, 0.0], dtype=torch.float64)}},
            ValueError,
            r"`rows\['keys'\]` must be 0 or in the range of float32; got 1e-60",
        ),
        (
            {"weight": 1, "rows": {"keys": torch.ones(3, dtype=torch.complex64)}},
            TypeError,
            r"`rows\['keys'\]` must be a tensor of real numbers; got a complex64 tensor of shape \(3,\)",
        ),
    ],
)
def test_weights_that_float32_cannot_hold_are_refused(options, error, match):
    with pytest.raises(error, match=match):
        collect(Model(), **options)
    assert collect(Model(), weight=1e-40)["keys"].weight > 0  # a subnormal is a weight, too


@pytest.mark.bad_input
@pytest.mark.parametrize("clients", [5, {0: "a", 1: "b"}, {1, 2, 3}, iter([1, 2])])
def test_clients_that_are_no_sequence_are_refused(clients, generator):
    with pytest.raises(
        TypeError, match=r"`clients` must be a sequence, such as range\(100\); got "
    ):
        cohort(clients, size=1, generator=generator)


@pytest.mark.bad_input
def test_errors_name_a_few_of_many_parameters():
    model = nn.ModuleList(nn.Linear(1, 1) for _ in range(200))
    calls = (
        partial(load, model, {"weights": torch.zeros(1)}),
        partial(collect, model, weight=1, rows={"weights": torch.zeros(1)}),
        partial(snapshot, model, only=["weights"]),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"'0\.bias', .* and 395 more") as caught:
            call()
        assert len(str(caught.value)) < 250
