"""FedAMP: attentive mixtures of models."""

import math

import pytest
import torch

import fedprompt as fp
from fedprompt.methods.fedamp import attention, fedamp
from sent_messages import sent_by
from tiny_federations import last, parameters, vit_federation

ONE = torch.tensor(1.0)


def test_weights_of_a_mixture_sum_to_one_and_favor_similar_models():
    distances = torch.tensor([[0.0, 1.0, 3.0], [1.0, 0.0, 2.5], [3.0, 2.5, 0.0]])
    weights = attention(distances, 2.0)
    torch.testing.assert_close(weights.sum(1), torch.ones(3))
    assert (weights >= 0).all()
    assert weights[0, 1] > weights[0, 2]
    # The paper: alpha A'(d^2) with A(x) = 1 - exp(-x / sigma), and alpha = sigma / 3.
    square = torch.tensor(9.0, requires_grad=True)
    (slope,) = torch.autograd.grad(1 - torch.exp(-square / 2.0), square)
    torch.testing.assert_close(weights[0, 2], 2.0 / 3 * slope)


def test_a_newcomer_receives_a_mixture_without_new_distances(monkeypatch):
    """Each client differs from the initial model by another shift of three biases."""
    method = fedamp(vit_federation(clients=[0, 1, 2]), temperature=2.0)
    initial = {name: entry._replace(weight=ONE) for name, entry in method.form(0).items()}
    bias, shifts = initial["head.bias"].value, (0.25, 0.5, 1.0)
    payloads = {
        client: initial | {"head.bias": fp.Weighted(bias + shift, ONE)}
        for client, shift in enumerate(shifts)
    }
    state = method.server.step(0, payloads, method.server.state)
    monkeypatch.delattr(fp.aggregation, "distances")
    found = method.server.answer(5, state)["head.bias"].value
    expected = sum(math.exp(-3 * shift**2 / 2) / 4 * shift for shift in shifts)
    torch.testing.assert_close(found, bias + expected)


@pytest.mark.parametrize("temperature", [1e30, 1e-9])
def test_everyone_receives_the_mean_at_an_infinite_temperature_and_the_own_model_near_zero(
    temperature,
):
    federation = vit_federation(cohort_size=5)
    sent = sent_by(federation)
    last(fedamp, federation, temperature=temperature)
    ups = {client: each["head.weight"].value for client, each in sent.at(0, "up").items()}
    mean = torch.stack([*ups.values()]).mean(0)
    for client, each in sent.at(1, "down").items():
        expected = mean if temperature > 1 else ups[client]
        torch.testing.assert_close(each["head.weight"].value, expected)


def test_a_large_proximal_weight_brings_models_near_their_mixture():
    changes = {"clients": [0, 1], "cohort_size": 2, "steps": 12}
    spread = []
    for weight in (0.0, 50.0):
        predictions = last(
            fedamp, vit_federation(**changes), proximal_weight=weight, temperature=1e30
        )
        first, second = (parameters(predictions, client)["head.weight"] for client in (0, 1))
        spread.append((first - second).abs().max())
    assert spread[1] < spread[0] / 2
