"""Batches of small optimal-transport problems: solvers of one signature, and differentiable scores of their plans."""

from fedprompt.transport.alternating import dykstra, sinkhorn
from fedprompt.transport.duals import plan_from_duals
from fedprompt.transport.exact import exact, independent
from fedprompt.transport.newton import newton
from fedprompt.transport.scores import envelope, implicit, plan_fixed

__all__ = [
    "dykstra",
    "envelope",
    "exact",
    "implicit",
    "independent",
    "newton",
    "plan_fixed",
    "plan_from_duals",
    "sinkhorn",
]
