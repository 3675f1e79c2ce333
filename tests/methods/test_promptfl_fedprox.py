"""PromptFL with FedProx: its step follows the stated objective."""

import torch
import torch.nn.functional as F

from fedprompt.methods.promptfl_fedprox import promptfl_fedprox
from tiny_federations import ONE_CLIENT, clip_federation, descend, last, parameters


def test_the_second_step_descends_the_stated_objective():
    """At the first step of a round, the proximal term has gradient 0."""
    federation = clip_federation(**ONE_CLIENT)
    made = last(promptfl_fedprox, federation, learning_rate=0.5, proximal_weight=0.8)
    found = parameters(made, 0)["context.context"]
    model = federation.new_model()
    context = model.context.context
    start = context.detach().clone()
    for tokens, labels in federation.batches(0, 0):
        objective = F.cross_entropy(model(tokens), labels)
        objective = objective + 0.8 / 2 * (context - start).square().sum()
        descend(objective, [context], 0.5)
    torch.testing.assert_close(found, context.detach())
