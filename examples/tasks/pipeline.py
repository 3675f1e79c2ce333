"""From stored uint8 images to the inputs of a model, in batches on the model's device.

Training images are cropped and flipped by `augment`. ``--benchmark`` prints the speed of this
pipeline, of a training step, and of both together.
"""

import sys
from pathlib import Path

# Makes `studies` importable.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp
from tasks.resampling import FILTERS, augment, check_uint8, moved, resample, whole

__all__ = ["Preparation", "PreparedTrunk", "augment", "prepared"]


class Preparation(nn.Module):
    """Module from stored uint8 images to the float32 inputs of a model.

    Images move to the device of the module, are resized to a square and normalized. A gray image is
    repeated in three channels. It has no parameters, and nothing of it is in ``state_dict()``.

    Args:
        size: Side of the inputs in pixels.
        mean: Mean of each channel, for values in [0, 1].
        std: Standard deviation of each channel.
        interpolation: "bicubic" or "bilinear".
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        size: int,
        *,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        interpolation: str = "bicubic",
    ) -> None:
        super().__init__()
        if interpolation not in FILTERS:
            rule = f"be one of {', '.join(FILTERS)}"
            raise ValueError(f"`interpolation` must {rule}; got {interpolation!r}.")
        self.size, self.interpolation = size, interpolation
        for name, values in (("mean", mean), ("std", std)):
            self.register_buffer(name, torch.tensor(values).view(-1, 1, 1), persistent=False)

    @classmethod
    def of(cls, model: nn.Module, size: int) -> "Preparation":
        """Make the preparation of a model of timm or open_clip, on its device."""
        config: Any = getattr(model, "pretrained_cfg", None)
        if config is None:
            config = getattr(getattr(model, "visual", model), "preprocess_cfg", None)
        if config is None:
            got = type(model).__name__
            raise TypeError(f"`model` must be a model of timm or open_clip; got {got}.")
        keys = ("mean", "std", "interpolation")
        preparation = cls(size, **{key: config[key] for key in keys})
        return preparation.to(next(model.parameters()).device)

    def forward(self, images: Tensor) -> Tensor:
        """Prepare images (batch, 1 or 3, height, width)."""
        check_uint8(images)
        images = moved(images, self.mean.device)
        if images.shape[-2:] != (self.size, self.size):
            options = {"size": self.size, "interpolation": self.interpolation}
            images = resample(images, whole(images), **options)
        return torch.addcmul(-self.mean / self.std, images.float(), 1 / (255 * self.std))


class PreparedTrunk:
    """Trunk that takes stored uint8 images and prepares them itself.

    Everything else is that of the inner trunk, which is shared by all copies.

    Args:
        trunk: Trunk of prepared images.
        preparation: Function from stored images to prepared ones.
    """

    def __init__(self, trunk: fp.Trunk, preparation: Callable[[Tensor], Tensor]) -> None:
        self.trunk, self.preparation = trunk, preparation
        own = ("prefix", "dim", "depth", "num_features", "patch_size")
        for name in (*own, "block", "normalize", "pool"):
            setattr(self, name, getattr(trunk, name))
        if hasattr(trunk, "resume"):
            self.resume = trunk.resume

    def __deepcopy__(self, memo: dict[int, Any]) -> "PreparedTrunk":
        return self

    def __getattr__(self, name: str) -> Any:
        if name == "trunk":  # not yet set, as in unpickling
            raise AttributeError(name)
        return getattr(self.trunk, name)

    def embed(self, images: Tensor) -> tuple[Tensor, Any]:
        """Return the tokens of uint8 images, and their context."""
        return self.trunk.embed(self.preparation(images))


def prepared(trunk: fp.Trunk, preparation: Callable[[Tensor], Tensor]) -> fp.Trunk:
    """Return the trunk with a preparation of its images."""
    return PreparedTrunk(trunk, preparation)


class Speeds(NamedTuple):
    """Images in a second: of the pipeline alone, of a training step alone, and of both."""

    pipeline: float
    step: float
    both: float

    def goal(self, device: torch.device) -> tuple[str, bool]:
        """Describe the goal on a kind of device, and whether it is reached."""
        if device.type == "cpu":
            share = self.step / self.pipeline
            return f"pipeline / step, time: {share:.4f} (goal <= 0.1)", share <= 0.1
        ratio = self.both / min(self.pipeline, self.step)
        return f"both / the slower one, speed: {ratio:.2f} (goal >= 0.9)", ratio >= 0.9


def speeds(
    model: nn.Module, *, size: int, stored: int, batch_size: int = 32, rounds: int = 3
) -> Speeds:
    """Measure the pipeline with crops and flips, and a step of deep prompts and a head.

    The three are measured in turn. On a CPU, CPU time counts, so other processes matter little.

    Args:
        model: Vision transformer of timm, on the device.
        size: Side of its images in pixels.
        stored: Side of the stored images in pixels.
        batch_size: Number of images in a batch.
        rounds: Number of measurements, of which the median counts.
    """
    generator = torch.Generator().manual_seed(0)
    preparation, trunk = Preparation.of(model, size), fp.vit_trunk(model)
    device = preparation.mean.device
    shape = (max(256, batch_size), 3, stored, stored)
    images = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    prompts = fp.DeepPrompts(8, trunk, generator=generator).to(device)
    head = nn.Linear(trunk.num_features, 10).to(device)

    def pipeline() -> Tensor:
        batch = images[torch.randperm(len(images), generator=generator)[:batch_size]]
        options = {"size": size, "interpolation": preparation.interpolation, "device": device}
        return preparation(augment(batch, generator, **options))

    def step(inputs: Tensor) -> None:
        logits = head(fp.encode_prompted(trunk, inputs, prompts()).pooled)
        F.cross_entropy(logits, torch.arange(batch_size, device=device) % 10).backward()

    inputs = pipeline()
    calls = (pipeline, partial(step, inputs), lambda: step(pipeline()))
    repeats = 1 if device.type == "cpu" else 20
    times = [[_seconds(call, device, repeats) for call in calls] for _ in range(rounds + 1)]
    medians = torch.tensor(times[1:]).median(0).values  # the first round warms up
    return Speeds(*(batch_size / medians).tolist())


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Measure the time of one call."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = clock()
    for _ in range(repeats):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (clock() - start) / repeats


def main() -> None:
    import timm

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--benchmark", action="store_true", required=True)
    parser.add_argument(
        "--model", default="vit_base_patch16_224", help="vision transformer of timm"
    )
    parser.add_argument("--stored", type=int, default=32, help="side of the stored images")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="fail if the goal is not reached")
    args = parser.parse_args()
    model = timm.create_model(args.model, pretrained=False, num_classes=0).to(args.device)
    size = model.pretrained_cfg["input_size"][-1]
    measured = speeds(model, size=size, stored=args.stored, batch_size=args.batch_size)
    for name, speed in measured._asdict().items():
        print(f"{name:>8}: {speed:10,.1f} images per second")
    text, reached = measured.goal(torch.device(args.device))
    print(text)
    if args.check and not reached:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
