"""Protocols of the field, against loops over images that are written by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedprompt import Round, cosine_logits, prompted_text
from fedprompt.data import experiments as experiments
from fedprompt.data import leave_one_out
from fedprompt.methods import Federation, HeldOut, evaluate, kgcoop
from refusals import refused
from tiny_federations import NAMES, clip_federation

LABELS = st.lists(st.integers(0, 6), min_size=1, max_size=40)
SEVEN = ("ant", "bee", "cat", "dog", "emu", "fox", "gnu")


def draw(seed=0):
    return np.random.default_rng(seed)


@settings(max_examples=50, deadline=None)
@given(LABELS, st.integers(1, 4), st.data())
def test_few_shots_are_of_training_images_and_as_many_of_each_class(labels, shots, data):
    among = data.draw(st.lists(st.sampled_from(range(len(labels))), min_size=1, unique=True))
    kept = experiments.few_shots(labels, shots=shots, among=among, generator=draw())
    assert set(kept) <= set(among)
    assert sorted(kept) == [*kept]
    for one in range(7):
        available = sum(labels[position] == one for position in among)
        assert sum(labels[position] == one for position in kept) == min(shots, available)


@settings(max_examples=50, deadline=None)
@given(LABELS, st.integers(2, 7))
def test_base_and_new_classes_are_halves_and_numbered_from_0(labels, count):
    labels = [label % count for label in labels]
    half = count // 2 + count % 2
    for part, first, last in zip(
        experiments.base_to_new(labels, SEVEN[:count]), (0, half), (half, count), strict=True
    ):
        assert part.names == [*SEVEN[first:last]]
        expected = [(at, one - first) for at, one in enumerate(labels) if first <= one < last]
        assert [*zip(part.positions, part.labels, strict=True)] == expected


def test_base_to_new_accuracies_are_those_of_predictions_by_hand():
    """Base classes are 0 and 1 of a CLIP that saw no others; 2 and 3 are new."""
    whole = clip_federation(num_classes=4, class_names=NAMES[:4])
    labels = (torch.arange(len(whole.inputs)) * 7 % 4).numpy()
    base, new = experiments.base_to_new(labels, NAMES[:4])
    given = whole.renamed(base.names)
    shards = {0: np.arange(9), 1: np.arange(9, len(base.positions))}
    made = Federation(given.inputs[base.positions], torch.tensor(base.labels), shards)
    method = kgcoop(given, learning_rate=0.1)
    payload, _ = method.client(
        made.data(given, 0, 0), method.server.answer(0, method.server.state), {}
    )
    server = method.server.step(0, {0: payload}, method.server.state)

    now = Round(0, server, {})
    for part in (base, new):
        inputs, held = whole.inputs[part.positions], torch.tensor(part.labels)
        found = evaluate(
            method, made, now, HeldOut(inputs, held), class_names=part.names, clients=[0]
        )
        context, names = server["values"]["context.context"], given.tower.class_names(part.names)
        text = given.tower(prompted_text(context, names))[0]
        logits = cosine_logits(inputs[:, 0], text, scale=10.0)
        assert found["full"] == pytest.approx((logits.argmax(1) == held).double().mean().item())


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from("abcd"), min_size=2).filter(lambda own: len({*own}) > 1), st.data())
def test_each_domain_is_the_target_once_and_the_others_train(domains, data):
    train = data.draw(st.lists(st.sampled_from(range(len(domains))), unique=True))
    pairs, splits = leave_one_out(domains), experiments.leave_one_domain_out(domains, train=train)
    assert [*pairs] == [*splits] == sorted({*domains})
    for target, (clients, held) in splits.items():
        assert [domains[position] for position in held] == [target] * domains.count(target)
        assert sorted([*pairs[target][0], *held]) == [*range(len(domains))]
        expected = [
            [position for position in sorted(train) if domains[position] == source]
            for source in sorted({*domains} - {target})
        ]
        assert [client.tolist() for client in clients] == [one for one in expected if one]


def test_newcomers_never_train_and_transfer_has_all_classes():
    trained, new = experiments.newcomers([8, 3, 5, 1], share=0.5, generator=draw())
    assert (len(new), sorted([*trained, *new])) == (2, [1, 3, 5, 8])
    found = experiments.transfer([2, 0], SEVEN)
    assert (found.names, [*found.positions], [*found.labels]) == ([*SEVEN], [0, 1], [2, 0])


@settings(max_examples=50, deadline=None)
@given(LABELS, LABELS, st.data())
def test_own_tests_are_those_of_a_client_or_of_its_classes(clients, labels, data):
    tests = data.draw(st.lists(st.sampled_from(range(len(clients))), unique=True))
    own = experiments.own_tests(clients, tests)
    of_client = {c: [at for at, one in enumerate(tests) if clients[one] == c] for c in range(7)}
    assert {c: [*places] for c, places in own.items()} == {c: p for c, p in of_client.items() if p}
    shards = {4: [*range(len(clients) // 2 + 1)], 9: [len(clients) - 1]}
    for client, places in experiments.class_tests(clients, shards, labels).items():
        known = {clients[position] for position in shards[client]}
        assert [*places] == [at for at, label in enumerate(labels) if label in known]


test_wrong_calls_are_refused_by_name = refused(globals())("""
leave_one_out(['a', 'a']) -> ValueError: `len(set(domains))` must be at least 2; got 1
experiments.leave_one_domain_out(['a', 'b'], train=[2]) -> ValueError: `train` must lie in [0, 2)
experiments.base_to_new([0, 2], ['a', 'b']) -> ValueError: `labels` must lie in [0, 2)
experiments.base_to_new([0], ['a']) -> ValueError: `num_classes` must be at least 2; got 1
experiments.transfer([0], 'ab') -> TypeError: `class_names` must be a sequence of strings
experiments.own_tests([0], [1]) -> ValueError: `tests` must lie in [0, 1)
experiments.newcomers([0, 1], share=0, generator=draw()) -> ValueError: `share` must be above 0
""")
