"""FedProx: without the proximal term it is FedAvg, and its step follows the stated objective."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedprox import fedprox
from fedprompt.methods.fedvpt import fedvpt_d
from tiny_federations import descend, last, parameters, vit_federation


def test_without_the_proximal_term_it_is_fedavg_bitwise():
    plain = parameters(last(fedvpt_d, vit_federation()), 0)
    proximal = parameters(last(fedprox, vit_federation(), proximal_weight=0.0), 0)
    assert all(torch.equal(value, proximal[name]) for name, value in plain.items())


def test_the_second_step_descends_the_stated_objective():
    """At the first step of a round, the proximal term has gradient 0."""
    federation = vit_federation(
        rounds=1, clients=[0], cohort_size=1, make_optimizer=torch.optim.SGD
    )
    found = parameters(last(fedprox, federation, learning_rate=0.5, proximal_weight=0.8), 0)
    model = federation.new_model()
    start = fp.snapshot(model)
    for images, labels in federation.batches(0, 0):
        distance = sum((p - start[name]).square().sum() for name, p in model.named_parameters())
        objective = F.cross_entropy(model(images), labels) + 0.8 / 2 * distance
        descend(objective, model.parameters(), 0.5)
    torch.testing.assert_close(found, fp.snapshot(model))
