"""ProGrad: no step opposes the direction towards the zero-shot predictions."""

import pytest
import torch
import torch.nn.functional as F

from fedprompt.methods.prograd import prograd
from tiny_federations import ONE_CLIENT, clip_federation, last, parameters


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
