"""FedCLIP: both directions of a batch's match are learned by an attention over dimensions."""

import pytest
import torch

import fedprompt as fp
from fedprompt.methods.fedclip import _Attended, fedclip
from tiny_federations import clip_federation, descend, last, parameters

ONE_STEP = {"rounds": 1, "steps": 1, "make_optimizer": torch.optim.SGD}


@pytest.mark.usefixtures("float64")
def test_a_round_of_one_step_descends_the_mean_loss_of_clients_that_count_equally():
    """Images i and sentences j of a batch: -log softmax over j and over i, at i = j."""
    federation = clip_federation(cohort_size=5, **ONE_STEP)
    found = parameters(last(fedclip, federation, learning_rate=0.5), 0)
    model, objective = federation.seeded(_Attended, federation), 0.0
    first, _, second, _ = model.attention
    sentences = federation.handwritten_text()
    for client in federation.clients:
        for tokens, labels in federation.batches(client, 0):
            image = tokens[:, 0]
            hidden = torch.tanh(image @ first.weight.T + first.bias)
            image = image * (hidden @ second.weight.T + second.bias).softmax(1)
            cosines = (image / image.norm(dim=1, keepdim=True)) @ sentences[labels].T
            logits = federation.scale * cosines
            ours = logits.diag() - (logits.logsumexp(1) + logits.logsumexp(0)) / 2
            objective = objective - ours.mean() / 5
    descend(objective, model.parameters(), 0.5)
    torch.testing.assert_close(found, fp.snapshot(model))
