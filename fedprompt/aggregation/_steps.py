"""Parts of server updates: rules lifted over names, checks of a step, and known rows."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from fedprompt._checks import (
    check_dense,
    check_entry,
    check_finite,
    check_function,
    check_kind,
    check_number,
    kind,
    load_checked,
    per_row,
    values_readable,
    wrong_type,
    wrong_value,
)
from fedprompt.aggregation._mapped import State, TensorUpdate, init_each, step_each
from fedprompt.interfaces import Payload, Weighted

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True)
class EachName:
    """A rule for one tensor, lifted over the names of values."""

    rule: TensorUpdate

    def init(self, previous: Tensor | Mapping[str, Tensor], /) -> State:
        if isinstance(previous, Mapping):
            return init_each(dict.fromkeys(previous, self.rule), previous)
        return self.rule.init(previous)

    @overload
    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]: ...
    @overload
    def step(
        self, previous: Mapping[str, Tensor], mean: Payload, state: State, /
    ) -> tuple[dict[str, Tensor], State]: ...
    def step(self, previous: Any, mean: Any, state: State, /) -> Any:
        if isinstance(previous, Mapping):
            return step_each(dict.fromkeys(previous, self.rule), previous, mean, state)
        check_state(state, True)
        return self.rule.step(previous, mean, state)


def check_maker(make_optimizer: object, max_norm: float | None) -> None:
    """Require the constructor of an optimizer, and a bound or None."""
    check_function(
        "make_optimizer", make_optimizer, "be a function from parameters to an optimizer"
    )
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0)


def check_state(state: object, fits: bool) -> None:
    """Require the state of a server update."""
    if not isinstance(state, Mapping) or not fits:
        raise wrong_value("state", "come from `init` or the last `step`", kind(state))


def made(make_optimizer: MakeOptimizer, value: Tensor) -> torch.optim.Optimizer:
    """Make the optimizer of one parameter."""
    optimizer = make_optimizer([value])
    rule = "return an optimizer of torch.optim"
    check_kind("make_optimizer", optimizer, torch.optim.Optimizer, rule)
    return optimizer


def first_state(make_optimizer: MakeOptimizer, previous: Tensor) -> State:
    """Return the state dict of a new optimizer."""
    return deepcopy(made(make_optimizer, checked_previous(previous).detach().clone()).state_dict())


def optimized(
    make_optimizer: MakeOptimizer,
    value: Tensor,
    gradient: Tensor,
    state: State,
    *,
    max_norm: float | None,
) -> tuple[Tensor, torch.optim.Optimizer]:
    """Take one step from a copy of `value`; return the new value and the optimizer after it."""
    new = value.detach().clone().requires_grad_()
    new.grad = gradient
    if max_norm is not None:
        _shorten(new, max_norm)
    optimizer = made(make_optimizer, new)
    load_checked(optimizer, state)
    check_state(state, all(part.shape in ((), new.shape) for part in moments(optimizer).values()))
    optimizer.step()
    return new.detach(), optimizer


def moments(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the tensors that an optimizer of one parameter remembers."""
    return {
        name: part
        for own in optimizer.state.values()
        for name, part in own.items()
        if isinstance(part, Tensor)
    }


def check_stepped(mean: Weighted, results: Mapping[str, Tensor]) -> None:
    """Require a finite value and state after a step, by name, with one synchronization."""
    if not values_readable(*results.values()):
        return
    finite = {name: part.isfinite().all() for name, part in results.items()}
    if bool(torch.stack([each.to(mean.value.device) for each in finite.values()]).all()):
        return
    broken = [name for name, each in finite.items() if not each]
    largest = where_known(mean, mean.value, torch.zeros_like(mean.value)).abs().max().item()
    got = f"entries up to {largest:.3g}, which overflow {broken}"
    raise wrong_value("mean", "keep the value and the optimizer's state finite", got)


def check_step(previous: object, mean: Weighted) -> None:
    """Require a mean in the form of the previous value."""
    previous = checked_previous(previous)
    check_entry("mean", mean)
    if mean.value.shape != previous.shape:
        rule = f"have the shape of `previous` {tuple(previous.shape)}"
        raise wrong_value("mean.value", rule, tuple(mean.value.shape))


def checked_previous(previous: object) -> Tensor:
    """Return the previous value after checking that it is a floating-point tensor."""
    if not isinstance(previous, Tensor) or not previous.is_floating_point():
        raise wrong_type("previous", "be a floating-point tensor", kind(previous))
    check_dense("previous", previous)
    check_finite("previous", previous)
    return previous


def where_known(mean: Weighted, value: Tensor, otherwise: Tensor) -> Tensor:
    """Select `value` in rows of positive weight, and `otherwise` in the other rows."""
    return torch.where(per_row(mean.weight > 0, value), value, otherwise).detach()


def _shorten(parameter: Tensor, max_norm: float) -> None:
    """Clip the gradient of a parameter to `max_norm`, even if its norm overflows the dtype."""
    gradient = parameter.grad
    if gradient is None:
        return
    if not values_readable(gradient) or torch.linalg.vector_norm(gradient).isfinite():
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        return
    largest = gradient.abs().max()
    unit = gradient / largest
    parameter.grad = unit * min(largest.item(), max_norm / torch.linalg.vector_norm(unit).item())
