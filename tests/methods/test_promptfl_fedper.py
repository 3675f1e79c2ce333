"""PromptFL with FedPer: half of a context is sent, and its owner keeps the other half."""

import torch

from fedprompt.methods.promptfl import promptfl
from fedprompt.methods.promptfl_fedper import promptfl_fedper
from tiny_federations import clip_federation, last, parameters


def test_with_one_client_it_is_promptfl():
    """One client trains both halves together, so the division changes nothing."""
    alone = {"clients": [1], "cohort_size": 1}
    whole = parameters(last(promptfl, clip_federation(**alone)), 1)["context.context"]
    halves = last(promptfl_fedper, clip_federation(**alone)).of(1)
    torch.testing.assert_close(halves.context().detach(), whole)


def test_clients_share_the_first_tokens_and_own_the_last():
    federation = clip_federation(cohort_size=5)
    predictions = last(promptfl_fedper, federation)
    contexts = [predictions.of(client).context().detach().clone() for client in range(5)]
    for other in contexts[1:]:
        assert torch.equal(other[:, :2], contexts[0][:, :2])
        assert not torch.equal(other[:, 2:], contexts[0][:, 2:])
    received = predictions.received(5).context()
    assert torch.equal(received[:, :2], contexts[0][:, :2])
    assert torch.equal(received[:, 2:], federation.new_context()()[:, 2:])
