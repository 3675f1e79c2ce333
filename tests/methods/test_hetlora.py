"""HetLoRA: missing ranks are zeros, and a client counts by the norm of its product at a layer."""

import pytest
import torch

from fedprompt.methods import hetlora
from low_rank import ONE_ROUND, RATE, SIZES, mean, of_sizes, sent_by
from tiny_federations import last, parameters, vit_federation

pytestmark = pytest.mark.usefixtures("float64")


def padded(factor, shape):
    whole = torch.zeros(shape)
    whole[: factor.shape[0], : factor.shape[1]] = factor
    return whole


def test_factors_of_two_rounds_are_means_of_padded_factors_by_the_norms_of_products():
    federation = vit_federation(**ONE_ROUND | {"rounds": 2})
    found = parameters(last(hetlora, federation, learning_rate=RATE, rank=3, sizes=SIZES), 2)
    values = of_sizes(federation)
    for server_round in range(2):
        sent = sent_by(federation, values, server_round=server_round)
        head = mean(federation, [each[:2] for each in sent])
        factors = []
        for place in (2, 4):
            norms = [torch.linalg.matrix_norm(each[place + 1] @ each[place]) for each in sent]
            for at in (place, place + 1):
                wholes = [padded(each[at], values[at].shape) for each in sent]
                total = sum(n * each for n, each in zip(norms, wholes, strict=True))
                factors.append(total / sum(norms))
        values = [*head, *factors]
    assert values[5][:, 2].abs().max() > 1e-4  # the last column of the last B
    torch.testing.assert_close(list(found.values()), values)


def test_factors_stay_if_no_client_has_changed_the_product():
    federation = vit_federation(**ONE_ROUND)
    method = hetlora(federation, rank=3, sizes=SIZES)
    untrained = {
        c: {n: e._replace(weight=e.weight + 1) for n, e in method.form(c).items()} for c in (0, 1)
    }
    after = method.server.step(0, untrained, method.server.state)["values"]
    torch.testing.assert_close(after, method.server.state["values"], rtol=0, atol=0)
