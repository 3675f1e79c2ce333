"""FedVPT and FedVPT-D: a weighted mean of what clients train, with prompts at one or all layers."""

import torch

from fedprompt.methods.fedvpt import fedvpt_d
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
