"""Clients that share one trunk: batched streams, copies, states and training."""

import pytest
import torch

from fedprompt import DeepPrompts, PromptStream, batch_streams, encode_prompted
from tolerance import assert_near

DIM, DEPTH = 12, 3


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_batched_clients_have_the_losses_and_gradients_of_separate_runs(trunk, images, generator):
    # Three clients with 3, 1 and 2 samples. The prompts of the second are larger.
    owner = torch.tensor([0, 2, 0, 1, 2, 0])
    images = draw(generator, 6, *images.shape[1:])
    clients = [DeepPrompts(2, DIM, DEPTH, generator=generator).double() for _ in range(3)]
    with torch.no_grad():
        clients[1].tokens *= 5
    weights = draw(generator, 6, DIM)

    together = (
        weights
        * encode_prompted(
            trunk, images, batch_streams([client() for client in clients], owner)
        ).pooled
    ).sum(1)
    gradients = torch.autograd.grad(together.sum(), [client.tokens for client in clients])
    for number, (client, gradient) in enumerate(zip(clients, gradients, strict=True)):
        own = owner == number
        alone = (weights[own] * encode_prompted(trunk, images[own], client()).pooled).sum(1)
        assert_near(together[own], alone)
        assert_near(gradient, torch.autograd.grad(alone.sum(), client.tokens)[0])


@pytest.mark.bad_input  # the hook refuses unsigned integers
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8, torch.uint8])
@pytest.mark.parametrize("replace", [False, True])
def test_batch_streams_gives_each_sample_its_owners_tokens(replace, dtype, generator):
    clients = [
        PromptStream({layer: draw(generator, 2, DIM) for layer in (0, 2)}, replace)
        for _ in range(2)
    ]
    batched = batch_streams(clients, torch.tensor([1, 0, 1], dtype=dtype))
    assert batched.replace == replace
    assert batched.layers.keys() == {0, 2}
    for layer, tokens in batched.layers.items():
        assert torch.equal(
            tokens, torch.stack([clients[owner].layers[layer] for owner in (1, 0, 1)])
        )
