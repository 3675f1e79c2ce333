"""FedDistill: the teacher of a client leaves out what the client sent."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.feddistill import feddistill
from fedprompt.methods.local import local
from sent_messages import sent_by
from tiny_federations import CLASSES, descend, last, mixed_federation, parameters


def test_one_client_has_no_teacher_and_trains_alone_bitwise():
    alone = last(local, mixed_federation(clients=[1], cohort_size=1))
    made = mixed_federation(clients=[1], cohort_size=1)
    messages = sent_by(made)
    found = parameters(last(feddistill, made, distillation_weight=5.0), 1)
    expected = parameters(alone, 1).items()
    assert all(torch.equal(value, found[name]) for name, value in expected)
    assert not any(each["logits"].weight.any() for _, _, each in messages.of("down"))


def test_a_step_descends_the_cross_entropy_to_the_softmax_of_the_teacher():
    """In the second round, the teacher of each of two clients is what the other one sent."""
    changes = {"clients": [0, 1], "cohort_size": 2, "make_optimizer": torch.optim.SGD}
    made = mixed_federation(**changes, steps=1)
    messages = sent_by(made)
    rates = {"learning_rate": 0.5, "distillation_weight": 0.7}
    found = parameters(last(feddistill, made, **rates), 0)
    _, (value, weight) = [m["logits"] for _, client, m in messages.of("down") if client == 0]
    alone = last(feddistill, mixed_federation(**changes, steps=1, rounds=1), **rates).of(0)
    ((images, labels),) = made.batches(0, 1)
    logits = alone(images)
    teacher = -(value[labels].softmax(1) * logits.log_softmax(1)).sum(1)
    known = weight[labels] > 0
    objective = F.cross_entropy(logits, labels) + 0.7 * (known * teacher).mean()
    descend(objective, alone.parameters(), 0.5)
    torch.testing.assert_close(found, fp.snapshot(alone))
    assert known.any()


def test_the_teacher_averages_the_other_clients_of_earlier_rounds():
    made = mixed_federation(cohort_size=5)
    messages = sent_by(made)
    last(feddistill, made)
    first = {client: each["logits"] for number, client, each in messages.of("up") if number == 0}
    assert not any(each["logits"].weight.any() for _, _, each in messages.of("down")[:5])
    for _, client, message in messages.of("down")[5:]:
        others = [first[other] for other in first if other != client]
        for label in range(CLASSES):
            rows = [each.value[label] for each in others if each.weight[label] > 0]
            torch.testing.assert_close(message["logits"].value[label], torch.stack(rows).mean(0))
