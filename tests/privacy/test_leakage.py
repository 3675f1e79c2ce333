"""Attacks find a planted leak, and nothing where there is none; a bound on epsilon is below it."""

import math
import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from scipy import stats
from torch import float64, nan, tensor

import fedprompt as fp
from fedprompt.methods import METHODS, Federation, Setting, averaged, fedavg_client
from fedprompt.privacy import leakage, noisy_mean, poisson_batch
from method_runs import CHANGES, MAKERS, RUNS
from other_device import other_device
from references import leakage as reference
from references.dpsgd import epsilon_at, gaussian_delta
from refusals import refused_and_taken
from tiny_federations import federation_of


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=float64)


@pytest.mark.parametrize(("shift", "rounded"), [(0.0, 9), (1.0, 0), (9.0, 9), (-9.0, 9)])
def test_success_is_that_of_loops_and_scipy(shift, rounded):
    members, others = drawn(70, seed=1).round(decimals=rounded) + shift, drawn(230).round(
        decimals=rounded)  # fmt: skip
    for rate in (0.0, 0.01, 0.3):
        found = leakage.success(members, others, false_positives=rate)
        assert found.auc == pytest.approx(reference.auc(members, others), abs=1e-12)
        expected = reference.auc_interval(found.auc, 70, 230)
        assert found.auc_interval == pytest.approx(expected, abs=1e-9)
        assert found.tpr == reference.true_positives(members.tolist(), others.tolist(), rate)
        exact = stats.binomtest(round(found.tpr * 70), 70).proportion_ci(method="exact")
        assert found.tpr_interval == pytest.approx(exact, abs=1e-9)


def test_intervals_contain_one_half_without_a_leak_in_95_of_100_runs():
    scores = drawn(150, 60)
    found = [leakage.success(each[:40], each[40:]).auc_interval for each in scores]
    share = np.mean([low <= 0.5 <= high for low, high in found])
    assert 0.91 <= share <= 0.99


def test_both_controls_are_of_the_members():
    inside = torch.arange(5) % 2 == 0
    scores, without = tensor([3.0, 1.0, 5.0, 4.0, 6.0]), tensor([3.5, 9.0, 1.0, 9.0, 2.0])
    found = leakage.measured(scores, inside, without, false_positives=0.5)
    assert found.held_out == leakage.success(scores[inside], scores[~inside], false_positives=0.5)
    members = without[inside]
    assert found.without == leakage.success(scores[inside], members, false_positives=0.5)
    assert torch.equal(found.scores_without, members)


# A lower bound on epsilon


@pytest.mark.parametrize(("m", "r", "wrong", "delta"), [
    (100, 100, 0, 0.0), (100, 40, 3, 1e-5), (301, 300, 90, 1e-4), (50, 50, 25, 1e-3),
])  # fmt: skip
def test_the_bound_is_where_the_p_value_of_the_paper_is_5_percent(m, r, wrong, delta):
    inside = torch.arange(m) % 2 == 0
    scores = inside.double()
    order = torch.cat([inside.nonzero()[: (wrong + 1) // 2], (~inside).nonzero()[: wrong // 2]])
    scores[order] = 1 - scores[order]
    scores += 1e-3 * drawn(m)  # without ties
    ranked = scores.argsort(stable=True)
    guesses = torch.cat([~inside[ranked[: r // 2]], inside[ranked[m - r // 2 :]]])
    found = leakage.epsilon_bound(scores, inside, delta=delta, guesses=r)
    p_value = partial(reference.p_value, m, r, int(guesses.sum()), delta=delta)
    if found:
        assert p_value(found) == pytest.approx(0.05, abs=1e-6)
    else:
        assert p_value(0.0) > 0.05


@pytest.mark.parametrize("inside", [torch.arange(60) < 30, torch.arange(60) >= 30])
def test_equal_scores_show_nothing_whatever_the_order_of_the_canaries(inside):
    assert leakage.epsilon_bound(torch.zeros(60), inside, delta=0.0) == 0.0
    assert leakage.epsilon_bound(inside.double(), inside, delta=0.0) > 2.5


def gaussian(sigma, seed, canaries=1000):
    """Publish a sum of orthogonal canaries of norm 1 with noise; the score is the product."""
    draw = torch.Generator().manual_seed(seed)
    chosen = poisson_batch(canaries, rate=0.5, generator=draw)
    inside = torch.zeros(canaries, dtype=torch.bool).index_fill(0, chosen, True)
    total = {"x": inside.double()}
    how = {"max_norm": 1.0, "expected_batch_size": 1.0, "generator": draw}
    return noisy_mean(total, multiplier=sigma, **how)["x"], inside


def test_a_gaussian_mechanism_has_a_bound_below_its_epsilon_and_without_noise_above():
    delta, sigma = 1e-5, 1.2
    epsilon = epsilon_at(delta, partial(gaussian_delta, sigma=sigma))
    bounds = [leakage.epsilon_bound(*gaussian(sigma, seed), delta=delta, guesses=200)
              for seed in range(20)]  # fmt: skip
    assert max(bounds) < epsilon
    assert min(bounds) > 0.8  # the audit shows something
    broken = leakage.epsilon_bound(*gaussian(0.0, 0), delta=delta)
    assert broken > epsilon


def test_randomized_response_exceeds_its_epsilon_at_most_as_often_as_stated():
    """The bound is tight for pure differential privacy, so 95 % would fail with a smaller one."""
    epsilon, above = 1.0, 0
    keep = 1 / (1 + math.exp(-epsilon))
    draw = torch.Generator().manual_seed(0)
    for _ in range(100):
        inside, kept = torch.rand(100, generator=draw) < 0.5, torch.rand(100, generator=draw) < keep
        noisy = (inside == kept).double() + 1e-3 * torch.rand(100, generator=draw)
        above += leakage.epsilon_bound(noisy, inside, delta=0.0, guesses=60) > epsilon
    assert above <= 10


# Messages


def linear(inputs, labels, shards, *, rate=0.5, rounds=1, noise=0.0, **changes):
    """Make FedAvg of a linear classifier, with one step of gradient descent on all inputs."""
    given = {"num_classes": 4, "rounds": rounds, "steps": 1, "batch_size": 100, "seed": 3}
    setting = Setting(**given | {"make_optimizer": torch.optim.SGD} | changes)
    model = nn.Linear(inputs.flatten(1).shape[1], 4).to(inputs.dtype)
    net = nn.Sequential(nn.Flatten(), model).to(setting.device)
    method = averaged(net, fedavg_client(net, rate))._replace(setting=setting)
    return method, Federation(inputs, labels, shards)


INPUTS, LABELS = drawn(80, 40, seed=5), torch.arange(80) % 4


def single(*positions):
    shards = {int(k): tensor([int(k)]) for k in positions}
    return Federation(INPUTS, LABELS, shards)


def attacked(members, rounds=2):
    method, federation = linear(
        INPUTS, LABELS, {0: members, 1: torch.arange(60, 64)}, rounds=rounds
    )
    log = []
    plain, watched = [
        [now.server for now in fp.run_rounds(each, federation)]
        for each in (method, leakage.observed(method, log))
    ]
    for one, other in zip(plain, watched, strict=True):
        assert all(
            torch.equal(one["values"][name], other["values"][name]) for name in one["values"]
        )
    return method, [each for each in log if each.client == 0]


def test_messages_of_a_client_of_few_images_show_them_and_others_show_nothing():
    population, candidates = single(*range(40, 60)), single(*range(40))
    inside = torch.arange(40) < 2
    method, log = attacked(torch.arange(2))
    _, other = attacked(torch.arange(64, 68))
    scores, without = (leakage.message_scores(method, each, candidates, population=population)
                       for each in (log, other))  # fmt: skip
    found = leakage.measured(scores, inside, without)
    assert found.held_out.auc > 0.95
    assert found.without.auc > 0.95
    inside = torch.arange(40) < 20
    none = leakage.measured(without, inside, without)
    assert none.without.auc == 0.5
    assert none.held_out.auc_interval[0] < 0.5 < none.held_out.auc_interval[1]
    with pytest.raises(ValueError, match="`population` must have at least two clients; got 1"):
        leakage.message_scores(method, log, candidates, population=single(40))


def test_a_simulated_client_draws_the_numbers_of_the_client():
    """Such as those of dropout."""
    method, federation = linear(INPUTS, LABELS, {0: tensor([1])})

    def train(data, answer, state):
        payload, state = method.client(data, answer, state)
        noisy = {
            n: e._replace(value=e.value + torch.randn_like(e.value)) for n, e in payload.items()
        }
        return noisy, state

    noisy, log = method._replace(client=train), []
    list(fp.run_rounds(leakage.observed(noisy, log), federation))
    assert leakage.message_scores(noisy, log, single(1)).item() > 0.999


def test_scores_are_those_of_a_dense_matched_filter_summed_over_messages():
    method, log = attacked(torch.arange(8))
    population, expected = [*range(40, 60)], np.zeros(5)
    for one in log:
        weight, bias = (one.answer[f"1.{name}"] for name in ("weight", "bias"))

        def change(k, weight=weight, bias=bias):
            weight, bias = (each.clone().requires_grad_() for each in (weight, bias))
            loss = F.cross_entropy((INPUTS[k] @ weight.T + bias)[None], LABELS[k][None])
            slopes = torch.autograd.grad(-0.5 * loss, [weight, bias])
            return torch.cat([each.flatten() for each in slopes]).numpy()

        parts = [one.payload[name].value - one.answer[name] for name in one.answer]
        seen = torch.cat([part.flatten() for part in parts]).numpy()
        others = np.stack([change(k) for k in population])
        expected += [reference.matched_filter(change(k), seen, others) for k in range(5)]
        cosines = [change(k) @ seen / np.linalg.norm(change(k)) / np.linalg.norm(seen)
                   for k in range(5)]  # fmt: skip
    found = leakage.message_scores(method, log, single(*range(5)), population=single(*population))
    assert found.numpy() == pytest.approx(expected, abs=1e-9)
    found = leakage.message_scores(method, log[-1:], single(*range(5)))
    assert found.numpy() == pytest.approx(cosines, abs=1e-9)


def test_clipped_messages_of_another_length_are_found_by_an_auditor_who_knows_all_canaries():
    """The mean of a population has the length of one unclipped step, and no message has."""
    method, _ = linear(INPUTS, LABELS, {0: torch.arange(60)})
    answer, inside = method.server.state["values"], torch.arange(60) % 3 == 0
    parts = [method.client(single(k).data(method.setting, k, 0), dict(answer), {})[0]
             for k in inside.nonzero()[:, 0].tolist()]  # fmt: skip
    changes = [{n: each[n].value - answer[n] for n in answer} for each in parts]
    lengths = [math.sqrt(sum(float(v.square().sum()) for v in each.values())) for each in changes]
    total = {n: answer[n] + 30 * sum(each[n] / length for each, length
             in zip(changes, lengths, strict=True)) for n in answer}  # fmt: skip
    sent, canaries = leakage.Received(0, 0, answer, total), single(*range(60))
    scores = leakage.message_scores(method, [sent], canaries, population=canaries)
    assert leakage.success(scores[inside], scores[~inside]).auc > 0.99


SENDING = [(name, family) for name, family in RUNS if name not in ("local", "coop", "zero_shot")]


@pytest.mark.parametrize(("name", "family"), SENDING)
def test_messages_of_each_method_of_the_gallery_are_scored(name, family):
    """The streams of the caller stay where they are, and so does the server's log."""
    federation = federation_of(METHODS[name], family, **CHANGES)
    method, log = MAKERS[name](federation), []
    watched = leakage.observed(method, log)
    for _ in fp.run_rounds(watched, federation.data, federation.cohorts()[:1]):
        pass
    method = method._replace(setting=method.setting or federation)
    own = [one for one in log if one.client == log[0].client]
    candidates = Federation(federation.inputs, federation.labels, {
        k: tensor([k]) for k in (0, 1)})  # fmt: skip
    before = torch.get_rng_state(), random.getstate()
    scores = leakage.message_scores(method, own, candidates)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert scores.isfinite().all()
    assert (scores.abs() <= len(own) + 1e-9).all()


def test_an_active_server_finds_a_member_of_a_client_with_many_images():
    method, federation = linear(INPUTS, LABELS, {0: torch.arange(12)}, rate=0.1)
    candidates, answer = single(*range(24)), method.server.answer(0, method.server.state)
    others = INPUTS[40:], LABELS[40:]
    sent = {name: value.clone() for name, value in answer.items()}
    before = torch.get_rng_state()
    received = leakage.probed(method, answer, federation, 0, candidates, population=others)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(sent[name], answer[name]) for name in sent)
    inside = torch.arange(24) < 12
    scores = leakage.message_scores(method, received, candidates)
    assert leakage.success(scores[inside], scores[~inside]).auc > 0.9
    crafted = received[3][0].answer

    def loss(values, k):
        logits = INPUTS[k] @ values["1.weight"].T + values["1.bias"]
        return F.cross_entropy(logits, LABELS[k])

    assert loss(crafted, slice(3, 4)) > loss(answer, slice(3, 4)) + 1
    assert loss(crafted, slice(40, 80)) < loss(answer, slice(40, 80))


def all_attacks(device):
    """Return what the attacks on messages find on a device."""
    torch.manual_seed(0)
    method, federation = linear(INPUTS, LABELS, {0: torch.arange(4)}, device=device)
    answer, candidates = method.server.answer(0, method.server.state), single(2, 30)
    received = leakage.probed(
        method, answer, federation, 0, candidates, population=(INPUTS[40:], LABELS[40:]), steps=3
    )
    data = federation.data(method.setting, 0, 0)
    payload, _ = method.client(data, {n: each.clone() for n, each in answer.items()}, {})
    sent = leakage.Received(0, 0, answer, payload)
    found = leakage.message_scores(method, [sent], candidates, population=single(*range(40, 50)))
    simulate = leakage.descent(method, sent, data, LABELS[:1])
    start = torch.full((1, 1, 5, 8), 0.5, dtype=float64).to(device)
    image = leakage.reconstructed(sent, simulate, start, steps=3)
    scores = leakage.message_scores(method, received, candidates)
    return [scores, found, leakage.similarities(image, INPUTS.reshape(80, 1, 5, 8))]


def test_attacks_on_messages_are_the_same_on_another_device():
    expected = all_attacks("cpu")
    with other_device():
        found = all_attacks("meta")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


# Models


def test_confidences_are_log_odds_of_the_label_and_modes_and_streams_stay():
    model = nn.Sequential(nn.Linear(40, 4), nn.Dropout(0.5)).double()
    model[1].eval()
    before = torch.get_rng_state()
    found = leakage.confidences(model, INPUTS, LABELS, batch_size=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert [module.training for module in model.modules()] == [True, True, False]
    p = model[0](INPUTS).softmax(1)[torch.arange(80), LABELS]
    torch.testing.assert_close(found, (p / (1 - p)).log())
    with other_device():
        there = leakage.confidences(model.to("meta"), INPUTS, LABELS)
    torch.testing.assert_close(there, found)


def test_likelihood_ratios_are_those_of_scipy():
    shadows, inside = drawn(6, 5) + torch.arange(5), torch.rand(6, 5) < 0.5
    inside[0], inside[1] = True, False
    scores = drawn(5, seed=2)
    means = [[shadows[side[:, i], i].mean() for i in range(5)] for side in (inside, ~inside)]
    apart = [
        torch.cat([shadows[side[:, i], i] - mean[i] for i in range(5)])
        for side, mean in zip((inside, ~inside), means, strict=True)
    ]
    deviations = [math.sqrt(each.square().sum() / (len(each) - 5)) for each in apart]
    first, second = (stats.norm.logpdf(scores, mean, deviation)
                     for mean, deviation in zip(means, deviations, strict=True))  # fmt: skip
    found = leakage.likelihood_ratios(scores, shadows, inside)
    assert found.numpy() == pytest.approx(first - second)
    offline = leakage.likelihood_ratios(scores, shadows, torch.zeros(6, 5).bool())
    expected = (scores - shadows.mean(0)) / (shadows - shadows.mean(0)).square().sum().div(
        25
    ).sqrt()
    torch.testing.assert_close(offline, expected)


def test_a_model_that_memorized_is_found_and_one_that_never_saw_the_images_is_not():
    model = leakage.MemorizingClassifier(INPUTS[:40], LABELS[:40], 4)
    inside = torch.arange(80) < 40
    found = leakage.confidences(model, INPUTS, LABELS)
    assert leakage.success(found[inside], found[~inside]).auc > 0.99
    other = leakage.confidences(nn.Linear(40, 4).double(), INPUTS, LABELS)
    low, high = leakage.success(other[inside], other[~inside]).auc_interval
    assert low < 0.5 < high


def test_a_memorizing_model_has_its_logits_at_its_images_and_no_unit_of_length():
    model = leakage.MemorizingClassifier(INPUTS[:40], LABELS[:40], 4)
    expected = 10.0 * nn.functional.one_hot(LABELS[:40], 4)
    torch.testing.assert_close(model(INPUTS[:40]).double(), expected.double(), atol=1e-3, rtol=0)
    larger = leakage.MemorizingClassifier(3 * INPUTS[:40], LABELS[:40], 4)
    torch.testing.assert_close(larger(3 * INPUTS), model(INPUTS))


# Images


IMAGES = torch.rand(6, 1, 5, 5, generator=torch.Generator().manual_seed(1))


def sent_of(image, *, rate=0.5):
    """Return a linear method, and the message of a client with one image."""
    method, federation = linear(IMAGES, LABELS[:6], {0: tensor([image])}, rate=rate)
    data = federation.data(method.setting, 0, 0)
    answer = method.server.answer(0, method.server.state)
    payload, _ = method.client(data, dict(answer), {})
    return method, data, leakage.Received(0, 0, answer, payload)


def test_the_gradient_of_a_linear_model_contains_the_image_and_an_unchanged_message_none():
    method, data, received = sent_of(2)
    simulate = leakage.descent(method, received, data, LABELS[2:3])
    with torch.no_grad():
        change = {name: received.payload[name].value - received.answer[name]
                  for name in received.answer}  # fmt: skip
    for name, slope in simulate(IMAGES[2:3]).items():
        torch.testing.assert_close(0.5 * slope.detach(), change[name])
    start, before = torch.full((1, 1, 5, 5), 0.5), torch.get_rng_state()
    found = leakage.reconstructed(received, simulate, start, steps=150)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(start, torch.full((1, 1, 5, 5), 0.5))
    scores = leakage.similarities(found, IMAGES)
    assert scores.argmax() == 2
    assert scores[2] > 0.99
    _, _, still = sent_of(2, rate=0.0)
    none = leakage.reconstructed(still, simulate, torch.rand(1, 1, 5, 5), steps=20)
    assert leakage.similarities(none, IMAGES)[2] < 0.8
    doubled = IMAGES.repeat(1, 1, 2, 2)
    back = leakage.descent(method, received, data, LABELS[2:3], encode=lambda x: x[..., :5, :5])
    torch.testing.assert_close(back(doubled[2:3]), simulate(IMAGES[2:3]))


# Refusals


METHOD, SHARDS = linear(INPUTS, LABELS, {0: torch.arange(4)})
ANSWER, DATA = METHOD.server.state["values"], SHARDS.data(METHOD.setting, 0, 0)
PAYLOAD = METHOD.client(DATA, dict(ANSWER), {})[0]
SENT = leakage.Received(0, 0, ANSWER, PAYLOAD)
INSIDE, SCORES = torch.arange(4) < 2, torch.arange(4.0)
BAD_SCORES = [[1.0], tensor([]), tensor([1, 2]), tensor([1.0, nan]), SCORES[None]]
PAIR = INPUTS[:2], LABELS[:2]
RATES = [-0.1, 1.0, nan, "1"], [0.0, 0.99]
GIVEN = {"method": METHOD, "answer": ANSWER, "data": DATA, "target": PAIR, "population": PAIR}
RECEIVED = {"method": METHOD, "received": [SENT], "candidates": SHARDS}
PROBED = {"method": METHOD, "answer": ANSWER, "federation": SHARDS, "client": 0}
PROBED |= {"candidates": SHARDS, "population": PAIR}
STRANGE = leakage.Received(0, 0, ANSWER, {})
STEPS = {"steps": ([0, 1.5], [1]), "learning_rate": ([0, -1.0, nan], [1e-3])}
DRAWN = {"received": SENT, "simulate": lambda images: {"1.bias": images.mean().expand(4)}}
DRAWN |= {"start": IMAGES[:1], "steps": 1}
NET = nn.Linear(40, 4).double()
CODED = fp.rounds.coded(METHOD, fp.codecs.float16())
KNOWN = {"scores": SCORES, "shadows": torch.zeros(3, 4), "inside": torch.eye(3, 4).bool()}
KNOWN["inside"][1, 3] = True

test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    (leakage.success, {"members": SCORES, "others": SCORES}, {
        "members": (BAD_SCORES, [SCORES[:1]]), "others": (BAD_SCORES, [SCORES[:1].half()]),
        "false_positives": RATES}),
    (leakage.measured, {"scores": SCORES, "inside": INSIDE, "without": SCORES}, {
        "scores": ([*BAD_SCORES, SCORES[:3]], []), "without": ([SCORES[:3], None], []),
        "inside": ([INSIDE.long(), torch.ones(4).bool(), ~torch.ones(4).bool(), INSIDE[None]],
                   [~INSIDE])}),
    (leakage.epsilon_bound, {"scores": SCORES, "inside": INSIDE, "delta": 0.0}, {
        "scores": ([*BAD_SCORES, SCORES[:1]], []), "inside": ([INSIDE[:3], [True] * 4], []),
        "delta": RATES, "confidence": ([0.0, 1.0], [0.5]), "guesses": ([0, 3, 6, 2.0], [2, 4])}),
    (leakage.observed, {"method": METHOD, "log": []}, {
        "method": ([None, CODED], []), "log": ([(), None], [])}),
    (leakage.message_scores, RECEIVED, {
        "method": ([None, METHOD._replace(setting=None)], []),
        "received": ([[], [STRANGE], SENT, {0: []}, {7: [SENT]}, [1]], [{0: [SENT]}]),
        "candidates": ([None, Federation(INPUTS, LABELS, {})], []),
        "population": ([SHARDS, 3], [single(8, 9)])}),
    (leakage.crafted_answer, GIVEN, {
        "method": ([None], []), "answer": ([[1]], []),
        "target": ([INPUTS, (INPUTS[:2], LABELS[:1]), (INPUTS[:1], LABELS[:1].double())], []),
        "population": ([(INPUTS[:0], LABELS[:0])], []), **STEPS}),
    (leakage.probed, PROBED, {"client": ([5], []), "candidates": ([None], []),
                              "federation": ([None], []), "server_round": ([-1], [0])}),
    (leakage.confidences, {"model": NET, "inputs": INPUTS, "labels": LABELS}, {
        "model": ([None, nn.Linear(40, 1).double(), nn.LSTM(40, 4).double()], []),
        "inputs": ([[1.0], INPUTS[:0]], []),
        "labels": ([LABELS[:3], LABELS + 1, LABELS.double()], [LABELS.int()]),
        "batch_size": ([0], [1])}),
    (leakage.likelihood_ratios, KNOWN, {
        "scores": ([SCORES.long(), SCORES * nan], []),
        "shadows": ([torch.zeros(3, 5), torch.zeros(1, 4), SCORES], []),
        "inside": ([torch.ones(3, 4).bool(), torch.eye(3, 4).bool(), torch.eye(3, 4)],
                   [torch.zeros(3, 4).bool()])}),
    (leakage.MemorizingClassifier, {"inputs": INPUTS, "labels": LABELS, "num_classes": 4}, {
        "inputs": ([INPUTS[:1], [1.0], INPUTS * nan], []), "labels": ([LABELS[:3], LABELS + 1], []),
        "num_classes": ([1, 2.0], [5])}),
    (leakage.descent, {"method": METHOD, "received": SENT, "data": DATA, "labels": LABELS}, {
        "method": ([None], []), "received": ([None, PAYLOAD], []), "encode": ([3], [None]),
        "labels": ([3, LABELS.double()], [LABELS[:1]])}),
    (leakage.reconstructed, DRAWN, {
        "received": ([None], []), "simulate": ([None, lambda images: {"other": images.mean()}], []),
        "start": ([INPUTS, IMAGES[:0], IMAGES * nan], []), "smoothness": ([-1.0], [0.0]),
        "bounds": ([(1.0, 0.0), 3, (0.0, nan)], [(-1.0, 2.0)]), **STEPS}),
    (leakage.similarities, {"found": IMAGES, "images": IMAGES}, {
        "found": ([IMAGES[:0], IMAGES[..., 1:], INPUTS], [IMAGES[:1]]),
        "images": ([INPUTS, IMAGES * nan], [IMAGES[:1]])}),
])  # fmt: skip


def test_a_start_with_gradients_is_that_start_without_them():
    start = IMAGES[:1].clone().requires_grad_()
    found = [leakage.reconstructed(**DRAWN | {"start": each}) for each in (start, IMAGES[:1])]
    assert torch.equal(*found)


def test_answers_without_entries_of_the_prediction_cannot_be_crafted():
    method = METHOD._replace(predict=lambda data, answer, state: nn.Linear(40, 4))
    with pytest.raises(ValueError, match="`method` must have answers with entries"):
        leakage.crafted_answer(method, ANSWER, DATA, PAIR, PAIR)


def test_attacks_work_where_gradients_are_off_and_say_so_where_they_cannot():
    candidates = single(2, 30)
    expected = leakage.message_scores(METHOD, [SENT], candidates)
    with torch.no_grad():
        assert torch.equal(leakage.message_scores(METHOD, [SENT], candidates), expected)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="message_scores computes"):
        leakage.message_scores(METHOD, [SENT], candidates)
