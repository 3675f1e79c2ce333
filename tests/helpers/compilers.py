"""Backends of ``torch.compile`` for the solvers.

Both get the same graph. For a solver, inductor then compiles C++ for up to a minute, so only the
benchmarks of transport do so in every run of CI. They compare its plan with a reference.
"""

import pytest

COMPILERS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]
