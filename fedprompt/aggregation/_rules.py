"""Base of server rules: names, checks and unknown rows, so that a rule is its equations."""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._conversions import widened
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
    statistics: Collection[str] = ()
    """Names of values that are no parameters, or last parts of these names. They become means."""

    @abstractmethod
    def first_state(self, previous: Tensor) -> State:
        """Make the state before the first round."""

    @abstractmethod
    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        """Return the new value and state. Unknown rows of both tensors are 0, and so ignored."""

    def init(self, previous: Tensor | Mapping[str, Tensor], /) -> State:
        if isinstance(previous, Mapping):
            return init_by_name(self._rules(previous), previous)
        _check_previous(previous)
        return self.first_state(previous.detach())

    def step(self, previous: Any, mean: Any, state: State, /) -> Any:
        if isinstance(previous, Mapping):
            return step_by_name(self._rules(previous), previous, mean, state)
        _check_previous(previous)
        nouns.entry("mean", mean)
        new, after = self.stepped(previous, mean, state)
        _check_stepped(mean.known, {"value": new, **_tensors(after)})
        if check.values_readable(mean.weight) and not mean.weight.any():
            return previous.detach().clone(), state
        return new, after

    def _rules(self, names: Iterable[str]) -> dict[str, TensorUpdate]:
        known, mean = {*self.statistics}, Blend(0.0)
        return {
            name: mean if {name, str(name).rpartition(".")[2]} & known else self for name in names
        }

    def stepped(
        self, previous: Tensor, mean: Weighted, state: State, *, all_known: bool = False
    ) -> tuple[Tensor, State]:
        """Step without a look at numbers, which synchronizes a GPU."""
        check.shape("mean.value", mean.value, previous.shape, "`previous`")
        check_state(state, True)
        previous = previous.detach()
        if all_known:
            value = mean.value.detach().to(previous.device, copy=True)  # it may be written
            return self.update(previous, value, state)
        mean = Weighted._make(part.detach().to(previous.device) for part in mean)
        rows = mean.rows
        known = torch.where(rows, mean.value, 0.0)
        new, after = self.update(torch.where(rows, previous, 0), known, state)
        return torch.where(rows, new, previous), _keep_rows(rows, previous, state, after)


@dataclass(frozen=True)
class Blend(RowRule):
    """Mean, or a moving average of means."""

    decay: float

    def first_state(self, previous: Tensor) -> State:
        return {}

    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        check_state(state, not state)
        if self.decay > 0:
            mean = torch.lerp(widened(mean), widened(previous), self.decay)
        return mean.to(previous), state


def _check_previous(previous: Any) -> None:
    check.number_tensor("previous", previous)
    check.finite("previous", previous)


def check_state(state: object, fits: bool) -> None:
    """Require the state of a server update."""
    if not (isinstance(state, Mapping) and fits):
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
        with check.located(repr(name)):
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
    names = [name for name in previous if name in mean]
    before = {name: (previous[name], mean[name], state[name]) for name in names}
    made = _at_once(rules, before)
    for name in before if not made else ():
        with check.located(repr(name)):
            made[name] = rules[name].step(*before[name])
    new = {name: value for name, (value, _) in made.items()}
    states = {name: after for name, (_, after) in made.items()}
    return {**previous, **new}, {**state, **states}


def _at_once(
    rules: Mapping[str, TensorUpdate], before: Mapping[str, tuple[Tensor, Weighted, State]]
) -> dict[str, tuple[Tensor, State]]:
    """Step all names with one synchronization, or none if a number needs a closer look.

    One sum is finite only if all numbers are: a mean that is not makes the new value or state so.
    The root of a negative weight is NaN.
    """
    weights = [mean.weight for _, mean, _ in before.values() if isinstance(mean, Weighted)]
    made, numbers, all_known = {}, list[Tensor](), _are_known(weights)
    for name, (previous, mean, state) in before.items():
        rule = rules[name]
        if not (isinstance(rule, RowRule) and _is_plain(previous, mean)):
            return {}
        with check.located(repr(name)):
            new, after = made[name] = rule.stepped(previous, mean, state, all_known=all_known)
        numbers += [previous, new, *_tensors(after).values()]
        numbers += [] if all_known else [mean.weight.sqrt()]
    sent = [] if all_known else [weight.sum() for weight in weights]
    if len({part.device for part in (*numbers, *sent)}) != 1:
        return {}
    total = torch.cat([part.detach().flatten() for part in numbers]).sum()
    finite, *sums = torch.stack([total, *sent]).tolist()
    if not math.isfinite(finite):
        return {}
    for name, weight in zip(before, sums or [1.0] * len(before), strict=True):
        if not weight:
            made[name] = before[name][0].detach().clone(), before[name][2]
    return made


def _are_known(weights: Sequence[Any]) -> bool:
    """Whether all weights are positive and finite, where a look synchronizes nothing."""
    dense = all(isinstance(weight, Tensor) and check.is_dense(weight) for weight in weights)
    if not (dense and check.values_readable(*weights, sync=False)):
        return False
    one = torch.ones(1)  # a minimum of no numbers is an error
    low, high = torch.cat([one, *(weight.flatten() for weight in weights)]).aminmax()
    return low.item() > 0 and high.item() < math.inf


def _is_plain(previous: object, mean: object) -> bool:
    """Whether both are tensors whose numbers can be read."""
    if not (isinstance(previous, Tensor) and isinstance(mean, Weighted)):
        return False
    parts = (previous, *mean)
    plain = all(isinstance(part, Tensor) and check.is_dense(part) for part in parts)
    return plain and previous.is_floating_point() and check.values_readable(*parts)
