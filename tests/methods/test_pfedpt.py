"""pFedPT: a border stays at its client, and each phase trains one part from the other's result."""

import torch
import torch.nn.functional as F

import fedprompt as fp
from fedprompt.methods.pfedpt import _Bordered, pfedpt
from tiny_federations import descend, last, parameters, vit_federation

ONE = {"clients": [0], "cohort_size": 1, "make_optimizer": torch.optim.SGD}


def test_the_border_is_added_to_the_pixels_of_the_edge_alone():
    federation = vit_federation()
    model, images = _Bordered(federation, 2), federation.inputs[:3]
    draw = federation.generator(0, purpose="border")
    for pixels in model.border.parameters():
        assert torch.equal(pixels, torch.empty_like(pixels).normal_(generator=draw))
    changed = images.clone()
    changed[:, :, :2] += model.border.rows[:, :2]
    changed[:, :, -2:] += model.border.rows[:, 2:]
    changed[:, :, 2:-2, :2] += model.border.columns[..., :2]
    changed[:, :, 2:-2, -2:] += model.border.columns[..., 2:]
    assert torch.equal(changed[:, :, 2:-2, 2:-2], images[:, :, 2:-2, 2:-2])
    torch.testing.assert_close(model(images), model.network(changed))
    assert not torch.allclose(model(images), model.network(images))


def test_the_first_phase_moves_the_border_and_the_second_the_head():
    federation = vit_federation(rounds=1, **ONE)
    found = parameters(last(pfedpt, federation, learning_rate=0.5, border_rate=3.0), 0)
    model = _Bordered(federation, 1)
    batches = federation.batches(0, 0)
    for part, rate in (model.border, 3.0), (model.network.head, 0.5):
        images, labels = next(batches)
        descend(F.cross_entropy(model(images), labels), part.parameters(), rate)
    torch.testing.assert_close(found, fp.snapshot(model))


def test_a_client_continues_with_the_border_of_its_last_round():
    federation = vit_federation(rounds=2, **ONE)
    found = parameters(last(pfedpt, federation, learning_rate=0.0, border_rate=3.0), 0)
    model = _Bordered(federation, 1)
    for server_round in range(2):
        images, labels = next(federation.batches(0, server_round))
        descend(F.cross_entropy(model(images), labels), model.border.parameters(), 3.0)
    torch.testing.assert_close(found, fp.snapshot(model))
