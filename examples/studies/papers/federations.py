"""Federations of a paper's setting: epochs, learning rates over rounds, and the model's device."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from methods.federation import (
    Batch,
    ClipFederation,
    Federation,
    Message,
    PromptedModel,
    PromptedText,
    VitFederation,
)
from studies.papers.borders import PART, BorderedModel, PiecewiseModel, PixelTrunk


class Stored:
    """Tensor in the memory of the host, of which an indexed part is on a device.

    Args:
        values: Images or tokens.
        device: Device of the parts.
        dtype: Floating-point dtype of the parts. If None, that of `values`.
    """

    def __init__(
        self, values: Tensor, device: torch.device, dtype: torch.dtype | None = None
    ) -> None:
        self.values, self.device, self.dtype = values, device, dtype or values.dtype
        self.shape = values.shape

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Tensor | slice) -> Tensor:
        index = index.cpu() if isinstance(index, Tensor) else index
        # Moved first: a conversion on the host would double what float16 tokens send.
        return self.values[index].to(self.device).to(self.dtype)

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield consecutive parts of at most `size` inputs, one at a time."""
        for start in range(0, len(self), size):
            yield self[start : start + size]


@dataclass(kw_only=True)
class Epochs(Federation):
    """Federation whose clients train for epochs. `steps` is then that of the client in turn.

    Attributes:
        epochs: Number of epochs of a client in a round.
        drop_last: Whether an epoch has full batches only. A client with fewer images than a batch
            keeps its only one.
        cosine: Whether learning rates decrease to 0 along a cosine over the rounds.
        device: Device of the models and batches.
        changed: Random change of a training batch by a generator on the CPU, or None. It takes the
            place of `augment`, whose generator is on the device.
        floats: Whether training images are floating-point, from 0 to 255.
    """

    steps: int = 0
    epochs: int
    drop_last: bool = False
    cosine: bool = False
    device: torch.device
    changed: Callable[[Tensor, torch.Generator], Tensor] | None = None
    floats: bool = False

    def batches(
        self, client: int, server_round: int, *, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """Yield the training batches of all epochs of a client in a round.

        In each epoch, every image is in at most one batch.
        """
        self.steps = self.epochs * self.num_batches(client)
        return self._drawn(client, server_round, purpose)

    def send_down(self, client: int, message: Message) -> Message:
        """Count a message to a client, which is then the client in turn."""
        self.steps = self.epochs * self.num_batches(client)
        return super().send_down(client, message)

    def num_batches(self, client: int) -> int:
        """Count the batches of an epoch of a client."""
        full, rest = divmod(len(self.shards[client]), self.batch_size)
        return full if self.drop_last and full else full + bool(rest)

    def _drawn(self, client: int, server_round: int, purpose: str) -> Iterator[Batch]:
        shard = self.shards[client]
        rng = Federation.generator(self, server_round, client, purpose=purpose)
        for _ in range(self.epochs):
            order = torch.randperm(len(shard), generator=rng, device="cpu")
            for positions in order.split(self.batch_size)[: self.num_batches(client)]:
                chosen = shard[positions.to(shard.device)]
                inputs = self.inputs[chosen]
                if self.changed is not None:
                    inputs = self.changed(inputs, rng)
                yield (inputs.float() if self.floats else inputs), self.labels[chosen]

    def own(self, client: int) -> Batch:
        """Return all training inputs of a client and their labels, without augmentation."""
        inputs, labels = super().own(client)
        return (inputs.float() if self.floats else inputs), labels

    def generator(
        self, server_round: int, client: int | None = None, *, purpose: str
    ) -> torch.Generator:
        """Make a generator on the device of the models."""
        rng = super().generator(server_round, client, purpose=purpose)
        if self.device.type == "cpu":
            return rng
        seed = int(torch.randint(2**62, (), generator=rng, device="cpu"))
        return torch.Generator(self.device).manual_seed(seed)

    def optimizer(
        self,
        parameters: nn.Module | Sequence[nn.Parameter],
        learning_rate: float,
        server_round: int = 0,
    ) -> torch.optim.Optimizer:
        """Make the optimizer of a client with the learning rate of the round."""
        progress = self.server_round / self.rounds
        factor = (1 + math.cos(math.pi * progress)) / 2 if self.cosine else 1.0
        return super().optimizer(parameters, learning_rate * factor)


@dataclass(kw_only=True)
class VitEpochs(Epochs, VitFederation):
    """Vision transformers with prompts, and convolutional networks with a border of pixels.

    Raises:
        ValueError: If a batch has more images than fit in one forward pass.
    """

    @property
    def num_backbones(self) -> int:
        """Number of backbones, which the first clients have in turn."""
        return len(self.trunks)

    def __post_init__(self) -> None:
        if self.batch_size > PART:
            raise ValueError(f"`batch_size` must be at most {PART}; got {self.batch_size}.")

    def new_model(
        self, client: int = 0, *, prompts: Callable[[fp.Trunk], nn.Module | None] | None = None
    ) -> PromptedModel:
        """Make a model on the device; its initial values do not depend on the device.

        Args:
            client: Id of the client that owns the model; it decides the trunk.
            prompts: Function from the trunk to a module of prompts. If None, deep prompts. A
                convolutional network has a border in any case.
        """
        trunk, kind = self.trunk_of(client), PiecewiseModel
        make = prompts or (lambda trunk: fp.DeepPrompts(self.num_prompts, trunk))
        if isinstance(trunk, PixelTrunk):
            kind, make = BorderedModel, lambda trunk: trunk.border()
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            model = kind(trunk, None, self.num_classes, num_features=self.num_features)
            model.prompts = make(trunk)
        return model.to(self.device)


@dataclass(kw_only=True)
class ClipEpochs(Epochs, ClipFederation):
    """A CLIP with contexts."""

    @property
    def num_backbones(self) -> int:
        """Number of backbones, which is one."""
        return 1

    def new_model(self, client: int = 0) -> PromptedText:
        """Make a model on the device."""
        return super().new_model(client).to(self.device)


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
class NetworkEpochs(Epochs):
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
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            torch.manual_seed(self.seed)
            network = self.makers[client % len(self.makers)]()
            size = {"num_features": self.num_features, "prepare": self.prepare}
            model = WholeNetwork(network, self.num_classes, **size)
        return model.to(self.device)
