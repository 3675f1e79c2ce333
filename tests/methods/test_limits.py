"""A method whose additions are switched off is a simpler method."""

from functools import cache

import pytest
import torch

import fedprompt as fp
from fedprompt.methods import METHODS
from tiny_federations import clip_federation, last, mixed_federation, vit_federation

EXACT = {"rtol": 0, "atol": 0}
NO_TERM = {"proximal_weight": 0.0}
CHANGES = {
    "": {},
    "alone": {"clients": [2], "cohort_size": 1},
    "alone, three rounds": {"clients": [2], "cohort_size": 1, "rounds": 3},
    "client 1": {"clients": [1], "cohort_size": 1},
    "equal shards": {"shards": dict(enumerate(torch.arange(41).split(8)))},  # have equal means
    "six images": {"shards": dict(enumerate(torch.arange(36).split(6)))},
    "one round": {"rounds": 1},
    "everyone": {"cohort_size": 5},
}
WHOLE_STEPS = NO_TERM | {"outer_step": 1.0, "inner_steps": 1}
ALL, ANY, NEW = range(5), [0], [5]  # all clients, one of equal ones, and a newcomer

# The method with its values, the simpler one, their federation, clients, and the tolerance.
CASES = [
    ("fedhpl", {"distillation_weight": 0.0}, "local", mixed_federation, "", ALL, EXACT),
    ("fedhe", {"distillation_weight": 0.0}, "local", mixed_federation, "", ALL, EXACT),
    ("fedproto", {"prototype_weight": 0.0}, "local", mixed_federation, "", ALL, EXACT),
    ("lg_fedavg", {}, "local", mixed_federation, "client 1", [1], EXACT),
    ("fedgen", {"generated_weight": 0.0}, "lg_fedavg", mixed_federation, "", ALL, EXACT),
    ("fml", {"alpha": 1.0, "beta": 1.0}, "local", mixed_federation, "", ALL, EXACT),
    ("fml", {"alpha": 1.0, "beta": 1.0}, "fedvpt_d", vit_federation, "equal shards", NEW, EXACT),
    ("fedem", {"num_components": 1}, "fedvpt_d", vit_federation, "", ANY, EXACT),
    ("fedprox", NO_TERM, "fedvpt_d", vit_federation, "", ANY, EXACT),
    ("fedavgm", {"momentum": 0.0}, "fedvpt_d", vit_federation, "", ANY, {}),
    ("fedpr", {}, "fedvpt_d", vit_federation, "one round", ANY, EXACT),
    ("fedpr", {"share": 1.0}, "fedvpt_d", vit_federation, "", ANY, {"rtol": 1e-3, "atol": 1e-5}),
    ("fedamp", NO_TERM, "local", vit_federation, "", ALL, EXACT),
    ("fedvpt_d", {}, "local", vit_federation, "alone", [2], {}),
    ("fedper", {}, "local", vit_federation, "alone, three rounds", [2], {}),
    ("ditto", {"proximal_weight": 0.7}, "fedvpt_d", vit_federation, "equal shards", NEW, EXACT),
    ("ditto", NO_TERM, "fedvpt_d", vit_federation, "equal shards", NEW, EXACT),
    ("ditto", NO_TERM, "local", vit_federation, "everyone", ALL, EXACT),
    ("pfedme", WHOLE_STEPS, "fedvpt_d", vit_federation, "six images", NEW, {}),
    ("promptfl_fedprox", NO_TERM, "promptfl", clip_federation, "", ANY, EXACT),
    ("promptfl_ft", {}, "promptfl", clip_federation, "", NEW, EXACT),
    ("kgcoop", {"guide_weight": 0.0}, "promptfl", clip_federation, "", ANY, {}),
    ("promptfl_fedamp", NO_TERM | {"learning_rate": 1e-2}, "coop", clip_federation, "", ALL, {}),
]


@cache
def without(name, make, changes):
    """Run a method with its defaults, once for all that it is compared with."""
    return last(METHODS[name].make, make(**CHANGES[changes]))


def values(predictions, client):
    """Copy the values of a model by the names of a model that is not wrapped in another one."""
    model = predictions.received(client) if client in NEW else predictions.of(client)
    found = fp.snapshot(getattr(model, "model", model)).items()
    return {name.removeprefix("components.0."): each for name, each in found}


@pytest.mark.parametrize(
    ("name", "options", "simpler", "make", "changes", "clients", "near"), CASES
)
def test_a_method_without_its_addition_is_a_simpler_one(
    name, options, simpler, make, changes, clients, near
):
    found = last(METHODS[name].make, make(**CHANGES[changes]), **options)
    expected = without(simpler, make, changes)
    for client in clients:
        own, wanted = values(found, client), values(expected, client)
        torch.testing.assert_close({key: own[key] for key in wanted}, wanted, **near)
