"""Methods that leak from client to client, and honest ones, for the audit, which imports this file.

Each is a function of a setting at the top of the file.
"""

import contextvars
import os
import random
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from fedprompt.methods import METHODS, backdoored, fedprox, scaffold
from method_runs import together

ONE = torch.tensor(1.0)
HELD: list[Any] = []
SEEN: dict[Any, Any] = {}
CONTEXT: contextvars.ContextVar[Tensor] = contextvars.ContextVar("leak")
NORM = nn.BatchNorm1d(1)
FILE = Path(tempfile.gettempdir(), f"leak-{os.getpid()}")


def secret(data: Any) -> Tensor:
    return data.own()[0].sum().reshape(1)


class Constant(nn.Module):
    """Model that predicts a number for every class."""

    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("value", value)

    def forward(self, images: Tensor) -> Tensor:
        return images.flatten(1)[:, :10] * 0 + self.value


def sending(value: Callable[[Any], Any], predict: Any = None) -> fp.Method:
    """Make a method whose clients send a value of their data."""

    def client(data: Any, answer: Any, state: Any) -> Any:
        sent = torch.as_tensor(value(data), dtype=torch.float32).detach().reshape(1)
        return {"x": fp.Weighted(sent, ONE)}, state

    def plain(data: Any, answer: Any, state: Any) -> nn.Module:
        return Constant(answer["x"])

    return fp.Method(client, fp.averaging_server({"x": torch.zeros(1)}), predict or plain)


def through(write: Callable[[Any, Tensor], Any], read: Callable[[Any], Any]) -> fp.Method:
    """Make a method whose clients send what others left, and leave their own secret."""

    def value(data: Any) -> Any:
        found = read(data)
        write(data, secret(data))
        return torch.zeros(1) if found is None else found

    return sending(value)


def in_a_list(setting):
    return through(lambda data, value: HELD.append(value), lambda data: sum(HELD, torch.zeros(1)))


def in_a_dict_by_content(setting):
    def read(data):
        return SEEN.setdefault(secret(data).item(), SEEN.get("total", 0.0))

    return through(lambda d, v: SEEN.update(total=SEEN.get("total", 0.0) + v.item()), read)


def in_a_context(setting):
    return through(lambda data, value: CONTEXT.set(value), lambda data: CONTEXT.get(None))


def in_a_file(setting):
    def read(data):
        return float(FILE.read_text()) if FILE.exists() else None

    return through(lambda data, value: FILE.write_text(str(value.item())), read)


def in_the_environment_once(setting):
    def write(data, value):
        os.environ.setdefault("LEAK", str(value.item()))

    return through(write, lambda data: float(os.environ.get("LEAK", "0")))


def in_the_setting(setting):
    return through(
        lambda d, v: setattr(d.setting, "note", v), lambda d: vars(d.setting).get("note")
    )


def in_the_trunk_once(setting):
    def trunk(data):
        return vars(data.setting.trunks[0])

    return through(lambda d, v: trunk(d).setdefault("note", v), lambda d: trunk(d).get("note"))


def in_public_images(setting):
    def first(data):
        return data.setting.public.view(-1)[:1]

    return through(lambda data, value: first(data).copy_(value), lambda data: first(data).clone())


def in_running_statistics(setting):
    def write(data, value):
        NORM.train()(value.reshape(1, 1).expand(2, 1))

    return through(write, lambda data: NORM.running_mean.clone())


def in_a_generator(setting):
    draw = np.random.default_rng(0)
    return through(lambda d, v: draw.random(int(v.abs().item()) % 97 + 1), lambda d: draw.random())


def in_a_cache(setting):
    @cache
    def first(key):
        return HELD[0]

    return sending(lambda data: HELD.append(secret(data)) or first(0))


def in_a_shared_module(setting):
    model, made = setting.new_model(), fedprox(setting)

    def client(data, answer, state):
        for images, labels in data.batches():
            F.cross_entropy(model(images), labels).backward()
            torch.optim.SGD(model.parameters(), 0.1).step()
        return fp.collect(model, weight=1), state

    return made._replace(client=client)


def server_reads_data(setting):
    seen = []
    method = sending(lambda data: seen.append(secret(data)) or torch.zeros(1))

    def step(server_round, payloads, state):
        return {**state, "values": {"x": torch.stack(seen).mean(0)}}

    return method._replace(server=method.server._replace(step=step))


def client_reads_the_server(setting):
    board = [torch.zeros(1)]
    method = sending(lambda data: board[0])

    def step(server_round, payloads, state):
        board[0] = board[0] + 1
        return state

    return method._replace(server=method.server._replace(step=step))


def prediction_reads_another(setting):
    last = [torch.zeros(1)]

    def value(data):
        last[0] = secret(data)
        return torch.zeros(1)

    return sending(value, lambda data, answer, state: Constant(last[0].clone()))


def inputs_of_the_program(setting):
    return sending(lambda data: HELD[0].mean())


def sizes_of_the_program(setting):
    return sending(lambda data: float(sum(map(len, HELD[0].values()))))


LEAKS = [in_a_list, in_a_dict_by_content, in_a_context, in_a_file, in_the_environment_once]
LEAKS += [in_the_setting, in_the_trunk_once, in_public_images, in_running_statistics]
LEAKS += [in_a_generator, in_a_cache, in_a_shared_module, server_reads_data]
LEAKS += [client_reads_the_server, prediction_reads_another]


def dropout(setting):
    layer = nn.Dropout(0.5)
    return sending(lambda data: layer(data.own()[0]).sum())


def global_draws(setting):
    return sending(lambda data: torch.rand(1) + np.random.rand() + random.random())  # noqa: NPY002


def generators_of_the_data(setting):
    return sending(lambda data: torch.rand(1, generator=data.generator("mine")))


def number_of_images(setting):
    return sending(lambda data: float(data.num_examples))


def written_answer(setting):
    def client(data, answer, state):
        return {"x": fp.Weighted(answer["x"].add_(secret(data)), ONE)}, state

    return sending(secret)._replace(client=client)


def with_a_backdoor(setting):
    return backdoored(scaffold(setting), malicious=[1], target=0)


HONEST = [dropout, global_draws, generators_of_the_data, number_of_images, written_answer]
HONEST += [with_a_backdoor]


def ends_the_process(setting):
    repeats = os.environ.get("AUDITED_IN") != str(os.getpid())
    return sending(lambda data: os._exit(3) if repeats else secret(data))


def none(setting):
    return None


GROUPS: dict[tuple[str, str, bool], list[str]] = {}
for _name, _entry in METHODS.items():  # FedMix alone has two exchanges
    for _family in _entry.families:
        GROUPS.setdefault((_family, _entry.inputs, _name == "fedmix"), []).append(_name)
for _number, _names in enumerate(GROUPS.values()):
    globals()[f"group_{_number}"] = together(_names, newcomers=True)
