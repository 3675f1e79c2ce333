"""The frozen tiny ViTs: their three sizes and their weights files."""

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
    """Return the path of the weights of a size, by default of the committed ones."""
    return folder / f"vit_{size.lower()}.safetensors"


def new_vit(size: str, *, seed: int) -> VisionTransformer:
    """Build an untrained ViT with a head for all printed glyphs.

    The global random state does not change.

    Args:
        size: "S", "B" or "L".
        seed: Seed of the initial weights.

    Raises:
        ValueError: If `size` is unknown.
    """
    if size not in ARCHITECTURES:
        raise ValueError(f"`size` must be one of {', '.join(ARCHITECTURES)}; got {size!r}.")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return VisionTransformer(**ARCHITECTURES[size])


def save_vit(
    model: VisionTransformer, size: str, path: Path, *, source_accuracy: float, recipe: str
) -> None:
    """Write the weights in half precision, with metadata.

    The metadata is needed to load the weights and to compare them with a new build.

    Args:
        model: Trained model from `new_vit`.
        size: Size of `model`.
        path: Path of the file.
        source_accuracy: Accuracy of `model` on held-out glyphs, in [0, 1].
        recipe: Version of the recipe that trained the model.
    """
    written = {"architecture": json.dumps(ARCHITECTURES[size], sort_keys=True), "classes": CLASSES}
    save_weights(
        model, path, written | {"recipe": recipe, "source_accuracy": f"{source_accuracy:.4f}"}
    )


def save_weights(model: nn.Module, path: Path, metadata: dict[str, str]) -> None:
    """Write the weights of a model in half precision, with metadata and their hash."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(weights, path, metadata | {"sha256": _sha256(weights)})


def load_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a weights file."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata()
    return metadata


def load_vit(size: str, *, with_head: bool = False, folder: Path = FOLDER) -> VisionTransformer:
    """Load a pretrained ViT in float32 and eval mode, 16 patches of 4 x 4 pixels and a class token.

    Args:
        size: "S" (48 wide, 3 blocks), "B" (64 wide, 4 blocks) or "L" (96 wide, 4 blocks).
        with_head: If true, the model keeps its classifier of the 47 printed glyphs. Otherwise it
            returns features, like a timm model with `num_classes=0`.
        folder: Folder of the weights files.

    Raises:
        ValueError: If `size` is unknown, or the file belongs to another architecture or other
            classes, or is corrupted.

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
        model: Model of the architecture of the file.
        path: Path of the file.
        written: Description of the model in the metadata of the file.
        expected: Description that is required.

    Raises:
        ValueError: If the descriptions differ, or the weights do not match their hash.
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
    """Return the SHA-256 hash of the bytes of all weights, ordered by name."""
    return hashlib.sha256(
        b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    ).hexdigest()
