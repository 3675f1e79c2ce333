"""Print the tables of the reference page of transport.

The first table has the number of evaluations that `newton` needs. The second table has the error
after the fixed number of steps under ``torch.compile``.

Run ``python docs/make_transport_tables.py`` in any folder. It takes some minutes on one core.
"""

import sys
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedprompt.transport import newton
from references.transport import marginals, planted_cost

KINDS = {
    "clip": "normal, deviation 0.035",
    "trained": "normal, deviation 0.12",
    "wide": "uniform in [0, 2]",
}
MASSES = (0.8, 0.95, 0.999, 1.0)
SHAPES = ((49, 2), (196, 2), (196, 4), (49, 8))
PROBLEMS = 100  # of each shape


def couplings(kind, mass, epsilon):
    """Yield the couplings of the problems of each shape."""
    for rows, columns in SHAPES:
        generator = torch.Generator().manual_seed(0)
        cost = planted_cost(kind, (PROBLEMS, rows, columns), generator).float()
        yield newton(
            cost, *marginals(rows, columns, mass, torch.float32), epsilon=epsilon
        )


def evaluations(kind, mass, epsilon):
    """Return the median and the maximum of the number of evaluations.

    If a problem is not solved, add the largest fraction of unsolved problems of a shape.
    """
    found = list(couplings(kind, mass, epsilon))
    counts = torch.cat([coupling.iterations for coupling in found])
    unsolved = max((coupling.error > 2e-5).double().mean().item() for coupling in found)
    text = f"{int(counts.median())} to {int(counts.max())}"
    return text + (f" ({unsolved:.0%} unsolved)" if unsolved else "")


def fixed_steps(kind, mass, epsilon):
    """Return the largest error after the fixed number of steps under ``torch.compile``."""
    with patch("torch.compiler.is_compiling", return_value=True):
        error = torch.cat(
            [coupling.error for coupling in couplings(kind, mass, epsilon)]
        )
    return f"{error.max():.0e}" if error.isfinite().all() else "NaN"


for measure in (evaluations, fixed_steps):
    print("| costs | `epsilon` |", *(f"mass {mass:g} |" for mass in MASSES))
    print("|---|---|" + "---|" * len(MASSES))
    for kind, words in KINDS.items():
        for epsilon in (0.1, 0.05, 0.01, 0.001):
            cells = (measure(kind, mass, epsilon) for mass in MASSES)
            print(
                f"| {words} | {epsilon:g} |",
                *(f"{cell} |" for cell in cells),
                flush=True,
            )
    print()
