"""FedBABU: the head does not change before a client personalizes."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.fedbabu import fedbabu
from sent_messages import sent_by
from tiny_federations import descend, last, parameters, vit_federation


def test_each_upload_is_the_broadcast_trained_behind_the_first_head():
    federation = vit_federation(cohort_size=5, make_optimizer=torch.optim.SGD)
    sent = sent_by(federation)
    predictions = last(fedbabu, federation, learning_rate=0.5)
    down, up = (sent.at(1, direction)[2]["prompts.tokens"] for direction in ("down", "up"))
    model = federation.new_model()
    first = model.head.weight.detach().clone()
    fp.load_values(model, {"prompts.tokens": down})
    for images, labels in federation.batches(2, 1):
        descend(F.cross_entropy(model(images), labels), model.prompts.parameters(), 0.5)
    torch.testing.assert_close(up.value, model.prompts.tokens.detach())
    assert torch.equal(fp.snapshot(predictions.received(5))["head.weight"], first)


def test_a_client_personalizes_prompts_and_head_from_the_last_broadcast():
    federation = vit_federation(cohort_size=5, make_optimizer=torch.optim.SGD)
    sent = sent_by(federation)
    predictions = last(fedbabu, federation, learning_rate=0.5)
    assert {name for each in sent for name in each.message} == {"prompts.tokens"}
    model = federation.new_model()
    fp.load_values(model, fp.snapshot(predictions.received(5)))
    for server_round in range(2):
        for images, labels in federation.batches(4, server_round):
            descend(F.cross_entropy(model(images), labels), model.parameters(), 0.5)
    torch.testing.assert_close(parameters(predictions, 4), fp.snapshot(model))
    assert all(parameter.requires_grad for parameter in model.parameters())
