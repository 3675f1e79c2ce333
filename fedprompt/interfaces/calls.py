"""Calls of a method: arguments are copies, and random streams begin anew, on every engine."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt import _casts
from fedprompt._own_copies import copied
from fedprompt._random_streams import begin_streams


def seed_of(method: Any) -> int:
    """Return the seed of a run: that of the method's setting, or the one of ``torch.manual_seed``.

    It is read when a run begins.
    """
    seed = getattr(method.setting, "seed", None)
    return torch.initial_seed() if seed is None else int(seed)


_MODULE = "return an nn.Module, whose dropout can be off and whose state can be saved"


class Calls(NamedTuple):
    """Calls of a method in one exchange.

    Attributes:
        method: Method.
        seed: Seed of the run.
        server_round: Round.
        exchange: Number of the exchange in the round.
    """

    method: Any
    seed: int
    server_round: int
    exchange: int = 0

    def _begin(self, purpose: str, client: int | None = None) -> None:
        begin_streams(self.seed, self.server_round, self.exchange, client, purpose)

    def data(self, data: Callable[[int, int], Any], client: int) -> Any:
        """Return the data of a client."""
        self._begin("data", client)
        return data(client, self.server_round)

    def answer(self, client: int, state: Any) -> Any:
        """Return the server's answer, which shares no memory with its state."""
        copies: dict[int, Tensor] = {}
        own = copied(state, copies)
        self._begin("answer", client)
        answer = self.method.server.answer(client, own)
        where = f"client {client}, round {self.server_round}"
        with check.located(where):
            check.instance("answer", answer, Mapping, "map names to tensors or Weighted")
            check.dense_message("answer", answer)
        return copied(answer, copies)

    def train(self, client: int, data: Any, answer: Any, state: Any) -> Any:
        """Return what the client function returns for an answer that is its own."""
        state = copied(state)
        self._begin("client", client)
        with _casts.ended():
            return self.method.client(data, answer, state)

    def step(self, payloads: Mapping[int, Any], state: Any) -> Any:
        """Return the next state of the server, which owns the payloads."""
        state = copied(state)
        self._begin("step")
        return self.method.server.step(self.server_round, payloads, state)

    def sums(self, state: Any) -> Any:
        """Begin a step that adds payloads as they come, or return None if the server has none."""
        begin = getattr(self.method.server.step, "begin", None)
        return begin and begin(state)

    def add(self, sums: Any, client: int, payload: Any) -> None:
        """Add a payload to sums, which read it as plain tensors and keep nothing of it."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            sums.add(client, payload)

    def summed(self, sums: Any, state: Any) -> Any:
        """Return the next state of the server after all payloads were added."""
        state = copied(state)
        self._begin("step")
        return sums.end(self.server_round, state)

    def predict(self, client: int, data: Any, answer: Any, state: Any) -> nn.Module:
        """Return the prediction of a client for an answer that is its own."""
        self._begin("predict", client)
        with _casts.ended():
            model: nn.Module = self.method.predict(data, answer, state)
        check.instance("method.predict", model, nn.Module, _MODULE)
        return model
