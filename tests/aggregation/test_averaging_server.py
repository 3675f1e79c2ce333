"""The server that sends the same values to all clients, by hand."""

from functools import partial

import torch

from fedprompt import Weighted, averaging_server, descend, ema, robust, snapshot
from fedprompt.aggregation import fedopt
from same import assert_identical


def test_all_clients_receive_the_weighted_mean(generator):
    payloads = {
        client: {"head": Weighted(torch.randn(2, generator=generator), torch.tensor(float(client)))}
        for client in (3, 7)
    }
    server = averaging_server({"head": torch.randn(2, generator=generator)})
    state = server.step(0, payloads, server.state)
    three, seven = (payloads[client]["head"].value.double() for client in (3, 7))
    expected = ((3 * three + 7 * seven) / 10).float()
    for client in (3, 5):
        torch.testing.assert_close(server.answer(client, state)["head"], expected)


def test_the_state_contains_that_of_the_update():
    """By hand: gradients 1 and 1, momentum 0.5, so the steps are 1 and 1.5."""
    momentum = descend(partial(torch.optim.SGD, lr=1.0, momentum=0.5))
    server = averaging_server({"head": torch.zeros(())}, momentum)
    payloads = {1: {"head": Weighted(torch.tensor(1.0), torch.tensor(1.0))}}
    first = server.step(0, payloads, server.state)
    second = server.step(1, payloads, first)
    assert_identical(server.answer(0, first)["head"], torch.tensor(-1.0))
    assert_identical(server.answer(0, second)["head"], torch.tensor(-2.5))


def test_the_first_broadcast_is_a_copy_that_training_the_model_does_not_change():
    model = torch.nn.Linear(1, 1)
    before = snapshot(model)
    server = averaging_server(dict(model.named_parameters()))
    with torch.no_grad():
        model.weight.add_(1.0)
    assert_identical(server.answer(0, server.state), before)
    assert not any(value.requires_grad for value in server.state["values"].values())


def test_another_aggregator_takes_the_place_of_the_mean():
    """Of three clients, the median is that of the one in the middle."""
    server = averaging_server({"head": torch.zeros(())}, aggregate=robust.weighted_median)
    values = {1: 1.0, 2: 9.0, 3: 2.0}
    payloads = {
        client: {"head": Weighted(torch.tensor(value), torch.tensor(1.0))}
        for client, value in values.items()
    }
    state = server.step(0, payloads, server.state)
    assert_identical(server.answer(0, state)["head"], torch.tensor(2.0))


VALUES = {"a": torch.ones(2)}


def test_a_server_receives_changes_if_its_update_descends():
    sgd = partial(torch.optim.SGD, lr=1.0)
    updates = [None, ema(decay=0.5), fedopt(sgd), descend(sgd)]
    received = [averaging_server(VALUES, update).changes for update in updates]
    assert received == [False, False, False, True]
