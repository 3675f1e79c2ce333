"""Tiny federations of random inputs, for the methods of the gallery."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from random import random
from typing import Any, NamedTuple

import numpy as np
import open_clip
import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import fedprompt as fp
from clips import NAMES, TEXT, TOKENIZER, VISION, copy_of
from fedprompt.methods import ClientData, ClipSetting, Setting, VitSetting, registry
from fedprompt.methods import Federation as Data

SIZES = (6, 8, 7, 9, 5, 6)  # numbers of inputs; the last client never trains
CLASSES = 3


def shifted(images: Tensor, generator: torch.Generator) -> Tensor:
    """Augment as torchvision does, from the global generators."""
    return images + torch.rand(()) + np.random.rand() + random()  # noqa: NPY002


RANDOM = {"drops": True, "augment": shifted}
"""Changes of a federation whose methods draw from the global generators."""
ONE_CLIENT = {"rounds": 1, "clients": [0], "cohort_size": 1, "make_optimizer": torch.optim.SGD}


@dataclass(kw_only=True)
class Federation(Setting):
    """Setting and data in one, with the count of what is sent.

    Attributes:
        inputs: Inputs of all clients.
        labels: Their classes.
        shards: Positions of the inputs of each client.
        ledger: What was sent.
        drops: Whether heads, prompts and other trained modules have dropout.
    """

    inputs: Tensor
    labels: Tensor
    shards: Mapping[int, Tensor]
    ledger: fp.Ledger = field(default_factory=fp.Ledger)
    drops: bool = False

    def seeded(self, make: Callable[..., Any], *arguments: Any) -> Any:
        """Make a module, with dropout behind the modules that have parameters."""
        made = super().seeded(make, *arguments)
        for module in made.modules() if self.drops else ():
            if [*module.parameters(recurse=False)]:
                module.register_forward_hook(_dropped)
        return made

    def data(self, client: int, server_round: int) -> ClientData:
        """Return the data of a client, with the batches of this federation."""
        made = Data(self.inputs, self.labels, self.shards).data(self, client, server_round)
        return TinyData(**vars(made))

    def batches(self, client: int, server_round: int, *, purpose: str = "batches") -> Any:
        """Yield the training batches of a client in a round."""
        return ClientData(**vars(self.data(client, server_round))).batches(purpose=purpose)

    def own(self, client: int) -> tuple[Tensor, Tensor]:
        """Return all training inputs of a client and their labels."""
        return self.data(client, 0).own()

    def num_examples(self, client: int) -> int:
        """Count the training inputs of a client."""
        return len(self.shards[client])

    def sent(self, direction: str, server_round: int, client: int, message: Any) -> None:
        """Count a message."""
        self.ledger.record(message, direction=direction, client=client, server_round=server_round)


def _dropped(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Drop some values of an output, or of a stream of prompts, in training."""
    drop = partial(nn.functional.dropout, p=0.25, training=module.training)
    if isinstance(output, fp.interfaces.PromptStream):
        return output._replace(layers={k: drop(v) for k, v in output.layers.items()})
    return drop(output) if isinstance(output, Tensor) else output


class TinyData(ClientData):
    """Data of a client whose federation may have other batches and counts in a test."""

    @property
    def num_examples(self) -> int:
        """Number of inputs, as the federation says."""
        return self.setting.num_examples(self.id)

    def batches(self, *, among: Tensor | None = None, purpose: str = "batches") -> Any:
        """Yield the batches of the federation."""
        if among is not None:
            return super().batches(among=among, purpose=purpose)
        return self.setting.batches(self.id, self.server_round, purpose=purpose)


@dataclass(kw_only=True)
class VitFederation(Federation, VitSetting):
    """Federation of images and frozen vision transformers."""


@dataclass(kw_only=True)
class ClipFederation(Federation, ClipSetting):
    """Federation of a frozen CLIP. Inputs are image tokens, the pooled one first, or images."""


class Predictions(NamedTuple):
    """Models of a method after a round.

    Attributes:
        method: Method.
        federation: Its federation.
        now: Round.
    """

    method: fp.Method
    federation: Federation
    now: fp.Round

    def of(self, client: int) -> Any:
        """Return the model of a client."""
        return self.now.model(self.method, self.federation.data(client, self.now.server_round))

    def received(self, client: int) -> Any:
        """Return the model of a client that has no state."""
        return self._replace(now=self.now._replace(clients={}, stateful=())).of(client)

    @property
    def everyone(self) -> Any:
        """The model of the first client, where all have the same."""
        return self.of(self.federation.clients[0])


def vit_federation(**changes: Any) -> VitFederation:
    """Five clients and a newcomer with images of three classes, one trunk of two blocks."""
    return VitFederation(**_common((1, 8, 8)) | {"trunks": [trunk(8)], "num_prompts": 2} | changes)


def mixed_federation(**changes: Any) -> VitFederation:
    """Like :func:`vit_federation`, with two kinds of trunks and features of six numbers."""
    return vit_federation(**{"trunks": [trunk(8), trunk(12)], "num_features": 6} | changes)


def clip_federation(**changes: Any) -> ClipFederation:
    """Five clients and a newcomer with the image tokens of three classes, and a tiny CLIP."""
    return ClipFederation(**_clip((5, 12)) | changes)


def clip_image_federation(**changes: Any) -> ClipFederation:
    """Like :func:`clip_federation`, with images as inputs."""
    return ClipFederation(**_clip((3, 16, 16)) | changes)


def federation_of(entry: registry.Entry, family: str, **changes: Any) -> Federation:
    """Make the federation of a family of tasks for a method of the gallery."""
    if entry.inputs == "images":
        return clip_image_federation(**changes)
    makers = {"one model": vit_federation, "mixed models": mixed_federation}
    makers |= {"CLIP": clip_federation}
    return makers[family](**changes)


def trunk(dim: int) -> fp.interfaces.Trunk:
    """A frozen ViT with random weights, two blocks and four patches, made and probed once."""
    torch.manual_seed(0)
    return _trunk(dim, torch.get_default_dtype())


def after_rounds(
    make: Callable[..., fp.Method], federation: Federation, **values: Any
) -> Iterator[Predictions]:
    """Run all rounds of a method, and yield its predictions after each."""
    method = make(federation, **values)

    def train(data: Any, answer: Any, state: Any) -> Any:
        federation.sent("down", data.server_round, data.id, answer)
        payload, state = method.client(data, answer, state)
        if payload is not None:
            federation.sent("up", data.server_round, data.id, payload)
        return payload, state

    counted = method._replace(client=train)
    for now in fp.run_rounds(counted, federation.data, federation.cohorts()):
        yield Predictions(method, federation, now)


def last(make: Callable[..., fp.Method], federation: Federation, **values: Any) -> Predictions:
    """Run all rounds of a method, and return its last predictions."""
    torch.manual_seed(federation.seed)
    *_, predictions = after_rounds(make, federation, **values)
    return predictions


def parameters(predictions: Predictions, client: int) -> dict[str, Tensor]:
    """Copy the parameters of the model of a client."""
    return fp.snapshot(predictions.of(client))


def descend(loss: Tensor, parameters: Iterable[Tensor], rate: float) -> None:
    """Take one step of gradient descent on a loss, in all parameters that are not frozen."""
    parameters = [each for each in parameters if each.requires_grad]
    gradients = torch.autograd.grad(loss, parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter -= rate * gradient


def forget_models() -> None:
    """Make all frozen models anew when they are used next."""
    _trunk.cache_clear()
    _frozen_clip.cache_clear()


@cache
def _trunk(dim: int, dtype: torch.dtype) -> fp.interfaces.Trunk:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 0}
        return fp.vit_trunk(VisionTransformer(embed_dim=dim, depth=2, num_heads=2, **sizes))


@cache
def _frozen_clip(dtype: torch.dtype) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        key = f"as initialized in {dtype}"  # numbers are drawn in this dtype
        model = copy_of(key, lambda: open_clip.model.CLIP(12, VISION, TEXT).eval())
    return {"clip": fp.freeze(model.to(dtype)), "tower": fp.TextTower(model, TOKENIZER)}


def _clip(shape: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    return (
        _common(shape)
        | _frozen_clip(torch.get_default_dtype())
        | {
            "class_names": NAMES[:CLASSES],
            **{"scale": 10.0, "template": "a photo of a {}.", "length": 4},
        }
    )


def _common(shape: tuple[int, ...]) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(0)
    total = sum(SIZES)
    shards = torch.arange(total).split(list(SIZES))
    return {
        "inputs": torch.randn(total, *shape, generator=rng),
        "labels": torch.arange(total) % CLASSES,
        "shards": dict(enumerate(shards)),
        "clients": range(len(SIZES) - 1),
        "num_classes": CLASSES,
        "public": torch.randn(6, *shape, generator=rng),
        **{"rounds": 2, "steps": 2, "cohort_size": 3, "batch_size": 4, "seed": 0},
    }
