"""Mixtures and distances of payloads, against loops."""

import math
import sys
from fractions import Fraction

import pytest
import torch

from fedprompt import Weighted, distances, mixtures, weighted_mean
from refusals import check_refused, refusals
from same import assert_identical, assert_same
from tolerance import assert_near

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


def known(weight, value):
    return (weight > 0).reshape(weight.shape + (1,) * (value.ndim - weight.ndim))


# Mixtures. Each law takes an implementation and fails by an AssertionError.


def agrees_with_fractions(mix, payloads, weights):
    for row, answer in zip(weights.tolist(), mix(payloads, weights), strict=True):
        for name, entry in answer.items():
            sent = [
                (Fraction(factor), payload[name])
                for factor, payload in zip(row, payloads, strict=True)
                if name in payload
            ]
            for place in range(entry.weight.numel()):
                rows = [
                    (factor * Fraction(each.weight.reshape(-1)[place].item()), each.value)
                    for factor, each in sent
                ]
                total = sum(weight for weight, _ in rows)
                assert entry.weight.reshape(-1)[place].item() == pytest.approx(float(total))
                numbers = entry.value.reshape(entry.weight.numel(), -1)[place].tolist()
                for column, number in enumerate(numbers):
                    terms = [
                        weight
                        * Fraction(value.reshape(entry.weight.numel(), -1)[place, column].item())
                        for weight, value in rows
                        if weight > 0
                    ]
                    expected = float(sum(terms) / total) if total > 0 else 0.0
                    assert number == pytest.approx(expected, rel=1e-5, abs=1e-6)


def ones_give_the_mean(mix, payloads, weights):
    everyone = mix(payloads, torch.ones_like(weights))
    for answer in everyone:
        assert_same(answer, weighted_mean(payloads), ordered=False)


def the_identity_gives_each_client_back(mix, payloads, weights):
    for payload, answer in zip(payloads, mix(payloads, torch.eye(len(payloads))), strict=True):
        for name, entry in payload.items():
            rows = known(entry.weight, entry.value).expand_as(entry.value)
            assert_near(answer[name].value[rows], entry.value[rows])
            assert_identical(answer[name].weight, entry.weight)


def clients_have_no_order(mix, payloads, weights):
    for one, other in zip(
        mix(payloads, weights), mix(payloads[::-1], weights.flip(1)), strict=True
    ):
        assert set(one) == set(other)
        for name in one:
            torch.testing.assert_close(one[name].value, other[name].value)


LAWS = [
    agrees_with_fractions,
    ones_give_the_mean,
    the_identity_gives_each_client_back,
    clients_have_no_order,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixtures_obey_their_laws(law, dtype, generator):
    law(mixtures, drawn(generator, dtype=dtype), attention(generator))


def ignores_the_weights_of_payloads(payloads, weights):
    even = [
        {name: Weighted(value, (weight > 0).float()) for name, (value, weight) in payload.items()}
        for payload in payloads
    ]
    return mixtures(even, weights)


def counts_unknown_rows_as_zeros(payloads, weights):
    filled = [
        {
            name: Weighted(value.nan_to_num(), torch.where(weight > 0, weight, 1.0))
            for name, (value, weight) in payload.items()
        }
        for payload in payloads
    ]
    return mixtures(filled, weights)


def swaps_answers_and_clients(payloads, weights):
    square = weights[: len(payloads)]
    return mixtures(payloads, square.T) + mixtures(payloads, weights[len(payloads) :])


def uses_positions_as_weights(payloads, weights):
    return mixtures(payloads, weights * torch.arange(1.0, 5.0))


WRONG = {
    ignores_the_weights_of_payloads: ones_give_the_mean,
    counts_unknown_rows_as_zeros: the_identity_gives_each_client_back,
    swaps_answers_and_clients: agrees_with_fractions,
    uses_positions_as_weights: clients_have_no_order,
}


@pytest.mark.parametrize(("wrong", "law"), WRONG.items(), ids=lambda thing: thing.__name__)
def test_laws_reject_known_wrong_mixtures(wrong, law, generator):
    payloads, weights = drawn(generator), attention(generator)
    with pytest.raises(AssertionError):
        law(wrong, payloads, weights)
    assert set(WRONG.values()) == set(LAWS)


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


def test_mixtures_of_finite_payloads_are_finite():
    sent = [
        {"head": Weighted(*(torch.tensor(x, dtype=torch.float64) for x in (MOST, MOST)))}
        for _ in range(2)
    ]
    (answer,) = mixtures(sent, torch.tensor([[1e18, 0.5]], dtype=torch.float64))
    assert [tensor.item() for tensor in answer["head"]] == [MOST, MOST]


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


def is_the_joint_euclidean_norm(measure, payloads):
    result = measure(payloads)
    for j, one in enumerate(payloads):
        for k, other in enumerate(payloads):
            squares = [
                (one[name].value[rows] - other[name].value[rows]).square().sum().item()
                for name in one
                for rows in [known(one[name].weight, one[name].value).expand_as(one[name].value)]
            ]
            assert result[j, k].item() == pytest.approx(math.sqrt(sum(squares)), rel=1e-12)


def is_symmetric_with_a_zero_diagonal(measure, payloads):
    result = measure(payloads)
    assert_identical(result, result.T)
    assert_identical(result.diagonal(), torch.zeros(len(payloads), dtype=result.dtype))


def scales_with_the_values(measure, payloads):
    for scale in (2.0**-600, 2.0**900):
        scaled = [
            {name: Weighted(scale * value, weight) for name, (value, weight) in payload.items()}
            for payload in payloads
        ]
        torch.testing.assert_close(measure(scaled) / scale, measure(payloads))


def squared(payloads):
    return distances(payloads).square()


def name_by_name(payloads):
    return sum(distances([{name: each[name]} for each in payloads]) for name in payloads[0])


def from_the_first(payloads):
    result = distances(payloads)
    return result - result[:, :1]


def without_scaling(payloads):
    rows = torch.stack(
        [torch.cat([each["keys"].value[[0, 2]].flatten(), each["head"].value]) for each in payloads]
    )
    return (rows[:, None] - rows).square().sum(-1).sqrt()


@pytest.mark.parametrize(
    ("law", "wrong"),
    [
        (is_the_joint_euclidean_norm, squared),
        (is_the_joint_euclidean_norm, name_by_name),
        (is_symmetric_with_a_zero_diagonal, from_the_first),
        (scales_with_the_values, without_scaling),
    ],
)
def test_distances_obey_their_laws_and_known_wrong_ones_do_not(law, wrong, generator):
    payloads = same_rows(generator)
    law(distances, payloads)
    with pytest.raises(AssertionError):
        law(wrong, payloads)


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
        far = [{"a": Weighted(torch.full((2,), x, dtype=dtype), torch.tensor(1.0))}
               for x in (most, -most)]  # fmt: skip
        assert distances(far).tolist() == [[0.0, most], [most, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_distances_are_in_float32_at_least(dtype, generator):
    result = distances(same_rows(generator, dtype=dtype))
    assert result.dtype == torch.promote_types(dtype, torch.float32)


def test_empty_tensors_have_distance_zero():
    empty = [{"a": Weighted(torch.zeros(0, 3), torch.zeros(0))} for _ in range(2)]
    assert distances(empty).tolist() == [[0.0, 0.0], [0.0, 0.0]]


REFUSED = """
mixtures([ONE], [[1.0]]) -> TypeError: `weights` must be floating-point of shape (answers, clients)
mixtures([ONE], torch.ones(1)) -> ValueError: `weights` must have shape (answers, clients), at
mixtures([ONE], torch.tensor([[-0.5]])) -> ValueError: `weights` must lie in [0, 1e+18]; got -0.5.
mixtures([ONE], torch.tensor([[torch.nan]])) -> ValueError: `weights` must be finite
mixtures([ONE], torch.ones(1, 2)) -> ValueError: `payloads` must have one payload for each of the 2
mixtures([ONE, ONE], torch.ones(1, 1)) -> ValueError: `payloads` must have one payload for each
mixtures(ONE, torch.ones(1, 1)) -> TypeError: `payloads` must be an iterable of payloads
mixtures([ONE['head']], torch.ones(1, 1)) -> TypeError: `payloads[0]` must map names to Weighted
mixtures([ONE, {'head': Weighted(torch.ones(3), torch.tensor(1.0))}], torch.ones(1, 2)) \
-> ValueError: `payloads[1]['head'].value` must have the shape of the first entry (2,); got (3,).
mixtures([ONE, {'head': Weighted(torch.full((2,), torch.nan), torch.tensor(1.0))}], torch.eye(2)) \
-> ValueError: `payloads[1]['head'].value` must be finite wherever its weight is positive
distances([]) -> ValueError: `payloads` must hold at least one payload; got none.
distances(ONE) -> TypeError: `payloads` must be an iterable of payloads; got one dict.
distances([ONE, {'other': ONE['head']}]) -> ValueError: `payloads[1]` must have the names ['head']
distances([{'head': Weighted(torch.tensor([torch.nan, 1.0]), torch.tensor(1.0))}]) \
-> ValueError: `payloads[0]['head'].value` must be finite wherever its weight is positive
distances([{'head': ONE['head']._replace(weight=torch.tensor(-1.0))}]) \
-> ValueError: `payloads[0]['head'].weight` must be finite and at least 0; got -1.0.
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
