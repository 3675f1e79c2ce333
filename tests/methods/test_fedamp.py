"""FedAMP, also with PromptFL: attentive mixtures, and the objective near them."""

import math

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import promptfl_fedamp
from fedprompt.methods.fedamp import attention, fedamp
from sent_messages import sent_by
from tiny_federations import clip_federation, descend, last, parameters, vit_federation

ONE = torch.tensor(1.0)


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_a_mixture_is_a_gradient_step_of_the_attention_objective(temperature):
    """The objective is the sum over pairs of A(d) = 1 - exp(-d / temperature).

    Here d is the squared distance. The gradient contains 2 A'(d), and the paper's weights contain
    A'(d), so the step size is halved.
    """
    values = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    payloads = [{"context": fp.Weighted(value, ONE)} for value in values]
    weights = attention(fp.aggregation.distances(payloads), temperature)
    torch.testing.assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64))
    assert (weights > 0).all()
    free = values.clone().requires_grad_()
    squares = torch.stack([(free[i] - free[j]).square().sum() for i in range(5) for j in range(i)])
    objective = (1 - torch.exp(-squares / temperature)).sum()
    (gradient,) = torch.autograd.grad(objective, free)
    expected = values - temperature / 5 / 2 * gradient
    torch.testing.assert_close(torch.einsum("ij,jab->iab", weights, values), expected)


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


@pytest.mark.parametrize(
    ("method", "made"), [(fedamp, vit_federation), (promptfl_fedamp, clip_federation)]
)
def test_the_second_round_descends_the_stated_objective(float64, method, made):
    """In the first round, all models and so all mixtures are equal."""
    changes = {"clients": [0, 1], "cohort_size": 2, "make_optimizer": torch.optim.SGD}
    values = {"learning_rate": 0.1, "proximal_weight": 0.8, "temperature": 30.0}
    first, federation = last(method, made(**changes, rounds=1), **values), made(**changes)
    own, other = (parameters(first, client) for client in (0, 1))
    square = sum((own[name] - other[name]).square().sum() for name in own)
    share = torch.exp(-square / 30.0) / 2
    center = {name: (1 - share) * own[name] + share * other[name] for name in own}
    model = federation.new_model()
    fp.load_values(model, own)
    for inputs, labels in federation.batches(0, 1):
        apart = sum((p - center[name]).square().sum() for name, p in model.named_parameters())
        descend(F.cross_entropy(model(inputs), labels) + 0.8 / 2 * apart, model.parameters(), 0.1)
    torch.testing.assert_close(
        parameters(last(method, federation, **values), 0), fp.snapshot(model)
    )
    assert 1e-4 < square < 100
