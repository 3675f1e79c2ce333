"""FedOTP: a round against the paper's algorithms, its rules against linear programs and means."""

from copy import deepcopy
from functools import partial

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import fedprompt as fp
from clips import TOKENIZER
from fedprompt.interfaces import ContextLearner, Coupling, TransportScore
from fedprompt.methods.fedotp import fedotp, fedotp_average, fedotp_classical
from fedprompt.transport import newton, unbalanced
from references import coop
from references import fedotp as reference
from references.transport import slow_plan
from refusals import refused
from tiny_federations import CLASSES, ONE_CLIENT, clip_federation, descend, last, parameters


def test_two_local_contexts_send_nothing_and_differ_between_clients():
    federation = clip_federation(rounds=1, clients=[0, 1], cohort_size=2)
    predictions = last(fedotp, federation, local=True)
    assert federation.ledger.total() == 0
    first, second = (parameters(predictions, client) for client in (0, 1))
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_pooled_logits_are_the_mean_cosine_of_the_pooled_token_and_both_contexts():
    federation = clip_federation()
    model = last(fedotp_average, federation, pooled=True).of(0)
    text = model.tower(fp.prompted_text(torch.cat([model.shared(), model.private()]), model.names))
    pooled = federation.inputs[:2, 0]
    cosine = torch.cosine_similarity(pooled[:, None, None], text, dim=-1)
    torch.testing.assert_close(model(federation.inputs[:2]), federation.scale * cosine.mean(1))


def literal(cost, a, b):
    """Algorithm 1 of the paper as a solver, one problem after the other."""
    plans = [reference.algorithm_1(one, a, b) for one in cost.flatten(0, 1)]
    plan, batch = torch.stack(plans).reshape(cost.shape), cost.shape[:2]
    error = (plan.sum(-1) / a - 1).clamp(min=0).amax(-1)
    count = torch.zeros(batch, dtype=torch.int64)
    return Coupling(plan, error, count, a, b, 0.1)


def at_rest(cost, a, b):
    return slow_plan(cost, a, b, epsilon=0.1, tolerance=1e-14)


@pytest.mark.parametrize(
    ("method", "plan", "mass", "tolerance"),
    [
        (partial(fedotp, solver=partial(newton, tolerance=1e-13)), at_rest, 0.8, 1e-10),
        (partial(fedotp, solver=literal), reference.algorithm_1, 0.8, 1e-12),
        (partial(fedotp_classical, solver=partial(newton, tolerance=1e-13)), at_rest, 1.0, 1e-10),
        (fedotp_average, lambda cost, a, b: a[:, None] * b, 1.0, 1e-12),
    ],
    ids=["at rest", "Algorithm 1", "classical", "average"],
)
def test_a_round_is_the_papers(float64, method, plan, mass, tolerance):
    """With its 16 tokens, rate, epsilon, masses, momentum and weight decay."""
    sgd = {"momentum": 0.9, "weight_decay": 5e-4}
    optimizer = partial(torch.optim.SGD, **sgd)
    names = ["cat", "dog", "polar bear"]
    values = {"rounds": 1, "length": 16, "scale": 100.0, "class_names": names}
    values |= {"clients": [0, 1], "cohort_size": 2}
    made = clip_federation(**values, make_optimizer=optimizer)
    still = clip_federation(**values, make_optimizer=optimizer, steps=0)
    before, after = (last(method, each, learning_rate=1e-3) for each in (still, made))
    encode = partial(coop.text_features, made.clip, TOKENIZER, names=names, before=16)
    match = partial(reference.logits, scale=100.0, mass=mass, plan=plan)
    clients, sent = made.cohort(0), []
    for client in clients:
        first = parameters(before, client)
        start = [first["shared.context"], first["private.context"]]
        batches = made.batches(client, 0)
        shared, private = reference.trained(
            start, batches, encode, match, learning_rate=1e-3, **sgd
        )
        sent.append(shared * made.num_examples(client))
        found = parameters(after, client)["private.context"]
        torch.testing.assert_close(found, private, rtol=0, atol=tolerance)
        assert (found - start[1]).abs().max() > 1e4 * tolerance
    mean = sum(sent) / sum(map(made.num_examples, clients))
    found = parameters(after, clients[0])["shared.context"]
    torch.testing.assert_close(found, mean, rtol=0, atol=tolerance)


class Latents(nn.Module):
    """Contexts of each class, from a few numbers by a linear map."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.codes = nn.Parameter(0.1 * torch.randn(1, CLASSES, 4, 2, generator=generator))
        self.register_buffer("basis", torch.randn(2, 16, generator=generator))

    def forward(self):
        return self.codes @ self.basis


def own_score(cost, coupling):
    """Prefer large similarities."""
    return (coupling.plan * cost.square()).sum((-2, -1))


def test_foreign_pieces_go_into_a_loop_and_into_the_method():
    """A solver, a score, a matcher and context learners; the step is that of a written loop."""
    pieces = Latents(1), Latents(2), own_score
    for piece, kind in zip(pieces, (ContextLearner, ContextLearner, TransportScore), strict=True):
        assert isinstance(piece, kind)
    solver = partial(unbalanced, rho=(1.0, 0.5))
    made = clip_federation(**ONE_CLIENT | {"steps": 1, "clients": [2]})
    shared, private = deepcopy(pieces[:2])
    ((tokens, labels),) = made.batches(2, 0)
    text = made.tower(
        fp.prompted_text(torch.cat([shared(), private()]), made.names, class_specific=True)
    )
    match = partial(fp.transport_logits, solver=solver, gradient=own_score)
    loss = F.cross_entropy(match(tokens[:, 1:], text, scale=made.scale), labels)
    descend(loss, [shared.codes, private.codes], 0.1)
    learners = {"shared": pieces[0], "private": pieces[1]}
    for values in ({"solver": solver, "gradient": own_score}, {"match": match}):
        trained = parameters(last(fedotp, made, learning_rate=0.1, **learners, **values), 2)
        torch.testing.assert_close(trained["shared.codes"], shared.codes.detach())
        torch.testing.assert_close(trained["private.codes"], private.codes.detach())
    assert torch.equal(pieces[0].codes, Latents(1).codes)


MADE = clip_federation()
test_wrong_hyperparameters_are_refused_by_name = refused(globals())("""
fedotp(MADE, match=3) -> TypeError: `match` must be a function; got 3
fedotp(MADE, match=fp.transport_logits, gradient=own_score) -> ValueError: `match` must be None with
last(fedotp, MADE, match=lambda x, h, scale: x) -> ValueError: `match` must have the shape of logits
fedotp(MADE, shared=3) -> TypeError: `shared` must be a function; got 3
fedotp(MADE, private=fp.ContextPrompts(16, length=3)) -> ValueError: `private()` must have the shape
fedotp(MADE, shared=Latents(1)) -> ValueError: `private()` must have the shape of `shared()`, each
""")
