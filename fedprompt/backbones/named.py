"""Networks by the name that a library gives them, with weights of the library or of a file."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from os import PathLike
from pickle import UnpicklingError
from typing import Any

import torch.nn as nn

import fedprompt._refusals as check
from fedprompt._files import path_of

_ERRORS = (AttributeError, LookupError, RuntimeError, TypeError, UnpicklingError, ValueError)
_LARGEST = 2048
_MOST = 512


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= _LARGEST


def _are_sizes(value: object) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_size, value))
    return pair or _is_size(value)


_SIZE = f"be an integer from 1 to {_LARGEST}", _is_size
_SIZES = f"be an integer from 1 to {_LARGEST}, or two of them", _are_sizes
_FLAG = "be true or false", lambda value: isinstance(value, bool)
_WORD = "be a word or ''", lambda value: isinstance(value, str) and value.isalnum() | (value == "")

ARGUMENTS: dict[str, dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "timm": {
        "img_size": _SIZES,
        "in_chans": _SIZE,
        "patch_size": _SIZES,
        "dynamic_img_size": _FLAG,
        "global_pool": _WORD,
        "class_token": _FLAG,
    },
    "open_clip": {"force_quick_gelu": _FLAG, "force_image_size": _SIZES},
    "transformers": {},
}
"""Arguments that a name may have, with rules. None runs code, reads a file or takes much memory."""

_PART = r"(?!\.)(?!.*\.\.)[\w.-]+"  # no path to another folder
_FORMS = {
    "timm": _PART,
    "open_clip": rf"{_PART}(:{_PART})?",
    "transformers": rf"{_PART}(/{_PART})?",
}


def parsed(model: str, arguments: Mapping[str, Any]) -> tuple[str, str]:
    """Split a name such as ``timm:vit_small_patch16_224.augreg_in1k``, and check its arguments.

    Returns:
        Library ("timm", "open_clip" or "transformers"), and name in the library, for open_clip with
        the tag of the weights after a colon.
    """
    check.text("model", model)
    library, _, name = model.partition(":")
    if library not in _FORMS or not re.fullmatch(_FORMS[library], name):
        rule = "be timm:NAME, open_clip:NAME:TAG or transformers:NAME"
        raise check.wrong("model", rule, repr(model[: check.LONGEST]))
    rule = f"be among {', '.join(sorted(ARGUMENTS[library])) or 'none'} for {library}"
    check.known("arguments", arguments, ARGUMENTS[library], rule)
    for key, value in arguments.items():
        own, holds = ARGUMENTS[library][key]
        check.require(holds(value), f"arguments[{key!r}]", own, check.kind(value))
    pixels, patch = (_sides(arguments.get(key, 0)) for key in ("img_size", "patch_size"))
    rule = f"make at most {_MOST} patches along a side"
    check.require(max(pixels) <= _MOST * (min(patch) or _LARGEST), "arguments", rule, max(pixels))
    return library, name


def _sides(value: Any) -> Sequence[int]:
    return (value,) if isinstance(value, int) else value


def check_network(model: str, network: object, libraries: Collection[str] | None = None) -> None:
    """Require that the library of a name makes networks of this class, so that it can be loaded."""
    (library, _), owner = parsed(model, {}), type(network).__module__.partition(".")[0]
    rule = f"be a name of {' or '.join(libraries or [])} for this module"
    check.require(libraries is None or library in libraries, "model", rule, repr(model))
    fits = owner == library or (library, owner) == ("open_clip", "timm")  # a tower of open_clip
    rule = f"have a network of {library}, which {model!r} can be"
    check.require(fits, "trunk", rule, f"one of type {type(network).__name__}")


def named_network(
    model: str, arguments: Mapping[str, Any], weights: str | PathLike[str] | None
) -> nn.Module:
    """Make a network in eval mode.

    Args:
        model: Name as in :func:`parsed`.
        arguments: Arguments of the library's constructor, of those in `ARGUMENTS`.
        weights: File of weights, or for transformers a folder. If None, the library downloads them.
    """
    library, name = parsed(model, arguments)
    file = None if weights is None else _weights(library, weights)
    try:
        network: nn.Module = _MAKERS[library](name, dict(arguments), file).eval()
    except _ERRORS as error:
        if isinstance(error, UnpicklingError) or "weights_only" in str(error):
            # The text of torch advises to run the code in the file.
            rule = "be a file of tensors alone, as torch.save(model.state_dict(), path) writes it"
            raise check.wrong("weights", rule, f"{file}, with other objects") from None
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(".")
        where = "" if file is None else " and the weights"
        rule = f"be a network of {library} that fits the arguments{where}"
        raise check.wrong("model", rule, f"{model!r}, {got}") from error
    return network


def _weights(library: str, weights: object) -> str:
    """Return the path of weights: a file, or for transformers a folder."""
    path = path_of("weights", weights, of="file or folder of weights")
    rule = "be a file" if library != "transformers" else "be a folder, as save_pretrained writes it"
    exists = path.is_dir() if library == "transformers" else path.is_file()
    check.require(exists, "weights", f"{rule} that exists", str(path))
    if library != "transformers" and path.suffix != ".safetensors":
        with path.open("rb") as file:
            rule = "end in .safetensors, because it is a file of this format"
            check.require(file.read(9)[8:] != b"{", "weights", rule, str(path))
    return str(path)


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a CLIP of open_clip."""
    import open_clip

    return open_clip.get_tokenizer(parsed(model, {})[1].partition(":")[0])


def _timm(name: str, arguments: dict[str, Any], file: str | None) -> Any:
    import timm

    if not timm.is_model(name):
        raise ValueError("timm has no network of this name")
    if file is None:
        return timm.create_model(name, pretrained=True, num_classes=0, **arguments)
    # Not strict, because the file may have a classifier. The fingerprint finds missing weights.
    network = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    timm.models.load_checkpoint(network, file, strict=False, weights_only=True)
    return network


def _open_clip(name: str, arguments: dict[str, Any], file: str | None) -> Any:
    import open_clip

    architecture, _, tag = name.partition(":")
    if architecture not in open_clip.list_models():
        raise ValueError("open_clip has no network of this name")
    return open_clip.create_model(architecture, pretrained=file or tag, **arguments)


def _transformers(name: str, arguments: dict[str, Any], file: str | None) -> Any:
    from transformers import AutoModel

    del arguments  # it has none
    return AutoModel.from_pretrained(file or name, trust_remote_code=False)


_MAKERS: dict[str, Callable[[str, dict[str, Any], str | None], Any]] = {
    "timm": _timm,
    "open_clip": _open_clip,
    "transformers": _transformers,
}
