"""Warnings about transport plans whose solver did not converge."""

import warnings

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import Coupling

FACTOR = 10
"""Largest violation of a plan that is accepted, in units of its tolerance."""

EVERY = 100
"""On an accelerator the violation is read at the first of so many calls, and kept there between."""

AT_ONCE = {"cpu"}
"""Types of devices on which it is read at each call, because reading costs nothing."""

UNSTATED = 1e-3
"""Tolerance of a solver that does not state one, where exact plans are needed."""

_TEXT = (
    "A transport plan violates its marginals by {:.3g} times its tolerance, so its scores "
    "are not those of its problem. Raise `max_iterations` or `epsilon`, or use `newton`. A solver "
    "that relaxes its marginals must return its `rho`."
)

_kept: dict[torch.device, tuple[int, Tensor]] = {}
_warned: set[str] = set()


def solved(coupling: object, *, strict: bool = False) -> Coupling:
    """Require a coupling, and warn once a process if a plan violates its marginals.

    Nothing is read under ``torch.compile`` and in ``torch.func`` transforms.

    Args:
        coupling: Result of a solver.
        strict: Whether to read this violation now, and to raise an error in place of a warning.
            Then the tolerance is `UNSTATED` if the solver does not state one.

    Raises:
        TypeError: If the result is not a coupling.
        ValueError: If `strict` is set, and the plan violates its marginals.
    """
    if not isinstance(coupling, Coupling):
        raise check.wrong_type("solver", "return a Coupling", check.kind(coupling))
    error = coupling.error.detach()
    tolerance = UNSTATED if strict and coupling.tolerance is None else coupling.tolerance
    if tolerance is None or not check.values_readable(error) or not error.numel():
        return coupling
    times = error.amax() / tolerance
    device = times.device
    calls, largest = (0, times) if strict else _kept.get(device, (0, times))
    largest = torch.maximum(largest, times)
    read = strict or device.type in AT_ONCE or calls % EVERY == 0
    if not strict:
        _kept[device] = calls + 1, torch.zeros_like(largest) if read else largest
    if read and not (worst := largest.item()) <= FACTOR:  # also if it is NaN
        text = _TEXT.format(worst)
        if strict:
            raise ValueError(text)
        if not _warned:
            _warned.add(text)
            warnings.warn(text, stacklevel=4)
    return coupling
