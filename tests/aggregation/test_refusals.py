"""Each argument of aggregators and server rules is refused by its name, and its edge is taken."""

from functools import partial

import pytest
import torch
from torch import nan, ones, tensor, zeros

import fedprompt as fp
from fedprompt import Weighted, robust
from fedprompt.aggregation import adam, distances, fedopt, mixtures, yogi
from refusals import number, refused_and_taken
from same import assert_identical

ONE = Weighted(ones(2, 3), ones(2))
NEGATIVE, INFINITE = ONE._replace(weight=-ones(2)), ONE._replace(weight=ones(2) / 0)
UNKNOWN, BROKEN = Weighted(zeros(2, 3) / 0, zeros(2)), Weighted(zeros(2, 3) / 0, tensor([0.0, 2.0]))
SHORT, WIDE = Weighted(ones(2, 4), ones(2)), ONE._replace(value=ONE.value.double())
ROWLESS, HEAVY = ONE._replace(weight=tensor(1.0)), ONE._replace(weight=ones(2).double())
PAYLOAD, NOT_MANY = {"head": ONE}, [None, 5, ONE, {"head": ONE}]
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def several(aggregate, *, of="entries", place="entries[1]", wrong=lambda bad: [ONE, bad]):
    """A row of a function of several entries or payloads, of which the second one is wrong."""
    rules = {
        of: ([*NOT_MANY, []], [iter(wrong(ONE))]),
        place: ([wrong(None), wrong(ones(2))], [wrong(ONE)]),
        f"{place}.value": (list(map(wrong, (SHORT, WIDE))), []),
        f"{place}.weight": (list(map(wrong, (NEGATIVE, INFINITE, ROWLESS, HEAVY))), []),
    }
    return lambda things: aggregate(things), {"things": wrong(ONE)}, rules


def step(rule, previous=None, mean=ONE, state=None):
    previous = zeros(2, 3) if previous is None else previous
    return rule.step(previous, mean, rule.init(zeros(2, 3)) if state is None else state)


def by_name(rule, mean=PAYLOAD, previous=None, state=None):
    values = {"head": zeros(2, 3), "keys": zeros(2, 3)}
    state = rule.init(values) if state is None else state
    return rule.step(values if previous is None else previous, mean, state)


named = lambda bad: [PAYLOAD, {"head": bad}]  # noqa: E731
trimmed, median = partial(robust.trimmed_mean, fraction=0.1), robust.weighted_median
krum, multi = partial(robust.krum, num_byzantine=0), robust.multi_krum
teachers = partial(fp.heterogeneous_means, dims=[4, 4])
RULES = [fp.overwrite(), fp.ema(decay=0.5), fp.descend(SGD), fedopt(SGD), adam(learning_rate=1.0)]
BETAS = [(0.9, 1.0), (-0.1, 0.9)], [(0.0, 0.0)]
RATE = [0, -1.0, nan, "1"], [1e-30]
FEW = [{"head": Weighted(ones(2, 3) * number, ones(2))} for number in range(5)]
ROWS = [
    *(several(aggregate) for aggregate in (fp.weighted_mean, median, trimmed, teachers)),
    *(several(f, place="payloads[1]['head']", wrong=named) for f in (fp.weighted_mean, median,
        trimmed)),
    *((lambda things, f=f: f(things), {"things": [ONE, ONE]}, {"entries[1].value": ([[ONE, BROKEN]],
        [ [ONE, UNKNOWN]])}) for f in (fp.weighted_mean, teachers)),
    *((lambda things, f=f: f(things), {"things": named(ONE)}, {"payloads[1]": ([[PAYLOAD, ONE]],
        [])}) for f in ( fp.weighted_mean, median, trimmed, robust.aggregate_by_name({}))),
    (lambda entries: fp.weighted_mean(entries), {"entries": []}, {"entries[0]": ([[ones(2)]], []),
        "payloads[0]['head']": ([[{"head": ones(2)}]], []), "payloads[1]['b'].value": ([ [{"a": ONE,
        "b": ONE}, {"a": ONE, "b": bad}] for bad in (SHORT, WIDE)], [])}),
    (lambda fraction: robust.trimmed_mean([ONE], fraction=fraction), {"fraction": 0}, { "fraction":
        ([-0.1, 0.5, nan, "0"], [0, 0.499])}),
    (fp.heterogeneous_means, {"entries": [ONE, ONE], "dims": [4, 2], "smoothing": 0, "similarity":
        None}, { "dims": ([[4], [4, 5, 6], 4], [iter([1, 1])]), "dims[1]": ([[4, 0], [4, 1.0]], []),
        "smoothing": ([-0.5, nan, "1"], [0]), "similarity": (["1", lambda *_: -1.0, lambda *_: nan,
        lambda *_: 2e18], [ lambda *_: 1e18, lambda dim, other: float(dim == other)])}),
    (krum, {"payloads": FEW, "num_byzantine": 1}, {"payloads": ([FEW[:4], []], [iter(FEW)]),
        "num_byzantine": number(0, None), "payloads[1]": ([[FEW[0], bad, *FEW[2:]] for bad in (ONE,
        {"x": ONE}, {})], []), "payloads[1]['head'].value": ([[FEW[0], {"head": SHORT}, *FEW[2:]]],
        []), "payloads[1]['head'].weight": ([[FEW[0], {"head": NEGATIVE}, *FEW[2:]]], [])}),
    (krum, {"payloads": FEW}, {"payloads": ([[{"head": ONE._replace(value=zeros(2, 3) / 0)}] * 3],
        [FEW[:3]])}),
    (multi, {"payloads": FEW, "num_byzantine": 1, "num_selected": 2}, {"num_selected": number(1,
        4)}),
    (multi, {"payloads": [*FEW[:4], {"head": BROKEN}], "num_byzantine": 0, "num_selected": 2}, {
        "num_selected": number(1, 4)}),
    (mixtures, {"payloads": [PAYLOAD, PAYLOAD], "weights": ones(1, 2)}, {"payloads": ([*NOT_MANY,
        [], [PAYLOAD]], []), "payloads[0]": ([[ONE, ONE]], []), "payloads[1]['head'].value":
        ([named(SHORT), named(BROKEN)], [named(UNKNOWN)]), "weights": ([[[1.0, 1.0]], ones(2),
        ones(0, 0), -ones(1, 2), ones(1, 2) / 0, ones(1, 2).long()], [zeros(1, 2), 1e18 * ones(1,
        2).double()])}),
    (lambda weights: mixtures([PAYLOAD], weights), {"weights": ones(1, 1)}, {"payloads": ([ones(1,
        2)], []), "weights": ( [torch.full((1, 1), 2e18)], [ones(0, 1)])}),
    (distances, {"payloads": [PAYLOAD]}, {"payloads": ([*NOT_MANY, []], []), "payloads[1]": (
        [[PAYLOAD, {"x": ONE}], [PAYLOAD, {}]], []), "payloads[0]['head'].value": ([[{"head":
        BROKEN}]], [[{"head": UNKNOWN}]]), "payloads[0]['head'].weight": ([[{"head": NEGATIVE}]],
        [])}),
    *((partial(step, rule), {"previous": zeros(2, 3), "mean": ONE, "state": None}, { "previous":
        ([zeros(2, 3).long(), [0.0], zeros(2, 3) / 0], []), "mean": ([ones(2, 3), PAYLOAD],
        [UNKNOWN, ONE]), "mean.value": ([Weighted(ones(2, 1), ones(2)), BROKEN], []), "mean.weight":
        ([NEGATIVE, INFINITE], []), "state": ([5, {"more": 1}] if rule not in RULES[2:4] else [5,
        {}], [])}) for rule in RULES),
    *((lambda previous, rule=rule: rule.init(previous), {"previous": zeros(1)}, {"previous": (
        [[0.0], zeros(1).long(), zeros(1) / 0, {1: zeros(1)}], [{}, {"a": zeros(1)}])}) for rule in
        RULES),
    *((partial(by_name, rule), {"mean": PAYLOAD, "previous": None, "state": None}, {"mean": ( [ONE,
        {"header": ONE}, {"head": ones(2, 3)}], [{}, {"head": UNKNOWN}]), "mean.weight": ( [{"head":
        NEGATIVE}, {"keys": INFINITE}], []), "previous": ([{1: zeros(2, 3)}, {"head": zeros(2,
        3).long(), "keys": zeros(2, 3)}], []), "state": ([{"head": {}}, 5], [])}) for rule in
        (*RULES, fp.update_by_name({"keys": fp.ema(decay=0)}))),
    *((lambda state, rule=rule: step(rule, state=state), {"state": rule.init(zeros(2, 3))},
        {"state": ([rule.init(zeros(3, 3))], [])}) for rule in ( adam(learning_rate=1.0),
        fedopt(partial(torch.optim.Adagrad, lr=0.1)))),
    (fp.ema, {"decay": 0.5}, {"decay": ([-0.1, 1.1, nan, "0"], [0, 1])}),
    *((make, {"make_optimizer": SGD, "max_norm": None}, {"make_optimizer": ([3], []), "max_norm": (
        [0, -1.0, nan], [None, 1e-30])}) for make in (fp.descend, fedopt)),
    (lambda make_optimizer: fedopt(make_optimizer).init(zeros(1)), {"make_optimizer": SGD},
        {"make_optimizer": ( [lambda parameters: 3], [])}),
    *((make, {"learning_rate": 1.0, "betas": (0.9, 0.9), "tau": 0.1}, {"learning_rate": RATE, "tau":
        RATE, "betas": ([0.9, (0.9,)], BETAS[1]), "betas[1]": (BETAS[0][:1], []), "betas[0]":
        (BETAS[0][1:], [])}) for make in (adam, yogi)),
    (robust.aggregate_by_name, {"rules": {}, "default": median}, {"rules": ([3, {1: median}], [{}]),
        "rules['a']": ([{"a": 3}], []), "default": ([3], [])}),
    (lambda payloads: robust.aggregate_by_name({})(payloads), {"payloads": []}, {"payloads": ([[],
        *NOT_MANY], [[{}, PAYLOAD]]), "payloads[1]['head']": ([named(ones(2))], []),
        "entries[0].weight": ([[{"head": NEGATIVE}]], [])}),
    (lambda rules: robust.aggregate_by_name(rules)([PAYLOAD]), {"rules": {}}, {"rules": ( [{"hea":
        median}, {"head.": median}], [{"head": median}])}),
    (fp.update_by_name, {"rules": {}, "default": fp.overwrite()}, {"rules": ([3], [{}]),
        "rules['a']": ([{"a": 3}], []), "default": ([3], [])}),
    (lambda rules: fp.update_by_name(rules).init({"head": zeros(1)}), {"rules": {}}, {"rules": (
        [{"key": fp.overwrite()}], [{"head": fp.overwrite()}])}),
    (lambda previous: fp.update_by_name({}).init(previous), {"previous": {}}, {"previous":
        ([zeros(1)], [{}])}),
    (fp.averaging_server, {"values": {"a": ones(2)}, "update": None, "aggregate": median},
        {"values": ([3, [ones(2)]], [{}]), "values['a']": ([{"a": 3}, {"a": ones(2).long()}], []),
        "update": ([3], [None]), "aggregate": ([3], [])}),
    (lambda state: fp.averaging_server({}).answer(1, state), {"state": None}, {"state": ([{}, None],
        [ {"values": {}, "update": {}}])}),
    (lambda payloads, state: fp.averaging_server({"a": ones(2, 3)}).step(0, payloads, state),
        {"payloads": {1: {"a": ONE}}, "state": fp.averaging_server({"a": ones(2, 3)}).state},
        {"payloads": ([[], 3], []), "state": ([{}, 3], [])}),
]  # fmt: skip
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken(ROWS)


@pytest.mark.bad_input
def test_a_malformed_entry_stops_the_stream_and_changes_nothing():
    asked = []
    stream = (asked.append(each) or each for each in (ONE, ONE, NEGATIVE, ONE, ONE))
    with pytest.raises(ValueError, match=r"`entries\[2\]\.weight`"):
        fp.weighted_mean(stream)
    assert len(asked) == 3
    stream = (asked.append(each) or each for each in [ONE] * 3)
    with pytest.raises(TypeError, match=r"`payloads\[0\]` must map names to Weighted, because"):
        robust.krum(stream, num_byzantine=0)
    assert len(asked) == 4
    for rule in RULES:
        value, state = step(rule)
        before = str(state)
        with pytest.raises(ValueError, match="`mean"):
            rule.step(value, NEGATIVE, state)
        assert str(state) == before
    assert_identical(ONE.value, ones(2, 3))


@pytest.mark.bad_input
def test_errors_give_the_position_among_the_payloads_that_have_the_name():
    by_name = robust.aggregate_by_name({})
    rule = r"^'head' \(counting the 2 payloads of 3 that have it\): `entries\[1\]"
    with pytest.raises(ValueError, match=rule):
        by_name([PAYLOAD, {"other": ONE}, {"head": BROKEN}])
    with pytest.raises(ValueError, match=r"^'head': `entries\[1\]"):
        by_name([PAYLOAD, {"head": BROKEN}])
    with pytest.raises(ValueError, match=r"^`payloads\[2\]\['head'\]\.value` must be finite"):
        fp.weighted_mean([PAYLOAD, {"other": ONE}, {"head": BROKEN}])
