"""Pretrain the tiny ViTs on rendered glyphs and write their weights.

Run it with `python examples/build_samples/build.py`.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from jaxtyping import Float, Int
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from tqdm import tqdm

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from build_samples.glyphs import CLASSES, augment, render
from fedprompt.samples._pixels import IMAGE_SIZE

RECIPE = "1"
NUM_PER_CLASS = 400
NUM_HELD_OUT = 40  # per class
STEPS = 1200
BATCH = 128
_COMMON = {"img_size": IMAGE_SIZE, "patch_size": 4, "in_chans": 1, "num_classes": len(CLASSES)}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "S": {"embed_dim": 48, "depth": 3, "num_heads": 3, **_COMMON},
    "B": {"embed_dim": 64, "depth": 4, "num_heads": 4, **_COMMON},
    "L": {"embed_dim": 96, "depth": 4, "num_heads": 6, **_COMMON},
}


def weights_path(size: str, folder: Path) -> Path:
    """Return the path of the weights of a size."""
    return folder / f"vit_{size.lower()}.safetensors"


def new_model(make: Callable[..., nn.Module], architecture: dict[str, Any], seed: int) -> nn.Module:
    """Make an untrained model. The global random state does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return make(**architecture)


def save(
    model: nn.Module,
    path: Path,
    architecture: dict[str, Any],
    source_accuracy: float,
    **metadata: str,
) -> None:
    """Write weights in half precision, with what is needed to load and to build them again.

    Args:
        model: Trained model from `new_model`.
        path: Path of the file.
        architecture: Architecture of `model`.
        source_accuracy: Accuracy of `model` on held-out data, in [0, 1].
        metadata: Further texts, such as the version of the recipe that trained the model.
    """
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    contents = b"".join(weights[name].numpy().tobytes() for name in sorted(weights))
    metadata["architecture"] = json.dumps(architecture, sort_keys=True)
    metadata["source_accuracy"] = f"{source_accuracy:.4f}"
    metadata["sha256"] = hashlib.sha256(contents).hexdigest()
    save_file(weights, path, metadata)
    print(f"{path}: accuracy {source_accuracy:.1%} on held-out data")


def pretrain(
    model: VisionTransformer,
    images: Float[Tensor, "batch 1 height width"],
    labels: Int[Tensor, "batch"],
    generator: torch.Generator,
    *,
    steps: int = STEPS,
) -> None:
    """Train all weights of a model in place to classify the glyphs.

    Args:
        model: Model to train; it is returned to eval mode.
        images: Glyphs without augmentation.
        labels: Classes of `images`.
        generator: Generator of the batches and their augmentation.
        steps: Number of steps, at least 20, because the first tenth warms up.
    """
    model.train()

    def loss(step: int) -> Tensor:
        batch = torch.randint(len(labels), (BATCH,), generator=generator)
        logits = model(augment(images[batch], generator))
        return F.cross_entropy(logits, labels[batch], label_smoothing=0.05)

    take_steps([*model.parameters()], loss, steps, learning_rate=1.5e-3, warm_up=0.1)
    model.eval()


def take_steps(
    parameters: Sequence[Any],
    loss: Callable[[int], Tensor],
    steps: int,
    *,
    learning_rate: float,
    warm_up: float,
) -> None:
    """Minimize a function of the step with AdamW and one cycle of learning rates.

    Args:
        parameters: Parameters, or groups of them with options.
        loss: Function of the number of the step.
        steps: Number of steps.
        learning_rate: Highest learning rate.
        warm_up: Share of the steps in which the rate rises.
    """
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=0.05)
    trained = [each for group in optimizer.param_groups for each in group["params"]]
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=learning_rate, total_steps=steps, pct_start=warm_up
    )
    for step in (progress := tqdm(range(steps))):
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        progress.set_postfix(loss=f"{value.item():.3f}", refresh=False)


@torch.inference_mode()
def accuracy(
    model: VisionTransformer,
    images: Float[Tensor, "batch 1 height width"],
    labels: Int[Tensor, "batch"],
) -> float:
    """Return the share of images that a model classifies correctly."""
    return float((model(images).argmax(1) == labels).float().mean())


def build(size: str, *, seed: int = 0, steps: int = STEPS) -> tuple[VisionTransformer, float]:
    """Run the whole recipe for one size.

    Args:
        size: "S", "B" or "L".
        seed: Seed of the glyphs, the initial weights and the batches.
        steps: Number of optimizer steps, at least 20.

    Returns:
        The model and its accuracy on held-out glyphs.
    """
    train, held_out = np.random.default_rng(seed).spawn(2)
    model = new_model(VisionTransformer, ARCHITECTURES[size], seed)
    pretrain(model, *render(NUM_PER_CLASS, train), torch.Generator().manual_seed(seed), steps=steps)
    return model, accuracy(model, *render(NUM_HELD_OUT, held_out))


def main() -> None:
    """Build the requested sizes and write one file for each."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--models", default=",".join(ARCHITECTURES), help="comma-separated sizes")
    arguments = parser.parse_args()
    for size in arguments.models.split(","):
        model, source_accuracy = build(size, seed=arguments.seed, steps=arguments.steps)
        path = weights_path(size, arguments.out)
        written = {"classes": CLASSES, "recipe": RECIPE}
        save(model, path, ARCHITECTURES[size], source_accuracy, **written)


if __name__ == "__main__":
    main()
