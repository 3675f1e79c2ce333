"""A network with trained prompts, and the folder from which it is built again."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.images.patches import image_tokens
from fedprompt.backbones.preparation import Preparation
from fedprompt.backbones.pretrained import Kind, Network, named
from fedprompt.backbones.text.tower import TextTower
from fedprompt.matching.logits import cosine_logits
from fedprompt.messages.payload import snapshot
from fedprompt.prompts.context import ContextPrompts, prompted_text
from fedprompt.prompts.forward import encode_prompted
from fedprompt.prompts.visual import DeepPrompts, LayeredPrompts, ShallowPrompts
from fedprompt.saved.saved_folder import Description

_PARTS: dict[str, Any] = {"prompts": LayeredPrompts, "head": nn.Linear, "context": ContextPrompts}
_TYPES = {LayeredPrompts, ShallowPrompts, DeepPrompts, nn.Linear, ContextPrompts}
_KINDS = "be LayeredPrompts with or without a linear head, or ContextPrompts"


class PromptedNetwork(nn.Module):
    """Frozen network with trained prompts, which classifies images.

    Args:
        network: Network, with the preparation of its images.
        parts: Trained parts, by name: "prompts", "head" or "context".
        description: Description of both.

    Attributes:
        class_names: Names of the classes, in the order of labels.
        preparation: Steps from an image to an input.
    """

    def __init__(self, network: Network, parts: nn.ModuleDict, description: Description) -> None:
        super().__init__()
        self.network, self.parts, self.description = network.model, parts, description
        self.class_names, self.preparation = list(description.class_names), network.preparation
        if "context" in parts:
            self.tower = cast(TextTower, network.tower)
            self.names = self.tower.class_names(self.class_names)
            own = cast(Any, network.model).logit_scale.exp()
            self.scale = float(own) if description.scale is None else description.scale
        else:
            self.trunk = network.trunk

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of prepared images, or their features if there are no classes."""
        if "context" not in self.parts:
            pooled = encode_prompted(self.trunk, images, self.parts["prompts"]()).pooled
            return cast(Tensor, self.parts["head"](pooled)) if "head" in self.parts else pooled
        context = self.parts["context"]()
        text = self.tower(prompted_text(context, self.names, class_specific=context.ndim == 4))
        pooled, _ = image_tokens(self.network, images)
        return cosine_logits(pooled, text[0], scale=self.scale)


def parts_of(module: nn.Module) -> nn.ModuleDict:
    """Find prompts and head, or the context, and refuse a module with other parameters."""
    if type(module) in _TYPES - {nn.Linear}:
        name = "prompts" if isinstance(module, LayeredPrompts) else "context"
        return nn.ModuleDict({name: module})
    check.module("module", module)
    children = dict(module.named_children())
    found = {
        name: children[name]
        for name, kind in _PARTS.items()
        if isinstance(children.get(name), kind) and type(children[name]) in _TYPES
    }
    values = snapshot(module, buffers=True)
    if other := [name for name in values if name.split(".")[0] not in found]:
        raise check.wrong("module", f"{_KINDS}, for a folder", f"one with {other[0]!r}")
    if found.keys() not in ({"prompts"}, {"prompts", "head"}, {"context"}):
        raise check.wrong("module", f"{_KINDS}, for a folder", f"parts {', '.join(found)!r}")
    return nn.ModuleDict(found)


def described(
    parts: nn.ModuleDict,
    backbone: Any,
    *,
    model: str,
    arguments: Mapping[str, Any],
    class_names: Sequence[str],
    preparation: Preparation | None,
    scale: float | None,
    about: Mapping[str, str],
) -> tuple[Description, Network]:
    """Describe parts and their network, which must be made by its name."""
    context = "context" in parts
    kind: Kind = "clip" if context else "vit"
    network = backbone if context else getattr(backbone, "model", None)
    check.texts("class_names", class_names, at_least=int(context))
    check.optional(check.number, "scale", scale, above=0)
    made = named(kind, model, arguments, network, preparation)
    prompts = cast(Any, parts["prompts"]) if "prompts" in parts else None
    found = Description(
        kind=kind,
        model=model,
        arguments=dict(made.arguments),
        fingerprint=fingerprint(backbone),
        preparation=made.preparation,
        class_names=tuple(class_names),
        layers=() if prompts is None else tuple(prompts.layers),
        replace=prompts is not None and prompts.replace,
        scale=scale,
        about={name: text for name, text in about.items() if text},
    )
    rebuilt(found, snapshot(parts, buffers=True), made)  # which requires a name for each class
    return found, made


def rebuilt(
    description: Description, state: Mapping[str, Tensor], network: Network
) -> PromptedNetwork:
    """Build a network with prompts whose sizes are those of the state."""
    names = description.class_names
    shapes = {name: tuple(value.shape) for name, value in state.items()}
    parts: dict[str, nn.Module] = {}
    if "prompts.tokens" in shapes:
        layers, count, dim = shapes["prompts.tokens"]
        rule = "name the layers of its prompts"
        check.require(len(description.layers) == layers, "folder", rule, description.layers)
        parts["prompts"] = LayeredPrompts(
            count, dim, layers=description.layers, replace=description.replace
        )
    if "head.weight" in shapes:
        classes, width = shapes["head.weight"]
        parts["head"] = nn.Linear(width, classes, bias="head.bias" in shapes)
        _check_names(names, classes, at_least=0)
    if "context.context" in shapes:
        contexts, *own, length, dim = shapes["context.context"]
        rule = "have one context, because a method combines several of them"
        check.require(contexts <= 1, "module", rule, contexts)
        parts["context"] = ContextPrompts(dim, length=length, num_classes=(*own, None)[0])
        _check_names(names, (*own, len(names))[0], at_least=1)
    whole = nn.ModuleDict(parts)
    fits = whole.state_dict().keys() == state.keys()
    check.require(
        fits, "folder", "have prompts, a head or a context alone", check.some_names(state)
    )
    whole.load_state_dict(dict(state))
    return PromptedNetwork(network, whole, description)


def check_reproduced(module: nn.Module, description: Description, network: Network) -> None:
    """Require that a folder predicts as a module does, if the module can predict."""
    if type(module) in _TYPES or type(module).forward is nn.Module.forward:
        return
    new = rebuilt(description, snapshot(parts_of(module), buffers=True), network)
    like, draw = next(network.model.parameters()), torch.Generator().manual_seed(0)
    shape = cast(Any, new.trunk)._image().shape if hasattr(new, "trunk") else network.inputs.shape
    images = torch.rand(shape, generator=draw, device="cpu").to(like)
    # Methods of the gallery have tokens of a CLIP as inputs.
    inputs = [images, network.tokens(images)] if description.kind == "clip" else [images]
    with torch.no_grad():
        logits = new.eval()(images)
        same = any(torch.equal(logits, found) for found in _outputs(module, inputs))
    rule = "classify as its prompts and head, or its context, do, because a folder has only these"
    check.require(same, "module", rule, f"{type(module).__name__}, whose logits differ")


@contextmanager
def flags_kept(backbone: Any) -> Iterator[None]:
    """Give weights of a backbone the same flags afterwards, because a folder has frozen ones."""
    model = getattr(backbone, "model", backbone)
    weights = model.parameters() if isinstance(model, nn.Module) else ()
    flags = [(weight, weight.requires_grad) for weight in weights]
    try:
        yield
    finally:
        for weight, flag in flags:
            weight.requires_grad_(flag)


def _outputs(module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the outputs of a module for the inputs that it takes."""
    for each in inputs:
        try:
            found = module(each)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue
        if isinstance(found, Tensor):
            yield found


def _check_names(names: Sequence[str], classes: int, *, at_least: int) -> None:
    rule = f"have a name for each of {classes} classes"
    fits = len(names) == classes or (not names and not at_least)
    check.require(fits, "class_names", rule, len(names))
