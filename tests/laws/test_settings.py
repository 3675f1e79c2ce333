"""Laws of the fields of a setting, over the whole gallery: schedule, steps, autocast, ranges."""

import inspect
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn

import fedprompt as fp
from fedprompt._trees import packed
from fedprompt.methods import METHODS
from fedprompt.methods.registry import range_of
from method_runs import MAKERS, RUNS
from same import assert_same
from tiny_federations import federation_of

SMALL = {"rounds": 2, "cohort_size": 2, "clients": [0, 1]}


def made(name: str, family: str, **changes: Any) -> tuple[Any, fp.Method]:
    federation = federation_of(METHODS[name], family, **SMALL | changes)
    return federation, MAKERS[name](federation)


def parameters(model: Any) -> dict[str, torch.Tensor]:
    known = isinstance(model, nn.Module) and [*model.parameters()]
    return fp.snapshot(model) if known else {}


PERSONALIZED_OTHERWISE = {"fedgh", "fedmgp", "fedpha", "perfedavg", "perfedavg_first_order"}
"""The server of FedGH trains a head; the others predict with the state {} in another way."""


STILL = {"epochs at a rate of 0": ([0], {"schedule": lambda now: 0.0, "steps": None})}
STILL |= {"no steps": ([0, 1], {"steps": 0})}


@pytest.mark.parametrize(("cohort", "changes"), STILL.values(), ids=STILL)
@pytest.mark.parametrize(("name", "family"), RUNS)
def test_no_client_moves_at_a_rate_of_0_or_without_steps(name, family, cohort, changes):
    if name == "dpfpl" and "steps" in changes:
        with pytest.raises(ValueError, match=r"^`steps` must be at least 1"):
            made(name, family, **changes)
        return
    optimizers = []

    def make_optimizer(parameters, **options):
        optimizers.append(torch.optim.AdamW(parameters, **options))
        return optimizers[-1]

    federation, method = made(name, family, **changes, make_optimizer=make_optimizer)
    start = fp.Round(-1, method.server.state, {})
    first = parameters(start.model(method, federation.data(0, 0)))
    *_, now = fp.run_rounds(method, federation.data, [cohort, [0]])
    if name not in PERSONALIZED_OTHERWISE:
        assert_same(parameters(now.model(method, federation.data(0, 1))), first, ordered=False)
    if not optimizers and "schedule" in changes:  # what is not read is said on its page
        page = inspect.getdoc(inspect.getmodule(METHODS[name].make))
        assert "`make_optimizer`" in page


@pytest.mark.parametrize(("name", "family"), RUNS)
def test_autocast_changes_a_loss_by_little_and_no_dtype(name, family, monkeypatch):
    losses: dict[Any, list[float]] = {None: [], torch.bfloat16: []}
    functions = {each: getattr(torch.autograd, each) for each in ("backward", "grad")}

    def watched(each, loss, *rest, **options):
        found = loss if isinstance(loss, torch.Tensor) else loss[0]
        if not losses[dtype]:
            assert torch.is_autocast_enabled("cpu") == (dtype is not None)
        losses[dtype].append(float(found.detach().sum()))
        if dtype is None:
            raise InterruptedError  # the first loss is enough
        return functions[each](loss, *rest, **options)

    for dtype, cohorts in ((None, [[0]]), (torch.bfloat16, [[0], [0]])):
        federation, method = made(name, family, autocast=dtype)
        start = fp.Round(-1, method.server.state, {})
        start.model(method, federation.data(0, 0))  # all models are made and probed
        with monkeypatch.context() as patched:
            for each in functions:
                patched.setattr(torch.autograd, each, partial(watched, each))
            with suppress(InterruptedError):
                *_, now = fp.run_rounds(method, federation.data, cohorts)
    packed(now, "round", tensors := {})
    assert torch.bfloat16 not in {tensor.dtype for tensor in tensors.values()}
    for exact, found in zip(losses[None][:1], losses[torch.bfloat16][:1], strict=True):
        assert found == pytest.approx(exact, rel=2e-2, abs=2e-2)


NUMBERS = [
    (name, option)
    for name, entry in METHODS.items()
    for option, default in entry.defaults.items()
    if isinstance(default, int | float) and not isinstance(default, bool)
]


@pytest.mark.parametrize(("name", "option"), NUMBERS)
def test_each_number_has_a_range_with_all_that_a_study_tunes(name, option):
    entry, check = METHODS[name], range_of(option)
    for inside in [entry.defaults[option], *entry.search.get(option, ())]:
        check(option, inside)
    for wrong in (-1, float("nan"), float("inf"), "x"):
        with pytest.raises((TypeError, ValueError), match=f"^`{option}` must be"):
            entry.make(None, **{option: wrong})


def test_parts_of_the_energies_of_fedkd_are_shares():
    check = range_of("energies")
    for energy in METHODS["fedkd"].defaults["energies"]:
        check("energies", energy)
    with pytest.raises(ValueError, match=r"^`energies` must be at most 1; got 1\.98"):
        METHODS["fedkd"].make(None, energies=(0.95, 1.98))
