"""Rules for single names: matching, results and errors."""

from functools import partial

import pytest
import torch

import fedprompt as fp
from refusals import check_refused, refusals


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


ONE = fp.Weighted(torch.ones(2, 3), torch.ones(2))


@pytest.mark.bad_input
def test_errors_give_the_position_among_the_payloads_that_have_the_name():
    """The malformed entry is from the third client, but the second one of its name."""
    good, broken = known(1.0), known(torch.nan)
    sent = [{"head": good, "keys": good}] * 2 + [{"head": good, "keys": known(1.0, -1.0)}]
    for aggregate in (
        fp.weighted_mean,
        partial(fp.robust.krum, num_byzantine=0),
        partial(fp.robust.trimmed_mean, fraction=0),
        fp.robust.weighted_median,
    ):
        with pytest.raises(ValueError, match=r"^`payloads\[2\]\['keys'\]\.weight` must be finite"):
            aggregate(sent)
    with pytest.raises(ValueError, match=r"^`payloads\[2\]\['head'\]\.value` must be finite"):
        fp.weighted_mean([{"head": good}, {"other": good}, {"head": broken}])
    by_name = fp.robust.aggregate_by_name({})
    rule = r"'head' \(counting the 2 payloads of 3 that have it\): `entries\[1\]"
    with pytest.raises(ValueError, match=rule):
        by_name([{"head": good}, {"other": good}, {"head": broken}])
    with pytest.raises(ValueError, match=r"^'head': `entries\[1\]"):
        by_name([{"head": good}, {"head": broken}])


KEYS = fp.update_by_name({"keys": fp.ema(decay=0.5)})
VALUES = {"head": torch.zeros(1), "keys": torch.zeros(1)}
STATE = KEYS.init(VALUES)
REFUSED = """
aggregate_by_name({})([]) -> ValueError: `payloads` must hold at least one payload; got none
aggregate_by_name({})([{'a': ONE}, ONE]) -> TypeError: `payloads[1]` must map names to Weighted
aggregate_by_name({})([{'keys': ONE}, {'keys': torch.ones(2)}]) -> TypeError: `payloads[1]['keys']`
aggregate_by_name({})([{'head.b': ONE._replace(weight=-torch.ones(2))}]) \
-> ValueError: 'head.b': `entries[0].weight` must be finite and at least 0
aggregate_by_name({'hea': constant(1)})([{'head': ONE}]) -> ValueError: `rules` must each match a
aggregate_by_name({'head.': constant(1)})([{'head.x': ONE}]) -> ValueError: `rules` must each match
KEYS.step(VALUES, {'head': known(1.0), 'header': known(1.0)}, STATE) \
-> ValueError: `mean` must have no other names than `previous` ['head', 'keys']; got ['header']
KEYS.step(VALUES, {'head': known(1.0), 'keys': known(1.0, -1.0)}, STATE) \
-> ValueError: 'keys': `mean.weight` must be finite and at least 0; got -1.0
KEYS.step(VALUES, {'head': torch.ones(1)}, STATE) -> TypeError: 'head': `mean` must be a Weighted
KEYS.step(VALUES, {'keys': known(1.0)}, {'head': {}}) -> ValueError: `state` must come from `init`
update_by_name({'key': overwrite()}).init(VALUES) -> ValueError: `rules` must each match a name
aggregate_by_name(rules={'a': 3}) -> TypeError: `rules['a']` must be a function of entries; got 3
aggregate_by_name(rules=3) -> TypeError: `rules` must be a mapping from names, each to a function
aggregate_by_name(rules={}, default=3) -> TypeError: `default` must be a function of entries; got 3
update_by_name(rules={'a': 3}) -> TypeError: `rules['a']` must be a server update; got 3 (int)
"""


@pytest.mark.bad_input
@pytest.mark.unhooked
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name(call, error, message):
    check_refused(call, error, message, globals())
    assert STATE == {"head": {}, "keys": {}}
    assert VALUES == {"head": 0.0, "keys": 0.0}
