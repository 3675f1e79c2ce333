"""Plain steps: SCAFFOLD without control variates, which are 0 in its first round."""

import pytest
import torch

from fedprompt.methods.plain_steps import plain_steps
from fedprompt.methods.scaffold import scaffold
from tiny_federations import last, parameters, vit_federation


@pytest.mark.parametrize(("rounds", "equal"), [(1, True), (2, False)])
def test_only_the_first_round_of_scaffold_is_the_same(rounds, equal):
    plain, corrected = (
        parameters(last(method, vit_federation(rounds=rounds), learning_rate=0.5), 0)
        for method in (plain_steps, scaffold)
    )
    near = [torch.allclose(value, corrected[name], atol=1e-6) for name, value in plain.items()]
    assert all(near) == equal
