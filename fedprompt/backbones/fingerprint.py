"""Fingerprints of backbones and prompts: lines of text that two parties can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn

import fedprompt._nouns as nouns
import fedprompt._refusals as check
from fedprompt.backbones._models import classifier
from fedprompt.backbones.attributes import Attributes, find_module, is_plain, tensors
from fedprompt.backbones.freezing import Trainable
from fedprompt.backbones.images._frozen import FrozenTrunk
from fedprompt.interfaces import PromptStream, TextEncoder, Trunk

# Parts of the names of settings that do not affect features: of classifiers, of dropout, of the
# initialization, and of the location of the weights.
_IRRELEVANT = ("num_classes", "drop", "init", "path")


def fingerprint(
    backbone: Trunk | TextEncoder | nn.Module,
    *streams: PromptStream,
    class_names: Sequence[str] = (),
    name_position: int | None = None,
) -> dict[str, str]:
    """Describe a backbone, the layers at which prompts enter it, and the classes.

    A receiver that compares fingerprints can refuse payloads made for another backbone. The
    parts of the fingerprint are:

    - ``weights``: a hash of all weights and buffers, and of the attention mask of a trunk, without
      classifiers and without the ``trainable`` parameters of a trunk. Hashing reads every weight
      once, so compute the fingerprint once.
    - ``settings``: a hash of numbers and strings that affect the features but are not stored in
      the weights, such as the number of heads, the pooling and the epsilon of norms. Booleans
      are left out, because some depend on the machine, such as the choice of a fused kernel.
      Dropout is left out, because a frozen backbone does not use it.
    - ``backbone``, ``activation`` and ``dtype``: their names.
    - ``prompts`` and ``classes``: if they were given. ``name_position``: for a text tower.

    Names of settings can differ between versions of timm and open_clip. All parties should use
    the same version.

    Args:
        backbone: Trunk from :func:`vit_trunk`, a :class:`TextTower`, a network without tokens, such
            as the one behind :class:`PadPrompts`, or a backbone of your own: an object with its
            ``nn.Module`` as the attribute ``model``, or a trunk or text tower with modules, tensors
            and plain settings as attributes.
        *streams: Prompt streams, in the order in which :func:`encode_prompted` gets them.
        class_names: Names of the classes, in the order of their labels. Empty if the message
            does not depend on the classes.
        name_position: Number of context tokens before the class name, as in
            :func:`prompted_text`. Used for text towers only.

    Returns:
        Text by the name of its part.

    Raises:
        TypeError: If `backbone` has neither modules nor tensors.

    Example:
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> model = VisionTransformer(16, 4, embed_dim=8, depth=2, num_heads=2)
        >>> trunk = vit_trunk(model)
        >>> stream = DeepPrompts(3, trunk.dim, trunk.depth)()
        >>> parts = fingerprint(trunk, stream, class_names=["cat", "dog"])
        >>> parts["backbone"], parts["activation"], parts["dtype"]
        ('VisionTransformer', "GELU(approximate='none')", 'float32')
        >>> parts["prompts"]
        '3, 3 at layers 0, 1, replacing'
    """
    model = find_module(backbone)
    for position, stream in enumerate(streams):
        nouns.stream(f"streams[{position}]", stream)
    check.texts("class_names", class_names, at_least=0)
    check.optional(check.count, "name_position", name_position, at_least=0)
    name = type(backbone if isinstance(model, Attributes) else model).__name__
    architecture = (getattr(model, "pretrained_cfg", None) or {}).get("architecture")
    activations = {repr(module) for module in model.modules() if _is_activation(module)}
    packed = [tensor for tensor in tensors(model).values() if tensor.is_quantized]
    weights = [*model.parameters(), *packed]
    dtypes = {str(weight.dtype).removeprefix("torch.") for weight in weights}
    parts = {
        "backbone": " ".join(filter(None, [name, architecture])),
        "weights": _weights(model, backbone),
        "settings": settings_of(model),
        "activation": ", ".join(sorted(activations)),
        "dtype": ", ".join(sorted(dtypes)),
    }
    if streams:
        parts["prompts"] = "; ".join(map(_insertion, streams))
    if class_names:
        parts["classes"] = hashlib.sha256(json.dumps(list(class_names)).encode()).hexdigest()
    if isinstance(backbone, TextEncoder) or not isinstance(backbone, Trunk | nn.Module):
        place = "after the context" if name_position is None else str(name_position)
        parts["name_position"] = place
    return parts


def _weights(model: Any, backbone: object) -> str:
    unused = {id(tensor) for module in classifier(model) for tensor in tensors(module).values()}
    if isinstance(trainable := getattr(backbone, "trainable", None), Trainable):
        unused.update(map(id, trainable.parameters()))
    named = tensors(model)
    if isinstance(backbone, FrozenTrunk) and backbone.mask is not None:
        named["attention_mask"] = backbone.mask
    total = hashlib.sha256()
    for name, tensor in sorted(named.items()):
        if id(tensor) not in unused:
            total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
            whole = getattr(
                tensor, "full_tensor", lambda same=tensor: same
            )()  # of a shard of a DTensor
            plain = (whole.dequantize() if whole.is_quantized else whole).detach().cpu()
            total.update(plain.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def settings_of(model: Any) -> str:
    """Hash the plain settings of a model, without its weights."""
    unused = classifier(model)
    settings = [
        (name, key, _rounded(value))
        for name, module in sorted(model.named_modules())
        # Activations are listed, and dropout is off.
        if module not in unused and not _is_activation(module)
        if "drop" not in type(module).__name__.lower()
        for key, value in sorted(vars(module).items())
        if is_plain(value)
        and not key.startswith("_")
        and not any(word in key for word in _IRRELEVANT)
    ]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _rounded(value: Any) -> Any:
    """Write numbers with nine digits, because the last bit of a root can depend on the machine."""
    if isinstance(value, tuple):
        return [_rounded(part) for part in value]
    return f"{value:.9g}" if isinstance(value, float) else value


def _is_activation(module: nn.Module) -> bool:
    """Whether a module is a pointwise function of a known library, without parameters."""
    defined_in = type(module).__module__
    is_pointwise = (
        defined_in in ("torch.nn.modules.activation", "transformers.activations")
        or defined_in.startswith("timm.layers.activations")
        or type(module).__name__ == "QuickGELU"
    )
    return is_pointwise and not any(True for _ in module.parameters())


def _insertion(stream: PromptStream) -> str:
    counts = ", ".join(str(tokens.shape[-2]) for tokens in stream.layers.values())
    layers = ", ".join(map(str, stream.layers))
    return f"{counts} at layers {layers}, {'replacing' if stream.replace else 'kept'}"
