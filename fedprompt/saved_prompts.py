"""Trained prompts in a file that records the backbone and the class names they belong to."""

import hashlib
import json
from collections.abc import Sequence
from os import PathLike, fspath

import torch.nn as nn

import fedprompt._refusals as check
from fedprompt._names import inner_name
from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.interfaces import TextEncoder, Trunk
from fedprompt.messages.payload import load_values, num_bytes, snapshot
from fedprompt.prompts.visual import GroupPrompts, LayeredPrompts
from fedprompt.wire import Expected, Header, open_payload, save_payload

__all__ = ["load_prompts", "save_prompts"]

_COUNT = "num_classes"
_LAYERS = "layers"
_LONGEST = 1000


def save_prompts(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    trunk: Trunk | TextEncoder | nn.Module,
    class_names: Sequence[str] = (),
) -> None:
    """Save a trained module and the fingerprint of the backbone that it belongs to.

    Parameters and persistent buffers are saved; the backbone is not. The layers of visual prompts
    are recorded, too. The file is in the safetensors format. Hashing reads every weight of the
    backbone once.

    Args:
        module: Prompts, or prompts with a head, such as an ``nn.ModuleDict``. Its numbers are
            finite.
        path: Path of the file. An existing file is replaced when all bytes are on the disk.
        trunk: Trunk, text tower or network that the module was trained with; see
            :func:`fingerprint` for trunks of your own.
        class_names: Class names in the order of labels. If empty, no class names are recorded.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> def make_trunk():
        ...     size = {"embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 0}
        ...     return vit_trunk(VisionTransformer(16, 4, **size))
        >>> trunk, other_trunk = make_trunk(), make_trunk()
        >>> trained, prompts = DeepPrompts(3, 8, 2), DeepPrompts(3, 8, 2)
        >>> with TemporaryDirectory() as folder:
        ...     path = f"{folder}/prompts.safetensors"
        ...     save_prompts(trained, path, trunk=trunk)
        ...     load_prompts(prompts, path, trunk=trunk)
        ...     try:
        ...         load_prompts(prompts, path, trunk=other_trunk)
        ...     except ValueError as error:
        ...         print(str(error).split("`blob` ")[1].split(",")[0])
        must come from the same weights
        >>> torch.equal(prompts.tokens, trained.tokens)
        True
    """
    parts = fingerprint(trunk, class_names=class_names)
    count = {_COUNT: str(len(class_names))} if class_names else {}
    header = Header(parts, meta={_LAYERS: _layers(module)} | count)
    save_payload(snapshot(module, buffers=True), path, header=header)


def load_prompts(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    trunk: Trunk | TextEncoder | nn.Module,
    class_names: Sequence[str] = (),
) -> None:
    """Load a file of :func:`save_prompts` into a module of the same form.

    Loading runs no code from the file. The module is unchanged if the file is refused.

    Args:
        module: Module with the names, shapes and dtypes of the saved one. Its visual prompts enter
            at the same layers, and replace earlier ones if those did.
        path: Path of the file.
        trunk: Trunk, text tower or network that the module will be used with. Its fingerprint must
            be the recorded one.
        class_names: Class names in the order of labels; they must be the recorded ones. If empty,
            they are not compared.

    Raises:
        ValueError: If the file is damaged, or belongs to another backbone, to other class names or
            to a module of another form. The text names the part that differs.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from timm.models.vision_transformer import VisionTransformer
        >>> size = {"embed_dim": 8, "depth": 2, "num_heads": 2, "num_classes": 0}
        >>> trunk = vit_trunk(VisionTransformer(16, 4, **size))
        >>> trained, prompts = DeepPrompts(3, 8, 2), DeepPrompts(3, 8, 2)
        >>> with TemporaryDirectory() as folder:
        ...     save_prompts(trained, f"{folder}/prompts.safetensors", trunk=trunk)
        ...     load_prompts(prompts, f"{folder}/prompts.safetensors", trunk=trunk)
        >>> torch.equal(prompts.tokens, trained.tokens)
        True
    """
    form = snapshot(module, buffers=True)
    parts = fingerprint(trunk, class_names=class_names)
    classes = parts.pop("classes", None)
    try:
        # The form bounds the file further.
        values, header = open_payload(
            path, expect=Expected(form, parts), max_bytes=2**30 + num_bytes(form)
        )
        if classes is not None and classes != header.fingerprint.get("classes"):
            raise _other_classes(header, len(class_names))
        layers = _layers(module)
        if (recorded := header.meta.get(_LAYERS, layers)) != layers:  # older files have none
            raise check.wrong("module", f"have prompts at the layers {recorded}", layers)
    except ValueError as error:
        raise ValueError(f"{fspath(path)!r} does not fit `module`: {error}") from error
    load_values(module, values)


def _layers(module: nn.Module) -> str:
    """Describe where the visual prompts of a module enter; a long text is hashed."""
    found = {
        inner_name(module, f"{name}.tokens".removeprefix(".")): part.extra_repr()
        for name, part in module.named_modules()
        if isinstance(part, LayeredPrompts | GroupPrompts)
    }
    text = json.dumps(found, sort_keys=True)
    return text if len(text) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()


def _other_classes(header: Header, count: int) -> ValueError:
    if "classes" not in header.fingerprint:
        rule = "be left out, because the file has none"
        return check.wrong("class_names", rule, f"{count} names")
    recorded = header.meta.get(_COUNT, "other")
    rule = f"be the {recorded} names of the file, in their order"
    return check.wrong("class_names", rule, f"{count} names, which differ in spelling or order")
