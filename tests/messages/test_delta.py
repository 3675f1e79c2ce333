"""The change of a client since the broadcast."""

import torch

from fedprompt import Weighted, delta
from same import assert_identical, assert_same


def test_values_are_subtracted_by_name_and_weights_are_kept():
    payload = {"head": Weighted(torch.tensor([[3.0, 5.0], [1.0, 1.0]]), torch.tensor([4.0, 2.0]))}
    values = {"other": torch.zeros(7), "head": torch.tensor([[1.0, 6.0], [0.5, 3.0]])}
    change = delta(payload, values)
    assert list(change) == ["head"]
    assert change["head"].value.tolist() == [[2.0, -1.0], [0.5, -2.0]]
    assert_identical(change["head"].weight, payload["head"].weight)


def test_unknown_rows_are_zero_and_nothing_is_changed_in_place():
    payload = {"keys": Weighted(torch.tensor([2.0, torch.nan]), torch.tensor([1.0, 0.0]))}
    values = {"keys": torch.tensor([0.5, 0.5])}
    change = delta(payload, values)
    assert change["keys"].value.tolist() == [1.5, 0.0]
    change["keys"].weight.fill_(9)
    assert payload["keys"].weight.tolist() == [1.0, 0.0]
    assert_same(values, {"keys": torch.tensor([0.5, 0.5])})
