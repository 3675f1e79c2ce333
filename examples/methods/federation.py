"""Federations of the generators that are not yet methods of `fedprompt.methods`.

A generator runs its rounds and yields :class:`Predictions` after each. It sends messages through
`send_up` and `send_down`, which count bytes. Settings, models and batches are those of
`fedprompt.methods.setting`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from jaxtyping import Float, Int
from torch import Tensor

import fedprompt as fp
from fedprompt.methods import setting
from fedprompt.methods.setting import (
    Batch,
    ClientData,
    ClipSetting,
    NearestPrototype,
    PromptedModel,
    Setting,
    VitSetting,
)
from fedprompt.methods.setting import PromptedClassifier as PromptedText

__all__ = [
    "Batch",
    "ClipFederation",
    "Federation",
    "Message",
    "NearestPrototype",
    "Predict",
    "Predictions",
    "PromptedModel",
    "PromptedText",
    "VitFederation",
]

Predict = Callable[[Tensor], Tensor]  # inputs to logits (batch, classes)
Message = Mapping[str, Tensor | fp.Weighted]


@dataclass(frozen=True)
class Predictions:
    """How clients predict after a round: with one model, or with one for each client.

    Models are used before the next round begins, one after the other. So one module may be
    returned for all clients, after loading the values of the one that is asked for.

    Args:
        everyone: Model of all clients, or any function from inputs to logits.
        client: Function from the id of a client to its model.
        newcomer: Function from the id of a client that never took part to the model it receives.
            Needed with `client`; otherwise it is `everyone`.
    """

    everyone: Predict | None = None
    client: Callable[[int], Predict] | None = None
    newcomer: Callable[[int], Predict] | None = None

    def __post_init__(self) -> None:
        if (self.everyone is None) == (self.client is None):
            raise ValueError("Exactly one of `everyone` and `client` must be given.")
        if self.everyone is None and self.newcomer is None:
            raise ValueError("`newcomer` must be given with `client`; got None.")

    def of(self, client: int) -> Predict:
        """Return the model of a client that takes part."""
        return self.everyone if self.client is None else self.client(client)

    def received(self, client: int) -> Predict:
        """Return the model that a client receives before its first round."""
        return self.everyone if self.newcomer is None else self.newcomer(client)


@dataclass(kw_only=True)
class Federation(Setting):
    """Setting with the data of all clients, and the count of what is sent.

    Attributes:
        inputs: Training images of all clients, or the tokens of a frozen network for them.
        labels: Their classes.
        shards: Positions of the training inputs of each client, by client id.
        ledger: What was sent.
    """

    inputs: Tensor
    labels: Int[Tensor, "inputs"]
    shards: Mapping[int, Int[Tensor, "own"]]
    ledger: fp.Ledger = field(default_factory=fp.Ledger)
    server_round: int = field(default=0, init=False)

    def cohort(self, server_round: int) -> list[int]:
        """Begin a round and draw its clients."""
        self.server_round = server_round
        return super().cohort(server_round)

    def data(self, client: int, server_round: int) -> "FederatedData":
        """Return the data of a client, with the batches of this federation."""
        return FederatedData(**vars(self._plain(client, server_round)))

    def _plain(self, client: int, server_round: int) -> ClientData:
        made = setting.Federation(self, self.inputs, self.labels, self.shards)
        return made.data(client, server_round)

    def batches(
        self, client: int, server_round: int, *, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Yield the training batches of a client in a round, `steps` in all.

        A second call yields the same batches. Another `purpose` yields others.
        """
        return self._plain(client, server_round).batches(purpose=purpose)

    def own(self, client: int) -> Batch:
        """Return all training inputs of a client and their labels, without augmentation."""
        return self._plain(client, 0).own()

    def num_examples(self, client: int) -> int:
        """Count the training inputs of a client."""
        return self._plain(client, 0).num_examples

    def class_counts(self, client: int) -> Float[Tensor, "classes"]:
        """Count the training inputs of each class of a client."""
        return self._plain(client, 0).class_counts

    def send_down(self, client: int, message: Message) -> Message:
        """Count a message from the server to a client, and return it."""
        return self._send("down", client, message)

    def send_up(self, client: int, message: Message) -> Message:
        """Count a message from a client to the server, and return it."""
        return self._send("up", client, message)

    def _send(self, direction: str, client: int, message: Message) -> Message:
        self.ledger.record(
            message, direction=direction, client=client, server_round=self.server_round
        )
        return message


class FederatedData(ClientData):
    """Data of a client whose federation may define batches of its own, such as epochs."""

    def batches(self, *, among: Tensor | None = None, purpose: str = "batches") -> Iterator[Batch]:
        """Yield the training batches of the federation."""
        made = self.setting
        if among is not None:
            made = replace(made, shards={self.id: made.shards[self.id][among]})
        return made.batches(self.id, self.server_round, purpose=purpose)

    def own(self) -> Batch:
        """Return all inputs as the federation gives them."""
        return self.setting.own(self.id)


@dataclass(kw_only=True)
class VitFederation(Federation, VitSetting):
    """Federation of images and frozen vision transformers."""


@dataclass(kw_only=True)
class ClipFederation(Federation, ClipSetting):
    """Federation of a frozen CLIP. Inputs are image tokens, the pooled one first, or images."""
