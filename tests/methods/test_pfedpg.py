"""pFedPG: the server moves its generator by the transposed Jacobian times the change of prompts."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.functional import jacobian
from torch.func import functional_call

import fedprompt as fp
from fedprompt.methods.pfedpg import _follow, _Generator, pfedpg
from tiny_federations import descend, last, parameters, vit_federation


def new_generator():
    torch.manual_seed(0)
    return _Generator([0, 1, 2], torch.randn(2, 8)).double()


def test_the_server_moves_by_the_transposed_jacobian_times_the_changes():
    generator = new_generator()
    before = fp.snapshot(generator)
    changes = {client: torch.randn(2, 8, dtype=torch.float64) for client in (0, 2)}
    _follow(generator, changes, 0.3)
    for name, value in generator.named_parameters():
        expected = before[name].clone()
        for client, change in changes.items():

            def prompts(value, name=name, client=client):
                return functional_call(generator, before | {name: value}, client)

            rows = jacobian(prompts, before[name])
            expected += 0.3 / 2 * torch.tensordot(change, rows, 2)
        torch.testing.assert_close(value.detach(), expected)


def test_descriptors_start_near_zero_and_a_newcomer_has_their_mean():
    generator = new_generator()
    drawn = torch.stack([*generator.descriptors.values()]).detach()
    assert drawn.std().item() == pytest.approx(0.02, rel=0.3)
    newcomer = generator(9)
    generator.descriptors["0"].data = drawn.mean(0)
    torch.testing.assert_close(generator(0), newcomer)
    assert generator.attention.in_proj_bias is None


def test_a_client_trains_its_own_head_and_the_prompts_of_its_descriptor():
    changes = {"rounds": 1, "clients": [0, 1], "cohort_size": 2, "make_optimizer": torch.optim.SGD}
    federation = vit_federation(**changes)
    predictions = last(pfedpg, federation, learning_rate=0.5)
    for client in (0, 1):
        model = federation.new_model(prompts=lambda trunk: fp.ShallowPrompts(2, trunk))
        torch.manual_seed(federation.seed)
        generator = _Generator([0, 1], model.prompts.tokens.detach()[0])
        fp.load_values(model, {"prompts.tokens": generator(client).detach()[None]})
        for images, labels in federation.batches(client, 0):
            loss = F.cross_entropy(model(images), labels)
            descend(loss, model.parameters(), 0.5)
        torch.testing.assert_close(parameters(predictions, client), fp.snapshot(model))
