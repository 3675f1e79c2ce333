"""From modules to messages and back."""

from collections.abc import Iterable, Mapping

import torch
import torch.nn as nn
from jaxtyping import Real
from torch import Tensor

from fedprompt._checks import (
    check_finite,
    check_number,
    check_upload,
    check_weights,
    checked_layout,
    kind,
    per_row,
    wrong_type,
    wrong_value,
)
from fedprompt.interfaces import Message, Weighted

_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def collect(
    module: nn.Module,
    *,
    weight: float,
    rows: Mapping[str, Real[Tensor, "..."]] | None = None,
    only: Iterable[str] | None = None,
) -> dict[str, Weighted]:
    """Make a client's upload of a module's parameters.

    All parameters travel by their names, trainable or not, as detached copies; buffers never do. What is private must be a module of its
    own that is never collected: weight 0 is not privacy.

    The names are those of the module inside a ``DistributedDataParallel``, a ``DataParallel`` or a
    compiled module, at whatever depth, so that they fit on every rank and without any wrapper.

    Args:
        module: What the client trained.
        weight: The evidence behind every parameter as a whole, usually ``num_examples``; finite and at least 0.
        rows: Evidence for single rows instead, by parameter name: a tensor of numbers or counts whose shape is the leading
            shape of that parameter.
        only: Names or dotted prefixes; None takes every parameter.

    Returns:
        From each name to its :class:`Weighted`, with float32 weights on the parameter's device.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If nothing matches, an entry of `only` or `rows` matches nothing, row weights
            have the wrong shape, a weight is negative, not finite or out of the range of float32
            (a positive one that would become 0 too), or a parameter holds NaN or infinity in a row
            of positive weight.

    Example:
        >>> payload = collect(nn.Linear(3, 2), weight=40)
        >>> {name: (tuple(upload.value.shape), upload.weight.item()) for name, upload in payload.items()}
        {'weight': ((2, 3), 40.0), 'bias': ((2,), 40.0)}
    """
    check_number("weight", weight, at_least=0)
    whole = _float32("weight", torch.tensor(weight, dtype=torch.float64))
    values, rows = snapshot(module, only=only), dict(rows or {})
    if unknown := sorted(rows.keys() - values.keys()):
        raise wrong_value("rows", f"name collected parameters {_some(values)}", _some(unknown))
    payload = {}
    for name, value in values.items():
        own = _float32(f"rows[{name!r}]", rows[name]) if name in rows else whole
        payload[name] = Weighted(value, own.to(value.device, copy=True))
        check_upload(f"payload[{name!r}]", payload[name])
    return payload


def _float32(argument: str, weight: object) -> Tensor:
    """Cast weights, so that none of them becomes infinite, or 0 and with it an unknown row."""
    if not isinstance(weight, Tensor) or weight.is_complex():
        raise wrong_type(argument, "be a tensor of real numbers", kind(weight))
    cast = weight.detach().float()
    lost = (cast == 0) & (weight != 0) | cast.isinf() & ~weight.isinf()
    if bool(lost.any()):
        raise wrong_value(argument, "be 0 or in the range of float32", weight[lost][0].item())
    return cast


def snapshot(module: nn.Module, *, only: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Copy a module's parameters: the first broadcast, and what the server keeps.

    Args:
        module: Any module.
        only: Names or dotted prefixes; None takes every parameter.

    Returns:
        Detached copies by name, trainable or not, without buffers. Names as in :func:`collect`.

    Raises:
        TypeError: If `module` is not an ``nn.Module`` or `only` is a bare string.
        ValueError: If nothing matches, or an entry of `only` matches nothing.

    Example:
        >>> list(snapshot(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), only=["1"]))
        ['1.weight', '1.bias']
    """
    if not isinstance(module, nn.Module):
        raise wrong_type("module", "be an nn.Module", kind(module))
    parameters = {_inner(module, name): parameter for name, parameter in module.named_parameters()}
    chosen = list(parameters) if only is None else _matching(list(parameters), only)
    if not chosen:
        raise wrong_value("module", "have parameters", type(module).__name__)
    return {name: parameters[name].detach().clone() for name in chosen}


@torch.no_grad()
def load_values(module: nn.Module, message: Message) -> None:
    """Write a message into a module, all of it or nothing.

    Names that the message lacks keep their values, and so do rows of weight 0. Buffers may be loaded.

    Args:
        module: The module to write into; names are those that :func:`collect` gives.
        message: Tensors or :class:`Weighted` by parameter or buffer name; values are cast to the dtype and device of what they overwrite.

    Raises:
        TypeError: If an entry is neither, or its dtype cannot be cast (float into an integer buffer).
        ValueError: If a name is unknown, a shape differs, a value is NaN or infinite (after the
            cast), or two names of one tied parameter come with different values; nothing is written
            then.

    Example:
        >>> model = nn.Linear(1, 2, bias=False)
        >>> load_values(model, {"weight": Weighted(torch.tensor([[7.0], [9.0]]), torch.tensor([1.0, 1.0]))})
        >>> model.weight.flatten().tolist()
        [7.0, 9.0]
    """
    if not isinstance(module, nn.Module):
        raise wrong_type("module", "be an nn.Module", kind(module))
    if not isinstance(message, Mapping):
        raise wrong_type("message", "map names to tensors or Weighted", kind(message))
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    targets = {_inner(module, name): target for name, target in named}
    if unknown := sorted(map(str, message.keys() - targets.keys())):
        raise wrong_value(
            "message", f"name parameters or buffers of `module` {_some(targets)}", _some(unknown)
        )
    new = {name: _new_value(name, targets[name], entry) for name, entry in message.items()}
    _check_ties(targets, new)
    for name, value in new.items():
        targets[name].copy_(value)


def num_bytes(message: Message) -> int:
    """Count what a message needs on the wire: weights in full, of values only the rows of weight above 0; no header.

    Args:
        message: Tensors or :class:`Weighted` by name.

    Returns:
        Bytes, in the dtypes that the message has.

    Raises:
        TypeError: If `message` is not a mapping of these.
        ValueError: If a weight has another shape than the rows of its value, is negative or not
            finite.

    Example:
        Two of three rows are known: 2 x 4 float32 values and 3 float32 weights.

        >>> num_bytes({"logits": Weighted(torch.zeros(3, 4), torch.tensor([2.0, 0.0, 1.0]))})
        44
    """
    return sum(bytes_by_name(message).values())


def bytes_by_name(message: Message) -> dict[str, int]:
    """Count each entry of a message."""
    if not isinstance(message, Mapping):
        raise wrong_type("message", "map names to tensors or Weighted", kind(message))
    if strange := [name for name in message if not isinstance(name, str)]:
        raise wrong_type("message", "have strings as names", kind(strange[0]))
    return {name: _entry_bytes(name, entry) for name, entry in message.items()}


def _entry_bytes(name: str, entry: Tensor | Weighted) -> int:
    if isinstance(entry, Weighted):
        check_weights(f"message[{name!r}]", checked_layout(f"message[{name!r}]", entry))
        event = entry.value.shape[entry.weight.ndim :].numel()
        known = int((entry.weight > 0).sum())
        return (
            entry.weight.numel() * entry.weight.element_size()
            + known * event * entry.value.element_size()
        )
    if isinstance(entry, Tensor):
        return entry.numel() * entry.element_size()
    raise wrong_type(f"message[{name!r}]", "be a tensor or a Weighted", kind(entry))


def _new_value(name: str, target: Tensor, entry: Tensor | Weighted) -> Tensor:
    argument = f"message[{name!r}]"
    if not isinstance(entry, Tensor | Weighted):
        raise wrong_type(argument, "be a tensor or a Weighted", kind(entry))
    value = entry if isinstance(entry, Tensor) else checked_layout(argument, entry).value
    if value.shape != target.shape:
        raise wrong_value(
            argument, f"have the shape of {name!r} {tuple(target.shape)}", tuple(value.shape)
        )
    if not torch.can_cast(value.dtype, target.dtype):
        raise wrong_type(argument, f"have a dtype that casts to {target.dtype}", value.dtype)
    value = value.to(target.device, target.dtype)
    if isinstance(entry, Tensor):
        check_finite(argument, value)
        return value
    weight = entry.weight.to(target.device)
    check_upload(argument, Weighted(value, weight))
    return torch.where(per_row(weight > 0, value), value, target)


def _inner(module: nn.Module, name: str) -> str:
    """Name a parameter or buffer as the module inside its wrappers does."""
    kept, owner = list[str](), module
    for part in name.split("."):
        if not ((isinstance(owner, _WRAPPERS) and part == "module") or part == "_orig_mod"):
            kept.append(part)
        owner = getattr(owner, part)
    return ".".join(kept)


def _check_ties(targets: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> None:
    """Require that names of one parameter get one value: otherwise the last of them would win."""
    first: dict[int, str] = {}
    for name, value in new.items():
        other = first.setdefault(id(targets[name]), name)
        if not torch.equal(value, new[other]):
            rule = f"hold equal values for {other!r} and {name!r}, which are one parameter"
            raise wrong_value("message", rule, "two that differ")


def _some(names: Iterable[str]) -> str:
    """List a few names; a large model has hundreds."""
    names = sorted(names)
    return f"{names[:5]} and {len(names) - 5} more" if len(names) > 5 else f"{names}"


def _matching(names: list[str], only: Iterable[str]) -> list[str]:
    if isinstance(only, str):
        raise wrong_type("only", "be several names or prefixes, such as ['prompts']", repr(only))
    entries = list(only)
    hits = {
        entry: {name for name in names if name == entry or name.startswith(f"{entry}.")}
        for entry in entries
    }
    if missed := [entry for entry in entries if not hits[entry]] or (not entries):
        raise wrong_value(
            "only",
            f"each match a name or a dotted prefix of {_some(names)}",
            missed if entries else "none",
        )
    matched = set().union(*hits.values())
    return [name for name in names if name in matched]
