"""PromptFL with FedAMP: limits of its attention, and the objective whose gradient it follows."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedamp import attention
from fedprompt.methods.promptfl_fedamp import promptfl_fedamp
from tiny_federations import clip_federation, descend, last, parameters


def contexts(count, *, spread=1.0):
    rng = torch.Generator().manual_seed(0)
    values = spread * torch.randn(count, 2, 3, generator=rng, dtype=torch.float64)
    return values, [{"context": fp.Weighted(value, torch.tensor(1.0))} for value in values]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 30.0])
def test_weights_sum_to_one_and_a_mixture_is_a_gradient_step_of_the_attention_objective(
    temperature,
):
    """The objective is the sum over pairs of A(d) = 1 - exp(-d / temperature).

    Here d is the squared distance. The gradient contains 2 A'(d), and the paper's weights contain
    A'(d), so the step size is halved.
    """
    values, payloads = contexts(5)
    weights = attention(fp.aggregation.distances(payloads), temperature)
    torch.testing.assert_close(weights.sum(1), torch.ones(5, dtype=torch.float64))
    assert (weights > 0).all()
    free = values.clone().requires_grad_()
    squares = torch.stack([(free[i] - free[j]).square().sum() for i in range(5) for j in range(i)])
    objective = (1 - torch.exp(-squares / temperature)).sum()
    (gradient,) = torch.autograd.grad(objective, free)
    expected = values - temperature / 5 / 2 * gradient
    torch.testing.assert_close(torch.einsum("ij,jab->iab", weights, values), expected)


def test_an_infinite_temperature_gives_the_mean_and_a_small_one_the_own_context():
    _, payloads = contexts(4)
    equal = torch.full((4, 4), 0.25, dtype=torch.float64)
    torch.testing.assert_close(attention(fp.aggregation.distances(payloads), float("inf")), equal)
    own = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(attention(fp.aggregation.distances(payloads), 1e-6), own)


def test_the_second_round_descends_the_stated_objective():
    """In the first round, all contexts and so all mixtures are equal."""
    changes = {"clients": [0, 1], "cohort_size": 2, "make_optimizer": torch.optim.SGD}
    values = {"learning_rate": 0.5, "proximal_weight": 0.8, "temperature": 2.0}
    first = last(promptfl_fedamp, clip_federation(**changes, rounds=1), **values)
    own, other = (parameters(first, client)["context.context"] for client in (0, 1))
    federation = clip_federation(**changes)
    share = torch.exp(-(own - other).square().sum() / 2.0) / 2
    center = (1 - share) * own + share * other
    model = federation.new_model()
    fp.load_values(model, {"context.context": own})
    for tokens, labels in federation.batches(0, 1):
        distance = (model.context.context - center).square().sum()
        objective = F.cross_entropy(model(tokens), labels) + 0.8 / 2 * distance
        descend(objective, [model.context.context], 0.5)
    found = parameters(last(promptfl_fedamp, federation, **values), 0)
    torch.testing.assert_close(found, fp.snapshot(model))
    assert (own - other).abs().max() > 1e-3
