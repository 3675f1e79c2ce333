"""LG-FedAvg: heads are common and averaged, and nothing else is sent."""

import torch

from fedprompt.methods.lg_fedavg import lg_fedavg
from fedprompt.methods.local import local
from sent_messages import sent_by
from tiny_federations import CLASSES, last, mixed_federation, parameters


def test_with_one_client_it_is_local_training_bitwise():
    alone = parameters(last(local, mixed_federation(clients=[1], cohort_size=1)), 1)
    found = parameters(last(lg_fedavg, mixed_federation(clients=[1], cohort_size=1)), 1)
    assert all(torch.equal(value, found[name]) for name, value in alone.items())


def test_all_clients_predict_with_the_mean_head_and_their_own_prompts():
    made = mixed_federation(rounds=1)
    messages = sent_by(made)
    predictions = last(lg_fedavg, made)
    total = sum(made.num_examples(client) for _, client, _ in messages.of("up"))
    mean = sum(
        message["weight"].value * made.num_examples(client) / total
        for _, client, message in messages.of("up")
    )
    models = {client: parameters(predictions, client) for client in made.clients}
    for values in models.values():
        torch.testing.assert_close(values["head.weight"], mean)
    first, second = (client for _, client, _ in messages.of("up")[:2])
    name = "projection.bias"
    assert not torch.equal(models[first][name], models[second][name])


def test_the_head_alone_is_sent():
    made = mixed_federation()
    last(lg_fedavg, made)
    assert made.ledger.total(direction="down") == 2 * 3 * 4 * CLASSES * (6 + 1)
