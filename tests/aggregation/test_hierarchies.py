"""Averaging along any tree of edge servers gives the mean of a flat federation, up to rounding.

Each server rounds its mean to the dtype of the values and its total to that of the weights. The
first changes a number by at most u = eps / 2 of the largest in its row. The second changes it by at
most twice the u of the weights.
"""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprompt as fp
from fedprompt.privacy import from_sum, to_summable
from same import assert_identical

FORMS = {"head.weight": ((3,), (2,)), "head.scale": ((), ()), "keys": ((2, 2), (1,))}  # rows, event
LOGITS = ((4,), (4,))
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WIDTHS = ("2", "6", "9")  # as names: of class logits, from clients whose features are that wide


def draw_payload(seed, names, *, dtype, weights, whole_numbers):
    """Make a payload in which unknown rows contain NaN."""
    generator = torch.Generator().manual_seed(seed)
    payload = {}
    for name in names:
        rows, event = FORMS.get(name, LOGITS)
        value = torch.randn((*rows, *event), generator=generator, dtype=torch.float64)
        weight = 10 ** (3 * torch.rand(rows, generator=generator, dtype=torch.float64))
        if whole_numbers:
            value, weight = (256 * value).round() / 256, weight.ceil()
        weight = torch.where(torch.rand(rows, generator=generator) < 0.3, 0.0, weight)
        value = torch.where((weight > 0).reshape(rows + (1,) * len(event)), value, torch.nan)
        payload[name] = fp.Weighted(value.to(dtype), weight.to(weights))
    return payload


SOME_NAMES = st.sets(st.sampled_from(list(FORMS)), min_size=1).map(sorted)


@st.composite
def trees(draw, *, held=SOME_NAMES, whole_numbers=False):
    """Draw a tree in which clients are payloads, and servers are lists of clients and servers."""
    dtype = draw(st.sampled_from(DTYPES))
    weights = draw(st.sampled_from([torch.float32, torch.float64]))
    make = partial(draw_payload, dtype=dtype, weights=weights, whole_numbers=whole_numbers)
    clients = st.builds(make, st.integers(0, 2**32), held)
    servers = st.recursive(
        clients, lambda below: st.lists(below, min_size=1, max_size=4), max_leaves=8
    )
    return draw(st.lists(servers, min_size=1, max_size=4))


def clients_of(tree):
    parts = [tree] if isinstance(tree, dict) else map(clients_of, tree)
    return list(parts) if isinstance(tree, dict) else [client for part in parts for client in part]


def depth(tree):
    return 0 if isinstance(tree, dict) else 1 + max(map(depth, tree))


def up(tree, aggregate):
    """Aggregate on each server, from the leaves to the root."""
    return tree if isinstance(tree, dict) else aggregate([up(below, aggregate) for below in tree])


def assert_equal_to_rounding(actual, expected, tree, *, alike=False):
    """Names share their rows where they are `alike`."""
    clients = clients_of(tree)
    assert actual.keys() == expected.keys()
    for name, (value, weight) in expected.items():
        assert actual[name].value.dtype == value.dtype
        keys = expected if alike else [name]
        sent = [client[key].value for client in clients for key in keys if key in client]
        largest = torch.stack(sent).double().nan_to_num().abs().amax(0)
        sums = len(clients) * 2**-51  # of the accumulators, in float64
        u_value, u_weight = (torch.finfo(tensor.dtype).eps / 2 for tensor in (value, weight))
        levels = depth(tree) + 1
        for got, wanted, unit, scale in (
            (actual[name].value, value.double(), u_value + 2 * u_weight, largest),
            (actual[name].weight, weight.double(), u_weight, weight.double()),
        ):
            allowed = 1.05 * (levels * unit + sums) * scale
            assert bool(((got.double() - wanted).abs() <= allowed).all()), name


MEANS = {
    "weighted_mean": fp.weighted_mean,
    "trimmed_mean of everything": partial(fp.robust.trimmed_mean, fraction=0),
}


@pytest.mark.parametrize("name", MEANS)
@settings(deadline=None, max_examples=15)
@given(tree=trees())
def test_averaging_along_any_tree_is_flat_averaging(name, tree):
    assert_equal_to_rounding(up(tree, MEANS[name]), fp.weighted_mean(clients_of(tree)), tree)


@settings(deadline=None, max_examples=30)
@given(tree=trees(held=st.just(list(FORMS)), whole_numbers=True))
def test_edges_that_send_sums_change_no_bit_where_the_sums_are_exact(tree):
    """For multiples of 1 / 256 with counts as weights, all float64 sums are exact."""

    def total(below):
        return to_summable(below) if isinstance(below, dict) else sum(map(total, below))

    clients = clients_of(tree)
    flat = from_sum(sum(map(to_summable, clients)), like=clients[0])
    assert_identical(from_sum(total(tree), like=clients[0]), flat)
    assert_identical(flat, fp.weighted_mean(clients))


# What does not hold.


def sent(*numbers):
    """One client for each number, all of weight 1."""
    return [{"a": fp.Weighted(torch.tensor([number]), torch.tensor(1.0))} for number in numbers]


SPREAD = [sent(0.0, 1.0, 9.0), sent(9.1, 20.0, 22.0), sent(9.2, 30.0, 33.0)]
