"""Hyperparameters: a grid of learning rates for each kind of parameters, and a rate of heads."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.nn as nn

from fedprompt.compare.hyperparameters import TUNING_SEED, draw, half_decades
from fedprompt.compare.rows import HEAD_RATE, Row
from fedprompt.methods import METHODS, VitSetting
from fedprompt.methods.models import PromptedModel
from fedprompt.methods.registry import LEARNING_RATE
from tasks.controls import CONTROLS, DRAWN_AS

HEAD_RATES = 0.01, 0.003, 0.03
"""Learning rates of projections and heads; the first is the default."""
CONTEXT_RATE = 0.005
"""Default learning rate of most rows that train contexts, a trial of all that share their range."""
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
    return replace(row, values={**row.values, HEAD_RATE: HEAD_RATES[0]})


def draws(row: Row, name: str, rates: tuple[float, float] | None = None) -> list[dict[str, Any]]:
    """Return the hyperparameters of trials; the first has those of the row.

    The learning rates are the half decades of a range, which is the same for all rows that train
    the same kind of parameters. Other hyperparameters are drawn, and the learning rate of the head
    has its own grid. The gate of pFedMoAP has the draws of pFedMoAP.

    Args:
        row: Row with a method.
        name: Name that decides the draws, with the name of the method.
        rates: Lowest and highest learning rate. If None, those of the method's file.
    """
    method = DRAWN_AS.get(str(row.method), row.method)
    rng = np.random.default_rng([TUNING_SEED, *f"{name} {method}".encode()])
    drawn = [dict(row.values)]
    if not (search := (METHODS | CONTROLS)[str(method)].search):
        return drawn
    others = [key for key in search if key != "learning_rate"]
    for rate in half_decades(*(rates or search["learning_rate"])):
        values = {key: draw(search[key], rng) for key in others}
        values = {key: values[key] for key in others if key in row.entry.search}
        if rate != row.values["learning_rate"]:
            drawn.append({**row.values, **values, "learning_rate": rate})
    contexts = row.entry.families[0] == "CLIP" and search["learning_rate"] in LEARNING_RATE.values()
    if contexts and row.values["learning_rate"] != CONTEXT_RATE:
        drawn.append({**row.values, "learning_rate": CONTEXT_RATE})
    if HEAD_RATE in row.values:
        drawn += [{**row.values, HEAD_RATE: rate} for rate in HEAD_RATES[1:]]
    return drawn
