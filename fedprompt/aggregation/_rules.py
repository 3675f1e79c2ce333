"""Base of server rules: names, checks and unknown rows, so that a rule is its equations."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fedprompt._checks as check
from fedprompt.interfaces import Payload, ServerUpdate, State, Weighted

TensorUpdate = ServerUpdate[Tensor, Weighted]
FROM_INIT = "come from `init` or the last `step`"


class RowRule(ABC):
    """A server rule for a tensor, applied to each name of a dict of tensors.

    A subclass gives the first state and the equations. Rows of weight 0 keep their value and their
    state here, and a step with a result that is not finite is refused. With `changes`, the mean is
    that of changes since the broadcast, and otherwise that of values.
    """

    changes = False

    @abstractmethod
    def first_state(self, previous: Tensor) -> State:
        """Make the state before the first round."""

    @abstractmethod
    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the new value and state. Unknown rows of both tensors are 0, and so ignored."""

    def init(self, previous: Tensor | Mapping[str, Tensor], /) -> State:
        if isinstance(previous, Mapping):
            return init_by_name(dict.fromkeys(previous, self), previous)
        _check_previous(previous)
        return self.first_state(previous.detach())

    def step(self, previous: Any, mean: Any, state: State, /) -> Any:
        if isinstance(previous, Mapping):
            return step_by_name(dict.fromkeys(previous, self), previous, mean, state)
        _check_previous(previous)
        check.entry("mean", mean)
        check.shape("mean.value", mean.value, previous.shape, "`previous`")
        check_state(state, True)
        previous = previous.detach()
        mean = Weighted(*(part.to(previous.device) for part in mean))
        sent = mean.weight > 0
        rows = check.per_row(sent, previous)
        start, target = (torch.where(rows, part, 0).detach() for part in (previous, mean.value))
        new, after = self.update(start, target, state)
        _check_stepped(target, {"value": torch.where(rows, new, 0), **_tensors(after)})
        if check.values_readable(sent) and not sent.any():
            return previous.clone(), state
        return torch.where(rows, new, previous), _keep_rows(rows, previous, state, after)


def _check_previous(previous: Any) -> None:
    check.real("previous", previous, "be a floating-point tensor", floating=True)
    check.finite("previous", previous)


def check_state(state: object, fits: bool) -> None:
    """Require the state of a server update."""
    if not isinstance(state, Mapping) or not fits:
        raise check.wrong("state", FROM_INIT, check.kind(state))


def _tensors(state: Any, name: str = "") -> dict[str, Tensor]:
    """List the floating-point tensors of a nested state, by the last of their names."""
    if isinstance(state, Mapping):
        found = [_tensors(part, str(key)) for key, part in state.items()]
        return {key: part for parts in found for key, part in parts.items()}
    return {name: state} if isinstance(state, Tensor) else {}


def _check_stepped(mean: Tensor, results: Mapping[str, Tensor]) -> None:
    """Require a finite value and state after a step, by name, with one synchronization."""
    if not check.values_readable(*results.values()):
        return
    finite = {name: part.isfinite().all() for name, part in results.items()}
    if not bool(torch.stack([flag.to(mean.device) for flag in finite.values()]).all()):
        broken = [name for name, flag in finite.items() if not flag]
        got = f"entries up to {mean.abs().max().item():.3g}, which overflow {broken}"
        raise check.wrong("mean", "keep the value and the optimizer's state finite", got)


def _keep_rows(rows: Tensor, previous: Tensor, before: Any, after: Any) -> Any:
    """Return a nested state with its tensors before the step in unknown rows."""
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        pairs = {name: (before.get(name), part) for name, part in after.items()}
        return {name: _keep_rows(rows, previous, *pair) for name, pair in pairs.items()}
    if isinstance(after, Tensor) and isinstance(before, Tensor) and after.shape == previous.shape:
        return torch.where(rows, after, before.to(after.device))
    return after


def init_by_name(rules: Mapping[str, TensorUpdate], previous: Mapping[str, Tensor]) -> State:
    """Make the state of each name by its rule."""
    check.names("previous", previous)
    states = {}
    for name, rule in rules.items():
        with check.named(repr(name)):
            states[name] = rule.init(previous[name])
    return states


def step_by_name(
    rules: Mapping[str, TensorUpdate], previous: Mapping[str, Tensor], mean: Payload, state: State
) -> tuple[dict[str, Tensor], State]:
    """Step each name of the mean by its rule. Other names keep their value and their state."""
    check.names("previous", previous)
    check.names("mean", mean, "map names to Weighted")
    check.known("mean", mean, previous, "have no other names than `previous`")
    check.instance("state", state, Mapping, "map names to states")
    if missing := sorted(set(previous) - set(state)):
        raise check.wrong("state", FROM_INIT, f"nothing for {missing}")
    new = dict(previous)
    states = dict(state)
    for name in (name for name in previous if name in mean):
        with check.named(repr(name)):
            new[name], states[name] = rules[name].step(previous[name], mean[name], state[name])
    return new, states
