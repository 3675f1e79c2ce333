"""Server rules with a gradient: steps of an optimizer, and adaptive rates (FedOpt)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._names import STATISTICS
from fedprompt.aggregation._rules import FROM_INIT, RowRule, check_state
from fedprompt.interfaces import ServerRule, State

_MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


def descend(make_optimizer: _MakeOptimizer, *, max_norm: float | None = None) -> ServerRule:
    """Take one step of a torch optimizer, with the mean as the gradient (FedL2G).

    If clients send parameters and not gradients, use :func:`fedopt`.

    Rows of total weight 0 keep their value and their moments. If the new value or state is not
    finite, the step raises a ValueError and changes nothing, so you can repeat the round without
    the client at fault.

    Args:
        make_optimizer: Constructor of the optimizer, called with the parameters, such as
            ``partial(torch.optim.SGD, lr=0.1)``.
        max_norm: Bound on the Euclidean norm of the gradient (above 0). If None, gradients are not
            clipped. The code of FedL2G uses 100.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is the state dict of the
        optimizer; its options are not used, so a rule with another learning rate can continue.
        In a dict, each name has a separate optimizer and a separate norm.

    Example:
        >>> from functools import partial
        >>> update = descend(partial(torch.optim.SGD, lr=0.5))
        >>> guides = torch.tensor([[1.0], [1.0]])
        >>> gradient = Weighted(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0, 0.0]))
        >>> update.step(guides, gradient, update.init(guides))[0]
        tensor([[0.],
                [1.]])
    """
    return _Optimizer(make_optimizer, max_norm, gradient=_as_sent)


def fedopt(
    make_optimizer: _MakeOptimizer,
    *,
    max_norm: float | None = None,
    statistics: Collection[str] = STATISTICS,
) -> ServerRule:
    r"""Take one step of a torch optimizer, with the movement of the mean as gradient (FedOpt).

    .. math:: g = v - \bar v

    Here :math:`v` is the previous value and :math:`\bar v` the mean of the round. With
    ``partial(torch.optim.SGD, lr=1.0)``, this is :func:`overwrite` up to rounding, and with
    ``momentum=0.9`` in it FedAvgM.

    Rows of total weight 0 keep their value and their moments. State that is not kept for each
    number, such as Adam's number of steps, advances for all rows. If the mean has no known row,
    nothing changes. If the new value or state is not finite, the step raises a ValueError and
    changes nothing.

    Args:
        make_optimizer: Constructor of the optimizer, called with the parameters, such as
            ``partial(torch.optim.Adam, lr=0.01)``.
        max_norm: Bound on the Euclidean norm of the movement (above 0). If None, it is not clipped.
        statistics: Names, or last parts of names, of values that are no parameters, such as running
            statistics. They take the mean of the round, because steps could make a variance
            negative.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is the state dict of the
        optimizer; its options are not used, so a rule with another learning rate can continue.
        In a dict, each name has a separate optimizer and a separate norm.

    Example:
        The mean moved from 1 to 3, and a step with rate 0.5 goes half of the way.

        >>> from functools import partial
        >>> server = fedopt(partial(torch.optim.SGD, lr=0.5))
        >>> values = {"head": torch.tensor([1.0])}
        >>> mean = {"head": Weighted(torch.tensor([3.0]), torch.tensor(10.0))}
        >>> server.step(values, mean, server.init(values))[0]
        {'head': tensor([2.])}

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1; FedAvgM: Hsu et
        al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification", 2019.
    """
    return _Optimizer(make_optimizer, max_norm, gradient=torch.sub, statistics=statistics)


def adam(
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    statistics: Collection[str] = STATISTICS,
) -> ServerRule:
    r"""Scale the movement of each coordinate by its average size (FedAdam).

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta
    .. math:: s \leftarrow \beta_2 s + (1 - \beta_2) \Delta^2
    .. math:: v \leftarrow v + \eta\, m / (\sqrt s + \tau)

    Here :math:`\Delta` is the mean minus the previous value :math:`v`. At the start, :math:`m` is 0
    and :math:`s` is :math:`\tau^2`. There is no bias correction, unlike in ``torch.optim.Adam``.
    Rows of total weight 0 keep their value and their moments. Moments are in float32 at least. A
    step raises a ValueError if its result is not finite.

    Args:
        learning_rate: Server learning rate :math:`\eta` (above 0). A coordinate that always moves
            in one direction moves by about this much in each round.
        betas: Decays :math:`\beta_1` and :math:`\beta_2` of both moments (each in [0, 1)).
        tau: Adaptivity :math:`\tau` (above 0). Movements below it are hardly scaled up.
        statistics: Names, or last parts of names, of values that are no parameters, such as running
            statistics. They take the mean of the round, because steps could make a variance
            negative.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state has the moments ``first``
        and ``second``.

    Example:
        >>> server = adam(learning_rate=0.1, betas=(0.0, 0.0), tau=1e-6)
        >>> value = torch.tensor([0.0, 0.0])
        >>> mean = Weighted(torch.tensor([5.0, -0.01]), torch.tensor(10.0))
        >>> server.step(value, mean, server.init(value))[0]  # the signs, times the rate
        tensor([ 0.1000, -0.1000])

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _Adaptive(learning_rate, betas, tau, _adam, statistics)


def yogi(
    *,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.99),
    tau: float = 1e-3,
    statistics: Collection[str] = STATISTICS,
) -> ServerRule:
    r"""Scale movements as :func:`adam`, with a second moment that changes slowly (FedYogi).

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta
    .. math:: s \leftarrow s - (1 - \beta_2)\, \Delta^2\, \mathrm{sign}(s - \Delta^2)
    .. math:: v \leftarrow v + \eta\, m / (\sqrt s + \tau)

    Only the second line differs from :func:`adam`, so :math:`s` forgets large movements slowly.

    Args:
        learning_rate: Server learning rate :math:`\eta` (above 0).
        betas: Decays :math:`\beta_1` and :math:`\beta_2` of both moments (each in [0, 1)).
        tau: Adaptivity :math:`\tau` (above 0).
        statistics: As for :func:`adam`.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors, with the state of :func:`adam`.

    Example:
        >>> server = yogi(learning_rate=0.1, betas=(0.0, 0.5), tau=1.0)
        >>> value = torch.tensor([0.0])
        >>> mean = Weighted(torch.tensor([2.0]), torch.tensor(10.0))
        >>> new, state = server.step(value, mean, server.init(value))
        >>> state["second"]  # 1 + 0.5 * 4
        tensor([3.])

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _Adaptive(learning_rate, betas, tau, _yogi, statistics)


@dataclass(frozen=True)
class _Optimizer(RowRule):
    make_optimizer: _MakeOptimizer
    max_norm: float | None
    gradient: Callable[[Tensor, Tensor], Tensor]
    statistics: Collection[str] = ()

    def __post_init__(self) -> None:
        rule = "be a function from parameters to an optimizer"
        check.function("make_optimizer", self.make_optimizer, rule)
        check.optional(check.number, "max_norm", self.max_norm, above=0)
        check.texts("statistics", self.statistics, at_least=0)

    @property
    def changes(self) -> bool:  # type: ignore[override]
        return self.gradient is _as_sent

    def first_state(self, previous: Tensor) -> State:
        return deepcopy(self._made(previous.clone()).state_dict())

    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        new = previous.clone().requires_grad_()
        new.grad = self.gradient(previous, mean.to(previous.dtype))
        if self.max_norm is not None:
            _shorten(new, self.max_norm)
        optimizer = self._made(new)
        options = {name: o for name, o in optimizer.param_groups[0].items() if name != "params"}
        load_state(optimizer, state)
        optimizer.param_groups[0].update(options)  # those of the state may be of earlier rounds
        parts = [part for memory in optimizer.state.values() for part in memory.values()]
        shapes = {part.shape for part in parts if isinstance(part, Tensor)}
        check_state(state, shapes <= {(), new.shape})
        optimizer.step()
        return new.detach(), optimizer.state_dict()

    def _made(self, value: Tensor) -> torch.optim.Optimizer:
        optimizer = self.make_optimizer([value])
        rule = "return an optimizer of torch.optim"
        check.instance("make_optimizer", optimizer, torch.optim.Optimizer, rule)
        return optimizer


def load_state(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Load a copy of a state dict, which later steps of the optimizer do not change."""
    rule = "be a state dict of this optimizer"
    check.instance("state", state, Mapping, rule)
    before = optimizer.state_dict()
    try:
        optimizer.load_state_dict(deepcopy(dict(state)))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        optimizer.load_state_dict(before)
        raise check.wrong("state", rule, check.kind(state)) from error


def _as_sent(previous: Tensor, mean: Tensor) -> Tensor:
    return mean


def _shorten(parameter: Tensor, max_norm: float) -> None:
    """Clip the gradient of a parameter to `max_norm`, even if its norm overflows the dtype."""
    gradient: Any = parameter.grad
    if not check.values_readable(gradient) or torch.linalg.vector_norm(gradient).isfinite():
        torch.nn.utils.clip_grad_norm_([parameter], max_norm)
        return
    largest = gradient.abs().max()
    unit = gradient / largest
    parameter.grad = unit * min(largest.item(), max_norm / torch.linalg.vector_norm(unit).item())


@dataclass(frozen=True)
class _Adaptive(RowRule):
    learning_rate: float
    betas: tuple[float, float]
    tau: float
    second_moment: Callable[[Tensor, Tensor, float], Tensor]
    statistics: Collection[str]

    def __post_init__(self) -> None:
        check.number("learning_rate", self.learning_rate, above=0)
        check.pair("betas", self.betas, "be two numbers")
        for position, beta in enumerate(self.betas):
            check.number(f"betas[{position}]", beta, at_least=0)
            check.require(beta < 1, f"betas[{position}]", "be below 1", beta)
        check.number("tau", self.tau, above=0)
        check.texts("statistics", self.statistics, at_least=0)

    def first_state(self, previous: Tensor) -> State:
        first = torch.zeros_like(previous, dtype=torch.promote_types(previous.dtype, torch.float32))
        return {"first": first, "second": torch.full_like(first, float(self.tau) ** 2)}

    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        first, second = (_moment(name, state, previous) for name in ("first", "second"))
        movement = mean.to(first.dtype) - previous.to(first.dtype)
        first = self.betas[0] * first + (1 - self.betas[0]) * movement
        second = self.second_moment(second, movement.square(), self.betas[1])
        step = self.learning_rate * first / (second.sqrt() + self.tau)
        new = (previous.to(first.dtype) + step).to(previous.dtype)
        return new, {"first": first, "second": second}


def _adam(second: Tensor, square: Tensor, decay: float) -> Tensor:
    return decay * second + (1 - decay) * square


def _yogi(second: Tensor, square: Tensor, decay: float) -> Tensor:
    return second - (1 - decay) * square * (second - square).sign()


def _moment(name: str, state: State, previous: Tensor) -> Tensor:
    """Return a moment of the state, on the device of the previous value."""
    moment: Any = state.get(name)
    fits = isinstance(moment, Tensor) and moment.shape == previous.shape
    rule = f"{FROM_INIT} for a value of shape {tuple(previous.shape)}"
    got = f"{check.kind(moment)} as {name!r}"
    check.require(fits and moment.is_floating_point(), "state", rule, got)
    return cast(Tensor, moment.to(previous.device))
