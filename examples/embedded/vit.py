"""The frozen tiny ViTs: their three sizes, and how they are kept in a file."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from embedded.glyphs import CLASSES
from embedded.pixels import IMAGE_SIZE

FOLDER = Path(__file__).parent
_COMMON = {"img_size": IMAGE_SIZE, "patch_size": 4, "in_chans": 1, "num_classes": len(CLASSES)}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "S": {"embed_dim": 48, "depth": 3, "num_heads": 3, **_COMMON},
    "B": {"embed_dim": 64, "depth": 4, "num_heads": 4, **_COMMON},
    "L": {"embed_dim": 96, "depth": 4, "num_heads": 6, **_COMMON},
}


def weights_path(size: str, folder: Path = FOLDER) -> Path:
    """Return where the weights of a size are kept, by default the committed ones."""
    return folder / f"vit_{size.lower()}.safetensors"


def new_vit(size: str, *, seed: int) -> VisionTransformer:
    """Build an untrained ViT with a head for all printed glyphs; the global random state is left alone.

    Args:
        size: "S", "B" or "L".
        seed: Of the initial weights.

    Raises:
        ValueError: If there is no such size.
    """
    if size not in ARCHITECTURES:
        raise ValueError(f"`size` must be one of {', '.join(ARCHITECTURES)}; got {size!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return VisionTransformer(**ARCHITECTURES[size])


def save_vit(
    model: VisionTransformer, size: str, path: Path, *, source_accuracy: float, recipe: str
) -> None:
    """Write the weights in half precision, with what is needed to read them and to compare them with a new build.

    Args:
        model: From `new_vit`, trained.
        size: Of `model`.
        path: Of the file to write.
        source_accuracy: Share of held-out glyphs that `model` recognises, in [0, 1].
        recipe: Version of the recipe that trained it.
    """
    written = {"architecture": json.dumps(ARCHITECTURES[size], sort_keys=True), "classes": CLASSES}
    save_weights(
        model, path, written | {"recipe": recipe, "source_accuracy": f"{source_accuracy:.4f}"}
    )


def save_weights(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write a model in half precision, with metadata and the hash of its weights."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(weights, path, metadata | {"sha256": _sha256(weights)})


def load_metadata(path: Path) -> dict[str, str]:
    """Read what `save_vit` wrote beside the weights."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


def load_vit(size: str, *, with_head: bool = False, folder: Path = FOLDER) -> VisionTransformer:
    """Load a pretrained ViT in float32 and eval mode, 16 patches of 4 x 4 pixels and a class token.

    Args:
        size: "S" (48 wide, 3 blocks), "B" (64 wide, 4 blocks) or "L" (96 wide, 4 blocks).
        with_head: Keep the classifier of the 47 printed glyphs; otherwise the model returns features, as timm's `num_classes=0` does.
        folder: Where the files lie.

    Raises:
        ValueError: If there is no such size, or the file was written for another architecture or other classes, or was changed.

    Example:
        >>> load_vit("B")(torch.zeros(2, 1, 16, 16)).shape
        torch.Size([2, 64])
    """
    model = new_vit(size, seed=0)
    path = weights_path(size, folder)
    metadata = load_metadata(path)
    written = json.loads(metadata["architecture"]) | {"classes": metadata["classes"]}
    load_weights(model, path, written, expected=ARCHITECTURES[size] | {"classes": CLASSES})
    if not with_head:
        model.reset_classifier(0)
    return model.eval()


def load_weights(model: nn.Module, path: Path, written: object, *, expected: object) -> None:
    """Copy weights into a model's float32 parameters.

    Args:
        model: Of the architecture that was written.
        path: Of the file.
        written: What its metadata says of the model.
        expected: What it must say.

    Raises:
        ValueError: If it says something else, or the weights were changed.
    """
    if written != expected:
        raise ValueError(f"`{path.name}` must hold {expected}; got {written}.")
    weights, stated = load_file(path), load_metadata(path)["sha256"]
    if _sha256(weights) != stated:
        raise ValueError(
            f"The weights in `{path.name}` must have the sha256 {stated}; got {_sha256(weights)}."
        )
    model.load_state_dict(weights)


def _sha256(weights: dict[str, Tensor]) -> str:
    """Hash the weights' bytes, in the order of their names."""
    return hashlib.sha256(
        b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    ).hexdigest()
