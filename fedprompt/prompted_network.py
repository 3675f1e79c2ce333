"""A network with trained prompts, and the description from which it is built again."""

import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn as nn
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._saved_config import CONFIG, FORMAT, read_config
from fedprompt.backbones.freezing import freeze
from fedprompt.backbones.images.patches import image_tokens
from fedprompt.backbones.images.vit import vit_trunk
from fedprompt.backbones.named import check_network, named_network, parsed, tokenizer_of
from fedprompt.backbones.text.tower import TextTower
from fedprompt.matching.logits import cosine_logits
from fedprompt.messages.payload import snapshot
from fedprompt.prompts.context import ContextPrompts, prompted_text
from fedprompt.prompts.forward import encode_prompted
from fedprompt.prompts.visual import DeepPrompts, LayeredPrompts, ShallowPrompts

_PARTS: dict[str, Any] = {"prompts": LayeredPrompts, "head": nn.Linear, "context": ContextPrompts}
_TYPES = {LayeredPrompts, ShallowPrompts, DeepPrompts, nn.Linear, ContextPrompts}
_KINDS = "be LayeredPrompts with or without a linear head, or ContextPrompts"


class PromptedNetwork(nn.Module):
    """Frozen network with trained prompts, which classifies images.

    Args:
        network: Network of a library, in eval mode.
        parts: Trained parts, by name: "prompts", "head" or "context".
        config: Description of both.

    Attributes:
        class_names: Names of the classes, in the order of labels.
    """

    def __init__(self, network: nn.Module, parts: nn.ModuleDict, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.network, self.parts, self.config = freeze(network), parts, dict(config)
        self.class_names = list(config["class_names"])
        images = cast(nn.Module, getattr(network, "visual", network))  # of open_clip
        if config.get("tower") not in (None, type(images).__name__):  # of a CLIP of transformers
            images = getattr(network, "vision_model", network)
        self.trunk: Any = network if "context" in parts else vit_trunk(images)
        if "context" in parts:
            self.tower = TextTower(network, tokenizer_of(config["model"]))
            self.names = self.tower.class_names(self.class_names)
            given = config["scale"]
            self.scale = float(cast(Any, network).logit_scale.exp()) if given is None else given

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images, or their features if there are no classes."""
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


def describe_parts(parts: nn.ModuleDict, class_names: Sequence[str]) -> dict[str, Any]:
    """Describe parts by the arguments of their classes."""
    if "context" in parts:
        contexts, *classes, length, dim = cast(Any, parts["context"]).context.shape
        rule = "have one context, because a method combines several of them"
        check.require(contexts <= 1, "module", rule, contexts)
        check.some("class_names", class_names, "name the classes of a context")
        if classes and len(class_names) != classes[0]:
            rule = f"have a name for each of {classes[0]} classes of the context"
            raise check.wrong("class_names", rule, len(class_names))
        sizes = {"dim": dim, "length": length, "num_classes": classes[0] if classes else None}
        return {"kind": "context", "context": sizes}
    prompts, head = cast(Any, parts["prompts"]), cast(Any, dict(parts.items()).get("head"))
    _, count, dim = prompts.tokens.shape
    sizes = {"num_prompts": count, "dim": dim, "layers": list(prompts.layers)}
    made: dict[str, Any] = {"kind": "prompts", "prompts": sizes | {"replace": prompts.replace}}
    if head is not None:
        if class_names and len(class_names) != head.out_features:
            rule = f"have a name for each of {head.out_features} classes of the head"
            raise check.wrong("class_names", rule, len(class_names))
        made["head"] = {name: getattr(head, name) for name in ("in_features", "out_features")}
        made["head"]["bias"] = head.bias is not None
    return made


def check_reproduced(
    module: nn.Module, parts: nn.ModuleDict, backbone: Any, config: Mapping[str, Any]
) -> None:
    """Require that a folder can be loaded, and then predicts as the module does, if it can."""
    context = "context" in parts
    network: Any = backbone if context else getattr(backbone, "model", None)
    check_network(config["model"], network, libraries=["open_clip"] if context else None)
    if type(module) in _TYPES or type(module).forward is nn.Module.forward:
        return
    flags = [(weight, weight.requires_grad) for weight in network.parameters()]
    try:
        new = PromptedNetwork(network, parts, config)
        with torch.no_grad():
            images = _images(network.visual) if context else new.trunk._image()
            inputs = [images]
            if context:  # methods of the gallery have tokens as inputs
                pooled, patches = image_tokens(network, images)
                inputs.append(torch.cat([pooled[:, None], patches], 1))
            logits = new(images)
            same = any(torch.equal(logits, found) for found in _outputs(module, inputs))
    finally:
        for weight, flag in flags:
            weight.requires_grad_(flag)
    rule = "classify as its prompts and head, or its context, do, because a folder has only these"
    check.require(same, "module", rule, f"{type(module).__name__}, whose logits differ")


def _images(visual: Any) -> Tensor:
    size = visual.image_size
    sides = (size, size) if isinstance(size, int) else tuple(size)
    like, draw = next(visual.parameters()), torch.Generator().manual_seed(0)
    return torch.rand(1, 3, *sides, generator=draw, device="cpu").to(like)


def _outputs(module: nn.Module, inputs: Sequence[Tensor]) -> Iterator[Tensor]:
    """Yield the outputs of a module for the inputs that it takes."""
    for each in inputs:
        try:
            found = module(each)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            continue
        if isinstance(found, Tensor):
            yield found


def make_config(
    parts: nn.ModuleDict, class_names: Sequence[str], model: str, about: Mapping[str, Any]
) -> dict[str, Any]:
    """Describe a network with prompts."""
    parsed(model, about["arguments"])
    head = {"format": FORMAT, "fedprompt": version("fedprompt"), "model": model}
    return head | describe_parts(parts, class_names) | {"class_names": [*class_names], **about}


def rebuilt(
    folder: Path, weights: str | PathLike[str] | None, device: torch.device | str
) -> PromptedNetwork:
    """Build the network of a folder, with new prompts in place of the trained ones."""
    config = read_config(folder)
    with check.located(str(folder / CONFIG)):
        parsed(config["model"], config["arguments"])
    parts = {name: kind(**config[name]) for name, kind in _PARTS.items() if name in config}
    with check.located(str(folder)):
        network = named_network(config["model"], config["arguments"], weights)
    moved = nn.ModuleDict(parts).to(device)
    return PromptedNetwork(network.to(device), moved, config)


def card(config: Mapping[str, Any], name: str) -> str:
    """Write the card of a folder, in Markdown."""
    library, network = parsed(config["model"], config["arguments"])
    hub = {"timm": f"timm/{network}", "transformers": network}.get(library)
    head = {"library_name": "fedprompt", "base_model": hub, "tags": "[fedprompt]"}
    lines = [f"{key}: {value}" for key, value in head.items() if value]
    if config["license"]:
        lines.append(f"license: {config['license']}")
    rows = {
        "network": f"`{config['model']}`",
        "trained part": f"{config['kind']}: `{json.dumps(config[config['kind']])}`",
        "classes": ", ".join(config["class_names"]),
        **{key: config[key] for key in ("sentence", "method", "data")},
        "fedprompt": config["fedprompt"],
    }
    cells = {key: " ".join(value.split()).replace("|", "\\|") for key, value in rows.items()}
    table = [f"| {key} | {cell} |" for key, cell in cells.items() if cell]
    title = f"# {name.removeprefix('hub:')}"
    text = ["---", *lines, "---", title, "", "Trained prompts of a frozen network.", ""]
    text += ["| | |", "|---|---|", *table, "", "```python", "import fedprompt as fp", ""]
    text += [f'model = fp.load_prompts("{name}")', "logits = model(images)", "```", ""]
    return "\n".join(text)
