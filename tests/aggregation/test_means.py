"""The weighted mean of entries and payloads, against loops and calculations by hand."""

import weakref

import pytest
import torch

import fedprompt as fp
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
