"""Rules for single names: matching, results and errors."""

import pytest
import torch

import fedprompt as fp


def known(value, weight=1.0):
    return fp.Weighted(torch.tensor([value]), torch.tensor(weight))


def constant(number):
    """Make an aggregator that always returns one number."""

    def aggregate(entries):
        *_, last = entries
        return last._replace(value=torch.full_like(last.value, number))

    return aggregate


RULES = {"head": 1.0, "head.proj": 2.0, "head.proj.weight": 3.0}


MATCHES = [
    ("head", 1.0),  # the full name
    ("head.bias", 1.0),  # a prefix
    ("head.proj.bias", 2.0),  # the longer prefix
    ("head.proj.weight", 3.0),  # the full name over both prefixes
    ("head.project", 1.0),  # "head.proj" ends inside a word
    ("header.x", 9.0),  # so does "head"
    ("ahead", 9.0),
    ("x.head", 9.0),  # a suffix is not a prefix
    ("keys", 9.0),
]


@pytest.mark.parametrize("order", [1, -1])
def test_names_match_the_full_name_then_the_longest_prefix_then_the_default(order):
    rules = {rule: constant(number) for rule, number in list(RULES.items())[::order]}
    payload = fp.robust.aggregate_by_name(rules, default=constant(9.0))(
        [{}, {name: known(0.0) for name, _ in MATCHES}]  # a client may send no name at all
    )
    assert {name: entry.value.item() for name, entry in payload.items()} == dict(MATCHES)


@pytest.mark.parametrize("order", [1, -1])
def test_updates_match_names_as_aggregators_do(order):
    # From 0 towards 1, ema with decay d gives 1 - d. This is exact for multiples of 1/16.
    rules = {rule: fp.ema(decay=number / 16) for rule, number in list(RULES.items())[::order]}
    update = fp.update_by_name(rules, default=fp.ema(decay=9 / 16))
    values = {name: torch.zeros(1) for name, _ in MATCHES}
    new, _ = update.step(values, {name: known(1.0) for name in values}, update.init(values))
    assert {name: 16 * (1 - value.item()) for name, value in new.items()} == dict(MATCHES)
