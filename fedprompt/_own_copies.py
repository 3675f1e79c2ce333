"""Copies of what a function receives and returns, as if it had been sent."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

_PLAIN = {type(None), bool, int, float, str}


def copied(tree: Any, known: dict[int, Tensor] | None = None) -> Any:
    """Copy a tree as sending does: each tensor is dense, contiguous, detached and unshared.

    Args:
        tree: Tree of dicts, lists, tuples, tensors and other leaves.
        known: Copies that nobody else has, by identity, of calls with the same dict. The first time
            that `tree` has one of them, it is not copied again.
    """
    return _copied(tree, {} if known is None else known)


def _copied(part: Any, known: dict[int, Tensor]) -> Any:
    kind = type(part)
    if kind is Tensor or isinstance(part, Tensor):
        dense = kind is Tensor and part.is_contiguous() and not part.requires_grad
        if dense and known.pop(id(part), None) is not None:
            return part
        own: Tensor
        if dense:
            own = part.clone()
        else:
            own = part.detach().clone(memory_format=torch.contiguous_format)
            if kind.__torch_dispatch__ is Tensor.__torch_dispatch__:  # it has PyTorch's operators
                own = own.as_subclass(Tensor)
        known[id(own)] = own
        return own
    if kind in _PLAIN:
        return part
    if kind is dict or isinstance(part, Mapping):
        return {key: _copied(child, known) for key, child in part.items()}
    if isinstance(part, tuple):
        parts = [_copied(child, known) for child in part]
        if hasattr(part, "stateful"):  # a round has more than its fields
            named: Any = part
            return named._replace(**dict(zip(named._fields, parts, strict=True)))
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    if kind is list:
        return [_copied(child, known) for child in part]
    return copy.deepcopy(part)


def shared_until_written(tensor: Tensor) -> Tensor:
    """Return a tensor with the same memory, until either of the two is written by PyTorch."""
    same: Tensor = tensor.detach()._lazy_clone()
    return nn.Parameter(same, requires_grad=False) if isinstance(tensor, nn.Parameter) else same


def own_module(model: nn.Module) -> nn.Module:
    """Copy a module; frozen parameters share their memory until one of the two is written."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if not parameter.requires_grad and type(parameter) is nn.Parameter:
            memo[id(parameter)] = shared_until_written(parameter)
    for part in (part for module in model.modules() for part in vars(module).values()):
        if isinstance(part, Tensor):
            if part.grad_fn is not None:
                memo[id(part)] = part.detach().clone()
        elif hasattr(part, "__deepcopy__") and not isinstance(part, nn.Module):
            copy.deepcopy(part, memo)  # a trunk comes before the parts that it has in common
    for buffer in model.buffers():
        if buffer.grad_fn is not None:
            memo[id(buffer)] = buffer.detach().clone()
    return copy.deepcopy(model, memo)
