"""Parts of a message under a dotted name."""

from collections.abc import Mapping
from typing import TypeVar

import fedprompt._refusals as check

_Entry = TypeVar("_Entry")


def part(message: Mapping[str, _Entry], name: str) -> dict[str, _Entry]:
    """Return the entries of a message under a dotted name, without that name.

    Args:
        message: Tensors or :class:`Weighted` by name.
        name: Dotted name in front of the entries; :func:`named` puts it there.

    Returns:
        Entries in the order of `message`. The dict is empty if no name begins with `name`.

    Example:
        >>> answer = {"head": torch.zeros(2)} | named("control", {"head": torch.ones(2)})
        >>> part(answer, "control")
        {'head': tensor([1., 1.])}
    """
    check.names("message", message, "map names to tensors or Weighted")
    check.text("name", name)
    prefix = f"{name}."
    found = {key: entry for key, entry in message.items() if key.startswith(prefix)}
    return {key.removeprefix(prefix): entry for key, entry in found.items()}


def named(name: str, entries: Mapping[str, _Entry]) -> dict[str, _Entry]:
    """Put a dotted name in front of all names, so that a message can have several parts.

    Args:
        name: Name of the part.
        entries: Tensors or :class:`Weighted` by name.

    Example:
        >>> named("control", {"head": torch.ones(2)})
        {'control.head': tensor([1., 1.])}
    """
    check.text("name", name)
    check.names("entries", entries, "map names to tensors or Weighted")
    return {f"{name}.{key}": entry for key, entry in entries.items()}
