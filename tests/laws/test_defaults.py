"""Defaults of transport, matching, guidance, selection and prompts."""

import inspect

import pytest

import fedprompt as fp
from fedprompt import guidance, selection, transport

SOLVER = {"epsilon": 0.1, "tolerance": 1e-5}  # epsilon is that of FedOTP
DEFAULTS = [
    (transport.newton, {**SOLVER, "max_iterations": 100}),
    (transport.dykstra, {**SOLVER, "max_iterations": 1000}),
    (transport.sinkhorn, {**SOLVER, "max_iterations": 1000}),
    (transport.unbalanced, {**SOLVER, "max_iterations": 1000, "rho": 1.0}),
    (transport.plan_from_duals, {"epsilon": 0.1}),
    (fp.transport_logits, {"mass": 0.8, "lean": False, "strict": False}),  # FedOTP's mass
    (guidance.guide_gradient, {"guide_weight": 1.0}),
    (guidance.guided_loss, {"guide_weight": 1.0}),
    (guidance.central_difference, {"step": 1e-4}),
    (selection.selection_health, {"max_cosine": 0.5}),
    (fp.ContextPrompts, {"num_contexts": 1, "length": 16}),  # CoOp's n_ctx
    (fp.LowRankContext, {"num_contexts": 1}),
    (fp.prompted_text, {"class_specific": False, "per_sample": False}),
    (fp.PadPrompts, {"padding": 3}),  # Table 8 of FedHPL
    (fp.LayeredPrompts, {"replace": False}),  # SGPT keeps earlier tokens
    (fp.GroupPrompts, {"replace": False}),
    (fp.initialize_at, {"noise": 0.1}),
]


@pytest.mark.parametrize(("function", "expected"), DEFAULTS)
def test_defaults_are_the_documented_numbers(function, expected):
    parameters = inspect.signature(function).parameters.values()
    found = {own.name: own.default for own in parameters if type(own.default) in (int, float, bool)}
    assert found == expected


def test_the_patch_size_without_a_trunk_is_16():
    assert fp.ShallowPrompts(2, 8).patch_size == (16, 16)
