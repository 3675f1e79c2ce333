"""FedProto: prototypes are means over images and clients, and the nearest one is predicted."""

import torch

from fedprompt.methods.fedproto import fedproto
from sent_messages import sent_by
from tiny_federations import CLASSES, last, mixed_federation


def test_the_broadcast_averages_the_images_of_each_class_over_clients():
    made = mixed_federation(cohort_size=5)
    messages = sent_by(made)
    last(fedproto, made)
    first = [message["prototypes"] for number, _, message in messages.of("up") if number == 0]
    for _, _, message in messages.of("down")[5:]:
        for label in range(CLASSES):
            total = sum(own.weight[label] for own in first)
            mean = sum(own.value[label] * own.weight[label] for own in first) / total
            torch.testing.assert_close(message["prototypes"].value[label], mean)


def test_a_client_keeps_its_prototypes_at_the_server_when_it_is_not_in_the_round():
    made = mixed_federation(cohort_size=1, rounds=3)
    messages = sent_by(made)
    known = last(fedproto, made).now.server["mean"]
    latest = {client: message["prototypes"] for _, client, message in messages.of("up")}
    assert len(latest) > 1
    torch.testing.assert_close(known.weight, sum(own.weight for own in latest.values()))


def test_the_nearest_prototype_is_predicted():
    made = mixed_federation()
    model = last(fedproto, made).of(1)
    features = model.model.features(made.inputs).detach()
    for row, logits in zip(features, model(made.inputs), strict=True):
        apart = [(row - prototype).norm() for prototype in model.prototypes]
        assert logits.argmax() == torch.stack(apart).argmin()
