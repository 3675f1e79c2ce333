"""FedVPT and FedVPT-D: a weighted mean of what clients train, with prompts at one or all layers."""

import pytest
import torch

from fedprompt.methods.fedvpt import fedvpt, fedvpt_d
from fedprompt.methods.local import local
from tiny_federations import SIZES, last, parameters, vit_federation


def test_the_server_has_the_mean_of_local_models_weighted_by_examples():
    """In the first round, clients train as in local training."""
    changes = {"rounds": 1, "cohort_size": 5}
    found = parameters(last(fedvpt_d, vit_federation(**changes)), 0)
    alone = last(local, vit_federation(**changes))
    models = [parameters(alone, client) for client in range(5)]
    for name, value in found.items():
        total = sum(
            size * model[name].double() for size, model in zip(SIZES[:5], models, strict=True)
        )
        torch.testing.assert_close(value, (total / sum(SIZES[:5])).float())


def test_with_one_client_it_is_local_training():
    one = {"clients": [2], "cohort_size": 1}
    shared = parameters(last(fedvpt_d, vit_federation(**one)), 2)
    alone = parameters(last(local, vit_federation(**one)), 2)
    torch.testing.assert_close(shared, alone)


@pytest.mark.parametrize(("method", "layers"), [(fedvpt, 1), (fedvpt_d, 2)])
def test_messages_have_the_prompts_of_one_or_of_all_layers(method, layers):
    """Two prompts of width 8 a layer, and a head of three classes; four bytes a number."""
    federation = vit_federation(rounds=1, cohort_size=1)
    last(method, federation)
    numbers = layers * 2 * 8 + 8 * 3 + 3
    assert federation.ledger.total(direction="down") == 4 * numbers
    tensors = 3  # each with a weight
    assert federation.ledger.total(direction="up") == 4 * (numbers + tensors)
