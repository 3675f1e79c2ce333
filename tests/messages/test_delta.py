"""The change of a client since the broadcast."""

import torch

from fedprompt import Weighted, delta
from refusals import refused
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


ONE = {"head": Weighted(torch.ones(2), torch.tensor(1.0))}


ONES, BROADCAST = torch.ones(2), {"head": torch.ones(2)}
test_wrong_calls_are_refused_by_name = refused(globals())("""
delta(ONE, {}) -> ValueError: `values` must have the name 'head'; got []
delta(ONE, [torch.ones(2)]) -> TypeError: `values` must map names to tensors; got
delta(ONE, {'head': torch.ones(3)}) -> ValueError: `values['head']` must have the shape of the
delta(ONE, {'head': torch.ones(2).double()}) -> TypeError: `values['head']` must be a tensor of
delta(ONE, {'head': torch.ones(2).to_sparse()}) -> TypeError: `values['head']` must be a dense
part([ONE], 'head') -> TypeError: `message` must map names to tensors or Weighted; got a list
part(ONE, 3) -> TypeError: `name` must be a string; got 3 (int)
named(3, ONE) -> TypeError: `name` must be a string; got 3 (int)
named('head', {3: ONES}) -> TypeError: `entries` must have strings as names; got 3 (int)
delta(ONE['head'], BROADCAST) -> TypeError: `payload` must map names to Weighted
delta({'head': Weighted(3e38 * ONES, torch.tensor(1.0))}, {'head': -3e38 * ONES}) \
-> ValueError: `payload['head'] minus values['head']` must be finite; got 2 entries of 2
delta({'head': Weighted(torch.full((2,), torch.nan), torch.tensor(1.0))}, BROADCAST) \
-> ValueError: `payload['head'].value` must be finite wherever its weight is positive
""")
