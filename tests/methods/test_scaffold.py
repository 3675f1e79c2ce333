"""SCAFFOLD: control variates of clients average to the server's, and correct each step."""

import pytest
import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedamp import fedamp
from fedprompt.methods.scaffold import scaffold
from sent_messages import sent_by
from tiny_federations import descend, last, parameters, vit_federation

NAME = "control.head.weight"


def variates(sent, clients):
    """Sum the changes that each client sent."""
    own = {client: torch.tensor(0.0) for client in clients}
    for each in sent:
        if each.direction == "up":
            own[each.client] = own[each.client] + each.message[NAME].value
    return own


def test_absent_clients_keep_their_variates_so_the_mean_over_all_clients_stays_the_servers():
    federation = vit_federation(cohort_size=2, rounds=4)
    sent = sent_by(federation)
    last(scaffold, federation)
    own = variates([each for each in sent if each.server_round < 3], federation.clients)
    for down in sent.at(3, "down").values():
        torch.testing.assert_close(down[NAME], sum(own.values()) / 5, rtol=1e-4, atol=1e-6)


def test_with_one_client_it_is_plain_descent():
    federation = vit_federation(clients=[0], cohort_size=1, rounds=3)
    found = parameters(last(scaffold, federation, learning_rate=0.4), 0)
    model = federation.new_model()
    for server_round in range(3):
        for images, labels in federation.batches(0, server_round):
            descend(F.cross_entropy(model(images), labels), model.parameters(), 0.4)
    torch.testing.assert_close(found, fp.snapshot(model))


def test_the_variate_of_a_client_is_its_mean_gradient_of_the_last_round():
    """Option II: with a variate of 0 on both sides, it is the mean of the gradients of a round."""
    federation = vit_federation(rounds=1, clients=[3], cohort_size=1)
    sent = sent_by(federation)
    last(scaffold, federation, learning_rate=0.4)
    model, gradients = federation.new_model(), []
    for images, labels in federation.batches(3, 0):
        loss = F.cross_entropy(model(images), labels)
        gradients += torch.autograd.grad(loss, [model.head.weight], retain_graph=True)
        descend(loss, model.parameters(), 0.4)
    torch.testing.assert_close(
        sent[-1].message[NAME].value, torch.stack(gradients).mean(0), rtol=1e-4, atol=1e-6
    )


def test_the_first_step_of_the_second_round_is_corrected():
    changes = {"cohort_size": 5, "steps": 1}
    federation = vit_federation(**changes)
    sent = sent_by(federation)
    last(scaffold, federation, learning_rate=0.4)
    down, up = (sent.at(1, direction)[2] for direction in ("down", "up"))
    own = variates([each for each in sent if each.server_round < 1], federation.clients)[2]
    model = federation.new_model()
    fp.load_values(model, {name: down[name] for name in fp.snapshot(model)})
    ((images, labels),) = federation.batches(2, 1)
    (gradient,) = torch.autograd.grad(F.cross_entropy(model(images), labels), [model.head.weight])
    expected = -0.4 * (gradient - own + down[NAME])
    torch.testing.assert_close(up["head.weight"].value, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("method", [scaffold, fedamp])
def test_numbers_that_a_codec_leaves_out_stay_where_payloads_are_changes_or_values(method):
    made = vit_federation(rounds=1, clients=[0], cohort_size=1)
    coded = fp.rounds.coded(method(made), fp.codecs.top_k(fraction=0.25))
    (now,) = fp.run_rounds(coded, made.data, [[0]])
    found, start = now.model(coded, made.data(5, 0)), made.new_model()
    pairs = zip(found.parameters(), start.parameters(), strict=True)
    same = torch.cat([torch.isclose(one, other).flatten() for one, other in pairs])
    assert 0.7 < same.float().mean() < 0.8
