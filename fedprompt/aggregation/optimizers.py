"""Server optimizers: the movement of the mean is a step's gradient (FedOpt)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fedprompt._checks import check_number, kind, wrong_type, wrong_value
from fedprompt.aggregation._mapped import State
from fedprompt.aggregation._steps import (
    EachName,
    MakeOptimizer,
    check_maker,
    check_step,
    check_stepped,
    checked_previous,
    first_state,
    moments,
    optimized,
    where_known,
)
from fedprompt.interfaces import ServerRule, Weighted


def fedopt(
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
) -> ServerRule:
    r"""Take one step of a torch optimizer, with the movement of the mean as gradient (FedOpt).

    .. math:: g = v - \bar v

    Here :math:`v` is the previous value and :math:`\bar v` the mean of the round. With
    ``partial(torch.optim.SGD, lr=1.0)``, this is :func:`overwrite` up to rounding.

    Rows of total weight 0 keep their value and their moments. State that is not kept for each
    number, such as Adam's number of steps, advances for all rows. If the mean has no known row,
    nothing changes. A step is refused with a ValueError if the new value or state is not finite.
    The state that was passed in is unchanged then.

    Args:
        make_optimizer: Constructor of the optimizer, called with the parameters, such as
            ``partial(torch.optim.Adam, lr=0.01)``.
        max_norm: Bound on the Euclidean norm of the movement (above 0). If None, it is not clipped.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state is the state dict of the
        optimizer. In a dict, each name has a separate optimizer and a separate norm.

    Example:
        The mean moved from 1 to 3, and a step with rate 0.5 goes half of the way.

        >>> from functools import partial
        >>> server = fedopt(partial(torch.optim.SGD, lr=0.5))
        >>> values = {"head": torch.tensor([1.0])}
        >>> mean = {"head": Weighted(torch.tensor([3.0]), torch.tensor(10.0))}
        >>> server.step(values, mean, server.init(values))[0]
        {'head': tensor([2.])}

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 1.
    """
    check_maker(make_optimizer, max_norm)
    return EachName(_FedOpt(make_optimizer, max_norm))


def fedavgm(*, learning_rate: float = 1.0, momentum: float = 0.9) -> ServerRule:
    r"""Add momentum to the movement of the mean (FedAvgM).

    .. math:: m \leftarrow \beta m + \Delta, \qquad v \leftarrow v + \eta\, m

    Here :math:`\Delta` is the mean minus the previous value :math:`v`, and :math:`m` is 0 at the
    start. Rows of total weight 0 keep their value and their momentum.

    Args:
        learning_rate: Server learning rate :math:`\eta` (above 0).
        momentum: Decay :math:`\beta` of the momentum (in [0, 1)). With 0 and rate 1, this is
            :func:`overwrite` up to rounding.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors.

    Example:
        >>> server = fedavgm(momentum=0.5)
        >>> value, state = torch.tensor(0.0), server.init(torch.tensor(0.0))
        >>> for _ in range(2):  # clients move by 1 in each round
        ...     mean = Weighted(value + 1, torch.tensor(10.0))
        ...     value, state = server.step(value, mean, state)
        >>> value
        tensor(2.5000)

    References:
        Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification", 2019.
    """
    check_number("learning_rate", learning_rate, above=0)
    _check_decay("momentum", momentum)
    return fedopt(partial(torch.optim.SGD, lr=learning_rate, momentum=momentum))


def fedadam(
    *, learning_rate: float, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
) -> ServerRule:
    r"""Scale the movement of each coordinate by its average size (FedAdam).

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta
    .. math:: s \leftarrow \beta_2 s + (1 - \beta_2) \Delta^2
    .. math:: v \leftarrow v + \eta\, m / (\sqrt s + \tau)

    Here :math:`\Delta` is the mean minus the previous value :math:`v`. At the start, :math:`m` is 0
    and :math:`s` is :math:`\tau^2`. There is no bias correction, unlike in ``torch.optim.Adam``.
    So rows of total weight 0 keep value and moments, as if the round had not happened. Moments are
    in float32 at least. A step is refused with a ValueError if its result is not finite.

    Args:
        learning_rate: Server learning rate :math:`\eta` (above 0). A coordinate that always moves
            in one direction moves by about this much in each round.
        betas: Decays :math:`\beta_1` and :math:`\beta_2` of both moments (each in [0, 1)).
        tau: Adaptivity :math:`\tau` (above 0). Movements below it are hardly scaled up.

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors. Its state has the moments ``first``
        and ``second``.

    Example:
        >>> server = fedadam(learning_rate=0.1, betas=(0.0, 0.0), tau=1e-6)
        >>> value = torch.tensor([0.0, 0.0])
        >>> mean = Weighted(torch.tensor([5.0, -0.01]), torch.tensor(10.0))
        >>> server.step(value, mean, server.init(value))[0]  # the signs, times the rate
        tensor([ 0.1000, -0.1000])

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _adaptive(learning_rate, betas, tau, _adam)


def fedyogi(
    *, learning_rate: float, betas: tuple[float, float] = (0.9, 0.99), tau: float = 1e-3
) -> ServerRule:
    r"""Scale the movement of each coordinate by a slowly changing size (FedYogi).

    .. math:: m \leftarrow \beta_1 m + (1 - \beta_1) \Delta
    .. math:: s \leftarrow s - (1 - \beta_2)\, \Delta^2\, \mathrm{sign}(s - \Delta^2)
    .. math:: v \leftarrow v + \eta\, m / (\sqrt s + \tau)

    Only the second line differs from :func:`fedadam`. The size :math:`s` changes by
    :math:`(1 - \beta_2) \Delta^2` in a round, so it forgets large movements slowly.

    Args:
        learning_rate: Server learning rate :math:`\eta` (above 0).
        betas: Decays :math:`\beta_1` and :math:`\beta_2` of both moments (each in [0, 1)).
        tau: Adaptivity :math:`\tau` (above 0).

    Returns:
        A :class:`ServerRule` for a tensor or a dict of tensors, with the state of :func:`fedadam`.

    Example:
        >>> server = fedyogi(learning_rate=0.1, betas=(0.0, 0.5), tau=1.0)
        >>> value = torch.tensor([0.0])
        >>> mean = Weighted(torch.tensor([2.0]), torch.tensor(10.0))
        >>> new, state = server.step(value, mean, server.init(value))
        >>> state["second"]  # 1 + 0.5 * 4
        tensor([3.])

    References:
        Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.
    """
    return _adaptive(learning_rate, betas, tau, _yogi)


@dataclass(frozen=True)
class _FedOpt:
    make_optimizer: MakeOptimizer
    max_norm: float | None

    def init(self, previous: Tensor, /) -> State:
        return first_state(self.make_optimizer, previous)

    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]:
        check_step(previous, mean)
        if not bool((mean.weight > 0).any()):
            return previous.detach().clone(), state
        zeros = torch.zeros_like(previous)
        movement = where_known(mean, previous - mean.value.to(previous.dtype), zeros)
        # An unknown row starts at 0, so that weight decay does not reach its first moments.
        start = where_known(mean, previous, zeros)
        new, optimizer = optimized(
            self.make_optimizer, start, movement, state, max_norm=self.max_norm
        )
        check_stepped(mean, {"value": where_known(mean, new, zeros), **moments(optimizer)})
        return where_known(mean, new, previous), _kept(mean, state, optimizer)


def _kept(mean: Weighted, before: State, optimizer: torch.optim.Optimizer) -> State:
    """Return the state dict of an optimizer, with the old moments in rows of weight 0."""
    after = optimizer.state_dict()
    for parameter, old in before["state"].items():
        new = after["state"][parameter]
        for name, part in old.items():
            if isinstance(part, Tensor) and part.shape == mean.value.shape:
                new[name] = where_known(mean, new[name], part.to(new[name].device))
    return after


@dataclass(frozen=True)
class _Adaptive:
    learning_rate: float
    betas: tuple[float, float]
    tau: float
    second_moment: Callable[[Tensor, Tensor, float], Tensor]

    def init(self, previous: Tensor, /) -> State:
        dtype = torch.promote_types(checked_previous(previous).dtype, torch.float32)
        first = torch.zeros_like(previous, dtype=dtype, requires_grad=False)
        return {"first": first, "second": torch.full_like(first, self.tau**2)}

    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]:
        check_step(previous, mean)
        first, second = (_moment(name, state, previous) for name in ("first", "second"))
        start, zeros = previous.detach().to(first.dtype), torch.zeros_like(first)
        movement = where_known(mean, mean.value.to(first.dtype) - start, zeros)
        decay = self.betas[0]
        new_first = decay * first + (1 - decay) * movement
        new_second = self.second_moment(second, movement.square(), self.betas[1])
        step = self.learning_rate * new_first / (new_second.sqrt() + self.tau)
        after = {
            "first": where_known(mean, new_first, first),
            "second": where_known(mean, new_second, second),
        }
        new = (start + step).to(previous.dtype)
        check_stepped(mean, {"value": where_known(mean, new, torch.zeros_like(new)), **after})
        return where_known(mean, new, previous), after


def _adam(second: Tensor, square: Tensor, decay: float) -> Tensor:
    return decay * second + (1 - decay) * square


def _yogi(second: Tensor, square: Tensor, decay: float) -> Tensor:
    return second - (1 - decay) * square * (second - square).sign()


def _adaptive(
    learning_rate: float,
    betas: tuple[float, float],
    tau: float,
    second_moment: Callable[[Tensor, Tensor, float], Tensor],
) -> ServerRule:
    check_number("learning_rate", learning_rate, above=0)
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise wrong_type("betas", "be two numbers", kind(betas))
    for position, beta in enumerate(betas):
        _check_decay(f"betas[{position}]", beta)
    check_number("tau", tau, above=0)
    return EachName(_Adaptive(learning_rate, (betas[0], betas[1]), tau, second_moment))


def _check_decay(argument: str, decay: float) -> None:
    check_number(argument, decay, at_least=0)
    if decay >= 1:
        raise wrong_value(argument, "be below 1", decay)


def _moment(name: str, state: State, previous: Tensor) -> Tensor:
    """Return a moment of the state, on the device of the previous value."""
    moment = state.get(name)
    if (
        not isinstance(moment, Tensor)
        or not moment.is_floating_point()
        or moment.shape != previous.shape
    ):
        rule = f"come from `init` or the last `step` for a value of shape {tuple(previous.shape)}"
        raise wrong_value("state", rule, f"{kind(moment)} as {name!r}")
    return moment.to(previous.device)
