"""Server updates: overwrite values by a mean, average over rounds, or take a gradient step."""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from fedprompt._checks import (
    check_number,
    check_upload,
    kind,
    per_row,
    values_readable,
    wrong_type,
    wrong_value,
)
from fedprompt._float64 import rounded, widened
from fedprompt.aggregation._mapped import State, TensorUpdate, init_each, step_each
from fedprompt.interfaces import Payload, ServerRule, Weighted


def overwrite() -> ServerRule:
    """Replace values by their mean (FedAvg).

    Rows of total weight 0 keep their previous value exactly.

    Returns:
        A :class:`ServerRule` with an empty state. Like every server update of the library, it takes
        a tensor and an entry, or a dict of tensors and a payload. Names that the payload lacks keep
        their value.

    Example:
        >>> server = overwrite()
        >>> values = {"head": torch.tensor([1.0, 2.0]), "keys": torch.tensor([3.0])}
        >>> mean = {"head": Weighted(torch.tensor([5.0, 0.0]), torch.tensor([3.0, 0.0]))}
        >>> server.step(values, mean, server.init(values))[0]
        {'head': tensor([5., 2.]), 'keys': tensor([3.])}

        The same with one tensor:

        >>> server.step(values["head"], mean["head"], server.init(values["head"]))[0]
        tensor([5., 2.])
    """
    return _EachName(_Blend(decay=0.0))


def ema(*, decay: float) -> ServerRule:
    r"""Move values towards their mean, as an exponential moving average over rounds.

    .. math:: v \leftarrow \text{decay} \cdot v + (1 - \text{decay}) \cdot \bar v

    Rows of total weight 0 keep their previous value exactly.

    Args:
        decay: Weight of the previous value (in [0, 1]). With 0, this is :func:`overwrite`. With 1,
            values never change. SGPT uses 0.5 for keys and group prompts.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is empty.

    Example:
        >>> update = ema(decay=0.5)
        >>> value = torch.tensor([2.0])
        >>> mean = Weighted(torch.tensor([4.0]), torch.tensor(1.0))
        >>> update.step(value, mean, update.init(value))[0]
        tensor([3.])

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and
        Personalized Federated Learning" (SGPT), CVPR 2024, Eq. 7.
    """
    check_number("decay", decay, at_least=0, at_most=1)
    return _EachName(_Blend(decay))


def descend(
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
) -> ServerRule:
    """Take one step of a torch optimizer, with the mean as the gradient (FedL2G).

    If clients send the negative change of their parameters, this is FedOpt, such as FedAdam.

    Rows of total weight 0 have gradient 0 and keep their value exactly, without momentum or weight
    decay. A step is refused with a ValueError if the new value or state is not finite. The state
    that was passed in is unchanged then, and the round can be repeated without the client at fault.

    Args:
        make_optimizer: Constructor of the optimizer, called with the parameters, such as
            ``partial(torch.optim.SGD, lr=0.1)``.
        max_norm: Bound on the Euclidean norm of the gradient (above 0). If None, gradients are not
            clipped. The code of FedL2G uses 100.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is the state dict of the
        optimizer. In a dict, each name has a separate optimizer and a separate norm.

    Example:
        >>> from functools import partial
        >>> update = descend(partial(torch.optim.SGD, lr=0.5))
        >>> guides = torch.tensor([[1.0], [1.0]])
        >>> gradient = Weighted(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 0.0]))
        >>> update.step(guides, gradient, update.init(guides))[0]
        tensor([[0.],
                [1.]])
    """
    if max_norm is not None:
        check_number("max_norm", max_norm, above=0)
    return _EachName(_Descend(make_optimizer, max_norm))


@dataclass(frozen=True)
class _EachName:
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
        return self.rule.step(previous, mean, state)


@dataclass(frozen=True)
class _Blend:
    decay: float

    def init(self, previous: Tensor, /) -> State:
        return {}

    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]:
        _check_step(previous, mean)
        blended = mean.value
        if self.decay > 0:
            blended = torch.lerp(widened(mean.value), widened(previous), self.decay)
        return _where_known(mean, rounded(blended, previous), previous), state


@dataclass(frozen=True)
class _Descend:
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    max_norm: float | None

    def init(self, previous: Tensor, /) -> State:
        return deepcopy(self.make_optimizer([previous.detach().clone()]).state_dict())

    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]:
        _check_step(previous, mean)
        new = previous.detach().clone().requires_grad_()
        new.grad = _where_known(mean, mean.value.to(previous.dtype), torch.zeros_like(previous))
        if self.max_norm is not None:
            _shorten(new, self.max_norm)
        optimizer = self.make_optimizer([new])
        optimizer.load_state_dict(deepcopy(dict(state)))  # it updates the loaded tensors in place
        optimizer.step()
        _check_stepped(mean, _where_known(mean, new, torch.zeros_like(new)), optimizer)
        return _where_known(mean, new.detach(), previous), optimizer.state_dict()


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


def _check_stepped(mean: Weighted, new: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Require a finite value and a finite state after the step, with one synchronization."""
    if not values_readable(new):
        return
    results = {"value": new}
    for state in optimizer.state.values():
        results |= {name: part for name, part in state.items() if isinstance(part, Tensor)}
    finite = {name: part.isfinite().all() for name, part in results.items()}
    if bool(torch.stack([each.to(new.device) for each in finite.values()]).all()):
        return
    broken = [name for name, each in finite.items() if not each]
    largest = _where_known(mean, mean.value, torch.zeros_like(mean.value)).abs().max().item()
    got = f"entries up to {largest:.3g}, which overflow {broken}"
    raise wrong_value("mean", "keep the value and the optimizer's state finite", got)


def _check_step(previous: Tensor, mean: Weighted) -> None:
    if not isinstance(previous, Tensor) or not previous.is_floating_point():
        raise wrong_type("previous", "be a floating-point tensor", kind(previous))
    check_upload("mean", mean)
    if mean.value.shape != previous.shape:
        rule = f"have the shape of `previous` {tuple(previous.shape)}"
        raise wrong_value("mean.value", rule, tuple(mean.value.shape))


def _where_known(mean: Weighted, value: Tensor, otherwise: Tensor) -> Tensor:
    """Select `value` in rows of positive weight, and `otherwise` in the other rows."""
    return torch.where(per_row(mean.weight > 0, value), value, otherwise).detach()
