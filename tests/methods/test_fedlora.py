"""FedLoRA: factors are trained as parts of the weights, and averaged one by one."""

import pytest
import torch

from fedprompt.methods.fedlora import fedlora
from low_rank import ONE_ROUND, RATE, initial, mean, trained
from tiny_federations import last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def test_the_server_has_the_means_of_both_factors():
    federation = vit_federation(**ONE_ROUND)
    found = parameters(last(fedlora, federation, learning_rate=RATE), 0)
    start = initial(federation)
    expected = mean(federation, [trained(federation, client, start) for client in range(5)])
    torch.testing.assert_close(list(found.values()), expected)


def test_a_message_has_the_bytes_of_the_factors_and_of_the_head():
    """Two layers of width 8 with A (2, 8) and B (24, 2), three classes; eight bytes a number."""
    federation = vit_federation(rounds=1, cohort_size=1)
    last(fedlora, federation)
    numbers = 2 * (2 * 8 + 24 * 2) + 8 * 3 + 3
    assert federation.ledger.total(direction="down") == 8 * numbers
    assert federation.ledger.total(direction="up") == 8 * numbers + 6 * 4  # float32 weights
