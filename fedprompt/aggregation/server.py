"""Server updates: overwrite values by a mean, average over rounds, or take a gradient step."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedprompt._checks import check_number
from fedprompt._float64 import rounded, widened
from fedprompt.aggregation._mapped import State
from fedprompt.aggregation._steps import (
    EachName,
    check_maker,
    check_state,
    check_step,
    check_stepped,
    checked_previous,
    first_state,
    moments,
    optimized,
    where_known,
)
from fedprompt.interfaces import ServerRule, Weighted


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
    return EachName(_Blend(decay=0.0))


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
    return EachName(_Blend(decay))


def descend(
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer],
    *,
    max_norm: float | None = None,
) -> ServerRule:
    """Take one step of a torch optimizer, with the mean as the gradient (FedL2G).

    If clients send parameters and not gradients, use :func:`fedopt`.

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
    check_maker(make_optimizer, max_norm)
    return EachName(_Descend(make_optimizer, max_norm))


@dataclass(frozen=True)
class _Blend:
    decay: float

    def init(self, previous: Tensor, /) -> State:
        checked_previous(previous)
        return {}

    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]:
        check_step(previous, mean)
        check_state(state, not state)
        blended = mean.value
        if self.decay > 0:
            blended = torch.lerp(widened(mean.value), widened(previous), self.decay)
        return where_known(mean, rounded(blended, previous), previous), state


@dataclass(frozen=True)
class _Descend:
    make_optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    max_norm: float | None

    def init(self, previous: Tensor, /) -> State:
        return first_state(self.make_optimizer, previous)

    def step(self, previous: Tensor, mean: Weighted, state: State, /) -> tuple[Tensor, State]:
        check_step(previous, mean)
        zeros = torch.zeros_like(previous)
        gradient = where_known(mean, mean.value.to(previous.dtype), zeros)
        new, optimizer = optimized(
            self.make_optimizer, previous, gradient, state, max_norm=self.max_norm
        )
        check_stepped(mean, {"value": where_known(mean, new, zeros), **moments(optimizer)})
        return where_known(mean, new, previous), optimizer.state_dict()
