"""The proximal term, which keeps the parameters of a client near the broadcast."""

from collections.abc import Mapping

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._names import inner_name


def proximal_loss(module: nn.Module, values: Mapping[str, Tensor]) -> Float[Tensor, ""]:
    r"""Compute half the squared distance of a module's parameters to `values` (FedProx).

    .. math:: \tfrac12 \lVert \theta - v \rVert_2^2

    Multiply by a `proximal_weight` and add to the loss of each step. Parameters without a name in
    `values`, such as private ones, are free, and so are buffers, such as running statistics. The
    sum is computed in float32 at least.

    Args:
        module: Module that the client trains.
        values: Tensors by parameter name, such as the broadcast of this round. Names are as in
            :func:`collect`. They receive no gradient. They may have another dtype and device than
            the parameters.

    Returns:
        The loss. A parameter with several names counts once.

    Raises:
        ValueError: If `values` is empty, a name is not a parameter, or a shape differs.

    Example:
        >>> model = nn.Linear(2, 1, bias=False)
        >>> values = {"weight": model.weight.detach() + torch.tensor([[3.0, 4.0]])}
        >>> round(proximal_loss(model, values).item(), 4)  # 25 / 2
        12.5

    References:
        Li et al., "Federated Optimization in Heterogeneous Networks" (FedProx), MLSys 2020.
    """
    check.module("module", module)
    check.tensors("values", values, sync=False)
    named = module.named_parameters(remove_duplicate=False)
    parameters = {inner_name(module, name): parameter for name, parameter in named}
    buffers = {inner_name(module, name) for name, _ in module.named_buffers()}
    values = {name: value for name, value in values.items() if name not in buffers}
    check.known("values", values, parameters, "name parameters of `module`")
    check.some("values", values, "name parameters of `module`")
    pairs: dict[Tensor, Tensor] = {}  # every parameter once
    for name, value in values.items():
        check.shape(f"values[{name!r}]", value, parameters[name].shape, "the parameter")
        pairs.setdefault(parameters[name], value.detach())
    wide = any(parameter.dtype == torch.float64 for parameter in pairs)
    dtype, device = torch.float64 if wide else torch.float32, next(iter(pairs)).device
    squares = [(p.to(dtype) - v.to(p.device, dtype)).square().sum() for p, v in pairs.items()]
    return 0.5 * torch.stack([square.to(device) for square in squares]).sum()
