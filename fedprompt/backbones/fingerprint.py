"""What a message was made for, as a few lines of text that two parties can compare."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from fedprompt._checks import check_count, kind, wrong_type
from fedprompt.interfaces import PromptStream, TextEncoder, Trunk

_IDLE = (
    "num_classes",
    "drop",
    "init",
    "path",
)  # of a classifier, of training, of how weights were made, of where they lay


def fingerprint(
    backbone: Trunk | TextEncoder,
    *streams: PromptStream,
    class_names: Sequence[str] = (),
    name_position: int | None = None,
) -> dict[str, str]:
    """Describe the backbone, where prompts enter it and the classes, so that a payload meant for others is refused.

    Weights and buffers are hashed bit by bit, classifiers left out. What computes the features and shows in no weight is told beside
    them: activations by name, and a hash of the plain settings of all modules, numbers and strings such as those of heads, pooling and
    the epsilon of norms. Booleans are no part of it, as some, such as that for a fused kernel, vary by machine; nor is dropout, which
    rests in a frozen backbone. Another version of timm or open_clip may name its settings otherwise: all should run the same one.
    Hashing reads every weight once; make the fingerprint once.

    Args:
        backbone: Trunk or text tower. One of your own keeps its ``nn.Module`` as ``model``, is an
            ``nn.Module``, or has its modules, tensors and plain settings as attributes.
        streams: What enters it, in the order in which :func:`encode_prompted` gets it.
        class_names: One for each class, in the order of labels; none where classes play no part.
        name_position: For a text tower, as in :func:`prompted_text`: number of context tokens before the class name. If None, all.

    Returns:
        Text by part, ``backbone``, ``weights``, ``settings``, ``activation`` and ``dtype``; ``prompts`` and ``classes`` where
        they were given, and ``name_position`` for a text tower.

    Raises:
        TypeError: If `backbone` has neither modules nor tensors.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> trunk = vit_trunk(VisionTransformer(img_size=16, patch_size=4, num_classes=0, embed_dim=8, depth=2, num_heads=2))
        >>> parts = fingerprint(trunk, DeepPrompts(3, trunk.dim, trunk.depth)(), class_names=["cat", "dog"])
        >>> parts["backbone"], parts["activation"], parts["dtype"], parts["prompts"]
        ('VisionTransformer', "GELU(approximate='none')", 'float32', '3, 3 at layers 0, 1, replacing')
    """
    model = _module_of(backbone)
    for position, stream in enumerate(streams):
        if not isinstance(stream, PromptStream):
            raise wrong_type(f"streams[{position}]", "be a PromptStream", kind(stream))
    if isinstance(class_names, str) or not all(isinstance(name, str) for name in class_names):
        raise wrong_type("class_names", "be a sequence of strings", kind(class_names))
    if name_position is not None:
        check_count("name_position", name_position, at_least=0)
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    parts = {
        "backbone": " ".join(filter(None, [_name_of(backbone, model), architecture])),
        "weights": _weights(model),
        "settings": _settings(model),
        "activation": ", ".join(
            sorted({repr(module) for module in model.modules() if _is_activation(module)})
        ),
        "dtype": ", ".join(
            sorted(
                {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
            )
        ),
    }
    if streams:
        parts["prompts"] = "; ".join(map(_insertion, streams))
    if class_names:
        parts["classes"] = hashlib.sha256(json.dumps(list(class_names)).encode()).hexdigest()
    if not isinstance(backbone, Trunk):
        parts["name_position"] = (
            "behind the context" if name_position is None else str(name_position)
        )
    return parts


class _Attributes(nn.Module):
    """Modules, tensors and plain settings that a custom trunk has as attributes."""

    def __init__(self, backbone: object) -> None:
        super().__init__()
        for name, part in getattr(backbone, "__dict__", {}).items():
            if isinstance(part, nn.Module):
                self.add_module(f"own:{name}", part)
            elif isinstance(part, Tensor):
                self.register_buffer(f"own:{name}", part)
            elif isinstance(part, list | tuple) and all(isinstance(m, nn.Module) for m in part):
                self.add_module(f"own:{name}", nn.ModuleList(part))
            elif _is_plain(part):
                setattr(self, f"own:{name}", part)


def _module_of(backbone: object) -> nn.Module:
    """Return the module whose tensors and settings determine the features of a backbone."""
    model = getattr(backbone, "model", None)
    if isinstance(model, nn.Module):
        return model
    if isinstance(backbone, Trunk | TextEncoder):
        model = backbone if isinstance(backbone, nn.Module) else _Attributes(backbone)
        if model.state_dict():
            return model
    rule = "be a trunk or a text tower that keeps its nn.Module as `model`, or its modules"
    raise wrong_type("backbone", f"{rule} and tensors as attributes", kind(backbone))


def _name_of(backbone: object, model: nn.Module) -> str:
    return type(backbone if isinstance(model, _Attributes) else model).__name__


def _weights(model: Any) -> str:
    unused = {
        id(tensor)
        for module in _classifier(model)
        for tensor in module.state_dict(keep_vars=True).values()
    }
    total = hashlib.sha256()
    for name, tensor in sorted(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in unused:
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def _settings(model: Any) -> str:
    unused = _classifier(model)
    told = []
    for name, module in sorted(model.named_modules()):
        if (
            module not in unused
            and not _is_activation(module)
            and "drop" not in type(module).__name__.lower()
        ):
            plain = {
                key: value
                for key, value in sorted(vars(module).items())
                if _is_plain(value) and not key.startswith("_")
            }
            told += [
                (name, key, _rounded(value))
                for key, value in plain.items()
                if not any(word in key for word in _IDLE)
            ]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _is_plain(value: object) -> bool:
    return type(value) in (int, float, str) or (
        isinstance(value, tuple) and all(type(part) in (int, float, str) for part in value)
    )


def _rounded(value: Any) -> Any:
    """Write numbers in nine digits: the last bit of a root may depend on the machine."""
    if isinstance(value, tuple):
        return [_rounded(part) for part in value]
    return f"{value:.9g}" if isinstance(value, float) else value


def _classifier(model: Any) -> set[nn.Module]:
    classifier = model.get_classifier() if hasattr(model, "get_classifier") else None
    return set(classifier.modules()) if isinstance(classifier, nn.Module) else set()


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is a pointwise function of timm, open_clip or torch, and no attention."""
    room = type(module).__module__
    known = (
        room == "torch.nn.modules.activation"
        or room.startswith("timm.layers.activations")
        or type(module).__name__ == "QuickGELU"
    )
    return known and not any(True for _ in module.parameters())


def _insertion(stream: PromptStream) -> str:
    counts = ", ".join(str(tokens.shape[-2]) for tokens in stream.layers.values())
    return f"{counts} at layers {', '.join(map(str, stream.layers))}, {'replacing' if stream.replace else 'carried on'}"
