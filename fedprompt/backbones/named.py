"""Networks by the name that a library gives them, with weights of the library or of a file."""

import re
from collections.abc import Callable, Mapping
from os import PathLike, fspath
from typing import Any

import torch.nn as nn

import fedprompt._refusals as check

ARGUMENTS = {
    "timm": "img_size in_chans patch_size dynamic_img_size global_pool class_token",
    "open_clip": "force_quick_gelu force_image_size",
    "transformers": "",
}
"""Arguments that a name may have. None of them runs code, or reads a file."""

_FORMS = {
    "timm": r"[\w.-]+",
    "open_clip": r"[\w.-]+(:[\w.-]+)?",
    "transformers": r"[\w.-]+(/[\w.-]+)?",
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
    allowed = sorted(ARGUMENTS[library].split())
    rule = f"be among {', '.join(allowed) or 'none'} for {library}"
    check.known("arguments", arguments, allowed, rule)
    return library, name


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
    file = None if weights is None else fspath(weights)
    network: nn.Module = _MAKERS[library](name, dict(arguments), file).eval()
    return network


def tokenizer_of(model: str) -> Any:
    """Return the tokenizer of a CLIP of open_clip."""
    import open_clip

    return open_clip.get_tokenizer(parsed(model, {})[1].partition(":")[0])


def _timm(name: str, arguments: dict[str, Any], file: str | None) -> Any:
    import timm

    if file is None:
        return timm.create_model(name, pretrained=True, num_classes=0, **arguments)
    # Not strict, because the file may have a classifier. The fingerprint finds missing weights.
    network = timm.create_model(name, pretrained=False, num_classes=0, **arguments)
    timm.models.load_checkpoint(network, file, strict=False, weights_only=True)
    return network


def _open_clip(name: str, arguments: dict[str, Any], file: str | None) -> Any:
    import open_clip

    architecture, _, tag = name.partition(":")
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
