"""FedGH: the server alone trains the head, by gradient descent on prototypes."""

import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt.methods.fedgh import _train_head, fedgh
from tiny_federations import last, mixed_federation


def test_a_step_of_the_server_is_the_gradient_step_of_softmax_regression():
    """The gradient is the mean of (probabilities - one-hot) times features."""
    rng = torch.Generator().manual_seed(0)
    entries = [
        fp.Weighted(torch.randn(3, 2, generator=rng), torch.tensor([4.0, 0.0, 1.0])),
        fp.Weighted(torch.randn(3, 2, generator=rng), torch.tensor([0.0, 2.0, 3.0])),
    ]
    head = nn.Linear(2, 3)
    weight, bias = head.weight.detach().clone(), head.bias.detach().clone()
    _train_head(head, entries, learning_rate=0.5, steps=1)
    rows = [(0, 0), (0, 2), (1, 1), (1, 2)]  # entry and class of each known prototype
    start_weight, start_bias = weight.clone(), bias.clone()
    for entry, label in rows:
        features = entries[entry].value[label]
        error = (start_weight @ features + start_bias).softmax(0)
        error[label] -= 1
        weight -= 0.5 * error[:, None] * features / 4
        bias -= 0.5 * error / 4
    torch.testing.assert_close(head.weight.detach(), weight)
    torch.testing.assert_close(head.bias.detach(), bias)


def test_heads_that_clients_trained_are_not_used():
    """Without steps of the server, the head keeps its initial values."""
    made = mixed_federation()
    predictions = last(fedgh, made, server_steps=0)
    initial = made.new_model(0).head.weight
    for client in made.clients:
        assert torch.equal(predictions.of(client).head.weight, initial)
    assert not torch.equal(last(fedgh, mixed_federation()).of(0).head.weight, initial)
