"""FML: without mutual learning, it is local training and FedAvg next to each other."""

import torch
import torch.nn.functional as F

from fedprompt.methods.fedvpt import fedvpt_d
from fedprompt.methods.fml import fml
from fedprompt.methods.local import local
from tiny_federations import last, mixed_federation, parameters, vit_federation


def same(first, second):
    return all(torch.equal(value, second[name]) for name, value in first.items())


def test_without_mutual_learning_the_private_model_is_that_of_local_training_bitwise():
    alone = last(local, mixed_federation())
    found = last(fml, mixed_federation(), alpha=1.0, beta=1.0)
    assert all(same(parameters(alone, k), parameters(found, k)) for k in range(5))


def test_without_mutual_learning_the_messenger_is_that_of_fedavg_bitwise():
    shards = dict(enumerate(torch.arange(41).split(8)))  # the means are equal for equal shards
    average = last(fedvpt_d, vit_federation(shards=shards)).of(0)
    messenger = last(fml, vit_federation(shards=shards), alpha=1.0, beta=1.0).received(5)
    assert same(dict(average.named_parameters()), dict(messenger.named_parameters()))


def test_a_step_descends_both_stated_objectives():
    made = mixed_federation(
        rounds=1, steps=1, clients=[1], cohort_size=1, make_optimizer=torch.optim.SGD
    )
    predictions = last(fml, made, learning_rate=0.5, alpha=0.3, beta=0.6)
    private, messenger = made.new_model(1), made.new_model(0)
    images, labels = next(made.batches(1, 0))
    logits = private(images), messenger(images)
    models = (private, messenger), (predictions.of(1), predictions.received(5))
    for k, share in enumerate((0.3, 0.6)):
        own, other = logits[k], logits[1 - k].detach().softmax(1)
        divergence = (other * (other.log() - own.log_softmax(1))).sum(1).mean()
        objective = share * F.cross_entropy(own, labels) + (1 - share) * divergence
        trained = {n: p for n, p in models[0][k].named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(objective, list(trained.values()))
        found = dict(models[1][k].named_parameters())
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            torch.testing.assert_close(found[name], parameter - 0.5 * gradient)
