"""Clients with the first rows of a value: each row is averaged over those that have it."""

import torch

import fedprompt as fp
from fedprompt.aggregation import padded
from refusals import refused
from same import assert_identical

VALUES = {"tokens": torch.arange(24.0).view(2, 4, 3), "head": torch.ones(2)}
SHAPES = {1: (2, 4, 3), 4: (1, 2, 3), 7: (2, 1, 3)}


def form(client):
    shapes = {"tokens": SHAPES[client], "head": (2,)}
    zero = torch.tensor(0.0)
    return {name: fp.Weighted(torch.zeros(shape), zero) for name, shape in shapes.items()}


def sent(client, weight):
    draw = torch.Generator().manual_seed(client)
    return {
        name: fp.Weighted(torch.randn(entry.value.shape, generator=draw), torch.tensor(weight))
        for name, entry in form(client).items()
    }


def test_each_number_is_the_mean_over_the_clients_that_have_it():
    payloads = {client: sent(client, weight) for client, weight in ((1, 1.0), (4, 5.0), (7, 2.0))}
    server = fp.averaging_server(VALUES, form=form)
    state = server.step(0, payloads, server.state)
    for place in torch.cartesian_prod(*map(torch.arange, (2, 4, 3))).tolist():
        total = weights = 0.0
        for client, payload in payloads.items():
            if all(at < size for at, size in zip(place, SHAPES[client], strict=True)):
                weight = payload["tokens"].weight.item()
                total += weight * payload["tokens"].value[(*place,)].item()
                weights += weight
        found = state["values"]["tokens"][(*place,)]
        torch.testing.assert_close(found, torch.tensor(total / weights))
    sums = server.step.begin(server.state)  # as they come
    for client, payload in payloads.items():
        sums.add(client, payload)
    assert_identical(sums.end(0, server.state), state)


def test_rows_that_nobody_has_keep_their_value_and_clients_receive_their_rows():
    server = fp.averaging_server(VALUES, form=form)
    payloads = {4: sent(4, 3.0)}
    values = server.step(0, payloads, server.state)["values"]
    assert_identical(values["tokens"][:1, :2], payloads[4]["tokens"].value)
    assert_identical(values["tokens"][1:], VALUES["tokens"][1:])
    assert_identical(values["tokens"][:, 2:], VALUES["tokens"][:, 2:])
    for client, (depth, length, _) in SHAPES.items():
        answer = server.answer(client, {"values": values, "update": {}})
        assert_identical(answer["tokens"], values["tokens"][:depth, :length])


def test_a_robust_aggregator_ignores_rows_that_a_client_does_not_have():
    server = fp.averaging_server(VALUES, aggregate=fp.robust.weighted_median, form=form)
    payloads = {client: sent(client, 1.0) for client in (1, 4)}
    values = server.step(0, payloads, server.state)["values"]["tokens"]
    torch.testing.assert_close(values[1, 3], payloads[1]["tokens"].value[1, 3])


def test_rows_of_weight_0_of_a_client_stay_unknown():
    half = {"head": fp.Weighted(torch.full((2,), torch.nan), torch.tensor([0.0, 0.0]))}
    assert padded(half, VALUES)["head"].weight.tolist() == [0.0, 0.0]


LONG = {"head": fp.Weighted(torch.zeros(3), torch.tensor(1.0))}
OTHER = {"keys": fp.Weighted(torch.zeros(3), torch.tensor(1.0))}
DEEP = {"head": fp.Weighted(torch.zeros(1, 2), torch.tensor(1.0))}
SERVER = fp.averaging_server(VALUES, form=form)
test_wrong_shapes_are_refused = refused(globals())("""
padded(LONG, VALUES) -> ValueError: `payload['head']` must have at most the sizes (2,) of `values[
padded(DEEP, VALUES) -> ValueError: `payload['head']` must have at most the sizes (2,) of
padded(OTHER, VALUES) -> ValueError: `payload` must have no other names than `values`: ['head',
padded([1], VALUES) -> TypeError: `payload` must map names to Weighted
padded(LONG, None) -> TypeError: `values` must map names to tensors
aggregation.leading(VALUES, LONG) -> ValueError: `form['head']` must have at most the sizes (2,) of
aggregation.leading(VALUES, {"head": zeros(2)}) -> TypeError: `form
SERVER.step(0, {1: LONG}, SERVER.state) -> ValueError: payloads[1]: `payload['head']` must
averaging_server(VALUES, form={}) -> TypeError: `form` must be a function
""")
