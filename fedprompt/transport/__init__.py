"""Optimal transport for batches of small problems: solvers, and differentiable scores of plans."""

from fedprompt.transport.alternating import dykstra, sinkhorn
from fedprompt.transport.duals import plan_from_duals
from fedprompt.transport.exact import exact, independent
from fedprompt.transport.newton import newton
from fedprompt.transport.relaxed import unbalanced
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
    "unbalanced",
]
