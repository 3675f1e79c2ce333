"""TRIP: the assignment of tokens against loops over tokens, a step, and the mean of rounds."""

import math
from functools import partial

import pytest
import torch
from scipy.optimize import linear_sum_assignment

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.methods.trip import _clusters, _Mixture, trip
from references import coop
from tiny_federations import after_rounds, clip_federation, last

pytestmark = pytest.mark.usefixtures("float64")


def clusters_by_hand(tokens, centers, most):
    """Give tokens to their cheapest clusters, the cheapest token first, until one is full."""
    prices = torch.zeros(len(centers))
    for _ in range(100):
        distance = torch.stack([(tokens - center).norm(dim=1) for center in centers], 1)
        costs, sizes, members = distance + prices, [0] * len(centers), [[] for _ in centers]
        for token in sorted(range(len(tokens)), key=lambda i: float(costs[i].min())):
            cluster = int(costs[token].argmin())
            if sizes[cluster] < most[cluster]:
                sizes[cluster] += 1
                members[cluster].append(tokens[token])
        prices = prices + 1e-4 * (torch.tensor(sizes) - torch.tensor(most))
        prices = torch.tensor([p * bool(n) for p, n in zip(prices.tolist(), sizes, strict=True)])
        farthest = tokens[distance.min(1).values.argmax()]
        new = torch.stack([torch.stack(m).mean(0) if m else farthest for m in members])
        if sum(float((a - b).norm()) for a, b in zip(new, centers, strict=True)) < 1e-4 * len(new):
            break
        centers = new
    return centers, sizes


def shares_by_hand(tokens, centers, most, keys):
    centers, sizes = clusters_by_hand(tokens, centers, most)
    cosines = [[float(torch.cosine_similarity(c, key, dim=0)) for key in keys] for c in centers]
    clusters, experts = linear_sum_assignment(cosines, maximize=True)
    shares = torch.zeros(len(keys))
    for cluster, expert in zip(clusters, experts, strict=True):
        shares[expert] = sizes[cluster] / sum(sizes)
    return shares


@pytest.mark.parametrize(
    ("seed", "most", "size"),
    [(0, [5, 4, 4, 4], 1), (7, [9, 8, 8, 8], 1), (2, [2, 1, 1, 1], 1), (2, [9, 8, 8, 8], 0.01)],
)
def test_clusters_are_those_of_a_loop_over_tokens(seed, most, size):
    """Two images have equal tokens at first, so that a cluster is empty at the start.

    Prices of full and of empty clusters decide between near tokens, and between small ones often.
    """
    draw = torch.Generator().manual_seed(seed)
    tokens = size * torch.randn(5, 17, 6, generator=draw)
    tokens[:2, 1] = tokens[:2, 0]
    centers, sizes = _clusters(tokens, tokens[:, :4], torch.tensor(most))
    for image in range(5):
        expected, count = clusters_by_hand(tokens[image], tokens[image, :4], most)
        assert sizes[image].tolist() == count
        torch.testing.assert_close(centers[image], expected, rtol=0, atol=1e-13)


def test_a_step_descends_both_cross_entropies_of_the_mixed_contexts():
    one = {"rounds": 1, "steps": 1, "cohort_size": 1, "clients": [2]}
    made = clip_federation(**one, make_optimizer=torch.optim.SGD)
    options = {"num_experts": 3, "teacher_weight": 2.0, "capacity": 1.5}
    found = last(trip, made, learning_rate=0.1, **options).now.server["newest"]
    model = _Mixture(made, 3, 2.0, fp.transport.exact)
    first = torch.randperm(5, generator=made.stream(0, purpose="centers"))[:3]
    ((tokens, labels),) = made.batches(2, 0)
    loss = 0.0
    for image, label in zip(tokens, labels, strict=True):
        shares = shares_by_hand(image, image[first], [2, 2, 1], model.keys)
        context = sum(s * each for s, each in zip(shares, model.experts(), strict=True))
        names = (made.class_names, made.length)
        (text,) = coop.text_features(made.clip, TOKENIZER, context[None], *names)
        unit = image[0] / image[0].norm()
        logits = (10.0 * text @ unit / text.norm(dim=1)).log_softmax(0)
        teacher = (10.0 * made.handwritten_text() @ unit).softmax(0)
        loss = loss - (logits[label] + 2.0 * (teacher * logits).sum()) / len(labels)
    (step,) = torch.autograd.grad(loss, model.experts.context)
    expected = model.experts.context.detach() - 0.1 * step
    torch.testing.assert_close(found["experts.context"], expected, rtol=0, atol=1e-13)


def test_predictions_use_a_mean_of_the_rounds_with_weights_of_a_beta_distribution():
    made = clip_federation(rounds=4)
    values = [trip(made).server.state["newest"]["experts.context"]]
    weights = [((t - 0.5) / 5 * (1 - (t - 0.5) / 5)) ** -0.8 for t in (1, 1, 2, 3, 4)]
    for count, each in enumerate(after_rounds(trip, made), 2):
        values.append(each.now.server["newest"]["experts.context"])
        mean = sum(w * v for w, v in zip(weights[:count], values, strict=True)) / math.fsum(
            weights[:count]
        )
        torch.testing.assert_close(each.of(0).experts.context.detach(), mean)


def test_a_soft_plan_of_another_solver_is_close_and_too_many_experts_are_refused():
    made = clip_federation()
    solvers = (None, partial(fp.transport.newton, epsilon=1e-3))
    logits = [last(trip, made, solver=each).of(0)(made.inputs[:4]) for each in solvers]
    torch.testing.assert_close(*logits, rtol=0, atol=1e-2)
    assert not torch.equal(*logits)
    assert last(trip, made, num_experts=5).of(0)(made.inputs).shape == (len(made.inputs), 3)
    with pytest.raises(ValueError, match=r"^`num_experts` must be at most 5, the tokens; got 6\."):
        last(trip, made, num_experts=6)
