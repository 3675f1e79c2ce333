"""FedPer: heads are private, and prompts are averaged."""

from itertools import pairwise

import torch

import fedprompt as fp
from fedprompt.methods.fedper import fedper
from sent_messages import sent_by
from tiny_federations import last, parameters, vit_federation


def test_only_prompts_are_sent_and_everyone_has_the_same():
    federation = vit_federation(cohort_size=5)
    sent = sent_by(federation)
    predictions = last(fedper, federation)
    assert {name for each in sent for name in each.message} == {"prompts.tokens"}
    models = [parameters(predictions, client) for client in range(5)]
    for first, second in pairwise(models):
        assert torch.equal(first["prompts.tokens"], second["prompts.tokens"])
        assert not torch.equal(first["head.weight"], second["head.weight"])


def test_a_newcomer_has_the_prompts_of_all_and_the_first_head():
    federation = vit_federation()
    predictions = last(fedper, federation)
    received = fp.snapshot(predictions.received(5))
    assert torch.equal(received["head.weight"], federation.new_model().head.weight)
    shared = parameters(predictions, 0)["prompts.tokens"]
    assert torch.equal(received["prompts.tokens"], shared)
