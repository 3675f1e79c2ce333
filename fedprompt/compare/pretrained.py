"""Frozen networks by name or from a file, with the preparation of their images.

Libraries load what is on this machine. Only if something is missing, the connection is tried, for a
few seconds, because a download without one retries for minutes.
"""

import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.nn as nn
from jaxtyping import Float
from torch import Tensor

import fedprompt as fp
import fedprompt._refusals as check
from fedprompt.compare.trials import line_of
from fedprompt.interfaces import TrainableTrunk

__all__ = ["Network", "network"]

PATIENCE = 2.0
"""Longest time of a try of the connection, in seconds."""

WEIGHTS = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".tar")
"""Extensions of files of weights."""

EXAMPLES = {"--vit": "vit_base_patch16_224", "--clip": "ViT-B-16-quickgelu:openai"}
"""Examples of names in messages."""


@dataclass(frozen=True, eq=False)
class Network:
    """Frozen network, with the preparation of its images.

    Attributes:
        name: Name, as it was given.
        model: Model in float32. For a CLIP, both towers.
        size: Height and width of its images in pixels.
        mean: Mean of each channel, for values in [0, 1].
        std: Standard deviation of each channel.
        interpolation: "bicubic" or "bilinear".
        trunk: Trunk of a vision transformer, or None for a CLIP.
        tower: Text tower of a CLIP, or None.
    """

    name: str
    model: nn.Module
    size: int
    mean: Sequence[float]
    std: Sequence[float]
    interpolation: str = "bicubic"
    trunk: TrainableTrunk | None = None
    tower: fp.TextTower | None = None

    @cached_property
    def identity(self) -> str:
        """Hash of the weights."""
        return fp.fingerprint(self.model)["weights"][:12]

    @torch.no_grad()
    def tokens(
        self, images: Float[Tensor, "batch 3 height width"]
    ) -> Float[Tensor, "batch tokens dim"]:
        """Encode prepared images by the image tower of a CLIP, the pooled token first."""
        if hasattr(self.model, "visual"):
            return tokens_of(self.model, images)
        vision: Any = self.model.vision_model
        hidden = vision.post_layernorm(vision(images).last_hidden_state)
        tokens: Tensor = self.model.get_submodule("visual_projection")(hidden)
        return tokens


def tokens_of(
    model: nn.Module, images: Float[Tensor, "batch 3 height width"]
) -> Float[Tensor, "batch tokens dim"]:
    """Encode prepared images by the image tower of open_clip, the pooled token first."""
    pooled, patches = fp.image_tokens(model, images)
    return torch.cat([pooled[:, None], patches], 1)


def network(
    given: str | nn.Module | fp.TextTower,
    kind: Literal["vit", "clip"] = "vit",
    *,
    size: int | None = None,
) -> Network:
    """Make a frozen vision transformer, or a frozen CLIP.

    A name of timm is a vision transformer, and a name of open_clip with the tag of its weights is a
    CLIP (or its image tower). A name with ``/``, such as ``facebook/dinov2-small`` or
    ``openai/clip-vit-base-patch32``, belongs to transformers. ``NAME=FILE`` reads weights from a
    file, and for transformers from a folder. A file alone needs the name of the network in its own
    name, and a folder alone a configuration (``save_pretrained``, ``push_to_hf_hub``).

    Args:
        given: ``NAME``, ``NAME=FILE``, a file, or a model: of timm with its configuration, of
            open_clip, or a :class:`fedprompt.TextTower`.
        kind: "vit" or "clip". Messages name the flag ``--vit`` or ``--clip``.
        size: Height and width of images. If None, those of the network. Models, and networks of
            transformers, keep their own.

    Raises:
        ValueError: If there is no such name or file, a file is damaged or of another network, or
            the network is no vision transformer or no CLIP.
        ConnectionError: If weights are not on this machine and cannot be downloaded. The message
            has the file and the flag that takes it.

    Example:
        >>> from fedprompt import samples
        >>> made = network(TextTower(samples.clip(), samples.tokenize), "clip")
        >>> made.size, made.tokens(torch.zeros(1, 3, 32, 32)).shape
        (32, torch.Size([1, 65, 96]))
    """
    check.require(kind in ("vit", "clip"), "kind", 'be "vit" or "clip"', repr(kind))
    check.optional(check.count, "size", size)
    flag = f"--{kind}"
    if not isinstance(given, str):
        return _checked(flag, _of_model(flag, given))
    name, _, file = given.partition("=")
    if file or Path(given).exists() or Path(given).suffix in WEIGHTS:
        path = Path(file or given)
        check.require(path.exists(), flag, "name a file that exists", path)
        name, load = _from_file(flag, name if file else "", path, size)
        try:
            with _offline():
                made = replace(load(), name=name)  # without "local-dir:"
        except Exception as error:
            got = f"{path}, damaged or of another network ({line_of(error)})"
            raise check.wrong(flag, f"have a file of the weights of {name}", got) from error
    else:
        made = _by_name(flag, name, size)
    return _checked(flag, made)


# Each library: a function from a name and a source of weights to a network that is not checked.


def _timm(name: str, size: int | None, **source: Any) -> Network:
    import timm

    with _all_weights():  # timm leaves out a size of None
        model = timm.create_model(name, pretrained=True, num_classes=0, img_size=size, **source)
    return _of_timm(name, model, size)


def _of_timm(name: str, model: nn.Module, size: int | None = None) -> Network:
    made: Any = model.pretrained_cfg
    own = getattr(getattr(model, "patch_embed", None), "img_size", None) or made["input_size"]
    return Network(name, model, size or own[-1], made["mean"], made["std"], made["interpolation"])


def _open_clip(name: str, size: int | None, weights: str | None = None) -> Network:
    import open_clip

    architecture, _, tag = (name, "", "") if name.startswith("local-dir:") else name.partition(":")
    found = open_clip.get_pretrained_cfg(architecture, tag) if tag else {}
    kept = {key: found[key] for key in ("mean", "std", "interpolation") if key in found}
    quick = bool(found.get("quick_gelu"))
    model = open_clip.create_model(
        architecture,
        weights or tag or None,
        force_image_size=size,
        force_quick_gelu=quick,  # otherwise open_clip only warns
        force_preprocess_cfg=kept,
        require_pretrained=True,
    )
    tower = fp.TextTower(model, open_clip.get_tokenizer(architecture))
    return _of_open_clip(name, tower)


def _of_open_clip(name: str, tower: fp.TextTower) -> Network:
    from open_clip.constants import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD

    visual: Any = tower.model.visual
    made = getattr(visual, "preprocess_cfg", None) or {}
    normal = made.get("mean", OPENAI_DATASET_MEAN), made.get("std", OPENAI_DATASET_STD)
    side = visual.image_size if isinstance(visual.image_size, int) else visual.image_size[0]
    how = made.get("interpolation", "bicubic")
    return Network(name, tower.model, side, *normal, how, tower=tower)


def _transformers(name: str, kind: str, folder: str) -> Network:
    from transformers import AutoModel, AutoTokenizer
    from transformers.models.auto.image_processing_auto import get_image_processor_config

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    made = get_image_processor_config(folder)
    if "image_mean" not in made:
        raise ValueError("there is no preprocessor_config.json with `image_mean`")
    config = getattr(model.config, "vision_config", model.config)
    normal = (made["image_mean"], made["image_std"])
    how = {2: "bilinear"}.get(made.get("resample", 3), "bicubic")
    clip = kind == "clip"
    tower = fp.TextTower(model, AutoTokenizer.from_pretrained(folder)) if clip else None
    return Network(name, model, config.image_size, *normal, how, tower=tower)


def _of_model(flag: str, given: Any) -> Network:
    """Return the network of a model with its own preparation."""
    name = type(given).__name__
    if flag == "--clip":
        from open_clip.tokenizer import SimpleTokenizer

        if isinstance(given, fp.TextTower) and hasattr(given.model, "visual"):
            return _of_open_clip(name, given)
        if getattr(given, "vocab_size", 0) == 49408:
            tokenizer = SimpleTokenizer(context_length=given.context_length)
            return _of_open_clip(name, fp.TextTower(given, tokenizer))
        rule = (
            "be a name, a CLIP of open_clip with the tokenizer of CLIP, or a TextTower of open_clip"
        )
        raise check.wrong_type(flag, rule, check.kind(given))
    if not getattr(given, "pretrained_cfg", None):
        raise check.wrong_type(flag, "be a name or a model of timm", check.kind(given))
    return _of_timm(name, given)


def _from_file(
    flag: str, name: str, path: Path, size: int | None
) -> tuple[str, Callable[[], Network]]:
    """Return the name of a network, and the function that loads it from a file or a folder."""
    import timm

    if path.is_dir() and ("/" in name or not name):
        if (path / "open_clip_config.json").exists():
            return str(path), partial(_open_clip, f"local-dir:{path}", size)
        config = path / "config.json"
        if config.exists() and '"architecture"' in config.read_text():
            return str(path), partial(_timm, f"local-dir:{path}", size)
        return name or str(path), partial(_transformers, name or str(path), flag[2:], str(path))
    name = name or path.name.removesuffix(path.suffix)
    if flag == "--vit" and timm.is_model(name):
        source = {"file": str(path), "custom_load": False}  # some names of timm mean an .npz file
        return name, partial(_timm, name, size, pretrained_cfg_overlay=source)
    import open_clip  # takes seconds

    if name.partition(":")[0] in open_clip.list_models():
        return name, partial(_open_clip, name, size, str(path))
    known = open_clip.list_models() if flag == "--clip" else timm.list_models()
    rule = f"name the network of a file, such as {EXAMPLES[flag].partition(':')[0]}=FILE"
    raise check.wrong(flag, rule, _similar(name, known))


def _by_name(flag: str, name: str, size: int | None) -> Network:
    """Load a network from this machine, or else by a connection."""
    load, address, file = _source(flag, name, size)
    try:
        try:
            with _offline():
                return load()
        except Exception as error:
            if not _is_missing(error):
                raise
        if _is_reachable(address):
            return load()
    except Exception as error:
        got = f"{name} ({line_of(error)})"
        raise check.wrong(flag, f"name a network such as {EXAMPLES[flag]}", got) from error
    raise ConnectionError(
        f"The weights of {name} are not on this machine, and {address} cannot be reached: get "
        f"{file} there and pass {flag} {name}={'FOLDER' if '/' in name else 'FILE'}."
    )


def _source(flag: str, name: str, size: int | None) -> tuple[Callable[[], Network], str, str]:
    """Return the function that loads a name, the address of its weights, and their file."""
    import timm
    from huggingface_hub import constants

    hub = constants.ENDPOINT
    if "/" in name:
        files = "config.json, preprocessor_config.json, model.safetensors"
        files += " and the files of the tokenizer" * (flag == "--clip")
        return partial(_transformers, name, flag[2:], name), f"{hub}/{name}", files
    if flag == "--vit" and timm.is_model(name) and (made := timm.get_pretrained_cfg(name)):
        _check_transformer(flag, name)
        address = f"{hub}/{made.hf_hub_id}" if made.hf_hub_id else str(made.url or "")
        file = "model.safetensors" if made.hf_hub_id else address.rpartition("/")[2]
        if address:
            return partial(_timm, name, size), address, file
    import open_clip  # takes seconds
    from open_clip.constants import HF_SAFE_WEIGHTS_NAME

    architecture, _, tag = name.partition(":")
    if architecture in open_clip.list_models():
        found = open_clip.get_pretrained_cfg(architecture, tag)
        if not found:
            tags = ", ".join(open_clip.list_pretrained_tags_by_model(architecture))
            rule = f"name weights of {architecture} as NAME:TAG: {tags}"
            raise check.wrong(flag, rule, repr(name))
        folder, _, file = found.get("hf_hub", "").rpartition("/")
        address = f"{hub}/{folder}" if folder else found["url"]
        file = file or (HF_SAFE_WEIGHTS_NAME if folder else address.rpartition("/")[2])
        return partial(_open_clip, name, size), address, file
    known = open_clip.list_models() if flag == "--clip" else timm.list_models(pretrained=True)
    raise check.wrong(flag, f"name a network, such as {EXAMPLES[flag]}", _similar(name, known))


def _checked(flag: str, made: Network) -> Network:
    """Freeze a network, and require a vision transformer or a CLIP that takes its images."""
    values = vars(made) | {"model": fp.freeze(made.model.float())}
    images = torch.zeros(1, 3, made.size, made.size)
    try:
        if flag == "--vit":
            trunk = fp.vit_trunk(getattr(made.model, "visual", made.model))
            trunk.embed(images)
            values |= {"trunk": trunk, "tower": None}
        else:
            Network(**values).tokens(images)
    except Exception as error:
        raise _unfit(flag, made.name, error) from error
    return Network(**values)


def _check_transformer(flag: str, name: str) -> None:
    """Require a vision transformer of timm, before its weights are read."""
    import timm

    with torch.device("meta"):
        model = timm.create_model(name, num_classes=0)
    try:
        fp.vit_trunk(model)
    except TypeError as error:
        raise _unfit(flag, name, error) from error


def _unfit(flag: str, name: str, error: Exception) -> ValueError:
    kind = "a vision transformer" if flag == "--vit" else "a CLIP with patches"
    why = str(error) if isinstance(error, TypeError) else ""  # (why it is not one)
    reason = why.partition("(")[2].rpartition(")")[0] or str(error)
    return check.wrong(flag, f"name {kind}", f"{name} ({line_of(reason)})")


# The machine and its connection.


@contextmanager
def _offline() -> Iterator[None]:
    """Let libraries read their caches only."""
    from huggingface_hub import constants

    before, level = constants.HF_HUB_OFFLINE, logging.root.manager.disable
    constants.HF_HUB_OFFLINE = True
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
        logging.disable(level)


def _is_missing(error: BaseException | None) -> bool:
    """Return whether a file is not in a cache."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    missing = (LocalEntryNotFoundError, OfflineModeIsEnabled)
    while error is not None and not isinstance(error, missing):
        error = error.__cause__ or error.__context__
    return error is not None


def _is_reachable(address: str) -> bool:
    """Return whether a server answers soon; any answer counts."""
    from huggingface_hub import constants

    answers = list[bool]()

    def ask() -> None:
        request = urllib.request.Request(address, method="HEAD")
        with suppress(OSError):
            with suppress(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=PATIENCE).close()
            answers.append(True)

    if constants.HF_HUB_OFFLINE:
        return False
    thread = threading.Thread(target=ask, daemon=True)  # a name server may not answer at all
    thread.start()
    thread.join(PATIENCE)
    return bool(answers)


@contextmanager
def _all_weights() -> Iterator[None]:
    """Refuse a file that lacks weights of a model, or has more blocks, which timm would accept."""
    load = nn.Module.load_state_dict

    def checked(model: nn.Module, *arguments: Any, **options: Any) -> Any:
        found = load(model, *arguments, **options)
        parts = {name for name, _ in model.named_children()} - {"head", "fc_norm", "norm"}
        more = [name for name in found.unexpected_keys if name.partition(".")[0] in parts]
        if found.missing_keys or more:
            one = f"no {found.missing_keys[0]}" if found.missing_keys else more[0]
            raise ValueError(f"it is of another network, which has {one}")
        return found

    with patch.object(nn.Module, "load_state_dict", checked):
        yield


def _similar(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name.partition(":")[0], known, n=3)
    return repr(name) + (f" (similar: {', '.join(near)})" if near else "")
