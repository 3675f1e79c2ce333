"""FedSA-LoRA: the factors A are averaged, and each client goes on from its own B and head."""

import pytest
import torch

from fedprompt.methods import fedsa_lora
from low_rank import ONE_ROUND, RATE, initial, mean, trained
from tiny_federations import last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def test_after_two_rounds_clients_have_the_mean_of_a_and_their_own_b_and_head():
    federation = vit_federation(**ONE_ROUND | {"rounds": 2})
    found = last(fedsa_lora, federation, learning_rate=RATE)
    values = [initial(federation) for _ in range(5)]
    for server_round in range(2):
        now = {"server_round": server_round}
        values = [trained(federation, client, values[client], **now) for client in range(5)]
        shared = mean(federation, values)
        for own in values:
            own[2], own[4] = shared[2], shared[4]
    for client in range(5):
        torch.testing.assert_close([*parameters(found, client).values()], values[client])
    assert not torch.equal(values[0][3], values[1][3])
