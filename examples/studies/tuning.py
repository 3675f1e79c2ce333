"""Rows of all methods, of which heads have another learning rate."""

from dataclasses import dataclass, replace
from typing import Any

import torch.nn as nn

from fedprompt.methods import METHODS, VitSetting
from fedprompt.methods.models import PromptedModel
from studies.controls import CONTROLS
from studies.core import HEAD_RATE, Row

HEAD = 0.01
"""Default learning rate of projections and heads."""
ONE_RATE = "head_tuning", "plain_steps", "scaffold"
"""Methods that train heads only, or with the plain steps of their definition."""


@dataclass(kw_only=True)
class HeadSetting(VitSetting):
    """Setting whose clients train projections and heads with another learning rate.

    Attributes:
        head_rate: Learning rate of projections and heads. If None, it is that of the method.
    """

    head_rate: float | None = None

    def new_model(self, client: int | None = None, **options: Any) -> PromptedModel:
        """Make a model whose projection and head are marked."""
        model = super().new_model(client, **options)
        for parameter in (*model.projection.parameters(), *model.head.parameters()):
            parameter.of_head = True
        return model

    def optimizer(self, parameters: Any, learning_rate: float, server_round: int = 0) -> Any:
        """Make the optimizer of a client, with a group of projections and heads."""
        make = super().optimizer
        if self.head_rate is None:
            return make(parameters, learning_rate, server_round)
        if isinstance(parameters, nn.Module):
            parameters = [weight for weight in parameters.parameters() if weight.requires_grad]
        heads = [weight for weight in parameters if hasattr(weight, "of_head")]
        others = [weight for weight in parameters if not hasattr(weight, "of_head")]
        parts = (others, learning_rate), (heads, self.head_rate)
        optimizer, *more = (make(part, rate, server_round) for part, rate in parts if part)
        for head_optimizer in more:
            optimizer.add_param_group(head_optimizer.param_groups[0])
        return optimizer


def rows_of(family: str, *without: str) -> list[Row]:
    """Return the rows of all methods of a family and of their controls, without some."""
    methods = (METHODS | CONTROLS).items()
    return [Row.of(n) for n, entry in methods if family in entry.families and n not in without]


def two_rates(row: Row) -> Row:
    """Give a row the default learning rate of heads, if it trains other parameters, too."""
    if row.method in ONE_RATE:
        return row
    return replace(row, values={**row.values, HEAD_RATE: HEAD})
