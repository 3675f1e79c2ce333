"""PromptFL: one step of descent in each client is one step on the weighted mean of their losses."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.promptfl import promptfl
from tiny_federations import clip_federation, last, parameters


@pytest.mark.usefixtures("float64")
def test_a_round_of_one_step_descends_the_weighted_mean_of_the_losses():
    federation = clip_federation(rounds=1, steps=1, cohort_size=5, make_optimizer=torch.optim.SGD)
    found = parameters(last(promptfl, federation, learning_rate=2.0), 0)
    model = federation.new_model()
    start = fp.snapshot(model)["context.context"]
    total = sum(federation.num_examples(client) for client in federation.clients)
    objective = sum(
        federation.num_examples(client) / total * F.cross_entropy(model(tokens), labels)
        for client in federation.clients
        for tokens, labels in federation.batches(client, 0)
    )
    (gradient,) = torch.autograd.grad(objective, model.context.context)
    torch.testing.assert_close(found["context.context"], start - 2.0 * gradient)
