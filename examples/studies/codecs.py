"""Fewer bytes: FedAvg of deep prompts and a head, whose changes go through a codec."""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import fedprompt as fp
from fedprompt.compare import Trial
from fedprompt.interfaces import Codec, Message, Payload
from fedprompt.methods import VitSetting, fedvpt_d
from studies import digits
from studies.ablations import VIT, sides, tested
from studies.core import Machine, Row, study, trial


class OfChanges(NamedTuple):
    """Codec of the changes since the broadcast, to which the server adds the broadcast again.

    Attributes:
        codec: Codec, or None for changes as they are.
        memory: Whether what is left out is in the next message (error feedback).
    """

    codec: Codec | None
    memory: bool = True
    needs_changes = True

    def init(self, payload: Payload, /) -> Mapping[str, Any]:
        """Make the state, which is empty."""
        return {}

    def encode(self, payload: Payload, state: Mapping[str, Any], /) -> Any:
        """Encode a payload."""
        if self.codec is None:
            return payload, {}
        message, left_out = self.codec.encode(payload, state or self.codec.init(payload))
        return message, left_out if self.memory else {}

    def decode(self, message: Message, /, *, like: Payload) -> Any:
        """Decode a message."""
        return message if self.codec is None else self.codec.decode(message, like=like)


CODECS = {
    "float32": OfChanges(None),
    "float16": OfChanges(fp.codecs.float16()),
    "int8": OfChanges(fp.codecs.int8()),
    "top 10 %": OfChanges(fp.codecs.top_k(fraction=0.1), memory=False),
    "top 10 %, error feedback": OfChanges(fp.codecs.top_k(fraction=0.1)),
    "top 1 %": OfChanges(fp.codecs.top_k(fraction=0.01), memory=False),
    "top 1 %, error feedback": OfChanges(fp.codecs.top_k(fraction=0.01)),
}


def coded(codec: str, setting: VitSetting, **values: Any) -> fp.Method:
    """Make FedAvg with a codec."""
    return fp.rounds.coded(fedvpt_d(setting, **values), CODECS[codec])


RATE = {"learning_rate": 0.01}
ROWS = [Row(title, "fedvpt_d", RATE, instead=partial(coded, title)) for title in CODECS]


def make(partition: str, row: Row, *, seed: int, machine: Machine) -> Trial:
    """Make five clients with one network, under label shift."""
    train, test = sides(seed, "inverted_rotated")
    shards = {"of": "dirichlet", "count": 5, "alpha": 0.3, "min_size": len(train.labels) // 30}
    build = partial(VitSetting, trunks=[digits.trunk("B")])
    budget = VIT | {"rounds": 10, "steps": 12, "cohort_size": 5}
    return trial(build, train, test, shards, seed=seed, places=tested(seed), **budget)


STUDIES = {"codecs": study("codecs", rows=lambda partition: ROWS, make=make)}
