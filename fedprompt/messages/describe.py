"""Sizes of a model and of its messages, in one line."""

from typing import Any, NamedTuple

import torch.nn as nn

import fedprompt._refusals as check
from fedprompt.interfaces import Message, TextEncoder, Trunk, Weighted
from fedprompt.messages.payload import num_bytes


class Description(NamedTuple):
    """Numbers of parameters, and bytes of a client in a round; ``print`` shows one line.

    Attributes:
        trained: Number of parameters with gradients.
        frozen: Number of parameters without gradients.
        sent: Number of values in the message, without its weights.
        num_bytes: Bytes of the message, as counted by :func:`num_bytes`.
    """

    trained: int
    frozen: int
    sent: int
    num_bytes: int

    def __str__(self) -> str:
        share = self.trained / max(1, self.trained + self.frozen)
        return (
            f"trained {self.trained:,} of {self.trained + self.frozen:,} parameters ({share:.2%}), "
            f"sent {self.sent:,} ({self.num_bytes:,} bytes a round)"
        )


def describe(
    model: nn.Module, message: "Message", *, trunk: "nn.Module | Trunk | TextEncoder | None" = None
) -> "Description":
    """Count the trained, frozen and sent parameters, and the bytes that a client sends in a round.

    Parameters that `model` and `trunk` share count once.

    Args:
        model: Module that the client trains, such as prompts and a head.
        message: Tensors or :class:`Weighted` by name, such as the payload of :func:`collect`.
        trunk: Frozen backbone, if it is not part of `model`: a module, or a trunk or tower of this
            library. If None, only the parameters of `model` count.

    Returns:
        Named tuple of the numbers of `trained`, `frozen` and `sent` parameters and of bytes
        (`num_bytes`), which prints as one line.

    Example:
        >>> from fedprompt import collect
        >>> backbone = nn.Linear(100, 4).requires_grad_(False)
        >>> head = nn.Linear(4, 2)
        >>> payload = collect(head, weight=50)
        >>> print(describe(head, payload, trunk=backbone))
        trained 10 of 414 parameters (2.42%), sent 10 (48 bytes a round)
    """
    check.module("model", model)
    backbone = trunk if isinstance(trunk, nn.Module) else getattr(trunk, "model", None)
    rule = "be a module, or a trunk or tower of fedprompt"
    check.typed(trunk is None or isinstance(backbone, nn.Module), "trunk", rule, trunk)
    parameters = {*model.parameters(), *(() if backbone is None else backbone.parameters())}
    size = num_bytes(message)
    trained = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    frozen = sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
    return Description(trained, frozen, sum(map(_sent, message.values())), size)


def _sent(entry: Any) -> int:
    """Count the values of an entry that are sent: rows of weight 0 are not."""
    if not isinstance(entry, Weighted):
        return int(entry.numel())
    event = entry.value.shape[entry.weight.ndim :].numel()
    return int((entry.weight > 0).sum()) * event
