"""Clients that share one trunk: batched streams, copies, states and training."""

import numpy as np
import pytest
import torch

from errors import raises
from fedprompt import DeepPrompts, PromptStream, ShallowPrompts, batch_streams, encode_prompted
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


STREAM = PromptStream({0: torch.zeros(1, 2)})


LAYOUT = (
    "`streams[1]` must have the layers, lengths and `replace` of the first stream "
    "({0: (1, 2)}, False); got "
)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("streams", "owner", "error", "message"),
    [
        ([], [0], ValueError, "`streams` must contain at least one stream; got none."),
        *(
            (streams, [0], TypeError, "`streams` must be a sequence of PromptStream; got a ")
            for streams in ({"a": 3}, np.ones((2, 3)))
        ),
        (
            [STREAM, PromptStream({1: torch.zeros(1, 2)})],
            [0],
            ValueError,
            LAYOUT + "({1: (1, 2)}, False).",
        ),
        (
            [STREAM, PromptStream({0: torch.zeros(3, 2)})],
            [0],
            ValueError,
            LAYOUT + "({0: (3, 2)}, False).",
        ),
        (
            [STREAM, PromptStream({0: torch.zeros(1, 2)}, True)],
            [0],
            ValueError,
            LAYOUT + "({0: (1, 2)}, True).",
        ),
        ([PromptStream({0: torch.zeros(4, 1, 2)})], [0], ValueError, "`streams` must contain"),
        ([ShallowPrompts(1, 2)], [0], TypeError, "`streams[0]` must be a PromptStream; call the"),
        (STREAM, [0], TypeError, "`streams[0]` must be a PromptStream; call the prompt module;"),
        ([STREAM, STREAM], [0, 2], ValueError, "`owner` must lie in"),
        ([STREAM, STREAM], [-1, 0], ValueError, "`owner` must lie in"),
        ([STREAM], [0.0], TypeError, "`owner` must be integers of shape (batch,); got a float32"),
        ([STREAM], [[0]], TypeError, "`owner` must be integers of shape (batch,); got a int64"),
        ([STREAM], [True], TypeError, "`owner` must be integers of shape (batch,); got a bool"),
    ],
)
def test_batch_streams_refuses_streams_and_owners_that_do_not_match(streams, owner, error, message):
    with raises(error, message):
        batch_streams(streams, torch.as_tensor(owner))
