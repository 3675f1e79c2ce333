"""Clients that train for epochs, and whole networks that are trained from scratch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from fedprompt.methods import ClientData, Federation, Setting
from fedprompt.methods.setting import Batch


@dataclass(kw_only=True)
class EpochSetting(Setting):
    """Setting whose clients train for epochs.

    Attributes:
        epochs: Number of epochs of a client in a round. With 0, a client takes `steps` batches.
        drop_last: Whether an epoch has full batches only. A client with fewer images than a batch
            keeps its only one.
    """

    epochs: int = 0
    drop_last: bool = False


class EpochData(ClientData):
    """Data of a client that trains for epochs."""

    def num_batches(self, size: int) -> int:
        """Count the batches of an epoch of `size` images."""
        full, rest = divmod(size, self.setting.batch_size)
        return full if self.setting.drop_last and full else full + bool(rest)

    @property
    def steps(self) -> int:
        """Number of batches in a round."""
        return self.setting.epochs * self.num_batches(self.num_examples)

    def batches(
        self, *, among: Int[Tensor, "chosen"] | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Yield the batches of all epochs; in each, every image is in at most one batch."""
        rng, count = self.stream(purpose), self.num_examples if among is None else len(among)
        for _ in range(self.setting.epochs):
            order = torch.randperm(count, generator=rng, device="cpu")
            for chosen in order.split(self.setting.batch_size)[: self.num_batches(count)]:
                yield self.batch(chosen if among is None else among.cpu()[chosen], rng)


@dataclass(frozen=True)
class EpochFederation(Federation):
    """Federation whose clients train for epochs, if its setting says so."""

    def data(self, setting: Setting, client: int, server_round: int) -> ClientData:
        """Return the data of a client in a round."""
        data = super().data(setting, client, server_round)
        return EpochData(**vars(data)) if getattr(setting, "epochs", 0) else data


class WholeNetwork(nn.Module):
    """Network that is trained as a whole, with features of a common width and a linear head.

    Args:
        network: Network without a head.
        num_classes: Number of classes.
        num_features: Width of the features after adaptive average pooling.
        prepare: Function from images to inputs of the network.
    """

    prompts = None

    def __init__(
        self,
        network: nn.Module,
        num_classes: int,
        *,
        num_features: int,
        prepare: Callable[[Tensor], Tensor],
    ) -> None:
        super().__init__()
        self.network, self.num_features, self.prepare = network, num_features, prepare
        self.projection, self.head = nn.Identity(), nn.Linear(num_features, num_classes)

    def features(self, images: Tensor) -> Tensor:
        """Encode images."""
        return F.adaptive_avg_pool1d(self.network(self.prepare(images)), self.num_features)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images."""
        return self.head(self.features(images))


@dataclass(kw_only=True)
class NetworkSetting(EpochSetting):
    """Networks of different architectures that are trained from scratch.

    Attributes:
        makers: Makers of networks, given to clients in turn.
        num_features: Width of the features of all networks.
        prepare: Function from images to inputs of the networks.
    """

    makers: Sequence[Callable[[], nn.Module]]
    num_features: int
    prepare: Callable[[Tensor], Tensor]

    @property
    def num_backbones(self) -> int:
        """Number of networks, which the first clients have in turn."""
        return len(self.makers)

    def new_model(self, client: int = 0) -> WholeNetwork:
        """Make the network of a client; its initial values depend on the seed and the network."""
        size = {"num_features": self.num_features, "prepare": self.prepare}
        make = self.makers[client % len(self.makers)]
        return self.seeded(lambda: WholeNetwork(make(), self.num_classes, **size))
