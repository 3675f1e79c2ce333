"""Arguments of transport are refused by name, and their edges are taken."""

import math
from functools import partial

from torch import full, nan, ones, tensor, zeros

from fedprompt.transport import (
    dykstra,
    envelope,
    exact,
    implicit,
    independent,
    newton,
    plan_fixed,
    plan_from_duals,
    sinkhorn,
    unbalanced,
)
from refusals import number, refused_and_taken

HALF, MOST = full((2,), 0.5), full((2,), 0.4)
GOOD = {"cost": zeros(3, 2, 2), "a": HALF, "b": MOST}
FOUND = newton(**GOOD)


def spoilt(value, like=GOOD["cost"]):
    """Change the last number of a tensor."""
    changed = like.clone().contiguous()
    changed.view(-1)[-1] = value
    return changed


def parts(**wrong):
    """Couplings of which one part is wrong."""
    return [FOUND._replace(**{name: value}) for name, values in wrong.items() for value in values]


WRONG = [None, [0.5, 0.5], HALF.long(), HALF.to("meta"), tensor(0.5), ones(3) / 3, ones(4, 2)]
MASSES = {
    "cost": ([None, spoilt(nan), spoilt(-math.inf), zeros(2), zeros(3, 0, 2), ones(3, 2, 2).long()],
             [full((3, 2, 2), 2e38)]),  # finite numbers whose sum is not
    "a": ([*WRONG, tensor([1.5, -0.5])], [tensor([1.0, 0.0]), ones(3, 2) / 2]),
    "b": ([*WRONG, tensor([1.0, 0.0]), tensor([[0.5, 0.5], [0.9, 0.9], [0.5, 0.5]])], [HALF]),
}  # fmt: skip
ABOVE_0 = [0, -1.0, nan, math.inf, "0.1", True], [1e-3]
OPTIONS = {"epsilon": ABOVE_0, "tolerance": (ABOVE_0[0], [1e-30]), "max_iterations": number(1)}
EQUAL = GOOD | {"b": HALF}
PLANS = parts(
    plan=[spoilt(-1.0, FOUND.plan), spoilt(nan, FOUND.plan), FOUND.plan.to("meta"), None],
    a=[None], b=[None, HALF * nan], error=[ones(2), ones(3, device="meta")],
)  # fmt: skip
EPSILONS = parts(epsilon=[-0.1, "0.1", nan])
SCORED = {"cost": GOOD["cost"], "coupling": FOUND}
COSTS = [None, spoilt(nan), GOOD["cost"][0], GOOD["cost"].long()], [spoilt(9.0)]
test_wrong_arguments_are_refused_by_name_and_edges_are_taken = refused_and_taken([
    *((solver, GOOD, MASSES) for solver in (newton, exact, independent)),
    (unbalanced, GOOD, {"a": MASSES["a"]}),
    *((solver, EQUAL, OPTIONS) for solver in (newton, dykstra, sinkhorn, unbalanced)),
    *((solver, EQUAL, {"b": ([MOST], [])})
      for solver in (sinkhorn, partial(unbalanced, rho=math.inf))),
    (unbalanced, GOOD, {"rho": ([0.0, (1.0, -1.0), (1.0, 1.0, 1.0), tensor(math.inf), nan], [
        1e-3, (1.0, math.inf)]) }),
    (unbalanced, EQUAL, {"rho": ([], [math.inf])}),
    (plan_from_duals, {"duals": zeros(3, 2)} | GOOD, MASSES | {"epsilon": ABOVE_0, "duals": (
        [None, ones(3, 3), zeros(2), spoilt(nan, zeros(3, 2))], [spoilt(-9.0, zeros(3, 2))])}),
    *((score, SCORED, {"cost": COSTS, "coupling": ([FOUND.plan, *PLANS], [FOUND])})
      for score in (plan_fixed, envelope, implicit)),
    *((score, SCORED, {"coupling": (EPSILONS, [FOUND._replace(epsilon=0)])})
      for score in (envelope, implicit)),
    (envelope, SCORED, {"coupling": ([independent(**GOOD)], [exact(**GOOD)])}),
    (lambda a: plan_fixed(GOOD["cost"], FOUND._replace(a=a)), {}, {"a": ([ones(5)], [HALF])}),
])  # fmt: skip
