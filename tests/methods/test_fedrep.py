"""FedRep: the head is fitted to the received prompts, then the prompts behind it."""

import torch
import torch.nn.functional as F

from fedprompt.methods.fedrep import fedrep
from sent_messages import sent_by
from tiny_federations import ONE_CLIENT, descend, last, parameters, vit_federation


def test_each_half_of_the_batches_descends_in_one_block_of_coordinates():
    federation = vit_federation(**ONE_CLIENT | {"steps": 4})
    found = parameters(last(fedrep, federation, learning_rate=0.5), 0)
    model = federation.new_model()
    for number, (images, labels) in enumerate(federation.batches(0, 0)):
        block = list((model.head if number < 2 else model.prompts).parameters())
        descend(F.cross_entropy(model(images), labels), block, 0.5)
    expected = {name: parameter.detach() for name, parameter in model.named_parameters()}
    torch.testing.assert_close(found, expected)


def test_prompts_are_averaged_with_equal_weights_and_heads_are_never_sent():
    federation = vit_federation(cohort_size=5)
    sent = sent_by(federation)
    predictions = last(fedrep, federation)
    assert {name for each in sent for name in each.message} == {"prompts.tokens"}
    ups = [each["prompts.tokens"].value for each in sent.at(1, "up").values()]
    mean = torch.stack(ups).double().mean(0).float()
    torch.testing.assert_close(parameters(predictions, 0)["prompts.tokens"], mean)
    heads = [parameters(predictions, client)["head.weight"] for client in range(5)]
    assert len({tuple(head.flatten().tolist()) for head in heads}) == 5
