"""FedL2G: clients send the gradient of the quiz loss through one step, and never train on it."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import Federation, Setting
from fedprompt.methods.fedl2g import _drawn, _study_and_quiz, fedl2g_f, fedl2g_l
from references import fedl2g
from refusals import refused
from sent_messages import sent_by
from tiny_federations import CLASSES, last, mixed_federation

METHODS = [(fedl2g_l, False, CLASSES), (fedl2g_f, True, 6)]


@dataclass(kw_only=True)
class Small(Setting):
    """Networks with one hidden layer, or with two, and points in place of images."""

    num_backbones = 2

    def new_model(self, client=0):
        return self.seeded(lambda: Net(client % 2))


class Net(nn.Module):
    def __init__(self, is_deep):
        super().__init__()
        self.deep, self.body = nn.Linear(8, 8) if is_deep else nn.Identity(), nn.Linear(8, 4)
        self.head = nn.Linear(4, CLASSES)

    def features(self, points):
        inner = self.deep(points)
        return self.body(points if inner is points else inner.tanh()).tanh()


def cosine(guided, guides):
    return 1 - F.cosine_similarity(guided, guides).mean()


def halved(parameters, gradients, *, learning_rate):
    return {name: parameters[name] - learning_rate / 2 * gradients[name] for name in parameters}


def rows_by_backward(evaluate, parameters, direction):
    """Differentiate each entry of the guided output by a backward pass of its own."""
    leaves = {name: value.clone().requires_grad_() for name, value in parameters.items()}

    def product(guided):
        found = []
        for entry in guided.flatten():
            pulled = torch.autograd.grad(
                entry, [*leaves.values()], retain_graph=True, allow_unused=True
            )
            pairs = zip(pulled, direction.values(), strict=True)
            found.append(sum((a * b).sum() for a, b in pairs if a is not None))
        return torch.stack(found).view_as(guided)

    return evaluate(leaves, product)


PAPER = {"guide_weight": 1.0, "warm_up": 1, "train_in_warm_up": False}
OWN = {"loss": cosine, "update": halved, "derivative": rows_by_backward}
SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
CASES = {
    "paper": (SGD, fedl2g.sgd, {}, PAPER),
    "momentum": (SGD, fedl2g.sgd, {"momentum": 0.9}, {"warm_up": 1, "max_norm": 1e-3}),
    "AdamW": (ADAMW, fedl2g.adamw, {"eps": 1e-3}, PAPER | {"quiz_size": 2}),
    "own pieces": (SGD, fedl2g.sgd, {}, {"warm_up": 0} | OWN),
    "no steps": (SGD, fedl2g.sgd, {}, {"warm_up": 0}),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("by_features", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_rounds_equal_the_algorithm_by_hand(case, by_features):
    """Alg. 1 with a learning rate that falls from round to round, for clients of unlike classes."""
    kind, reference, options, values = CASES[case]
    draw = torch.Generator().manual_seed(0)
    points, labels = torch.randn(48, 8, generator=draw), torch.arange(48) % CLASSES
    shards = {
        c: torch.arange(48)[c * 12 :][: 9 + c][labels[c * 12 :][: 9 + c] != c] for c in range(4)
    }
    made = Small(
        clients=range(4), num_classes=CLASSES, rounds=3, steps=3 * (case != "no steps"),
        cohort_size=3, batch_size=4, seed=0, public=points[:0],
        make_optimizer=partial(kind, **options), schedule=lambda progress: 1 - progress / 2,
    )  # fmt: skip
    federation = Federation(points, labels, shards)
    method = (fedl2g_f if by_features else fedl2g_l)(
        made, learning_rate=0.1, server_rate=5.0, **values
    )
    values = {"guide_weight": 0.1, "quiz_size": 10, "max_norm": 100.0} | values
    guides = method.server.state["guides"]
    models = {client: fp.snapshot(made.new_model(client)) for client in range(4)}
    for server_round, now in enumerate(fp.run_rounds(method, federation)):
        rate = 0.1 * (1 - server_round / 6)
        follows, sent = server_round >= values["warm_up"], []
        for client in made.cohort(server_round):
            data = federation.data(made, client, server_round)
            positions, quiz = _study_and_quiz(data, values["quiz_size"])
            trains = follows or values.get("train_in_warm_up", True)
            batches = list(data.batches(among=positions)) if trains else []
            study = batches[-1] if batches else _drawn(data, positions)
            own = values.get("update")
            models[client], gradient = fedl2g.client_round(
                models[client], guides, batches, study, quiz, reference(rate, **options),
                by_features=by_features, weight=values["guide_weight"],
                followed=values["guide_weight"] * follows, loss=values.get("loss", F.mse_loss),
                trial=own and partial(own, learning_rate=rate),
            )  # fmt: skip
            sent.append((gradient, study[1]))
            found = fp.snapshot(now.model(method, data))
            torch.testing.assert_close(found, dict(models[client]), rtol=0, atol=1e-12)
        old = guides
        guides = fedl2g.server_round(old, sent, rate=5.0, max_norm=values["max_norm"])
        torch.testing.assert_close(now.server["guides"], guides, rtol=0, atol=1e-12)
        assert (guides - old).norm() > 1e-9


def test_a_client_with_one_image_sends_nothing():
    shards = {0: torch.arange(1), 1: torch.arange(1, 9)}
    made = mixed_federation(shards=shards, clients=[0, 1], cohort_size=2)
    messages = sent_by(made)
    last(fedl2g_l, made)
    assert {client for _, client, _ in messages.of("up")} == {1}


@pytest.mark.parametrize(("images", "expected"), [(3, 1), (24, 6), (40, 10), (80, 10)])
def test_a_quarter_of_the_images_but_at_most_ten_are_the_quiz(images, expected):
    made = mixed_federation(shards={0: torch.arange(images) % 40})
    study, (_, labels) = _study_and_quiz(made.data(0, 0), 10)
    assert (len(study), len(labels)) == (images - expected, expected)


@pytest.mark.parametrize(("method", "by_features", "width"), METHODS)
def test_the_broadcast_is_one_guide_for_each_class(method, by_features, width):
    made = mixed_federation()
    last(method, made)
    assert made.ledger.total(direction="down") == 2 * 3 * 4 * CLASSES * width


test_wrong_values_are_refused_by_name = refused(globals())("""
last(fedl2g_l, mixed_federation(make_optimizer=torch.optim.Rprop)) -> TypeError: got Rprop
""")
