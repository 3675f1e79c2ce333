"""FedHe: the teacher is the running mean of all messages, one vote each."""

import torch

from fedprompt.methods.fedhe import fedhe
from sent_messages import sent_by
from tiny_federations import CLASSES, last, mixed_federation


def test_the_teacher_averages_all_messages_of_all_rounds():
    made = mixed_federation(rounds=3)
    messages = sent_by(made)
    last(fedhe, made)
    assert not any(each["logits"].weight.any() for _, _, each in messages.of("down")[:3])
    for number, _, message in messages.of("down")[3:]:
        sent = [each["logits"] for before, _, each in messages.of("up") if before < number]
        for label in range(CLASSES):
            rows = [each.value[label] for each in sent if each.weight[label] > 0]
            torch.testing.assert_close(message["logits"].value[label], torch.stack(rows).mean(0))
