"""Trained prompts in a file or a folder that records the backbone and the class names."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from os import PathLike, fspath
from pathlib import Path
from typing import Any, overload

import torch
import torch.nn as nn

import fedprompt._refusals as check
from fedprompt._names import inner_name
from fedprompt.backbones.fingerprint import fingerprint
from fedprompt.backbones.preparation import Preparation
from fedprompt.backbones.pretrained import check_source, network
from fedprompt.interfaces import TextEncoder, Trunk
from fedprompt.messages.payload import load_values, num_bytes, snapshot
from fedprompt.prompts.visual import GroupPrompts, LayeredPrompts
from fedprompt.saved import saved_folder as saved
from fedprompt.saved.network import (
    PromptedNetwork,
    check_reproduced,
    described,
    flags_kept,
    parts_of,
    rebuilt,
)
from fedprompt.saved.saved_folder import CONFIG, STATE
from fedprompt.wire import Expected, Header, open_payload, save_payload

_COUNT = "num_classes"
_LAYERS = "layers"
_LONGEST = 1000
_HUB = "hub:"


def save_prompts(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    trunk: Trunk | TextEncoder | nn.Module,
    class_names: Sequence[str] = (),
    model: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    preparation: Preparation | None = None,
    sentence: str = "",
    scale: float | None = None,
    method: str = "",
    data: str = "",
    license: str = "",
) -> None:
    """Save a trained module and the fingerprint of the backbone that it belongs to.

    Parameters and persistent buffers are saved; the backbone is not. The layers of visual prompts
    are recorded, too. The file is in the safetensors format. Hashing reads every weight of the
    backbone once.

    With `model`, the name of the network in its library, a folder is written: the file
    ``state.safetensors``, a description ``config.json`` and a card ``README.md``. Then
    :func:`load_prompts` builds the network and the prompts in one call. The module of a folder is
    :class:`LayeredPrompts`, or a module whose parts are such `prompts` and a linear `head`, or it
    is one context of :class:`ContextPrompts` for a CLIP of open_clip. If the module can be called,
    it must give the logits of these parts on one image: the folder does not have its code.

    Args:
        module: Prompts, or prompts with a head, such as an ``nn.ModuleDict``. Its numbers are
            finite.
        path: Path of the file or the folder. An existing file is replaced when all bytes are on the
            disk. With ``"hub:USER/NAME"``, the folder is uploaded to the Hugging Face Hub.
        trunk: Trunk, text tower or network that the module was trained with; see
            :func:`fingerprint` for trunks of your own. For a context in a folder it is the CLIP
            itself, so that its image tower is compared, too.
        class_names: Class names in the order of labels. If empty, no class names are recorded.
        model: Name of the network: ``timm:NAME``, ``open_clip:NAME:TAG`` or ``transformers:NAME``.
            If None, a file is written.
        arguments: Arguments of the network's constructor, such as ``{"in_chans": 1}`` in timm. The
            size of images is found.
        preparation: Preparation of the images. If None, that of the library for this network.
        sentence: Sentence around the class names, for the card.
        scale: Factor of the cosines in the logits of a context. If None, that of the CLIP.
        method: Method of the training, for the card.
        data: Data of the training, for the card.
        license: License of the prompts, as the Hub names it, such as ``"mit"``.

    Raises:
        ValueError: If `module` has parts that a folder cannot describe or other logits than its
            parts, or `model` is not a name of this form or of another library than the network. A
            name of another network is found when the folder is loaded.

    Example:
        >>> import timm
        >>> from tempfile import TemporaryDirectory
        >>> from safetensors.torch import save_file
        >>> network = timm.create_model("test_vit", num_classes=0).eval()
        >>> trunk = vit_trunk(network)
        >>> prompts, head = DeepPrompts(3, trunk), nn.Linear(64, 2)
        >>> trained = nn.ModuleDict({"prompts": prompts, "head": head})
        >>> with TemporaryDirectory() as folder:
        ...     save_file(network.state_dict(), f"{folder}/weights.safetensors")
        ...     about = {"class_names": ["cat", "dog"], "model": "timm:test_vit"}
        ...     save_prompts(trained, f"{folder}/pets", trunk=trunk, **about)
        ...     model = load_prompts(f"{folder}/pets", weights=f"{folder}/weights.safetensors")
        >>> model.class_names, model(torch.zeros(1, 3, 160, 160)).shape
        (['cat', 'dog'], torch.Size([1, 2]))
    """
    about = {"sentence": sentence, "method": method, "data": data, "license": license}
    if model is None:
        more = about | {"arguments": arguments, "preparation": preparation, "scale": scale}
        if unused := [name for name, value in more.items() if value]:
            raise check.wrong(unused[0], "be left out without `model`, which makes a folder", "one")
        rule = "be given for the Hub, which keeps folders"
        check.require(not fspath(path).startswith(_HUB), "model", rule, "None")
        _save_file(module, path, trunk, class_names)
        return
    for name, text in about.items():
        check.text(name, text)
    parts = parts_of(module)
    rule = "be the CLIP itself, so that its image tower is compared, too"
    check.typed("context" not in parts or isinstance(trunk, nn.Module), "trunk", rule, trunk)
    how: dict[str, Any] = {"model": model, "arguments": arguments or {}, "class_names": class_names}
    how |= {"preparation": preparation, "scale": scale, "about": about}
    with flags_kept(trunk):
        found, made = described(parts, trunk, **how)
        check_reproduced(module, found, made)
    with tempfile.TemporaryDirectory() as scratch:
        hub = fspath(path).startswith(_HUB)
        folder = Path(scratch) if hub else Path(path)
        name = fspath(path) if hub else folder.resolve().name
        call = f'import fedprompt as fp\n\nmodel = fp.load_prompts("{name}")\n'
        text = saved.card(found, name, f"{call}logits = model(model.preparation(image)[None])")
        state = snapshot(parts, buffers=True)
        saved.write(folder, found, state, text)
        if hub:
            _upload(folder, fspath(path).removeprefix(_HUB))


@overload
def load_prompts(
    module: nn.Module,
    path: str | PathLike[str],
    *,
    trunk: Trunk | TextEncoder | nn.Module,
    class_names: Sequence[str] = (),
) -> None: ...
@overload
def load_prompts(
    module: str | PathLike[str],
    *,
    weights: str | PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> PromptedNetwork: ...
def load_prompts(
    module: nn.Module | str | PathLike[str],
    path: str | PathLike[str] | None = None,
    *,
    trunk: Trunk | TextEncoder | nn.Module | None = None,
    class_names: Sequence[str] = (),
    weights: str | PathLike[str] | None = None,
    device: torch.device | str = "cpu",
) -> PromptedNetwork | None:
    """Load a file of :func:`save_prompts` into a module of the same form, or a whole folder.

    Loading runs no code from the file. The module is unchanged if the file is refused.

    With a folder in place of the module, the network is made by its library, and returned with the
    prompts as one module in eval mode. It maps images to logits, or to features if there is no
    head. Its attributes are `network`, `class_names`, `description` and `preparation`, which makes
    an input from an image.

    Args:
        module: Module with the names, shapes and dtypes of the saved one. Its visual prompts enter
            at the same layers, and replace earlier ones if those did. Or a folder, or
            ``"hub:USER/NAME"`` on the Hugging Face Hub, with ``@REVISION`` behind it if needed.
        path: Path of the file.
        trunk: Trunk, text tower or network that the module will be used with. Its fingerprint must
            be the recorded one.
        class_names: Class names in the order of labels; they must be the recorded ones. If empty,
            they are not compared.
        weights: Weights of the network for a folder: a file, or for transformers a folder. If None,
            the library downloads them. Their fingerprint must be the recorded one.
        device: Device of the network of a folder.

    Returns:
        None for a file, and the network with prompts for a folder.

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
    if isinstance(module, nn.Module):
        rule = "be given with `trunk`, for a module"
        check.typed(path is not None and trunk is not None, "path", rule, path)
        rule = "be left out for a module, whose network you have"
        check.require(weights is None, "weights", rule, "one")
        _load_file(module, path, trunk, class_names)
        return None
    given = {"path": path, "trunk": trunk, "class_names": class_names or None}
    if unused := [name for name, value in given.items() if value is not None]:
        raise check.wrong(unused[0], "be left out for a folder, which has its own", "one")
    found, state = saved.read(_downloaded(fspath(module)))
    rule = "have prompts or a context; load the model of a method by fedprompt.compare.load"
    check.require(not found.method, "module", rule, f"one of {found.method}")
    check_source(found.model, found.arguments)
    made = network(found.model, found.kind, weights=weights, arguments=found.arguments)
    made = replace(made, preparation=found.preparation or made.preparation)
    made.model.to(device)
    prompted = rebuilt(found, state, made).to(device)
    backbone = made.model if found.kind == "clip" else prompted.trunk
    saved.check_fingerprint(found, fingerprint(backbone))
    return prompted.eval()


def _upload(folder: Path, name: str) -> None:
    """Upload a folder to a repository of the Hub, which is made if it does not exist."""
    import huggingface_hub

    hub = huggingface_hub.HfApi()
    hub.create_repo(name, exist_ok=True)
    hub.upload_folder(repo_id=name, folder_path=str(folder))


def _downloaded(source: str) -> Path:
    """Return a folder, downloaded from the Hub if it is there."""
    if not source.startswith(_HUB):
        return Path(source)
    import huggingface_hub

    name, _, revision = source.removeprefix(_HUB).partition("@")
    wanted = {"revision": revision or None, "allow_patterns": [STATE, CONFIG]}
    return Path(huggingface_hub.snapshot_download(name, **wanted))


def _save_file(module: nn.Module, path: Any, trunk: Any, class_names: Sequence[str]) -> None:
    parts = fingerprint(trunk, class_names=class_names)
    count = {_COUNT: str(len(class_names))} if class_names else {}
    header = Header(parts, meta={_LAYERS: _layers(module)} | count)
    save_payload(snapshot(module, buffers=True), path, header=header)


def _load_file(module: nn.Module, path: Any, trunk: Any, class_names: Sequence[str]) -> None:
    form = snapshot(module, buffers=True)
    parts = fingerprint(trunk, class_names=class_names)
    classes = parts.pop("classes", None)
    try:
        longest = 2**30 + num_bytes(form)  # the form bounds the file further
        values, header = open_payload(path, expect=Expected(form, parts), max_bytes=longest)
        if classes is not None and classes != header.fingerprint.get("classes"):
            raise _other_classes(header, len(class_names))
        layers = _layers(module)
        if (recorded := header.meta.get(_LAYERS)) != layers:
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
    rule = f"be the {header.meta.get(_COUNT, 'other')} names of the file, in their order"
    return check.wrong("class_names", rule, f"{count} names, which differ in spelling or order")
