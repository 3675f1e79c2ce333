"""Server rules without a gradient: overwrite values by a mean, or average over rounds."""

from dataclasses import dataclass

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._float64 import rounded, widened
from fedprompt.aggregation._rules import RowRule, check_state
from fedprompt.interfaces import ServerRule, State


def overwrite() -> ServerRule:
    """Replace values by their mean (FedAvg).

    Rows of total weight 0 keep their previous value exactly.

    Returns:
        A :class:`ServerRule` with an empty state. Like every server update, it takes a tensor and
        an entry, or a dict of tensors and a payload. If a name is missing from the payload, its
        value does not change.

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
    return _Blend(decay=0.0)


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
    check.number("decay", decay, at_least=0, at_most=1)
    return _Blend(decay)


@dataclass(frozen=True)
class _Blend(RowRule):
    decay: float

    def first_state(self, previous: Tensor) -> State:
        return {}

    def update(self, previous: Tensor, mean: Tensor, state: State) -> tuple[Tensor, State]:
        check_state(state, not state)
        if self.decay > 0:
            mean = torch.lerp(widened(mean), widened(previous), self.decay)
        return rounded(mean, previous), state
