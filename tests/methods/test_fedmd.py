"""FedMD: a digest of public images, then a revisit of private ones."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedmd import fedmd
from sent_messages import sent_by
from tiny_federations import CLASSES, descend, last, mixed_federation, parameters


def test_the_consensus_is_the_mean_of_the_logits_of_the_last_round():
    made = mixed_federation(rounds=3)
    messages = sent_by(made)
    last(fedmd, made)
    assert {fp.num_bytes(each) for _, _, each in messages.of("down")[:3]} == {4}
    for number, _, message in messages.of("down")[3:]:
        assert fp.num_bytes(message) == 4 * (6 * CLASSES + 1)  # six public images
        sent = [
            each["logits"].value for before, _, each in messages.of("up") if before == number - 1
        ]
        torch.testing.assert_close(message["logits"].value, torch.stack(sent).mean(0))


def test_a_second_round_takes_one_step_on_public_and_one_on_private_images():
    made = mixed_federation(
        clients=[0, 1], cohort_size=2, batch_size=8, make_optimizer=torch.optim.SGD
    )
    messages = sent_by(made)
    found = parameters(last(fedmd, made, learning_rate=0.1), 1)
    _, target = [each["logits"].value for _, client, each in messages.of("down") if client == 1]
    model = made.new_model(1)
    for images, labels in made.batches(1, 0):
        descend(F.cross_entropy(model(images), labels), model.parameters(), 0.1)
    # The batch has all public images.
    descend((model(made.public) - target).abs().mean(), model.parameters(), 0.1)
    images, labels = next(made.batches(1, 1))
    descend(F.cross_entropy(model(images), labels), model.parameters(), 0.1)
    expected = dict(model.named_parameters())
    torch.testing.assert_close(found, {name: expected[name].detach() for name in found})
