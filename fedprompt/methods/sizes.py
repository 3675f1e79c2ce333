"""Clients of unlike size: their own length of prompts, number of layers, or rank of LoRA."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn as nn

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.methods.setting import ClientData, Setting

Sizes = Mapping[int, int | Sequence[int]] | Mapping[str, int | Sequence[int]]
"""Size of each client that does not have the full size, by its id or, as in a file, by its text."""


def of_sizes(
    setting: Setting, make: Callable[..., fp.Method], sizes: Sizes | None, **full: int
) -> fp.Method:
    """Make a method whose clients may be smaller than its full size.

    A client trains and predicts as in the method of its size. It has the first rows of each
    parameter of the full size, on all axes. It receives these rows, and the server averages each
    row over the clients that have it. The first rows begin with the values of the smallest size.

    Args:
        setting: Setting of the run.
        make: Function from a size, as keywords, to a method of :func:`averaged` in which all
            clients have this size. Its server is a :func:`fedprompt.averaging_server`.
        sizes: Size of each smaller client, by client id. With several keywords, a size is one
            number or a sequence of them, and the missing ones are full. If None, all clients have
            the full size.
        full: Full size.

    Example:
        >>> from fedprompt.methods import averaged, fedavg_client
        >>> def make(rows):
        ...     model = setting.seeded(lambda: nn.Embedding(rows, 2))
        ...     return averaged(model, fedavg_client(model, learning_rate=0.1))
        >>> setting = Setting(num_classes=2, rounds=1, clients=range(3))
        >>> method = of_sizes(setting, make, {1: 2}, rows=4)
        >>> [tuple(method.form(client)["weight"].value.shape) for client in range(3)]
        [(4, 2), (2, 2), (4, 2)]
    """
    whole, most = make(**full), (*full.values(),)
    if sizes is None:
        return whole
    own = checked_sizes(setting, sizes, **full)
    smaller = sorted({*own.values()} - {most}, reverse=True)
    methods = {size: make(**dict(zip(full, size, strict=True))) for size in smaller}
    methods[most] = whole
    forms: Any = {size: method.form(0) for size, method in methods.items() if method.form}
    step: Any = whole.server.step
    check.require(hasattr(step, "unlike"), "make", "have an averaging_server", "another server")
    values, rule = whole.server.state["values"], fp.overwrite()
    for size in smaller:
        first = methods[size].server.state["values"].items()
        known = {name: fp.Weighted(value, torch.ones(())) for name, value in first}
        values, _ = rule.step(values, fp.aggregation.padded(known, values), rule.init(values))

    def size_of(client: int) -> tuple[int, ...]:
        return own.get(client, most)

    def form(client: int) -> Any:
        return forms[size_of(client)]

    def answer(client: int, state: Any) -> Any:
        values: Any = whole.server.answer(client, state)
        return fp.aggregation.leading(values, form(client))

    def train(data: ClientData, answer: Any, state: Any) -> Any:
        _check_clients(own, data.setting)  # all clients of the federation, if none were named
        return methods[size_of(data.id)].client(data, answer, state)

    def predict(data: ClientData, answer: Any, state: Any) -> nn.Module:
        return methods[size_of(data.id)].predict(data, answer, state)

    state = {**whole.server.state, "values": values}
    parts: Any = {"state": state, "answer": answer, "step": replace(step, unlike=True)}
    server = whole.server._replace(**parts)
    return fp.Method(train, server, predict, form=form)


def checked_sizes(setting: Setting, sizes: Sizes, **full: int) -> dict[int, tuple[int, ...]]:
    """Return the whole size of each client that is named, by its id or, as in a file, its text."""
    check.instance("sizes", sizes, Mapping, "map ids of clients to sizes")
    found = dict[int, tuple[int, ...]]()
    for key, given in sizes.items():
        client: Any = int(key) if isinstance(key, str) and key.isdecimal() else key
        check.count("key of sizes", client, at_least=0)
        place, size = f"sizes[{client}]", given if isinstance(given, list | tuple) else (given,)
        rule = f"be a number, or up to {len(full)} of them"
        check.require(1 <= len(size) <= len(full), place, rule, check.kind(given))
        for number, (what, most) in zip(size, full.items(), strict=False):
            check.count(place, number, at_most=most, of=f"the full {what}")
        found[int(client)] = (*map(int, size), *[*full.values()][len(size) :])
    check.require(len(found) == len(sizes), "sizes", "name each client once", [*sizes])
    _check_clients(found, setting)
    return found


def _check_clients(own: Mapping[int, Any], setting: Setting) -> None:
    """Require clients of the setting, if it names any."""
    strange = sorted(own.keys() - {*setting.clients}) if setting.clients else []
    check.nothing(strange, "sizes", "name clients of the setting")


def size_of_prompts(prompts: object) -> dict[str, int]:
    """Return the number of layers, if there are several, and the length of visual prompts."""
    rule = "be None, unless clients train LayeredPrompts, such as DeepPrompts"
    check.typed(isinstance(prompts, fp.LayeredPrompts), "sizes", rule, prompts)
    depth, length, _ = prompts.tokens.shape  # type: ignore[attr-defined]
    return {"depth": depth, "length": length} if depth > 1 else {"length": length}


def shorten(prompts: Any, *, length: int, depth: int = 1) -> None:
    """Keep the first layers of visual prompts, and the first tokens of each."""
    prompts.layers = prompts.layers[:depth]
    prompts.tokens = nn.Parameter(prompts.tokens.detach()[:depth, :length].clone())


def low_rank_pairs(names: Any) -> dict[str, tuple[str, str]]:
    """Return the names of the factors B and A of LoRA, by the name of the weight they change."""
    factors = [name for name in names if ".lora_B." in name]
    weights = [name.replace("lora_B.default", "base_layer") for name in factors]
    pairs = [(name, name.replace("lora_B", "lora_A")) for name in factors]
    return dict(zip(weights, pairs, strict=True))
