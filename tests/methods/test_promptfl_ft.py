"""PromptFL with fine-tuning: newcomers get PromptFL's context, and clients what they trained."""

import torch
import torch.nn.functional as F

from fedprompt.methods.promptfl import promptfl
from fedprompt.methods.promptfl_ft import promptfl_ft
from tiny_federations import clip_federation, descend, last, parameters


def test_a_client_predicts_with_the_broadcast_after_steps_on_its_own_data():
    changes = {"cohort_size": 5, "make_optimizer": torch.optim.SGD}
    found = parameters(last(promptfl_ft, clip_federation(**changes), learning_rate=0.5), 2)
    federation = clip_federation(**changes, rounds=1)
    model = last(promptfl, federation, learning_rate=0.5).of(0)
    context = model.context.context
    for tokens, labels in federation.batches(2, 1):
        descend(F.cross_entropy(model(tokens), labels), [context], 0.5)
    torch.testing.assert_close(found["context.context"], context.detach())
