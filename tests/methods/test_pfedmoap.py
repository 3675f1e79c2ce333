"""pFedMoAP: the gate is a mixture, experts are the nearest contexts of others, and are counted."""

import torch
import torch.nn.functional as F

from fedprompt.methods.pfedmoap import Mixture, _nearest, pfedmoap
from tiny_federations import clip_federation, last


def with_identities(model: Mixture) -> Mixture:
    """Make queries, keys, values and outputs of the gate equal to its inputs."""
    model.gate.in_proj_weight.data = torch.eye(12).repeat(3, 1)
    model.gate.out_proj.weight.data = torch.eye(12)
    return model


def test_the_gate_sums_to_one_so_equal_experts_mix_to_themselves_and_logits_add():
    model = with_identities(Mixture(clip_federation(), 0.25, 3))
    tokens = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    alone = model(tokens)
    model.others, model.known = (
        F.normalize(model.text(), dim=-1).detach().repeat(3, 1, 1),
        ~model.known,
    )
    torch.testing.assert_close(model(tokens), 1.25 * alone)


def test_each_head_weighs_experts_by_ten_times_their_products_with_the_image():
    model = with_identities(Mixture(clip_federation(), 0.0, 2))
    rng = torch.Generator().manual_seed(0)
    tokens = torch.randn(4, 5, 12, generator=rng)
    model.others, model.known = (
        F.normalize(torch.randn(2, 3, 12, generator=rng), dim=-1),
        ~model.known,
    )
    image, own = F.normalize(tokens[:, 0], dim=1), F.normalize(model.text(), dim=-1)
    experts = torch.cat([own, model.others])
    expected = torch.zeros(4, 3)
    for i in range(4):
        for label in range(3):
            for head in range(4):
                part = slice(3 * head, 3 * head + 3)
                products = experts[:, label, part] @ image[i, part]
                expected[i, label] += (10 * products).softmax(0) @ products
    torch.testing.assert_close(model(tokens), 10 * expected)


def test_experts_are_the_nearest_contexts_of_other_clients():
    contexts = {str(client): torch.full((1, 2, 3), float(client)) for client in range(5)}
    assert [int(each.max()) for each in _nearest(contexts, "4", 2)] == [3, 2]
    assert _nearest(contexts, "7", 2) == []  # a first round has no experts


def test_experts_are_sent_from_the_second_time_on():
    federation = clip_federation(clients=[0, 1, 2], cohort_size=3, rounds=2)
    predictions = last(pfedmoap, federation, num_experts=3)
    context = 4 * federation.length * federation.tower.dim
    down = [federation.ledger.total(direction="down", server_round=i, client=0) for i in (0, 1)]
    weights = 2 * 4  # of two experts, which are unknown at first
    assert down == [context + weights, 3 * context + weights]
    assert federation.ledger.total(direction="up") == 6 * (context + 4)
    assert predictions.of(0).known.all()
    assert not predictions.received(5).known.any()
