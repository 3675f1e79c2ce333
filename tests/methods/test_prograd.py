"""ProGrad: no step opposes the direction towards the zero-shot predictions."""

import pytest
import torch
import torch.nn.functional as F

from fedprompt.methods.prograd import _aligned, prograd
from tiny_federations import ONE_CLIENT, clip_federation, last, parameters


@pytest.mark.parametrize("seed", range(20))
def test_the_inner_product_with_the_guide_is_never_negative(seed):
    rng = torch.Generator().manual_seed(seed)
    gradient, guide = torch.randn(2, 4, 3, generator=rng, dtype=torch.float64)
    found = _aligned(gradient, guide)
    inner = (gradient * guide).sum()
    if inner >= 0:
        assert torch.equal(found, gradient)
    else:
        torch.testing.assert_close((found * guide).sum(), torch.zeros_like(inner))
        # Only a multiple of the guide was removed.
        torch.testing.assert_close(
            (found - gradient) / guide, (-inner / guide.square().sum()).expand(4, 3)
        )


def test_a_zero_guide_changes_nothing():
    gradient = torch.ones(4, 3)
    assert torch.equal(_aligned(gradient, torch.zeros(4, 3)), gradient)


@pytest.mark.parametrize("client", range(5))
def test_a_step_is_the_projected_gradient(client):
    """The guide comes from autograd of the cross-entropy with the zero-shot probabilities."""
    federation = clip_federation(**ONE_CLIENT | {"steps": 1, "clients": [client]})
    found = parameters(last(prograd, federation, learning_rate=1.0), client)["context.context"]
    model = federation.new_model()
    context = model.context.context
    ((tokens, labels),) = federation.batches(client, 0)
    image = F.normalize(tokens[:, 0], dim=-1)
    target = (federation.scale * image @ federation.handwritten_text().T).softmax(1)
    soft = F.cross_entropy(model(tokens), target)
    hard = F.cross_entropy(model(tokens), labels)
    (guide,), (gradient,) = (torch.autograd.grad(loss, context) for loss in (soft, hard))
    step = context.detach() - found
    inner = (gradient * guide).sum()
    expected = gradient - inner.clamp(max=0) / guide.square().sum() * guide
    torch.testing.assert_close(step, expected, rtol=1e-3, atol=1e-6)
    assert (step * guide).sum() >= -1e-4 * step.norm() * guide.norm()
