"""pFedMe: a round descends the Moreau envelope of a client's loss."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.pfedme import pfedme
from tiny_federations import last, parameters, vit_federation

ALONE = {"clients": [1], "cohort_size": 1, "rounds": 1}


def test_the_movement_is_the_gradient_of_the_moreau_envelope():
    r"""At the minimizer, :math:`\nabla f(\theta) + \lambda (\theta - w) = 0`."""
    federation = vit_federation(**ALONE, steps=1, make_optimizer=torch.optim.SGD)
    predictions = last(
        pfedme, federation, learning_rate=0.2, proximal_weight=3.0, outer_step=0.4, inner_steps=60
    )
    personal, moved = parameters(predictions, 1), fp.snapshot(predictions.received(5))
    model = federation.new_model()
    start = fp.snapshot(model)
    fp.load_values(model, personal)
    ((images, labels),) = federation.batches(1, 0)
    loss = F.cross_entropy(model(images), labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for name, gradient in zip(start, gradients, strict=True):
        expected = start[name] - 0.4 / 3.0 * gradient
        torch.testing.assert_close(moved[name], expected, rtol=1e-4, atol=1e-5)
        assert (moved[name] - start[name]).abs().max() > 1e-4


def test_the_proximal_center_is_the_moving_local_copy():
    """Two batches with one inner step each, written out."""
    federation = vit_federation(**ALONE, make_optimizer=torch.optim.SGD)
    predictions = last(
        pfedme, federation, learning_rate=0.5, proximal_weight=0.8, outer_step=0.25, inner_steps=2
    )
    model = federation.new_model()
    local = fp.snapshot(model)
    for images, labels in federation.batches(1, 0):
        for _ in range(2):
            loss = F.cross_entropy(model(images), labels)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
                    p -= 0.5 * (gradient + 0.8 * (p - local[name]))
        local = {
            name: 0.75 * local[name] + 0.25 * p.detach() for name, p in model.named_parameters()
        }
    torch.testing.assert_close(parameters(predictions, 1), fp.snapshot(model))
    torch.testing.assert_close(fp.snapshot(predictions.received(5)), local)
