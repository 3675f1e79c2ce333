"""FedOTP: its three rules against linear programs and means, and contexts that stay private."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import linprog

import fedprompt as fp
from fedprompt.methods.fedotp import fedotp, fedotp_average, fedotp_classical
from tiny_federations import clip_federation, last, parameters


def similarities(federation, model):
    contexts = torch.cat([model.shared(), model.private()])
    text = model.tower(fp.prompted_text(contexts, model.names))
    patches, text = F.normalize(federation.inputs[:2, 1:], dim=-1), F.normalize(text, dim=-1)
    return torch.einsum("bvd,jkd->bkvj", patches, text).detach()


@pytest.mark.parametrize(
    ("method", "mass"), [(fedotp, 0.5), (fedotp, 0.9), (fedotp_classical, 1.0)]
)
def test_logits_approach_the_best_transport_of_the_patches(method, mass):
    """Each context receives half of the mass, and a patch gives at most its share."""
    federation = clip_federation(rounds=1, steps=1, cohort_size=1, scale=1.0)
    values = {"epsilon": 1e-3} | ({"mass": mass} if method is fedotp else {})
    model = last(method, federation, learning_rate=0.1, **values).of(0)
    found = model(federation.inputs[:2]).detach()
    for scores, logits in zip(similarities(federation, model), found, strict=True):
        for score, logit in zip(scores, logits, strict=True):
            num_patches = len(score)
            best = linprog(
                -score.double().numpy().ravel(),
                A_ub=np.kron(np.eye(num_patches), np.ones(2)),
                b_ub=np.full(num_patches, 1 / num_patches),
                A_eq=np.kron(np.ones(num_patches), np.eye(2)),
                b_eq=np.full(2, mass / 2),
            )
            assert abs(-best.fun - logit.item()) < 5e-3


def test_without_transport_logits_are_the_mean_cosine_of_patches_and_contexts():
    federation = clip_federation()
    model = last(fedotp_average, federation, learning_rate=0.1).of(0)
    expected = federation.scale * similarities(federation, model).mean((2, 3))
    torch.testing.assert_close(model(federation.inputs[:2]).detach(), expected)


def test_a_mass_of_one_is_the_classical_variant_and_less_is_not():
    small = {"rounds": 1, "cohort_size": 1}
    classical = parameters(last(fedotp_classical, clip_federation(**small)), 0)
    whole = parameters(last(fedotp, clip_federation(**small), mass=1.0), 0)
    partial = parameters(last(fedotp, clip_federation(**small), mass=0.5), 0)
    torch.testing.assert_close(whole, classical)
    assert not torch.allclose(partial["shared.context"], classical["shared.context"])


@pytest.mark.parametrize("method", [fedotp, fedotp_classical, fedotp_average])
def test_only_the_shared_context_is_sent(method):
    federation = clip_federation(rounds=1, clients=[0, 1], cohort_size=2)
    predictions = last(method, federation)
    context = 4 * federation.length * federation.tower.dim
    turns = federation.rounds * federation.cohort_size
    assert federation.ledger.total(direction="down") == turns * context
    assert federation.ledger.total(direction="up") == turns * (context + 4)
    first, second = (parameters(predictions, client) for client in (0, 1))
    assert torch.equal(first["shared.context"], second["shared.context"])
    assert not torch.equal(first["private.context"], second["private.context"])


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
