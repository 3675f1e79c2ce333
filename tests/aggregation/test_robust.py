"""Robust aggregators, against other implementations and against attacks of a minority."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import Weighted, weighted_mean
from fedprompt.robust import krum, multi_krum, trimmed_mean, weighted_median
from references import robust
from same import assert_identical
from tolerance import assert_near


def column(values, weights):
    """One coordinate, sent by several clients."""
    return [
        Weighted(torch.tensor([value], dtype=torch.float64), torch.tensor(float(weight)))
        for value, weight in zip(values, weights, strict=True)
    ]


@st.composite
def columns(draw):
    """Whole weights whose sum is a multiple of 20, and values that may be equal."""
    weights = draw(st.lists(st.integers(0, 9), min_size=1, max_size=7))
    weights.append(20 - sum(weights) % 20)
    return draw(st.lists(st.integers(-9, 9), min_size=len(weights), max_size=len(weights))), weights


@settings(deadline=None, max_examples=30)
@given(column_=columns())
def test_a_weighted_median_is_numpys_median_of_copies(column_):
    assert_near(
        weighted_median(column(*column_)).value[0],
        torch.tensor(robust.median(*column_), dtype=torch.float64),
    )


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.2, 0.45])
@settings(deadline=None, max_examples=20)
@given(column_=columns())
def test_a_trimmed_mean_is_scipys_of_copies(fraction, column_):
    expected = torch.tensor(robust.trimmed(*column_, fraction), dtype=torch.float64)
    assert_near(trimmed_mean(column(*column_), fraction=fraction).value[0], expected)


def test_every_coordinate_is_sorted_for_itself():
    rows = torch.tensor([[1.0, 30.0], [2.0, 10.0], [3.0, 20.0]])
    entries = [Weighted(row, torch.tensor(1.0)) for row in rows]
    assert weighted_median(entries).value.tolist() == [2.0, 20.0]
    assert trimmed_mean(entries, fraction=0.4).value.tolist() == [2.0, 20.0]


def test_rows_without_entries_and_no_rows_at_all_pass_through():
    for value, weight in ((torch.zeros(2, 0), torch.ones(2)), (torch.zeros(0, 3), torch.zeros(0))):
        for aggregate in (weighted_median, partial(trimmed_mean, fraction=0.1)):
            result = aggregate([Weighted(value, weight)] * 3)
            assert_identical(tuple(result), (value, 3 * weight))


# A minority attacks: a fifth of the weight of every row lies.

HONEST, BYZANTINE = 8, 2


def honest_uploads(generator):
    """Integer weights, and values around 1, so that a flipped sign leaves their range."""
    weights = torch.randint(5, 20, (HONEST, 3), generator=generator).float()
    return [Weighted(1 + 0.2 * torch.rand(3, 4, generator=generator), weight) for weight in weights]


ATTACKS = {
    "far above": lambda honest, number: honest + 1e6,
    "far below": lambda honest, number: honest - 1e6,
    "far on either side": lambda honest, number: torch.full_like(honest, 1e6 * (-1) ** number),
    "one NaN": lambda honest, number: honest.index_fill(1, torch.tensor([2]), torch.nan),
    "infinity": lambda honest, number: honest - torch.inf,
    "the sign flipped and tenfold": lambda honest, number: -10 * honest,
}


def round_under_attack(attack, generator):
    """Honest entries, and two malicious ones with exactly a fifth of the weight of each row."""
    honest = honest_uploads(generator)
    mean, weight = weighted_mean(honest)
    lies = [Weighted(ATTACKS[attack](mean, number), weight / 8) for number in range(BYZANTINE)]
    return honest, [lies[0], *honest[:5], lies[1], *honest[5:]]


def lifted(select):
    return lambda entries: select([{"head": entry} for entry in entries])["head"]


ROBUST = {
    "weighted_median": weighted_median,
    "trimmed_mean": partial(trimmed_mean, fraction=0.2),
    "krum": lifted(partial(krum, num_byzantine=BYZANTINE)),
    "multi_krum": lifted(partial(multi_krum, num_byzantine=BYZANTINE, num_selected=HONEST)),
    "weighted_median of payloads": lifted(weighted_median),
}


def in_range(result, honest):
    values = torch.stack([entry.value for entry in honest])
    low, high = values.amin(0) - 1e-6, values.amax(0) + 1e-6
    return bool(((result.value >= low) & (result.value <= high)).all())


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", ROBUST)
def test_a_fifth_of_the_weight_cannot_push_the_result_out_of_the_honest_range(
    name, attack, generator
):
    for _ in range(10):
        honest, entries = round_under_attack(attack, generator)
        result = ROBUST[name](entries)
        assert in_range(result, honest)
        assert bool((result.weight > 0).all())


def test_a_trim_equal_to_the_share_of_the_lies_has_no_margin():
    """In floating point, a third of three weights of 0.3 is not quite one of them."""
    weight = torch.tensor(0.3, dtype=torch.float64)
    values = torch.tensor([[1.0], [1.2], [1e30]], dtype=torch.float64)
    entries = [Weighted(value, weight) for value in values]
    assert trimmed_mean(entries, fraction=1 / 3).value.item() > 1e10
    assert 1.0 <= trimmed_mean(entries, fraction=0.34).value.item() <= 1.2


def test_a_row_with_nan_does_not_count_and_its_neighbors_do():
    broken = Weighted(torch.tensor([[torch.nan, 1.0], [5.0, 5.0]]), torch.tensor([7.0, 7.0]))
    whole = Weighted(torch.tensor([[1.0, 2.0], [3.0, 3.0]]), torch.tensor([2.0, 2.0]))
    for aggregate in (weighted_median, partial(trimmed_mean, fraction=0.0)):
        value, weight = aggregate([broken, whole])
        assert weight.tolist() == [2.0, 9.0]
        assert value[0].tolist() == [1.0, 2.0]
        assert value[1, 0] > 4


# Krum.


def payload(*vectors, weight=1.0):
    return {
        f"part{place}": Weighted(torch.as_tensor(vector), torch.tensor(weight))
        for place, vector in enumerate(vectors)
    }


@pytest.mark.parametrize(("count", "num_byzantine"), [(3, 0), (7, 2), (9, 2), (9, 3)])
def test_krum_against_two_loops(count, num_byzantine, generator):
    for _ in range(3):
        payloads = [
            payload(torch.randn(2, 3, generator=generator), torch.randn(4, generator=generator))
            for _ in range(count)
        ]
        vectors = [
            torch.cat([entry.value.flatten() for entry in sent.values()]).tolist()
            for sent in payloads
        ]
        scores = robust.krum_scores(vectors, num_byzantine)
        ranking = sorted(range(count), key=scores.__getitem__)
        assert_identical(krum(payloads, num_byzantine=num_byzantine), payloads[ranking[0]])
        for num_selected in range(1, count - num_byzantine + 1):
            nearest = sorted(ranking[:num_selected])
            assert_identical(
                multi_krum(payloads, num_byzantine=num_byzantine, num_selected=num_selected),
                weighted_mean([payloads[position] for position in nearest]),
            )


def test_krum_counts_heads_and_multi_krum_averages_by_weight():
    """By hand: 1.1 scores .01 + .04, 1.0 .01 + .09, 1.3 .04 + .09, and 0.7 .09 + .16."""
    payloads = [
        payload([value], weight=weight)
        for value, weight in ((1.0, 1.0), (1.1, 3.0), (1.3, 1.0), (9.0, 1e6), (0.7, 1.0))
    ]
    assert krum(payloads, num_byzantine=1)["part0"].value.item() == pytest.approx(1.1)
    both = multi_krum(payloads, num_byzantine=1, num_selected=2)["part0"]
    assert both.value.item() == pytest.approx((1.0 + 3 * 1.1) / 4)
    assert both.weight.item() == 4.0


def test_krum_does_not_share_memory_and_ignores_the_order(generator):
    payloads = [payload(torch.randn(3, generator=generator)) for _ in range(7)]
    before = [sent["part0"].value.clone() for sent in payloads]
    chosen = krum(iter(payloads), num_byzantine=2)
    assert_identical(krum(payloads[::-1], num_byzantine=2), chosen)
    for tensor in chosen["part0"]:
        tensor.fill_(9)
    assert_identical([sent["part0"].value for sent in payloads], before)
    assert all(sent["part0"].weight == 1 for sent in payloads)


def rows(value, known):
    return {"logits": Weighted(torch.full((3, 2), value), torch.tensor(known))}


def test_krum_does_not_take_what_is_unknown_for_zero():
    """A payload with an unknown row would be selected if its 0 in that row counted."""
    payloads = [
        {"logits": Weighted(torch.tensor([[0.0], [value]]), torch.ones(2))}
        for value in (-2.0, -1.5, 1.5, 2.0, 9.0, 0.0)
    ]
    payloads[-1]["logits"].weight[1] = 0
    assert krum(payloads, num_byzantine=1)["logits"].weight.tolist() == [1.0, 1.0]


def test_krum_does_not_compare_what_knows_other_rows():
    """A copy with fewer known rows is not a neighbor, and rows of weight 0 are ignored."""
    everything, one = [1.0, 2.0, 3.0], [1.0, 0.0, 0.0]
    payloads = [rows(value, everything) for value in (1.0, 1.2, 1.1)] + [rows(1.1, one)] * 2
    assert krum(payloads, num_byzantine=1)["logits"].value.unique().item() == pytest.approx(1.1)
    assert krum(payloads, num_byzantine=1)["logits"].weight.tolist() == everything
    garbage = [rows(value, one) for value in (1.0, 1.1, 1.3)]
    for number, sent in enumerate(garbage):
        sent["logits"].value[1:] = (torch.nan, 1e9, -torch.inf)[number]
    assert krum(garbage, num_byzantine=0)["logits"].value[0, 0].item() == pytest.approx(1.0)


def test_a_trimmed_mean_does_not_leave_its_range_by_rounding(generator):
    """The lowest and the highest entry are removed."""
    value = torch.full((7, 4), 0.1, dtype=torch.float64)
    value[0], value[1] = -9.0, 9.0
    for _ in range(50):
        weight = 0.1 + torch.rand(7, generator=generator, dtype=torch.float64)
        weight[:2] = 0.05
        assert trimmed_mean(map(Weighted, value, weight), fraction=0.1).value.equal(value[2])
    zero = Weighted(torch.tensor([-0.0]), torch.tensor(1.0))
    assert trimmed_mean([zero], fraction=0.1).value.signbit().all()
