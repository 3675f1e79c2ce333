"""LG-FedAvg: heads are common and averaged, and nothing else is sent."""

import torch

from fedprompt.methods.lg_fedavg import lg_fedavg
from sent_messages import sent_by
from tiny_federations import last, mixed_federation, parameters


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
