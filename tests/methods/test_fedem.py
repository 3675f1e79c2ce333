"""FedEM: an E-step is Bayes' rule, weights rise in likelihood."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedem import _Mixture, _posterior, fedem
from tiny_federations import descend, last, vit_federation


def mixture():
    federation = vit_federation()
    model = _Mixture(federation, 3)
    model.weights.copy_(torch.tensor([0.2, 0.5, 0.3]))
    return federation, model


def test_an_e_step_is_the_rule_of_bayes():
    federation, model = mixture()
    images, labels = federation.own(0)
    found = _posterior(model.losses(images, labels), model.weights)
    torch.testing.assert_close(found.sum(1), torch.ones(len(images)))
    for image, label, row in zip(images, labels, found, strict=True):
        likelihoods = [one(image[None]).softmax(1)[0, label] for one in model.components]
        evidence = sum(w * p for w, p in zip(model.weights, likelihoods, strict=True))
        for weight, likelihood, probability in zip(model.weights, likelihoods, row, strict=True):
            torch.testing.assert_close(probability, weight * likelihood / evidence)


def test_a_step_follows_the_gradient_of_the_likelihood_of_the_mixture():
    federation, model = mixture()
    images, labels = federation.own(0)
    losses = model.losses(images, labels)
    expected = F.nll_loss(model(images), labels)
    found = (_posterior(losses, model.weights) * losses).sum(1).mean()
    parameters = list(model.parameters())
    gradients = (torch.autograd.grad(loss, parameters) for loss in (found, expected))
    torch.testing.assert_close(*gradients)


@torch.no_grad()
def test_each_update_of_the_weights_raises_the_likelihood_of_the_mixture():
    federation, model = mixture()
    images, labels = federation.own(0)
    before = -torch.inf
    for _ in range(5):
        likelihood = model(images)[torch.arange(len(images)), labels].sum()
        assert likelihood > before
        before = likelihood
        model.weights.copy_(_posterior(model.losses(images, labels), model.weights).mean(0))


def test_predictions_mix_probabilities_and_not_logits():
    federation, model = mixture()
    images = federation.own(0)[0]
    parts = [one(images).softmax(1) for one in model.components]
    expected = sum(w * part for w, part in zip(model.weights, parts, strict=True))
    torch.testing.assert_close(model(images).exp(), expected)


def test_weights_sum_to_one_and_a_newcomer_has_equal_ones():
    federation = vit_federation()
    predictions = last(fedem, federation)
    found = [predictions.of(client).weights.clone() for client in federation.cohort(1)]
    for weights in found:
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))
        assert weights.max() > weights.min()
    assert not torch.equal(found[0], found[1])
    torch.testing.assert_close(predictions.received(5).weights, torch.full((3,), 1 / 3))


def test_a_round_descends_with_the_new_weights():
    one = {"rounds": 1, "clients": [0], "cohort_size": 1, "make_optimizer": torch.optim.SGD}
    federation = vit_federation(**one)
    found = last(fedem, federation, learning_rate=0.5).of(0)
    model = _Mixture(federation, 3)
    model.weights.copy_(found.weights)
    for images, labels in federation.batches(0, 0):
        descend(F.nll_loss(model(images), labels), model.parameters(), 0.5)
    torch.testing.assert_close(fp.snapshot(found), fp.snapshot(model))


def test_new_weights_are_the_mean_posterior_under_the_broadcast():
    predictions = last(fedem, vit_federation(rounds=1, clients=[0, 1], cohort_size=2))
    federation = vit_federation()
    model = _Mixture(federation, 3)
    for client in (0, 1):
        with torch.no_grad():
            expected = _posterior(model.losses(*federation.own(client)), model.weights).mean(0)
        torch.testing.assert_close(predictions.of(client).weights, expected)
