"""FedAvgM, FedAdam and FedYogi: each follows its recursion from the messages it received."""

import pytest
import torch

from fedprompt.methods.fedopt import fedadam, fedavgm, fedyogi
from sent_messages import sent_by
from tiny_federations import last, parameters, vit_federation

ROUNDS, RATE = 4, 0.3


def run(method, **values):
    """Run a method; return its last head, and the broadcasts and movements of each round."""
    federation = vit_federation(rounds=ROUNDS)
    sent = sent_by(federation)
    found = parameters(last(method, federation, **values), 0)["head.weight"]
    downs, moves = [], []
    for server_round in range(ROUNDS):
        down, *_ = (each["head.weight"] for each in sent.at(server_round, "down").values())
        ups = [each["head.weight"] for each in sent.at(server_round, "up").values()]
        total = sum(entry.weight.double() for entry in ups)
        mean = sum(entry.value.double() * entry.weight.double() for entry in ups) / total
        downs.append(down.double())
        moves.append(mean - down.double())
    return found, downs, moves


def test_fedavgm_adds_all_earlier_movements_with_decay():
    found, downs, moves = run(fedavgm, momentum=0.6)
    steps = [
        sum(0.6 ** (now - past) * moves[past] for past in range(now + 1)) for now in range(ROUNDS)
    ]
    after = [*downs[1:], found.double()]
    for before, step, value in zip(downs, steps, after, strict=True):
        torch.testing.assert_close(value, before + step, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", [fedadam, fedyogi])
def test_the_adaptive_methods_follow_algorithm_2_coordinate_by_coordinate(method):
    found, downs, moves = run(method, server_rate=RATE)
    for row, column in [(0, 0), (2, 5)]:
        value = downs[0][row, column].item()
        first, second = 0.0, 1e-3**2
        for movement in moves:
            change = movement[row, column].item()
            first = 0.9 * first + 0.1 * change
            if method is fedadam:
                second = 0.99 * second + 0.01 * change**2
            else:
                sign = (second > change**2) - (second < change**2)
                second = second - 0.01 * change**2 * sign
            value += RATE * first / (second**0.5 + 1e-3)
        assert found[row, column].item() == pytest.approx(value, abs=1e-5)
