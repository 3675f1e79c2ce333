"""Fewer bytes: FedAvg of deep prompts and a head, whose changes go through a codec."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np

import fedprompt as fp
from fedprompt.compare.rows import Row, plain_method
from fedprompt.compare.trials import Trial
from fedprompt.interfaces import Codec, Message, Payload, State
from fedprompt.methods import VitSetting
from tasks import digits
from tasks.ablations import VIT, sides, trial
from tasks.core import Machine, task


class Forgetful(NamedTuple):
    """Codec that starts each round with an empty memory, so there is no error feedback.

    Attributes:
        codec: Codec with a memory.
    """

    codec: Codec

    def init(self, payload: Payload, /) -> Mapping[str, Any]:
        """Make the state, which is empty."""
        return {}

    def encode(self, payload: Payload, state: Mapping[str, Any], /) -> Any:
        """Encode a payload, and forget what is left out."""
        return self.codec.encode(payload, self.codec.init(payload))[0], {}

    def decode(self, message: Message, /, *, like: Payload) -> Any:
        """Decode a message."""
        return self.codec.decode(message, like=like)


CODECS: dict[str, Callable[[], Codec] | None] = {
    "float32": None,
    "float16": fp.codecs.float16,
    "int8": fp.codecs.int8,
    "top 10 %": lambda: Forgetful(fp.codecs.top_k(fraction=0.1)),
    "top 10 %, error feedback": partial(fp.codecs.top_k, fraction=0.1),
    "top 1 %": lambda: Forgetful(fp.codecs.top_k(fraction=0.01)),
    "top 1 %, error feedback": partial(fp.codecs.top_k, fraction=0.01),
}
ROWS = [Row(title, "fedvpt_d", {"learning_rate": 0.01}) for title in CODECS]


def as_changes(method: fp.Method) -> fp.Method:
    """Let clients send changes since the broadcast, to which the server adds the broadcast."""

    def client(data: Any, answer: Message, state: State) -> Any:
        payload, state = method.client(data, answer, state)
        return fp.delta(payload, answer), state

    def step(server_round: int, payloads: Mapping[int, Message], state: State) -> State:
        def whole(payload: Message) -> Message:
            values = {name: state["values"][name] + payload[name].value for name in payload}
            return {name: payload[name]._replace(value=values[name]) for name in payload}

        payloads = {client: whole(payload) for client, payload in payloads.items()}
        return method.server.step(server_round, payloads, state)

    return method._replace(client=client, server=method.server._replace(step=step))


def method(row: Row, trial: Trial) -> fp.Method:
    """Make FedAvg of changes, with the codec of a row."""
    changes, make = as_changes(plain_method(row, trial)), CODECS[row.title]
    return changes if make is None else fp.rounds.coded(changes, make())


def make(partition: str, row: Row, *, seed: int, machine: Machine, validate: bool) -> Trial:
    """Make five clients with one network, under label shift."""
    train, test = sides(seed, "inverted_rotated")
    rng = np.random.default_rng(seed)
    how = {"num_clients": 5, "alpha": 0.3, "min_size": len(train.labels) // 30, "generator": rng}
    shards = fp.data.dirichlet(train.labels, **how)
    build = partial(VitSetting, trunks=[digits.trunk("B")])
    budget = VIT | {"rounds": 10, "steps": 12, "cohort_size": 5}
    return trial(build, train, test, shards, seed=seed, **budget).shrunk(machine.shrink)


TASKS = {"codecs": task("codecs", rows=lambda partition: ROWS, make=make, method=method)}
