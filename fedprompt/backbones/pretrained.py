"""Frozen networks by name, from files and folders, with the preparation of their images."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
import torch.nn as nn
from jaxtyping import Float
from safetensors.torch import save_file
from torch import Tensor

import fedprompt._refusals as check
from fedprompt._files import path_of
from fedprompt.backbones._weights import tensors_in, weights_of
from fedprompt.backbones.fingerprint import fingerprint, settings_of
from fedprompt.backbones.freezing import freeze
from fedprompt.backbones.images.patches import image_tokens
from fedprompt.backbones.images.vit import vit_trunk
from fedprompt.backbones.preparation import (
    Preparation,
    Size,
    of_open_clip,
    of_timm,
    of_transformers,
)
from fedprompt.backbones.text.tower import TextTower
from fedprompt.interfaces import TrainableTrunk

Kind = Literal["vit", "clip"]

EXAMPLES = {"vit": "vit_base_patch16_224", "clip": "ViT-B-16-quickgelu:openai"}
"""Examples of names in messages."""

WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".tar", ".ckpt")
"""Extensions of files of weights."""

Sample = tuple[nn.Module, Callable[..., Any] | None, Preparation]
SAMPLES: dict[str, Callable[[], Sample]] = {}
"""Networks of packages above this one by name: model, tokenizer of a CLIP, and preparation."""


@dataclass(frozen=True, eq=False)
class Network:
    """Frozen network, with the preparation of its images.

    Attributes:
        name: Name, as it was given.
        model: Model in float32. For a CLIP, both towers.
        preparation: Steps from an image to an input.
        tower: Text tower of a CLIP, or None.
        source: Name that makes the network again, such as ``"timm:vit_base_patch16_224"``, or "".
        arguments: Arguments of the library's constructor, with the size of the images.
    """

    name: str
    model: nn.Module
    preparation: Preparation
    tower: TextTower | None = None
    source: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def trunk(self) -> TrainableTrunk:
        """Trunk of a vision transformer, or of the image tower of a CLIP."""
        images: Any = getattr(self.model, "visual", self.model)
        return vit_trunk(images)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Fingerprint of the whole model."""
        return fingerprint(self.model)

    @property
    def inputs(self) -> Float[Tensor, "1 channels height width"]:
        """One input of zeros."""
        return torch.zeros(1, len(self.preparation.mean), *self.preparation.size)

    @torch.no_grad()
    def tokens(
        self, images: Float[Tensor, "batch channels height width"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Encode prepared images by the image tower of a CLIP, the pooled token first."""
        if hasattr(self.model, "visual"):
            return tokens_of(self.model, images)
        vision: Any = self.model.vision_model
        hidden = vision.post_layernorm(vision(images).last_hidden_state)
        tokens: Tensor = self.model.get_submodule("visual_projection")(hidden)
        return tokens


def tokens_of(
    model: nn.Module, images: Float[Tensor, "batch channels height width"]
) -> Float[Tensor, "batch tokens dim"]:
    """Encode prepared images by the image tower of open_clip, the pooled token first."""
    pooled, patches = image_tokens(model, images)
    return torch.cat([pooled[:, None], patches], 1)


def network(
    given: str | nn.Module | TextTower,
    kind: Kind = "vit",
    *,
    size: int | Size | None = None,
    weights: str | PathLike[str] | None = None,
    arguments: Mapping[str, Any] | None = None,
    preparation: Preparation | None = None,
    argument: str = "",
) -> Network:
    """Make a frozen vision transformer, or a frozen CLIP.

    A name of timm is a vision transformer, and a name of open_clip with the tag of its weights is a
    CLIP (or its image tower). A name with ``/``, such as ``facebook/dinov2-small`` or
    ``openai/clip-vit-base-patch32``, belongs to transformers, except OpenAI's own, such as
    ``ViT-B/16``. With ``hf-hub:`` it belongs to timm or open_clip, and ``timm:``, ``open_clip:``
    and ``transformers:`` name a library. ``NAME=FILE`` reads weights from a file, and for
    transformers and ``hf-hub:`` from a folder. A file alone needs the name of the network in its
    own name, and a folder alone a configuration (``save_pretrained``, ``push_to_hf_hub``).

    Libraries load what is on this machine, or else download it. From a file, only tensors are read,
    so no code is run. Prefixes of names, such as ``module.``, are found.

    Args:
        given: ``NAME``, ``NAME=FILE``, a file, a folder, or a model: of timm, of open_clip, or a
            :class:`fedprompt.TextTower`.
        kind: "vit" or "clip".
        size: Height and width of images. If None, those of the network. Networks of transformers
            have that of their processor.
        weights: File or folder of weights, as in ``NAME=FILE``.
        arguments: Further arguments of the library's constructor.
        preparation: Preparation of the images, for a model of your own.
        argument: Name of `given` in messages, such as "--vit". If empty, `kind`.

    Raises:
        ValueError: If there is no such name or file, weights cannot be loaded or are of another
            network, or the network is no vision transformer or no CLIP.

    Example:
        >>> from fedprompt import samples
        >>> half = Preparation(32, (0.5,) * 3, (1.0,) * 3)
        >>> tower = TextTower(samples.clip(), samples.tokenize)
        >>> made = network(tower, "clip", preparation=half)
        >>> made.tokens(made.inputs).shape, made.trunk.depth
        (torch.Size([1, 65, 96]), 4)
    """
    check.require(kind in EXAMPLES, "kind", 'be "vit" or "clip"', repr(kind))
    flag = argument or kind
    if not isinstance(given, str):
        return _checked(flag, kind, of_model(flag, kind, given, preparation))
    name, _, file = given.partition("=")
    path = None if not (file or weights) else path_of(flag, file or weights)
    if path is None and name not in SAMPLES and (Path(given).exists() or given.endswith(WEIGHTS)):
        name, path = "", Path(given)
    check.require(path is None or path.exists(), flag, "name a file that exists", path)
    library, name = _library(flag, kind, name, path)
    given_arguments = dict(arguments or {})
    if size is not None:
        rule = f"be None for a network of {library}, which has its own"
        check.require(library in _SIZE, "size", rule, size)
        given_arguments[_SIZE[library]] = size
    try:
        made = _MAKERS[library](kind, name, path, given_arguments)
    except Exception as error:  # libraries and damaged files raise errors of any type
        line = f"({_line(error)})"
        if path is not None:
            rule = f"have weights of {name or 'a network of its configuration'}"
            raise check.wrong(flag, rule, f"{path} {line}") from error
        what = "FOLDER" if "/" in name else "FILE"
        raise ValueError(
            f"`{flag}` must name a network such as {EXAMPLES[kind]}, whose weights are on this "
            f"machine or can be downloaded; got {name} {line}. With weights of your own, give "
            f"{given}={what}."
        ) from error
    source = name if library == "samples" else f"{library}:{name}" if name else ""
    return _checked(flag, kind, replace(made, name=name or str(path), source=source))


def _library(flag: str, kind: Kind, name: str, path: Path | None) -> tuple[str, str]:
    """Return the library of a name, and the name in this library."""
    library, _, rest = name.partition(":")
    if name in SAMPLES:
        return "samples", name
    if library in _MAKERS:
        return library, rest
    if re.fullmatch(r"(RN|ViT-)\w+(/\d+)(@336px)?", name):  # OpenAI's own
        name = name.replace("/", "-").replace("@336px", "-336") + "-quickgelu:openai"
    if library in ("hf-hub", "hf_hub") or name.startswith("timm/"):
        rest = rest or name
        return {"vit": "timm", "clip": "open_clip"}[kind], f"hf-hub:{rest}"
    if "/" in name:
        return "transformers", name
    if not name and path is not None and path.is_dir():
        return _library_of(path), ""
    name = name or str(path and path.name.removesuffix(path.suffix))
    import open_clip  # takes seconds
    import timm

    if kind == "vit" and timm.is_model(name):
        return "timm", name
    architecture, _, tag = name.partition(":")
    if architecture in open_clip.list_models():
        tags = open_clip.list_pretrained_tags_by_model(architecture)
        rule = f"name weights of {architecture} as NAME:TAG: {', '.join(tags)}"
        check.require(path is not None or tag.lower() in tags, flag, rule, repr(name))
        return "open_clip", name
    known = open_clip.list_models() if kind == "clip" else timm.list_models(pretrained=True)
    near = ", ".join(get_close_matches(architecture, known, n=3))
    rule = f"name a network, such as {EXAMPLES[kind]}"
    rule += " before its file: NAME=FILE" * (path is not None)
    raise check.wrong(flag, rule, f"{name!r}{f' (similar: {near})' if near else ''}")


def _library_of(folder: Path) -> str:
    """Return the library whose configuration is in a folder."""
    if (folder / "open_clip_config.json").exists():
        return "open_clip"
    config = folder / "config.json"
    is_timm = config.exists() and '"architecture"' in config.read_text(encoding="utf-8")
    return "timm" if is_timm else "transformers"


# Each library: a function (kind, name, path, arguments) -> network that is not checked.

_SIZE = {"timm": "img_size", "open_clip": "force_image_size"}
"""Argument with the size of images."""


def _timm(kind: Kind, name: str, path: Path | None, arguments: dict[str, Any]) -> Network:
    import timm

    config: dict[str, Any] = {}
    if path is not None and path.is_dir():
        config = json.loads((path / "config.json").read_bytes())
        arguments = config.get("model_args", {}) | arguments
        path = next(each for each in sorted(path.iterdir()) if each.name.endswith(WEIGHTS))
    name = config.get("architecture", name)
    bare = _bare("timm", name, arguments, pretrained_cfg=config.get("pretrained_cfg"))
    vit_trunk(bare, probe=False)  # before weights are read
    cfg = {"pretrained_cfg": bare.pretrained_cfg, "num_classes": 0}
    with TemporaryDirectory() as scratch:
        if path is not None:
            custom = path.suffix == ".npz"
            file = path if custom else _rewritten(path, bare, Path(scratch))
            overlay = {"file": str(file), "custom_load": custom, "source": "", "classifier": None}
            cfg["pretrained_cfg_overlay"] = overlay
        model = timm.create_model(name, pretrained=True, **cfg, **arguments)
    model.pretrained_cfg = bare.pretrained_cfg
    return Network(name, model, _of_timm(model), arguments=arguments)


def _of_timm(model: Any) -> Preparation:
    patches = getattr(model, "patch_embed", None)
    channels = next(p.shape[1] for p in model.parameters() if p.ndim == 4)
    size = getattr(patches, "img_size", None) or model.pretrained_cfg["input_size"][1:]
    return of_timm(model.pretrained_cfg, tuple(size), channels)


def _open_clip(kind: Kind, name: str, path: Path | None, arguments: dict[str, Any]) -> Network:
    import open_clip

    architecture, _, tag = name.partition(":")
    if path is not None and path.is_dir():
        architecture, tag = f"local-dir:{path}", ""
    elif architecture == "hf-hub":
        architecture, tag = name, ""
    found = open_clip.get_pretrained_cfg(architecture, tag) if tag else {}
    kept = ("mean", "std", "interpolation", "resize_mode")
    with TemporaryDirectory() as scratch:
        file = None if path is None or path.is_dir() else path
        if file is not None and file.suffix != ".npz":
            bare = _bare("open_clip", name, arguments)
            file = _rewritten(file, bare, Path(scratch))
        model = open_clip.create_model(
            architecture,
            pretrained=str(file) if file else tag or None,
            require_pretrained=True,
            force_preprocess_cfg={key: found[key] for key in kept if key in found},
            **_quick(name),
            **arguments,
        )
    tower = TextTower(model, open_clip.get_tokenizer(architecture)) if kind == "clip" else None
    return Network(name, model, _of_open_clip(model), tower, arguments=arguments)


def _quick(name: str) -> dict[str, bool]:
    """Return the activation of the weights of a tag; otherwise open_clip only warns."""
    import open_clip

    found = open_clip.get_pretrained_cfg(*name.split(":")) if name.count(":") == 1 else {}
    return {"force_quick_gelu": True} if found.get("quick_gelu") else {}


def _bare(library: str, name: str, arguments: Mapping[str, Any], **more: Any) -> Any:
    """Make a model without weights, whose names, shapes and settings are read."""
    if library == "timm":
        import timm

        with torch.device("meta"):
            return timm.create_model(name, num_classes=0, **more, **arguments)
    import open_clip

    architecture = name if name.startswith("hf-hub:") else name.partition(":")[0]
    given = _quick(name) | dict(arguments)
    return open_clip.create_model(architecture, device="meta", pretrained_text=False, **given)


def _of_open_clip(model: Any) -> Preparation:
    visual = model.visual
    return of_open_clip(getattr(visual, "preprocess_cfg", None) or {}, visual.image_size)


def _transformers(kind: Kind, name: str, path: Path | None, arguments: dict[str, Any]) -> Network:
    from transformers import AutoImageProcessor, AutoModel, AutoTokenizer

    folder = str(path or name)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, **arguments)
    made = of_transformers(AutoImageProcessor.from_pretrained(folder, backend="torchvision"))
    tower = TextTower(model, AutoTokenizer.from_pretrained(folder)) if kind == "clip" else None
    return Network(name, model, made, tower)


def _sample(kind: Kind, name: str, path: Path | None, arguments: object) -> Network:
    model, tokenizer, preparation = SAMPLES[name]()
    if path is not None:
        raise ValueError("a sample has its own weights")
    tower = TextTower(model, tokenizer) if kind == "clip" and tokenizer else None
    return Network(name, model, preparation, tower)


_Maker = Callable[[Kind, str, Path | None, dict[str, Any]], Network]
_MAKERS: dict[str, _Maker] = {
    "timm": _timm,
    "open_clip": _open_clip,
    "transformers": _transformers,
    "samples": _sample,
}


def _rewritten(path: Path, model: nn.Module, scratch: Path) -> Path:
    """Write the weights of a model with its own names, from a file with any names."""
    found = weights_of(tensors_in(path), model)
    wide = {k: v.float() if v.is_floating_point() else v for k, v in found.items()}
    save_file({key: value.clone() for key, value in wide.items()}, scratch / "w.safetensors")
    return scratch / "w.safetensors"


def of_model(flag: str, kind: Kind, given: Any, preparation: Preparation | None) -> Network:
    """Return the network of a model, with its preparation."""
    model, tower = getattr(given, "model", given), given if isinstance(given, TextTower) else None
    made = preparation
    if made is None and getattr(model, "pretrained_cfg", None):
        made = _of_timm(model)
    elif made is None and hasattr(getattr(model, "visual", None), "image_size"):
        made = _of_open_clip(model)
    rule = "be a name, a model of timm or open_clip with its configuration, or have `preparation`"
    if made is None or not isinstance(model, nn.Module):
        raise check.wrong_type(flag, rule, check.kind(given))
    if kind == "clip" and tower is None:
        from open_clip.tokenizer import SimpleTokenizer

        rule = "be a name, a TextTower, or a CLIP of open_clip with the tokenizer of CLIP"
        check.typed(getattr(given, "vocab_size", 0) == 49408, flag, rule, given)
        tower = TextTower(given, SimpleTokenizer(context_length=given.context_length))
    return Network(type(given).__name__, model, made, tower)


def _checked(flag: str, kind: Kind, made: Network) -> Network:
    """Freeze a network, and require a vision transformer or a CLIP that takes its images."""
    freeze(made.model.float())
    try:
        if kind == "vit":
            made.trunk.embed(made.inputs)
        else:
            check.require(made.tower is not None, "model", "have a text tower", "none")
            made.tokens(made.inputs)
    except Exception as error:  # a model of others raises errors of any type
        rule = {"vit": "name a vision transformer", "clip": "name a CLIP with patches"}[kind]
        raise check.wrong(flag, rule, f"{made.name} ({_line(error)})") from error
    return made


def _line(error: Exception) -> str:
    """Return an error as one short line without its full stop."""
    text = " ".join(str(error).split())[:300].rstrip(".")
    name = type(error).__name__
    return f"{name}: {text}" if isinstance(error, KeyError) else text or name


# Names in files of strangers.

_PART = r"(?!\.)(?!.*\.\.)[\w.-]+"  # no path to another folder
_FORM = rf"(timm|open_clip|transformers):((hf-hub:)?{_PART}/)?{_PART}(:{_PART})?"
_OTHERS = ("in_chans", "dynamic_img_size", "global_pool", "class_token")
_ARGUMENTS = {
    "timm": (_SIZE["timm"], "patch_size", *_OTHERS),
    "open_clip": (_SIZE["open_clip"], "force_quick_gelu"),
}
"""Arguments that a name may have. None runs code, reads a file or takes much memory."""
_LARGEST, _MOST = 2048, 512
"""Largest number in an argument, and number of patches along a side."""


def check_source(model: str, arguments: Mapping[str, Any]) -> str:
    """Require a name with its library, and arguments without code, and return the library."""
    check.text("model", model)
    library = model.partition(":")[0]
    rule = "be timm:NAME, open_clip:NAME:TAG or transformers:NAME"
    fits = model in SAMPLES or re.fullmatch(_FORM, model) is not None
    check.require(fits, "model", rule, repr(model[: check.LONGEST]))
    known = _ARGUMENTS.get(library, ())
    rule = f"be among {', '.join(known) or 'none'} for {library}"
    check.known("arguments", arguments, known, rule)
    rule = f"be a number from 1 to {_LARGEST}, two of them, a flag, a word or ''"
    for name, value in arguments.items():
        numbers = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
        fits = all(type(each) is int and 0 < each <= _LARGEST for each in numbers)
        fits = fits or type(value) is bool or (isinstance(value, str) and (value + "a").isalnum())
        check.require(fits, f"arguments[{name!r}]", rule, check.kind(value))
    sides, patch = (np.ravel(arguments.get(n, _LARGEST)) for n in ("img_size", "patch_size"))
    rule = f"make at most {_MOST} patches along a side"
    check.require(max(sides) <= _MOST * min(patch), "arguments", rule, max(sides))
    return library


def named(
    kind: Kind,
    model: str,
    arguments: Mapping[str, Any],
    own: Any,
    preparation: Preparation | None = None,
) -> Network:
    """Return the network of a name, for a model that was made by it.

    The size of its images is added to the arguments. Weights are not compared.

    Raises:
        ValueError: If the library makes another network by this name and these arguments.
    """
    library, owner = check_source(model, arguments), type(own).__module__.partition(".")[0]
    name = model.removeprefix(f"{library}:")
    fits = model in SAMPLES or owner == library or (library, owner) == ("open_clip", "timm")
    rule = f"have a network of {library}, which {model!r} can be"
    check.require(fits, "trunk", rule, f"one of type {type(own).__name__}")
    images, tower = getattr(own, "visual", own), None
    if preparation is None and library == "timm":
        preparation = _of_timm(own)
    elif preparation is None and hasattr(images, "image_size"):
        preparation = of_open_clip(getattr(images, "preprocess_cfg", {}), images.image_size)
    if library in _ARGUMENTS:
        arguments = _completed(library, name, arguments, own)
    if kind == "clip":
        from open_clip import get_tokenizer

        tower = TextTower(own, get_tokenizer(name.partition(":")[0]))
    return Network(model, own, preparation, tower, model, arguments)  # type: ignore[arg-type]


def _completed(library: str, name: str, given: Mapping[str, Any], own: Any) -> dict[str, Any]:
    """Return arguments by which a library makes a network, with its size if that is needed."""
    images, key = getattr(own, "visual", own), _SIZE[library]
    place = getattr(own, "patch_embed", None) if library == "timm" else images
    size = getattr(place, key.removeprefix("force_"), None)
    differ: list[str] = []
    for more in ({}, {key: [*size] if isinstance(size, tuple) else size}):
        bare = _bare(library, name, more | dict(given))
        if library == "open_clip" and own is images:
            bare = bare.visual if hasattr(own, "image_size") else bare.visual.trunk
        shapes, others = ({k: v.shape for k, v in m.state_dict().items()} for m in (own, bare))
        found = [k for k, v in shapes.items() if others.get(k) != v and not k.startswith("head")]
        if not found and settings_of(own) == settings_of(bare):
            return more | dict(given)
        differ += found or ["settings"]
    rule = f"make the network from {library}:{name}"
    raise check.wrong("arguments", rule, f"a network with other {differ[0]}")
