"""Server updates: take the mean of a round, smooth it over rounds, or descend along it."""

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
from fedprompt.aggregation._mapped import State, TensorUpdate, init_each, step_each
from fedprompt.interfaces import Payload, ServerRule, Weighted


def overwrite() -> ServerRule:
    """Take the mean as the new value (FedAvg); rows of total weight 0 keep their previous value exactly.

    Returns:
        A :class:`ServerRule` that remembers nothing. As every server update, it takes a tensor with an
        entry as its mean, or a dict of tensors with a payload. Names that the payload lacks keep their
        value.

    Example:
        >>> server = overwrite()
        >>> values = {"head": torch.tensor([1.0, 2.0]), "keys": torch.tensor([3.0])}
        >>> mean = {"head": Weighted(torch.tensor([5.0, 0.0]), torch.tensor([3.0, 0.0]))}
        >>> server.step(values, mean, server.init(values))[0]
        {'head': tensor([5., 2.]), 'keys': tensor([3.])}

        The same with one tensor:

        >>> update = overwrite()
        >>> mean = Weighted(torch.tensor([[5.0], [0.0]]), torch.tensor([3.0, 0.0]))
        >>> new, state = update.step(torch.tensor([[1.0], [2.0]]), mean, update.init(torch.zeros(2, 1)))
        >>> new
        tensor([[5.],
                [2.]])
    """
    return _EachName(_Blend(decay=0.0))


def ema(*, decay: float) -> ServerRule:
    r"""Smooth over rounds: :math:`\text{new} = \text{decay} \cdot \text{previous} + (1 - \text{decay}) \cdot \text{mean}`.

    Rows of total weight 0 keep their previous value exactly: no momentum without evidence.

    Args:
        decay: In [0, 1]; 0 is :func:`overwrite`, 1 never moves. SGPT uses 0.5 for keys and group prompts.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is empty.

    Raises:
        ValueError: If `decay` lies outside [0, 1].

    Example:
        >>> update = ema(decay=0.5)
        >>> update.step(torch.tensor([2.0]), Weighted(torch.tensor([4.0]), torch.tensor(1.0)), update.init(torch.zeros(1)))[0]
        tensor([3.])

    References:
        Deng et al., "Unlocking the Potential of Prompt-Tuning in Bridging Generalized and Personalized Federated Learning" (SGPT),
        CVPR 2024, Eq. 7.
    """
    check_number("decay", decay, at_least=0, at_most=1)
    return _EachName(_Blend(decay))


def descend(
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
) -> ServerRule:
    """Treat the mean as a gradient and take one step of a torch optimiser (FedL2G; FedAdam with the clients' negative movement).

    Args:
        make_optimizer: Called with the parameters, for instance ``partial(torch.optim.SGD, lr=0.1)``.
        max_norm: Scale the gradient down to this Euclidean norm before the step if it is longer; None never does. FedL2G's code uses 100.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors, whose state is the optimiser's state dict. In a dict each name has
        an optimiser and a norm for itself. Rows of total weight 0 have no gradient and keep their
        value exactly, whatever the optimiser's momentum or weight decay would do to them.
        A step after which the new value or the state would not be finite is refused with a ValueError.
        The state that was passed in is unchanged then, so the round can be repeated without that client.

    Raises:
        ValueError: If `max_norm` is not above 0.

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
        blended = (
            mean.value
            if self.decay == 0
            else torch.lerp(mean.value.double(), previous.double(), self.decay)
        )
        return _where_known(mean, blended.to(previous.dtype), previous), state


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
        optimizer.load_state_dict(
            deepcopy(dict(state))
        )  # an optimiser updates the loaded tensors in place
        optimizer.step()
        _check_stepped(mean, _where_known(mean, new, torch.zeros_like(new)), optimizer)
        return _where_known(mean, new.detach(), previous), optimizer.state_dict()


def _shorten(parameter: Tensor, max_norm: float) -> None:
    """Scale the gradient of `parameter` down to `max_norm`, also where its norm overflows the dtype."""
    gradient = parameter.grad
    if (
        gradient is None
        or not values_readable(gradient)
        or torch.linalg.vector_norm(gradient).isfinite()
    ):
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        return
    largest = gradient.abs().max()
    unit = gradient / largest
    parameter.grad = unit * min(largest.item(), max_norm / torch.linalg.vector_norm(unit).item())


def _check_stepped(mean: Weighted, new: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Require a finite value and a finite state after the step; one sync where all is well."""
    states = {name: entry for own in optimizer.state.values() for name, entry in own.items()}
    results = {"value": new, **states}
    finite = {
        name: entry.isfinite().all() for name, entry in results.items() if isinstance(entry, Tensor)
    }
    if not values_readable(new) or bool(
        torch.stack([entry.to(new.device) for entry in finite.values()]).all()
    ):
        return
    broken = [name for name, entry in finite.items() if not entry]
    largest = _where_known(mean, mean.value, torch.zeros_like(mean.value)).abs().max().item()
    got = f"entries up to {largest:.3g}, which overflow {broken}"
    raise wrong_value("mean", "keep the value and the optimizer's state finite", got)


def _check_step(previous: Tensor, mean: Weighted) -> None:
    if not isinstance(previous, Tensor) or not previous.is_floating_point():
        raise wrong_type("previous", "be a floating-point tensor", kind(previous))
    check_upload("mean", mean)
    if mean.value.shape != previous.shape:
        raise wrong_value(
            "mean.value",
            f"have the shape of `previous` {tuple(previous.shape)}",
            tuple(mean.value.shape),
        )


def _where_known(mean: Weighted, value: Tensor, otherwise: Tensor) -> Tensor:
    return torch.where(per_row(mean.weight > 0, value), value, otherwise).detach()
