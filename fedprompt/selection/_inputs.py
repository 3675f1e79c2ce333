"""Checks of queries, keys and counts, and the share of each group in the counts."""

import torch
from torch import Tensor

import fedprompt._refusals as check


def check_pair(query: Tensor, keys: Tensor) -> None:
    """Require queries (batch, dim) and keys (groups, dim) on one device.

    Values are checked on CPU tensors only, to avoid a GPU synchronization.
    """
    for name, tensor, axes in (("query", query, "(batch, dim)"), ("keys", keys, "(groups, dim)")):
        rule = f"be a floating-point tensor {axes}"
        check.number_tensor(name, tensor, rule, ndim=2, read=True)
    check.require(0 not in keys.shape, "keys", "hold at least one group of width 1 or more", keys)
    check.comparable("query", query, "keys", keys)


def check_counts(name: str, counts: Tensor, groups: int, *, sync: bool = False) -> None:
    """Require one count for each group, finite and at least 0.

    Unless `sync` is set, values are checked on CPU tensors only.
    """
    real = isinstance(counts, Tensor) and not counts.is_complex() and counts.dtype != torch.bool
    check.typed(real, name, "be a tensor of counts (groups,)", counts)
    rule = f"have one count for each of {groups} groups"
    check.require(counts.shape == (groups,), name, rule, counts)
    if check.values_readable(counts, sync=sync):
        check.dense(name, counts)
        check.nonnegative(name, counts)


def shares(usage: Tensor | None, like: Tensor) -> Tensor:
    """Return each group's share of all selections, (groups,); zeros if there is no selection yet.

    Args:
        usage: Count of each group, or None.
        like: Similarities (batch, groups), which set the dtype and the device.
    """
    if usage is None:
        return like.new_zeros(like.shape[1])
    check_counts("usage", usage, like.shape[1])
    check.same_device("usage", usage, like.device, "the device of `keys`,")
    total = usage.sum(dtype=like.dtype)
    return usage.to(like.dtype) / (total + (total == 0))
