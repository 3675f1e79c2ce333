"""Servers that answer each client, without flwr."""

from functools import partial

import torch

from fedprompt import Weighted, averaging, descend
from fedprompt.interfaces import PairServer
from same import assert_identical, assert_same


def test_averaging_applies_the_aggregator_and_then_the_update(generator):
    values = {"head": torch.randn(2, generator=generator)}
    payloads = {
        client: {"head": Weighted(torch.randn(2, generator=generator), torch.tensor(float(client)))}
        for client in (7, 3)
    }
    server = averaging(values, clients=iter([3, 5, 7]))
    answers, _ = server.step(payloads, server.init()[1])
    three, seven = (payloads[client]["head"].value.double() for client in (3, 7))
    torch.testing.assert_close(answers[5]["head"], ((3 * three + 7 * seven) / 10).float())
    assert list(answers) == [3, 5, 7]
    assert_same(server.init()[0][3], values)
    assert isinstance(server, PairServer)


def test_averaging_adds_in_the_order_of_client_ids():
    seen = []

    def aggregate(payloads):
        payloads = list(payloads)
        seen.append([float(payload["head"].value) for payload in payloads])
        return payloads[0]

    server = averaging({"head": torch.tensor(0.0)}, clients=range(3), aggregate=aggregate)
    payloads = {
        client: {"head": Weighted(torch.tensor(float(client)), torch.tensor(1.0))}
        for client in (2, 1)
    }
    answers, _ = server.step(payloads, server.init()[1])
    assert seen == [[1.0, 2.0]]
    assert answers[0]["head"] == 1.0


def test_the_state_of_averaging_contains_that_of_the_update():
    """By hand: gradients 1 and 1, momentum 0.5, so the steps are 1 and 1.5."""
    momentum = descend(partial(torch.optim.SGD, lr=1.0, momentum=0.5))
    server = averaging({"head": torch.zeros(())}, clients=range(3), update=momentum)
    payloads = {1: {"head": Weighted(torch.tensor(1.0), torch.tensor(1.0))}}
    answers, first = server.step(payloads, server.init()[1])
    assert answers[0]["head"] == -1.0
    answers, second = server.step(payloads, first)
    assert answers[0]["head"] == -2.5
    assert_identical(first["values"]["head"], torch.tensor(-1.0))
    assert_identical(second["values"]["head"], torch.tensor(-2.5))
