"""Settings of networks that take no prompt tokens: trained as a whole, or frozen behind a border.

Methods run unchanged, because a model has the parts that they name: `prompts`, which is what a
client trains before the head, `projection` and `head`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any, cast

import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.methods.models import VitSetting
from fedprompt.methods.setting import Setting

__all__ = ["NetworkModel", "NetworkSetting"]


class _Frozen:
    """Frozen network that models share: it has no part in their state, and copies keep it."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network

    def __deepcopy__(self, memo: dict[int, Any]) -> _Frozen:
        return copy(self)


class NetworkModel(nn.Module):
    """Network with features of a common width and a linear head.

    Args:
        trained: Module that a client trains before the head: the network without a head, or a
            border of pixels before a frozen one.
        frozen: Frozen network behind `trained`, or None.
        num_classes: Number of classes.
        num_features: Width of the features, by adaptive average pooling. If None, the attribute
            `num_features` of the network.
        prepare: Function from images to inputs of `trained`. If None, they are the same.
    """

    def __init__(
        self,
        trained: nn.Module,
        frozen: nn.Module | None,
        num_classes: int,
        *,
        num_features: int | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        width = num_features or getattr(frozen or trained, "num_features", None)
        if not isinstance(width, int):
            rule = "be given for a network without the attribute `num_features`"
            raise check.wrong("num_features", rule, check.kind(frozen or trained))
        self.prompts, self.prepare = trained, prepare
        self._frozen = None if frozen is None else _Frozen(frozen)
        pooled = num_features is not None
        self.projection = nn.AdaptiveAvgPool1d(width) if pooled else nn.Identity()
        self.head = nn.Linear(width, num_classes)

    def features(self, images: Tensor) -> Float[Tensor, "batch dim"]:
        """Encode images."""
        found = self.prompts(images if self.prepare is None else self.prepare(images))
        found = found if self._frozen is None else self._frozen.network(found)
        return cast(Tensor, self.projection(found))

    def forward(self, images: Tensor) -> Float[Tensor, "batch classes"]:
        """Classify images."""
        return cast(Tensor, self.head(self.features(images)))


@dataclass(kw_only=True)
class NetworkSetting(Setting):
    """Setting of images and networks of any kind, such as convolutional ones.

    Each client trains a whole network. With `border`, networks are frozen instead, and a client
    trains a border of pixels and a head, as FedHPL does with ResNets.

    Attributes:
        networks: Functions that make a network without a head, given to clients in turn. Its
            initial values depend on the seed. With `border`, networks in place of functions.
        num_features: Width of the features that all networks have in common, by adaptive average
            pooling as in FedL2G. If None, each has its attribute `num_features`.
        border: Function that makes a module from images to inputs of a network, such as
            ``partial(fedprompt.PadPrompts, 224)``. If None, clients train whole networks.
        prepare: Function from images to inputs of the network or of the border, such as a
            normalization. If None, they are the same.

    Raises:
        ValueError: If there is no network, or a network has neither `num_features` nor this
            setting.
        TypeError: If a network is a module without `border`, because all clients would share it.

    Example:
        >>> def small(width):
        ...     layers = nn.Conv2d(3, width, 4, stride=4), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        ...     return nn.Sequential(*layers)
        >>> setting = NetworkSetting(
        ...     networks=[lambda: small(16), lambda: small(32)], num_features=8, num_classes=10,
        ...     rounds=2,
        ... )
        >>> [setting.new_model(client).prompts[0].out_channels for client in range(3)]
        [16, 32, 16]
        >>> setting.new_model(1).features(torch.rand(5, 3, 8, 8)).shape
        torch.Size([5, 8])
    """

    networks: Sequence[Callable[..., Any]]
    num_features: int | None = None
    border: Callable[[], nn.Module] | None = None
    prepare: Callable[[Tensor], Tensor] | None = None
    _widths: dict[int, int] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check.sequence("networks", self.networks, "networks")
        check.some("networks", self.networks, "have at least one network")
        check.optional(check.count, "num_features", self.num_features)
        check.optional(check.function, "border", self.border)
        check.optional(check.function, "prepare", self.prepare)
        kind = "functions that make one" if self.border is None else "networks, with `border`"
        for number, network in enumerate(self.networks):
            fits = isinstance(network, nn.Module) is (self.border is not None)
            check.typed(fits and callable(network), f"networks[{number}]", f"be {kind}", network)
        if self.border is not None:
            self.networks = [fp.freeze(cast(nn.Module, network)) for network in self.networks]

    @property
    def frozen_networks(self) -> Sequence[Any]:
        """The networks, if they are behind a border."""
        return () if self.border is None else self.networks

    @property
    def num_backbones(self) -> int:
        """Number of networks."""
        return len(self.networks)

    @property
    def trunk(self) -> Any:
        """Refuse methods that name tokens, because networks take none."""
        rule = "be a VitSetting for a method whose prompts are tokens"
        raise check.wrong("setting", rule, "a NetworkSetting")

    num_prompts = trunk

    def new_model(
        self,
        client: int | None = None,
        *,
        prompts: Callable[..., nn.Module | None] | None = None,
        tune: Any = None,
    ) -> NetworkModel:
        """Make a model; the initial values depend on the seed and the network alone.

        Args:
            client: Id of the client that owns the model. If None, all clients share it.
            prompts: Function from the network to what a client trains before the head, which may
                be None before a frozen network. If None, `deep_prompts`.
            tune: None, because a network is trained as a whole or is frozen.

        Raises:
            ValueError: If no client is named, and there are several networks; with `tune`; or if a
                client would train nothing but the head of a network that is not frozen.
        """
        if client is None:
            rule = "have one network, for a model that all clients share"
            check.require(len(self.networks) == 1, "networks", rule, len(self.networks))
        check.require(tune is None, "setting", "be a VitSetting for `tune`", "a NetworkSetting")
        network = self.networks[self.backbone_of(client or 0)]
        size: dict[str, Any] = {"num_features": self.num_features, "prepare": self.prepare}

        def drawn() -> NetworkModel:
            made = (prompts or self.deep_prompts)(network)
            if self.border is not None:
                frozen = cast(nn.Module, network)
                return NetworkModel(made or nn.Identity(), frozen, self.num_classes, **size)
            if made is None:
                raise check.wrong("setting", "have frozen networks, and so a `border`", "neither")
            return NetworkModel(made, None, self.num_classes, **size)

        return self.seeded(drawn)

    def bare_model(self) -> NetworkModel:
        """Make a model of all clients without a border."""
        return self.new_model(prompts=None if self.border is None else lambda network: None)

    def deep_prompts(self, network: Any) -> nn.Module:
        """Make what a client trains before the head: the border, or the network itself."""
        return cast(nn.Module, network() if self.border is None else self.border())

    def width_of(self, client: int) -> int:
        """Return the width of the features of a client's network."""
        kind = self.backbone_of(client)
        if kind not in self._widths:
            self._widths[kind] = self.new_model(client).head.in_features
        return self._widths[kind]


ImageSetting = VitSetting | NetworkSetting
"""Setting of a method that runs on frozen vision transformers and on networks of any kind."""
