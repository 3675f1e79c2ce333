"""Mixtures and distances of payloads, against loops."""

import math
import sys
from fractions import Fraction

import pytest
import torch

from fedprompt import Weighted, weighted_mean
from fedprompt.aggregation import distances, mixtures
from same import assert_same

MOST = sys.float_info.max


def drawn(generator, *, clients=4, dtype=torch.float32):
    """Payloads with unknown rows that hold NaN; client 1 does not send "head"."""
    payloads = []
    for client in range(clients):
        weight = 1 + 9 * torch.rand(3, generator=generator)
        weight[client % 3] = 0
        value = torch.randn(3, 2, generator=generator, dtype=dtype)
        value[client % 3] = torch.nan
        head = torch.randn(2, generator=generator, dtype=dtype)
        payload = {"keys": Weighted(value, weight), "head": Weighted(head, torch.tensor(2.0))}
        payloads.append({"keys": payload["keys"]} if client == 1 else payload)
    return payloads


def attention(generator, answers=5, clients=4):
    weights = torch.rand(answers, clients, generator=generator)
    weights[0, 2] = 0
    return weights


# Mixtures.


def by_fractions(payloads, name, row):
    """Return the mixture of one name with the factors of a row, number by number."""
    sent = [(Fraction(factor), *each[name])
            for factor, each in zip(row, payloads, strict=True) if name in each]  # fmt: skip
    count, weights, numbers = sent[0][2].numel(), [], []
    for place in range(count):
        shares = [
            (factor * Fraction(weight.reshape(-1)[place].item()), value.reshape(count, -1)[place])
            for factor, value, weight in sent
        ]
        weights.append(total := sum(share for share, _ in shares))
        for column in range(2):
            terms = [share * Fraction(value[column].item()) for share, value in shares if share]
            numbers.append(float(sum(terms) / total) if total else 0.0)
    return numbers, list(map(float, weights))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixtures_agree_with_fractions(dtype, generator):
    payloads, weights = drawn(generator, dtype=dtype), attention(generator)
    for row, answer in zip(weights.tolist(), mixtures(payloads, weights), strict=True):
        assert set(answer) == {"keys", "head"}
        for name, (value, weight) in answer.items():
            numbers, totals = by_fractions(payloads, name, row)
            assert value.flatten().tolist() == pytest.approx(numbers, rel=1e-5, abs=1e-6)
            assert weight.flatten().tolist() == pytest.approx(totals)


def test_factors_of_one_give_the_mean(generator):
    payloads = drawn(generator)
    for answer in mixtures(payloads, torch.ones(5, 4)):
        assert_same(answer, weighted_mean(payloads), ordered=False)


def test_an_answer_without_weight_knows_nothing(generator):
    payloads, weights = drawn(generator), attention(generator)
    weights[3] = 0
    answer = mixtures(payloads, weights)[3]
    assert set(answer) == {"keys", "head"}
    for value, weight in answer.values():
        assert not value.any()
        assert not weight.any()


def test_payloads_are_read_once_and_not_changed(generator):
    payloads, weights = drawn(generator), attention(generator)
    before = [{name: Weighted(*entry) for name, entry in each.items()} for each in payloads]
    assert_same(mixtures(iter(payloads), weights), mixtures(payloads, weights))
    assert_same(payloads, before)


ONE = {"head": Weighted(torch.ones(2), torch.tensor(1.0))}


# Distances.


def same_rows(generator, clients=4, dtype=torch.float64):
    """Payloads with one unknown row, in which they hold different garbage."""
    payloads = []
    for client in range(clients):
        keys = torch.randn(3, 2, generator=generator, dtype=dtype)
        keys[1] = (torch.nan, torch.inf, 1.0, -7.0)[client % 4]
        weight = torch.tensor([1.0, 0.0, 2.0 + client])
        head = torch.randn(5, generator=generator, dtype=dtype)
        payloads.append({"keys": Weighted(keys, weight), "head": Weighted(head, weight[2])})
    return payloads


@pytest.mark.parametrize("scale", [1.0, 2.0**-600, 2.0**900])
def test_distances_are_the_joint_euclidean_norms_of_the_known_rows(scale, generator):
    payloads = same_rows(generator)
    scaled = [
        {name: Weighted(scale * value, weight) for name, (value, weight) in each.items()}
        for each in payloads
    ]
    result = distances(scaled) / scale
    for j, one in enumerate(payloads):
        for k, other in enumerate(payloads):
            head = one["head"].value - other["head"].value
            keys = (one["keys"].value - other["keys"].value)[[0, 2]].flatten()
            expected = math.hypot(*head.tolist(), *keys.tolist())
            assert result[j, k].item() == pytest.approx(expected, rel=1e-12, abs=0)


def test_payloads_that_know_other_rows_are_infinitely_far(generator):
    payloads = same_rows(generator, clients=3)
    entry = payloads[2]["keys"]
    payloads[2]["keys"] = Weighted(entry.value.nan_to_num(), torch.tensor([1.0, 1.0, 0.0]))
    result = distances(payloads)
    assert result[2].tolist() == [torch.inf, torch.inf, 0.0]
    assert result[0, 1].isfinite()
    assert torch.softmax(-result, 1)[2].tolist() == [0.0, 0.0, 1.0]


def test_the_largest_distance_is_finite():
    for dtype in (torch.float32, torch.float64):
        most = torch.finfo(dtype).max
        far = [{"a": Weighted(sign * torch.full((2,), most, dtype=dtype), torch.tensor(1.0))}
               for sign in (1, -1)]  # fmt: skip
        assert distances(far).tolist() == [[0.0, most], [most, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_distances_are_in_float32_at_least(dtype, generator):
    result = distances(same_rows(generator, dtype=dtype))
    assert result.dtype == torch.promote_types(dtype, torch.float32)


def test_empty_tensors_have_distance_zero():
    assert distances([ONE]).tolist() == [[0.0]]
    empty = [{"a": Weighted(torch.zeros(0, 3), torch.zeros(0))} for _ in range(2)]
    assert distances(empty).tolist() == [[0.0, 0.0], [0.0, 0.0]]
