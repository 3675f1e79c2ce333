"""Checks of entries and payloads that are read as numbers, and of methods."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.interfaces import ClassNames, Method, Payload, PromptStream, Weighted
from fedprompt.interfaces.method import DECODES
from fedprompt.interfaces.nouns import per_row


def layout(argument: str, entry: object) -> Weighted:
    """Return an entry of tensors; its numbers are not checked."""
    if not isinstance(entry, Weighted):
        hint = " (collect(module, weight=...) makes a payload)" if isinstance(entry, Tensor) else ""
        raise check.wrong_type(argument, "be a Weighted(value, weight)", check.kind(entry) + hint)
    value: Any = entry.value
    if not isinstance(value, Tensor):
        rule, got = "be a floating-point tensor", check.kind(value)
        raise check.wrong_type(f"{argument}.value", rule, got)
    return entry


def entry(argument: str, entry: object) -> None:
    """Require an entry of numbers that fit, with one reduction and one synchronization.

    Values are not checked where they cannot be read.
    """
    value, weight = layout(argument, entry)
    if not check.values_readable(value, weight):
        return
    # A negative weight makes the second sum NaN. There are false alarms: a row of weight 0 may
    # contain NaN, and a large product may overflow.
    checksum = (value * per_row(weight, value)).sum() + weight.sqrt().sum()
    if not math.isfinite(checksum.item()):
        rows(argument, Weighted._make((value, weight)))


def rows(argument: str, entry: Weighted) -> None:
    """Require finite weights of at least 0, and finite values in rows of positive weight."""
    weights(argument, entry)
    rows = entry.known.reshape(entry.weight.numel(), -1)
    if broken := torch.nonzero(~torch.isfinite(rows).all(1)).flatten().tolist():
        rule = "be finite wherever its weight is positive"
        raise check.wrong(f"{argument}.value", rule, f"NaN or infinity in rows {broken[:5]}")


def weights(argument: str, entry: Weighted) -> None:
    """Require finite weights of at least 0; values are not checked."""
    check.nonnegative(f"{argument}.weight", entry.weight)


def payload(payload: object) -> None:
    """Require a payload of entries whose numbers fit."""
    for name, sent in form("payload", payload).items():
        entry(f"payload[{name!r}]", sent)


def form(argument: str, payload: Any, *, at_least: int = 1) -> Payload:
    """Return a payload of entries; numbers are not checked."""
    check.names(argument, payload, "map names to Weighted", at_least=at_least)
    for name, entry in payload.items():
        layout(f"{argument}[{name!r}]", entry)
    checked: Payload = payload
    return checked


def value_of(argument: str, values: Mapping[str, Tensor], name: str, entry: Weighted) -> Tensor:
    """Return the tensor of a name, which has the form of the payload's entry of this name."""
    check.require(name in values, argument, f"have the name {name!r}", sorted(values))
    like = entry.value
    check.tensor(f"{argument}[{name!r}]", values[name], like.dtype, like.shape, "the payload")
    return values[name]


def stream(argument: str, stream: Any, dim: int | None = None) -> None:
    """Require a stream of prompts of a width, with finite numbers on the CPU."""
    check.instance(argument, stream, PromptStream, "be a PromptStream; call the prompt module")
    for layer, tokens in stream.layers.items():
        place = f"{argument}.layers[{layer}]"
        check.instance(place, tokens, Tensor, "be a floating-point tensor")
        check.finite(place, tokens, sync=False)
        if tokens.ndim not in (2, 3) or dim not in (None, tokens.shape[-1]):
            width = "dim" if dim is None else str(dim)
            rule = f"have shape (prompts, {width}) or (batch, prompts, {width})"
            raise check.wrong(place, rule, tuple(tokens.shape))


def class_names(names: Any) -> None:
    """Require class names as a text tower makes them."""
    check.instance("names", names, ClassNames, "be ClassNames, from tower.class_names")
    check.instance("names.tokens", names.tokens, Tensor, "be a floating-point tensor")


def method(method: Any, *, needs_form: bool = False) -> None:
    """Require a method, with a form if it is needed."""
    check.instance("method", method, Method, "be a Method(client, server, predict)")
    if needs_form:
        check.function("method.form", method.form, DECODES)


def cohort(cohort: Iterable[int], server_round: int) -> list[int]:
    """Return the ids of the clients of a round, each once."""
    check.iterable(f"cohorts[{server_round}]", cohort, "ids of clients")
    drawn = list(cohort)
    with check.located(f"round {server_round}"):
        for position, client in enumerate(drawn):
            check.count(f"cohorts[{server_round}][{position}]", client, at_least=0)
        clients = [int(client) for client in drawn]
        doubled = sorted(client for client, times in Counter(clients).items() if times > 1)
        rule = "have a client at most once in a round"
        check.require(not doubled, "cohorts", rule, doubled)
    return clients
