"""One transport problem, several solvers of one signature, and what a score's gradient may mean."""

from fedprompt.transport.dykstra import dykstra
from fedprompt.transport.exact import exact, independent
from fedprompt.transport.gradients import envelope, implicit, plan_fixed
from fedprompt.transport.newton import newton
from fedprompt.transport.sinkhorn import sinkhorn

__all__ = ["dykstra", "envelope", "exact", "implicit", "independent", "newton", "plan_fixed", "sinkhorn"]
