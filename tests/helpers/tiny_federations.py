"""Tiny federations of random inputs, for the methods of the gallery."""

from collections.abc import Callable, Iterator
from typing import Any

import open_clip
import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import fedprompt as fp
from clips import NAMES, TEXT, TOKENIZER, VISION, copy_of
from fedprompt.methods import registry
from methods import as_generator
from methods.federation import ClipFederation, Federation, Predictions, VitFederation

SIZES = (6, 8, 7, 9, 5, 6)  # numbers of inputs; the last client never trains
CLASSES = 3


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
    makers = {
        "one model": vit_federation,
        "mixed models": mixed_federation,
        "CLIP": clip_federation,
    }
    return makers[family](**changes)


def trunk(dim: int) -> fp.Trunk:
    """A frozen ViT with random weights, two blocks and four patches."""
    torch.manual_seed(0)
    sizes = {"img_size": 8, "patch_size": 4, "in_chans": 1, "num_classes": 0}
    return fp.vit_trunk(VisionTransformer(embed_dim=dim, depth=2, num_heads=2, **sizes))


def last(
    method: Callable[..., Iterator[Predictions]], federation: Federation, **values: Any
) -> Predictions:
    """Run all rounds of a method or a generator, and return its last predictions."""
    registered = registry.METHODS.get(method.__name__)
    if registered and registered.make is method:
        method = as_generator(method, everyone=False)
    torch.manual_seed(federation.seed)
    after = list(method(federation, **values))
    assert len(after) == federation.rounds
    return after[-1]


def parameters(predictions: Predictions, client: int) -> dict[str, Tensor]:
    """Copy the parameters of the model of a client."""
    return fp.snapshot(predictions.of(client))


def _clip(shape: tuple[int, ...]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = copy_of("as initialized", lambda: open_clip.model.CLIP(12, VISION, TEXT).eval())
    return _common(shape) | {
        "clip": fp.freeze(model.to(torch.get_default_dtype())),
        "tower": fp.TextTower(model, TOKENIZER),
        "class_names": NAMES[:CLASSES],
        "scale": 10.0,
        "template": "a photo of a {}.",
        "length": 4,
    }


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
        "rounds": 2,
        "steps": 2,
        "cohort_size": 3,
        "batch_size": 4,
        "seed": 0,
        "public": torch.randn(6, *shape, generator=rng),
    }
