"""Copies of what a function receives and returns, as if it had been sent."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

_DENSE = torch.contiguous_format
_PLAIN = {type(None), bool, int, float, str}


def copied(tree: Any, given: Any = None) -> Any:
    """Copy a tree as sending does: each tensor is dense, contiguous, detached and unshared.

    Args:
        tree: Tree of dicts, lists, tuples, tensors and other leaves.
        given: Tree that nobody else has. Its tensors are not copied again.
    """
    return _copied(tree, {id(tensor) for tensor in _tensors(given)})


def _copied(part: Any, given: set[int]) -> Any:
    if isinstance(part, Tensor):
        dense = part.is_contiguous() and not part.requires_grad
        if id(part) in given and dense:
            given.remove(id(part))  # another name of it gets a copy
            return part
        return part.clone() if dense else part.detach().clone(memory_format=_DENSE)
    kind = type(part)
    if kind in _PLAIN:
        return part
    if isinstance(part, tuple):
        parts = [_copied(child, given) for child in part]
        if hasattr(part, "stateful"):  # a round has more than its fields
            named: Any = part
            return named._replace(**dict(zip(named._fields, parts, strict=True)))
        return kind._make(parts) if hasattr(kind, "_make") else kind(parts)
    if isinstance(part, Mapping):
        return {key: _copied(child, given) for key, child in part.items()}
    if kind is list:
        return [_copied(child, given) for child in part]
    return copy.deepcopy(part)


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, Mapping | list | tuple):
        for child in part.values() if isinstance(part, Mapping) else part:
            yield from _tensors(child)


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
