"""A learning rate of their own for projections and heads."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn

from fedprompt.interfaces import Trunk
from fedprompt.methods import VitSetting
from fedprompt.methods.setting import PromptedModel, Tune


def marked(model: PromptedModel) -> PromptedModel:
    """Mark the projection and the head of a model."""
    for parameter in (*model.projection.parameters(), *model.head.parameters()):
        parameter.of_head = True
    return model


@dataclass(kw_only=True)
class HeadSetting(VitSetting):
    """Setting whose clients train projections and heads with another learning rate.

    Attributes:
        head_rate: Learning rate of projections and heads. If None, it is that of the method.
    """

    head_rate: float | None = None

    def new_model(
        self,
        client: int = 0,
        *,
        prompts: Callable[[Trunk], nn.Module | None] | None = None,
        tune: Tune | None = None,
    ) -> PromptedModel:
        """Make a model whose projection and head are marked."""
        return marked(super().new_model(client, prompts=prompts, tune=tune))

    def optimizer(
        self,
        parameters: nn.Module | Sequence[nn.Parameter],
        learning_rate: float,
        server_round: int = 0,
    ) -> torch.optim.Optimizer:
        """Make the optimizer of a client, with a group of projections and heads."""
        if isinstance(parameters, nn.Module):
            parameters = [each for each in parameters.parameters() if each.requires_grad]
        heads = [each for each in parameters if getattr(each, "of_head", False)]
        rest = [each for each in parameters if not getattr(each, "of_head", False)]
        if self.head_rate is None or not heads:
            return super().optimizer(parameters, learning_rate, server_round)
        of_heads = super().optimizer(heads, self.head_rate, server_round)
        if not rest:
            return of_heads
        optimizer = super().optimizer(rest, learning_rate, server_round)
        optimizer.add_param_group(of_heads.param_groups[0])
        return optimizer
