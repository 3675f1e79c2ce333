"""Encoding: from a message to one safetensors blob."""

from __future__ import annotations

import torch
from torch import Tensor

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.interfaces import Message, Weighted
from fedprompt.wire import _format
from fedprompt.wire._format import Header, check_message, offsets

__all__ = ["check_message", "encode_payload"]  # rounds check the form of a payload


def encode_payload(message: Message, *, header: Header) -> bytes:
    r"""Write a message as one safetensors blob.

    Weights are written in full. Only the value rows of positive weight are written. So exactly
    ``num_bytes(message)`` bytes follow the header.

    A plain tensor keeps its name, so every reader of safetensors can open a broadcast. A
    :class:`Weighted` becomes ``name:value`` of shape (known rows, \*event) and ``name:weight``.
    Equal messages give equal bytes, in whatever order their names are.

    Nothing is encrypted, and weight 0 is not privacy.

    Args:
        message: Tensors or :class:`Weighted` by name, on any device.
        header: Round, sender, fingerprint and notes, which are written next to the tensors.

    Returns:
        The blob.

    Raises:
        TypeError: If a dtype is complex or narrower than 8 bits, or a tensor is not dense.
        ValueError: If `message` has a reserved name, a value is NaN or infinite, a weight is
            negative, or `header` is longer than 16 KiB.

    Example:
        >>> message = {"head": Weighted(torch.zeros(3, 4), torch.tensor([2.0, 0.0, 1.0]))}
        >>> blob = encode_payload(message, header=Header(client_id="7"))
        >>> len(blob) - 8 - int.from_bytes(blob[:8], "little") == num_bytes(message)
        True

    References:
        The format is that of https://github.com/huggingface/safetensors.
    """
    _format.check_header(header)
    laid = _format.slots("message", message)
    tensors: dict[str, Tensor] = {}
    for name, entry in message.items():
        argument = f"message[{name!r}]"
        if isinstance(entry, Weighted):
            for field, tensor in zip(Weighted._fields, entry, strict=True):
                check.dense(f"{argument}.{field}", tensor)
            nouns.entry(argument, entry)
            value, weight = entry
            rows = value.detach().reshape(laid[f"{name}:value"].shape)[weight.flatten() > 0]
            tensors |= {f"{name}:value": rows, f"{name}:weight": weight.detach()}
        else:
            check.finite(argument, entry)
            tensors[name] = entry.detach()
    sent = {key: laid[key]._replace(shape=tuple(tensor.shape)) for key, tensor in tensors.items()}
    ordered = [tensors[key].cpu().contiguous().flatten() for key in offsets(sent)]
    content = [tensor.view(torch.uint8).numpy().tobytes() for tensor in ordered]
    text = _format.header_text(header, sent, _format.digest_of(header, sent, content)).encode()
    return b"".join([len(text).to_bytes(8, "little"), text, *content])
