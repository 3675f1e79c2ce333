"""From a module to a message, and back."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn as nn
from jaxtyping import Real
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt._names import inner_name
from fedprompt.interfaces import Message, Payload, Weighted
from fedprompt.interfaces.nouns import per_row


def collect(
    module: nn.Module,
    *,
    weight: float,
    rows: Mapping[str, Real[Tensor, ...]] | None = None,
    only: Iterable[str] | None = None,
    buffers: bool = False,
) -> dict[str, Weighted]:
    """Copy a module's parameters into a payload: the message of a client.

    All parameters are sent under their names, trainable or not. Keep private parameters in another
    module, which is not collected: weight 0 is not privacy.

    If training changed buffers that are not sent, such as running statistics of batch
    normalization, a ``UserWarning`` names them once: a shared module would carry them from client
    to client, outside of all messages and states. Send them by `buffers`, or keep
    them in the state of each client (``snapshot(module, buffers=True)``).

    If `module` has trainable parameters and more bytes of frozen ones, a ``UserWarning`` names the
    frozen ones. Pass the trainable names as `only`, or all names if you mean to send them.

    Wrappers do not change the names: ``DistributedDataParallel``, ``DataParallel`` and compiled
    modules, at any depth.

    Args:
        module: Module that the client trained.
        weight: Evidence behind every parameter, usually ``num_examples``; finite and at least 0.
        rows: Evidence for single rows, by parameter name. It replaces `weight` for this name. Each
            is a tensor of numbers with the first axes of the parameter, such as (1, 8) for the
            tokens (1, 8, 48) of :class:`ShallowPrompts`.
        only: Names or dotted prefixes. If None, every parameter is sent.
        buffers: Whether floating-point buffers of ``module.state_dict()`` are sent, too. Integers,
            such as the number of batches, have no mean and are left out.

    Returns:
        Entries by name. Each has a detached copy of the parameter, and float32 weights on its
        device.

    Raises:
        ValueError: If nothing matches; an entry of `only` or `rows` matches nothing; a weight is
            negative, not finite, or positive and outside the range of float32; row weights have
            another shape; or a row of positive weight holds NaN or infinity.

    Example:
        >>> payload = collect(nn.Linear(3, 2), weight=40)
        >>> {name: tuple(entry.value.shape) for name, entry in payload.items()}
        {'weight': (2, 3), 'bias': (2,)}
        >>> payload["bias"].weight
        tensor(40.)
    """
    check.number("weight", weight, at_least=0)
    whole = _float32("weight", torch.tensor(weight, dtype=torch.float64))
    values = snapshot(module, only=only, buffers=buffers)
    if buffers:
        values = {name: value for name, value in values.items() if value.is_floating_point()}
    check.require(values, "only", "name floating-point numbers", "integers alone")
    if only is None and not buffers:
        _warn_of_frozen(module, values)
    rows = {} if rows is None else rows
    check.names("rows", rows)
    check.known("rows", rows, values, "name collected parameters")
    if weight:
        _warn_of_buffers(module, values, rows)
    payload = {}
    for name, value in values.items():
        counts = _counts(name, rows[name], value) if name in rows else whole
        payload[name] = Weighted(value, counts.to(value.device, copy=True))
        nouns.entry(f"payload[{name!r}]", payload[name])
    return payload


def _counts(name: str, given: object, value: Tensor) -> Tensor:
    """Cast the weights of a value's rows."""
    counts = _float32(f"rows[{name!r}]", given)
    check.first_axes(f"rows[{name!r}]", counts, repr(name), value)
    check.nonnegative(f"rows[{name!r}]", counts)
    return counts


def _warn_of_frozen(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Warn if most bytes of a module with trainable parameters are frozen: a backbone, probably."""
    trained = {name for name, tensor in _tensors(module).items() if tensor.requires_grad}
    frozen = [name for name in values if name not in trained]
    frozen_bytes = sum(values[name].nbytes for name in frozen)
    total = sum(value.nbytes for value in values.values())
    if not trained or 2 * frozen_bytes <= total:
        return
    paths = zip(*(name.split(".") for name in frozen), strict=False)
    common = ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, paths))
    under = f" under {common!r}" if common else ""
    warnings.warn(
        f"`module` has {len(frozen)} frozen parameters{under}, which are sent, too: "
        f"{frozen_bytes:,} of {total:,} bytes. "
        f"Pass `only`, such as only={sorted({name.partition('.')[0] for name in trained})}.",
        stacklevel=3,
    )


_LOADED = WeakKeyDictionary[nn.Module, dict[str, tuple[int, int]]]()
"""Buffers that the last `load_values` of a module did not write: identity and version of each."""

_WARNED = set[tuple[str, ...]]()
"""Names of buffers that a warning had, because clients may have new modules in each round."""

_COUNT = "num_batches_tracked"


def _marks(module: nn.Module) -> dict[str, tuple[int, int]]:
    """Return a mark of each buffer of the state dict, which a write changes.

    Modules with a function `start_round`, such as selection keys, begin each round anew.
    """
    anew = [part for part in module.modules() if hasattr(part, "start_round")]
    begun = {id(buffer) for part in anew for buffer in part.buffers()}
    watched = {id(buffer) for buffer in module.buffers()} - begun
    return {
        name: (id(tensor), tensor._version)
        for name, tensor in (_tensors(module, buffers=True) if watched else {}).items()
        if id(tensor) in watched and not tensor.is_inference()
    }


def _tensors(module: nn.Module, *, buffers: bool = False) -> dict[str, Tensor]:
    """Return the parameters, and the buffers of the state dict, by names without wrappers."""
    tensors: dict[str, Tensor] = dict(module.named_parameters())
    if buffers:
        saved = module.state_dict().keys()
        tensors |= {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {inner_name(module, name): tensor for name, tensor in tensors.items()}


def _warn_of_buffers(
    module: nn.Module, sent: Mapping[str, Tensor], rows: Mapping[str, Tensor]
) -> None:
    """Warn once if training changed buffers of a module that are neither loaded nor sent."""
    now, before = _marks(module), _LOADED.get(module)
    if before is None:  # it was never loaded, so only statistics are known to change
        parts = [part for part in module.modules() if part.training and getattr(part, _COUNT, None)]
        counted = {id(getattr(part, _COUNT)) for part in parts}
        changed, before = [name for name, mark in now.items() if mark[0] in counted], now
    else:
        changed = [name for name, mark in before.items() if now.get(name, mark) != mark]
    # PyTorch counts the writes into the number of batches, and not those into the statistics.
    names = [name.replace(_COUNT, "running_mean") for name in changed]
    known = {now[name][0] for name in sent if name in now} | set(map(id, rows.values()))
    missing = [name for name in names if name in before and now[name][0] not in known]
    if missing and (*missing,) not in _WARNED:
        _WARNED.add((*missing,))
        warnings.warn(
            "`module` has buffers that training changes and no message has, such as running "
            f"statistics: {check.some_names(missing)}. A shared module carries them from client to "
            "client. Send them by collect(..., buffers=True), or keep them in the state of each "
            "client, and load it: snapshot(module, buffers=True).",
            stacklevel=3,
        )


def _float32(argument: str, weight: Any) -> Tensor:
    """Cast weights; refuse one that would become infinite or 0."""
    rule = "be a tensor of real numbers"
    check.typed(isinstance(weight, Tensor) and not weight.is_complex(), argument, rule, weight)
    cast: Tensor = weight.detach().float()
    lost = (cast == 0) & (weight != 0) | cast.isinf() & ~weight.isinf()
    check.nothing(weight[lost].tolist(), argument, "be 0 or within the range of float32")
    return cast


def snapshot(
    module: nn.Module, *, only: Iterable[str] | None = None, buffers: bool = False
) -> dict[str, Tensor]:
    """Copy a module's parameters into values: the first broadcast, and the state of a server.

    Args:
        module: Any module.
        only: Names or dotted prefixes. If None, everything is copied.
        buffers: Whether the buffers of ``module.state_dict()`` are copied, too, such as the
            statistics of batch normalization. The state of a client that keeps its model needs
            them.

    Returns:
        Detached copies by name, trainable or not. Names are as in :func:`collect`.

    Raises:
        ValueError: If nothing matches, or an entry of `only` matches nothing.

    Example:
        >>> list(snapshot(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), only=["1"]))
        ['1.weight', '1.bias']
    """
    check.module("module", module)
    check.flag("buffers", buffers)
    found = _tensors(module, buffers=buffers)
    chosen = list(found) if only is None else _matching(list(found), only)
    check.require(chosen, "module", "have parameters", type(module).__name__)
    return {name: found[name].detach().clone() for name in chosen}


@torch.no_grad()
def load_values(module: nn.Module, message: Message) -> None:
    """Write a message into a module, completely or not at all.

    Parameters that the message does not name keep their values, and so do rows of weight 0.
    Buffers may be loaded, too.

    Args:
        module: Module to write into. Names are as in :func:`collect`.
        message: Tensors or :class:`Weighted` by parameter or buffer name. Values are cast to the
            dtype and device of their target.

    Raises:
        TypeError: If a dtype cannot be cast, such as a float into an integer buffer, or if a
            parameter is sharded, quantized or on the meta device.
        ValueError: If a name is unknown, a shape differs, a value is NaN or beyond the dtype, or
            two names of one tied parameter have different values. The module is unchanged then.

    Example:
        >>> model = nn.Linear(1, 2, bias=False)
        >>> entry = Weighted(torch.tensor([[7.0], [9.0]]), torch.tensor([1.0, 1.0]))
        >>> load_values(model, {"weight": entry})
        >>> model.weight.flatten().tolist()
        [7.0, 9.0]
    """
    check.module("module", module)
    check.names("message", message, "map names to tensors or Weighted")
    tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= module.named_buffers(remove_duplicate=False)
    targets = {inner_name(module, name): target for name, target in tensors.items()}
    check.known("message", message, targets, "name parameters or buffers of `module`")
    for name in message:
        check.dense(f"module.{name}", targets[name])
    new = {name: _new_value(name, targets[name], entry) for name, entry in message.items()}
    first: dict[int, str] = {}  # name of a tied parameter
    for name, value in new.items():
        other = first.setdefault(id(targets[name]), name)
        same = other == name or torch.equal(value, new[other])  # NaN differs from itself
        rule = f"have equal values for {other!r} and {name!r}, which are one parameter"
        check.require(same, "message", rule, "two that differ")
    for name, value in new.items():
        targets[name].copy_(value)
    _LOADED[module] = {name: mark for name, mark in _marks(module).items() if name not in new}


def delta(payload: Payload, values: Mapping[str, Tensor]) -> dict[str, Weighted]:
    """Subtract the broadcast from a payload: how far a client moved.

    Send the change instead of the value if a codec leaves numbers out
    (:func:`fedprompt.codecs.top_k`), or if an aggregator shall compare directions. A server adds
    the mean change with ``descend(partial(torch.optim.SGD, lr=1.0, maximize=True))``.

    Args:
        payload: Payload of :func:`collect`.
        values: Broadcast by name, with at least the names of the payload. Each tensor has the shape
            and dtype of the payload's value.

    Returns:
        Value minus broadcast by name, with the weights of the payload. Rows of weight 0 become 0.

    Raises:
        ValueError: If `values` lacks a name, a weight is negative, a number is not finite, or a
            difference overflows its dtype.

    Example:
        >>> payload = {"head": Weighted(torch.tensor([3.0, 5.0]), torch.tensor(40.0))}
        >>> delta(payload, {"head": torch.tensor([1.0, 6.0])})
        {'head': Weighted(value=tensor([ 2., -1.]), weight=tensor(40.))}
    """
    nouns.payload(payload)
    check.names("values", values)
    moved = {}
    for name, entry in payload.items():
        change = entry.value - nouns.value_of("values", values, name, entry)
        change = entry._replace(value=change).known
        check.finite(f"payload[{name!r}] minus values[{name!r}]", change)
        moved[name] = Weighted(change, entry.weight.clone())
    return moved


def num_bytes(message: Message) -> int:
    """Count the bytes of a message, without a header.

    Weights count in full; of values, only the rows of positive weight count.

    Args:
        message: Tensors or :class:`Weighted` by name.

    Returns:
        Number of bytes in the dtypes of the message.

    Raises:
        ValueError: If a weight is negative or not finite, or its shape is not the leading shape of
            its value.

    Example:
        Two of three rows are known: 2 x 4 float32 values and 3 float32 weights.

        >>> num_bytes({"logits": Weighted(torch.zeros(3, 4), torch.tensor([2.0, 0.0, 1.0]))})
        44
    """
    check.names("message", message, "map names to tensors or Weighted")
    return sum(_entry_bytes(f"message[{name!r}]", entry) for name, entry in message.items())


def _entry_bytes(argument: str, entry: Tensor | Weighted) -> int:
    check.instance(argument, entry, Tensor | Weighted, "be a tensor or a Weighted")
    if isinstance(entry, Tensor):
        return entry.numel() * entry.itemsize
    value, weight = nouns.layout(argument, entry)
    one = weight.item() if weight.ndim == 0 and weight.device.type == "cpu" else -1.0
    if not 0 <= one < math.inf:  # of one number, this is five times as fast
        nouns.weights(argument, entry)
    rows = int((weight > 0).sum()) if one < 0 else int(one > 0)
    return weight.nbytes + rows * value.shape[weight.ndim :].numel() * value.itemsize


def _new_value(name: str, target: Tensor, entry: Tensor | Weighted) -> Tensor:
    argument = f"message[{name!r}]"
    check.instance(argument, entry, Tensor | Weighted, "be a tensor or a Weighted")
    value = entry if isinstance(entry, Tensor) else nouns.layout(argument, entry).value
    check.shape(argument, value, target.shape, repr(name))
    rule = f"have a dtype that casts to {target.dtype}"
    check.require(torch.can_cast(value.dtype, target.dtype), argument, rule, value.dtype, TypeError)
    sent, value = value, value.to(target.device, target.dtype)
    if isinstance(entry, Tensor):
        check.finite(argument, value)
        integers = not target.is_floating_point() and not target.is_complex()
        if integers and value.dtype != sent.dtype and value.tolist() != sent.tolist():
            raise check.wrong(argument, f"fit into {value.dtype}", "numbers beyond it")
        return value.clone() if value is entry else value  # it may be memory of `module`
    weight = entry.weight.to(target.device)
    nouns.entry(argument, Weighted(value, weight))
    return torch.where(per_row(weight > 0, value), value, target)


def _matching(names: list[str], only: Iterable[str]) -> list[str]:
    check.iterable("only", only, "names or prefixes, such as ['prompts']")
    prefixes = list(only)
    check.texts("only", prefixes, at_least=0)
    dotted = {prefix: f"{prefix}." for prefix in prefixes}
    missed = [p for p in prefixes if not any(f"{name}.".startswith(dotted[p]) for name in names)]
    if missed or not prefixes:
        rule = f"each match a name or a dotted prefix of {check.some_names(names)}"
        raise check.wrong("only", rule, missed or "none")
    return [name for name in names if f"{name}.".startswith(tuple(dotted.values()))]
