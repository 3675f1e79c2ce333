"""CoOp: clients are independent, and the context is the whole model."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.coop import coop
from tiny_federations import ONE_CLIENT, clip_federation, last, parameters


@pytest.mark.usefixtures("float64")
def test_a_client_descends_over_all_of_its_rounds():
    """In the second round, it continues from where it ended."""
    federation = clip_federation(**ONE_CLIENT | {"rounds": 2})
    found = parameters(last(coop, federation, learning_rate=0.5), 0)
    context = federation.new_context()().detach().requires_grad_()
    names = federation.tower.class_names(federation.class_names)
    for server_round in range(2):
        for tokens, labels in federation.batches(0, server_round):
            text = F.normalize(federation.tower(fp.prompted_text(context, names))[0], dim=-1)
            logits = federation.scale * F.normalize(tokens[:, 0], dim=-1) @ text.T
            (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels), context)
            context = (context - 0.5 * gradient).detach().requires_grad_()
    torch.testing.assert_close(found, {"context.context": context.detach()})
