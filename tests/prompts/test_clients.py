"""Clients that share one forward pass of a trunk."""

import torch

from fedprompt import GroupPrompts, encode_prompted
from tolerance import assert_near

DIM, DEPTH = 12, 3


def test_batched_clients_have_the_losses_and_gradients_of_separate_runs(trunk, images, generator):
    # Three clients with 3, 1 and 2 samples. The prompts of the second are larger.
    owner = torch.tensor([0, 2, 0, 1, 2, 0])
    draw = {"generator": generator, "dtype": torch.float64}
    images, weights = torch.randn(6, *images.shape[1:], **draw), torch.randn(6, DIM, **draw)
    clients = GroupPrompts(3, 2, DIM, layers=range(DEPTH), generator=generator).double()
    with torch.no_grad():
        clients.tokens[1] *= 5

    def losses(chosen):
        pooled = encode_prompted(trunk, images[chosen], clients(owner[chosen])).pooled
        return (weights[chosen] * pooled).sum(1)

    together = losses(owner >= 0)
    (gradient,) = torch.autograd.grad(together.sum(), clients.tokens)
    for client in range(3):
        alone = losses(owner == client)
        assert_near(together[owner == client], alone)
        (separate,) = torch.autograd.grad(alone.sum(), clients.tokens)
        assert_near(gradient[client], separate[client])
