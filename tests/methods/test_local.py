"""Local training: nothing is shared, and a client continues where it ended."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods import local, take_step
from tiny_federations import last, parameters, vit_federation


def test_two_rounds_are_one_training_with_the_batches_of_both():
    """AdamW is new in each round; plain steps have no state, so both rounds are one training."""
    federation = vit_federation(cohort_size=5, make_optimizer=torch.optim.SGD)
    predictions = last(local, federation, learning_rate=0.3)
    model = federation.new_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.3)
    for server_round in range(2):
        for images, labels in federation.batches(3, server_round):
            take_step(optimizer, F.cross_entropy(model(images), labels))
    torch.testing.assert_close(parameters(predictions, 3), fp.snapshot(model), rtol=0, atol=0)
