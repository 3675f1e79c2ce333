"""Base of server rules: names, checks and unknown rows, so that a rule is its equations."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor

from fedprompt._checks import (
    check_dense,
    check_entry,
    check_finite,
    check_kind,
    check_names,
    kind,
    per_row,
    values_readable,
    wrong_type,
    wrong_value,
)
from fedprompt.aggregation._payloads import check_payload
from fedprompt.interfaces import Payload, ServerUpdate, Weighted

State = Mapping[str, Any]
TensorUpdate = ServerUpdate[Tensor, Weighted]
FROM_INIT = "come from `init` or the last `step`"


class RowRule(ABC):
    """A server rule for a tensor, applied to each name of a dict of tensors.

    A subclass gives the first state and the equations. Rows of weight 0 keep their value and their
    state here, and a step with a result that is not finite is refused.
    """

    @abstractmethod
    def first_state(self, previous: Tensor) -> State:
        """Make the state before the first round."""

    @abstractmethod
    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the new value and state. Unknown rows of both tensors are 0, and so ignored."""

    def init(self, previous: Tensor | Mapping[str, Tensor], /) -> State:
        if isinstance(previous, Mapping):
            return init_each(dict.fromkeys(previous, self), previous)
        return self.first_state(_checked_previous(previous).detach())

    @overload
    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]: ...
    @overload
    def step(
        self, previous: Mapping[str, Tensor], mean: Payload, state: State, /
    ) -> tuple[dict[str, Tensor], State]: ...
    def step(self, previous: Any, mean: Any, state: State, /) -> Any:
        if isinstance(previous, Mapping):
            return step_each(dict.fromkeys(previous, self), previous, mean, state)
        _check_step(previous, mean, state)
        previous, known = previous.detach(), mean.weight > 0
        rows = per_row(known, previous)
        start, target = (torch.where(rows, part, 0).detach() for part in (previous, mean.value))
        new, after = self.update(start, target, state)
        _check_stepped(target, {"value": torch.where(rows, new, 0), **_tensors(after)})
        if values_readable(known) and not known.any():
            return previous.clone(), state
        return torch.where(rows, new, previous), _keep_rows(rows, previous, state, after)


def _check_step(previous: object, mean: Weighted, state: object) -> None:
    """Require a mean in the form of the previous value, and a mapping as state."""
    previous = _checked_previous(previous)
    check_entry("mean", mean)
    if mean.value.shape != previous.shape:
        rule = f"have the shape of `previous` {tuple(previous.shape)}"
        raise wrong_value("mean.value", rule, tuple(mean.value.shape))
    check_state(state, True)


def _checked_previous(previous: object) -> Tensor:
    """Return the previous value after checking that it is a floating-point tensor."""
    if not isinstance(previous, Tensor) or not previous.is_floating_point():
        raise wrong_type("previous", "be a floating-point tensor", kind(previous))
    check_dense("previous", previous)
    check_finite("previous", previous)
    return previous


def check_state(state: object, fits: bool) -> None:
    """Require the state of a server update."""
    if not isinstance(state, Mapping) or not fits:
        raise wrong_value("state", FROM_INIT, kind(state))


def _tensors(state: Any, name: str = "") -> dict[str, Tensor]:
    """List the floating-point tensors of a nested state, by the last of their names."""
    if isinstance(state, Mapping):
        found = [_tensors(part, str(key)) for key, part in state.items()]
        return {key: part for parts in found for key, part in parts.items()}
    return {name: state} if isinstance(state, Tensor) else {}


def _check_stepped(mean: Tensor, results: Mapping[str, Tensor]) -> None:
    """Require a finite value and state after a step, by name, with one synchronization."""
    if not values_readable(*results.values()):
        return
    finite = {name: part.isfinite().all() for name, part in results.items()}
    if bool(torch.stack([each.to(mean.device) for each in finite.values()]).all()):
        return
    broken = [name for name, each in finite.items() if not each]
    got = f"entries up to {mean.abs().max().item():.3g}, which overflow {broken}"
    raise wrong_value("mean", "keep the value and the optimizer's state finite", got)


def _keep_rows(rows: Tensor, previous: Tensor, before: Any, after: Any) -> Any:
    """Return a nested state with its tensors before the step in unknown rows."""
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        return {
            name: _keep_rows(rows, previous, before.get(name), part) for name, part in after.items()
        }
    if isinstance(after, Tensor) and isinstance(before, Tensor) and after.shape == previous.shape:
        return torch.where(rows, after, before.to(after.device))
    return after


def init_each(rules: Mapping[str, TensorUpdate], previous: Mapping[str, Tensor]) -> State:
    """Make the state of each name by its rule."""
    check_names("previous", previous)
    states = {}
    for name, rule in rules.items():
        with named(name):
            states[name] = rule.init(previous[name])
    return states


def step_each(
    rules: Mapping[str, TensorUpdate], previous: Mapping[str, Tensor], mean: Payload, state: State
) -> tuple[dict[str, Tensor], State]:
    """Step each name of the mean by its rule. Other names keep their value and their state."""
    check_names("previous", previous)
    check_payload("mean", mean)
    if unknown := sorted(set(mean) - set(previous)):
        raise wrong_value(
            "mean", f"have no other names than `previous` {sorted(previous)}", unknown
        )
    check_kind("state", state, Mapping, "map names to states")
    if missing := sorted(set(previous) - set(state)):
        raise wrong_value("state", FROM_INIT, f"nothing for {missing}")
    new, states = dict(previous), dict(state)
    for name in (name for name in previous if name in mean):
        with named(name):
            new[name], states[name] = rules[name].step(previous[name], mean[name], state[name])
    return new, states


@contextmanager
def named(name: str, among: str = "") -> Iterator[None]:
    """Prefix a ValueError or TypeError with the name of a tensor."""
    try:
        yield
    except (ValueError, TypeError) as error:
        refused = ValueError if isinstance(error, ValueError) else TypeError
        raise refused(f"{name!r}{among}: {error}") from error
