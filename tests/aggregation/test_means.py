"""The weighted mean of entries and payloads, against loops and calculations by hand."""

import weakref
from functools import partial

import pytest
import torch

import fedprompt as fp
from refusals import refused
from same import assert_identical
from tolerance import assert_near


def test_weighted_mean_against_a_loop_over_clients_and_rows(generator):
    values = torch.randn(4, 3, 2, generator=generator)
    weights = torch.randint(0, 50, (4, 3), generator=generator).float()
    weights[:, 1] = torch.tensor([0.0, 3.0, 0.0, 8.0])
    mean = fp.weighted_mean(map(fp.Weighted, values, weights))
    expected, total = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for row in range(3):
        total[row] = weights[:, row].double().sum()
        for client in range(4):
            expected[row] += weights[client, row].item() * values[client, row].double() / total[row]
    assert_near(mean.value, expected, dtype=torch.float32)
    assert_identical(mean.weight, total.float())  # sums of small integers are exact


def test_sums_do_not_drift_over_many_clients():
    """A running float32 sum of 0.1 over 2,000 clients would lose digits. The mean is exact."""

    entry = fp.Weighted(torch.full((50,), 0.1), torch.full((50,), 1000.1))
    mean = fp.weighted_mean(entry for _ in range(2000))
    assert_identical(mean.value, entry.value)
    assert_identical(mean.weight, (2000 * entry.weight.double()).float())


def known(value, weight=1.0):
    return fp.Weighted(torch.tensor([value]), torch.tensor(weight))


def test_a_payload_without_a_name_has_weight_zero_for_it():
    payloads = [
        {"prompts": known(1.0, 2.0), "keys": known(5.0, 1.0)},
        {"prompts": known(4.0, 1.0)},
        {"keys": known(torch.nan, 0.0), "prompts": known(10.0, 1.0), "own": known(8.0, 3.0)},
    ]
    mean = fp.weighted_mean(iter(payloads))
    # prompts: (2 * 1 + 4 + 10) / 4 = 4. Only one client knows keys, and only one knows own.
    numbers = {name: (entry.value.item(), entry.weight.item()) for name, entry in mean.items()}
    assert numbers == {"prompts": (4.0, 4.0), "keys": (5.0, 1.0), "own": (8.0, 3.0)}


@pytest.mark.unhooked  # the hook keeps the arguments of a call alive
def test_payloads_are_streamed_in_the_memory_of_one_of_them():
    """Of two hundred payloads, at most three exist at a time."""
    alive: list[weakref.ref] = []

    def stream():
        for number in range(200):
            value = torch.full((10,), float(number))
            alive.append(weakref.ref(value))
            assert sum(reference() is not None for reference in alive) <= 3
            yield {name: fp.Weighted(value, torch.tensor(1.0 + number)) for name in "ab"}
            del value

    # Sum of n (1 + n) over sum of (1 + n) for n < 200, with sum n = 19,900, sum n^2 = 2,646,700.
    for entry in fp.weighted_mean(stream()).values():
        assert_near(entry.value, torch.full((10,), 2_666_600 / 20_100))
        assert entry.weight.item() == 20_100


ONE = fp.Weighted(torch.ones(2, 3), torch.ones(2))


@pytest.mark.unhooked
@pytest.mark.bad_input
@pytest.mark.parametrize("things", [None, 5, ONE, {"head": ONE}], ids=["None", "5", "one", "dict"])
@pytest.mark.parametrize(
    "aggregate",
    [
        fp.weighted_mean,
        fp.robust.weighted_median,
        partial(fp.robust.trimmed_mean, fraction=0.1),
        partial(fp.heterogeneous_means, dims=[4]),
        partial(fp.robust.krum, num_byzantine=0),
        partial(fp.robust.multi_krum, num_byzantine=0, num_selected=1),
        partial(fp.aggregation.mixtures, weights=torch.ones(1, 1)),
        fp.aggregation.distances,
        fp.robust.aggregate_by_name({}),
    ],
)
def test_aggregators_take_several_things(aggregate, things):
    got = {type(None): "None", int: r"5 \(int\)"}.get(type(things), f"one {type(things).__name__}")
    with pytest.raises(
        TypeError, match=rf"`(entries|payloads)` must be an iterable of .*; got {got}"
    ):
        aggregate(things)


@pytest.mark.unhooked
@pytest.mark.bad_input
def test_krum_refuses_the_first_entry_without_reading_more():
    asked = []
    stream = (asked.append(number) or ONE for number in range(5))
    with pytest.raises(TypeError, match=r"`payloads\[0\]` must map names to Weighted, because"):
        fp.robust.krum(stream, num_byzantine=0)
    assert asked == [0]


@pytest.mark.bad_input
def test_a_malformed_entry_stops_the_stream():
    broken, asked = ONE._replace(weight=torch.full((2,), torch.nan)), []
    stream = (asked.append(each) or each for each in (ONE, ONE, broken, ONE, ONE))
    with pytest.raises(ValueError, match=r"`entries\[2\]\.weight`"):
        fp.weighted_mean(stream)
    assert len(asked) == 3


test_wrong_calls_are_refused_by_name = refused(globals())("""
weighted_mean([]) -> ValueError: `entries` must hold at least one entr
heterogeneous_means([], []) -> ValueError: `entries` must hold at least one entr
weighted_mean([ONE, None]) -> TypeError: `entries[1]` must be a Weighted(value, weight); got None
weighted_mean([torch.ones(2)]) -> TypeError: `entries[0]` must be a Weighted
weighted_mean([ONE, Weighted(ones(2, 4), ones(2))]) -> ValueError: [1].value` must have the shape o
weighted_mean([ONE, Weighted(ones(2, 3), tensor(1.0))]) -> ValueError: [1].weight` must have the sha
weighted_mean([ONE, Weighted(ones(2, 3).double(), ones(2))]) -> TypeError: [1].value` must be a tens
weighted_mean([ONE, Weighted(ones(2, 3), ones(2).double())]) -> TypeError: [1].weight` must be a ten
weighted_mean([ONE, Weighted(torch.ones(2, 3), torch.tensor([1.0, -2.0]))]) \
-> ValueError: `entries[1].weight` must be finite and at least 0; got -2.0
weighted_mean([ONE, Weighted(full((2, 3), nan), tensor([0.0, 2.0]))]) -> ValueError: must be finite
weighted_mean([{'head': ONE}, ONE]) -> TypeError: `payloads[1]` must map names to Weighted; got a W
weighted_mean([{'head': torch.ones(2)}]) -> TypeError: `payloads[0]['head']` must be a
weighted_median([{'head': ONE}, ONE]) -> TypeError: `payloads[1]` must map names to Weighted; got
weighted_median([ONE, {'head': ONE}]) -> TypeError: `entries[1]` must be a Weighted
trimmed_mean([{'head': ONE}, ONE], fraction=0.1) -> TypeError: `payloads[1]` must map names to
heterogeneous_means([{'head': ONE}], [4]) -> TypeError: `entries[0]` must be a Weighted
""")


@pytest.mark.parametrize("other", [torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)])
def test_small_entries_of_another_shape_or_dtype_are_refused_where_they_are_packed(other):
    first = {name: fp.Weighted(torch.zeros(2, 3), torch.ones(())) for name in "ab"}
    second = first | {"b": fp.Weighted(other, torch.ones((), dtype=other.dtype))}
    with pytest.raises((TypeError, ValueError), match=r"payloads\[1\]\['b'\]"):
        fp.weighted_mean([first, second])
