"""Tasks of the examples, with their frozen backbones.

The images are the embedded digits, CIFAR or any folder of images.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

import build_samples
import fedprompt as fp
from fedprompt import samples


class Recipe(NamedTuple):
    """Hyperparameters of local training.

    A client trains for `steps` steps in a round, or for one epoch if `steps` is None. With `decay`,
    the learning rate decreases to 0 along a cosine over the rounds.
    """

    num_prompts: int
    batch_size: int
    steps: int | None
    rounds: int
    optimizer: Callable[..., torch.optim.Optimizer]
    learning_rate: float
    decay: bool

    def make_optimizer(self, parameters: Any, progress: float) -> torch.optim.Optimizer:
        """Return a new optimizer for one client and round.

        Args:
            parameters: Parameters to train.
            progress: Share of completed rounds, in [0, 1].
        """
        scale = (1 + np.cos(np.pi * progress)) / 2 if self.decay else 1.0
        return self.optimizer(parameters, lr=self.learning_rate * scale)


DIGITS = Recipe(8, 64, 12, 6, partial(torch.optim.AdamW, weight_decay=1e-3), 1e-2, decay=True)
FEDHPL = Recipe(
    3, 16, None, 10, partial(torch.optim.SGD, momentum=0.9, weight_decay=1e-4), 1e-2, decay=False
)


class Split(NamedTuple):
    """Labeled images, with the augmentation of training images."""

    dataset: Dataset[tuple[Tensor, Any]]
    labels: np.ndarray
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None

    def first(self, count: int) -> "Split":
        """Return the split with the first `count` images only."""
        return Split(
            Subset(self.dataset, range(min(count, len(self.labels)))),
            self.labels[:count],
            self.augment,
        )

    def batches(
        self, indices: Sequence[int], device: torch.device, *, size: int = 256
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield images and labels in order and without augmentation."""
        for images, labels in DataLoader(Subset(self.dataset, indices), size):
            yield images.to(device), labels.to(device)

    def training(
        self,
        indices: Sequence[int],
        device: torch.device,
        *,
        size: int,
        steps: int | None,
        generator: torch.Generator,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled and augmented batches.

        There is one epoch, or `steps` batches if `steps` is given.
        """
        loader = DataLoader(Subset(self.dataset, indices), size, shuffle=True, generator=generator)
        epochs = [loader] if steps is None else repeat(loader)
        for images, labels in islice(chain.from_iterable(epochs), steps):
            yield (
                (images if self.augment is None else self.augment(images, generator)).to(device),
                labels.to(device),
            )


class Task(NamedTuple):
    """Training and test images, with the default hyperparameters."""

    num_classes: int
    train: Split
    test: Split
    recipe: Recipe


class Backbone(NamedTuple):
    """Frozen network that clients share.

    It is a trunk that takes prompts, or a convolutional network that takes a border of pixels.
    """

    encoder: fp.Trunk | nn.Module
    dim: int
    patch_size: int
    image_size: int
    mean: Tensor
    std: Tensor


def load_task(dataset: str, *, root: str, seed: int, image_size: int) -> Task:
    """Load a task by the name of its data set.

    Args:
        dataset: "digits", "cifar10", "cifar100", or a folder with `train/CLASS/*` and
            `test/CLASS/*`.
        root: Folder of the data sets other than the digits.
        seed: Seed of the split of the digits.
        image_size: Side of the images other than the digits, in pixels.

    Returns:
        The task, with images in [0, 1].
    """
    if dataset == "digits":
        split = samples.digits(seed, domain=samples.inverted_rotated)
        train = Split(
            TensorDataset(split.train_images, split.train_labels),
            split.train_labels.numpy(),
            samples.augment,
        )
        return Task(
            10,
            train,
            Split(TensorDataset(split.test_images, split.test_labels), split.test_labels.numpy()),
            DIGITS,
        )
    from torchvision import transforms

    sets = image_sets(
        dataset,
        root,
        transforms.Compose([transforms.Resize((image_size, image_size)), transforms.ToTensor()]),
    )
    return Task(
        len(sets[0].classes),
        *(Split(images, np.asarray(images.targets)) for images in sets),
        FEDHPL,
    )


def image_sets(dataset: str, root: str, transform: Callable[[Any], Tensor]) -> list[Any]:
    """Open the training and the test images of a data set.

    `dataset` is "cifar10", "cifar100", or a folder with `train/CLASS/*` and `test/CLASS/*`.
    """
    from torchvision import datasets

    if dataset in ("cifar10", "cifar100"):
        kind = {"cifar10": datasets.CIFAR10, "cifar100": datasets.CIFAR100}[dataset]
        return [
            kind(root, train=train, download=True, transform=transform) for train in (True, False)
        ]
    return [
        datasets.ImageFolder(Path(root) / dataset / part, transform) for part in ("train", "test")
    ]


def load_backbone(
    name: str, *, pretrained: bool, image_size: int, device: torch.device
) -> Backbone:
    """Load an embedded ViT ("S", "B", "L") or any timm model.

    Vision transformers become trunks. Other models become frozen networks.
    """
    if name.upper() in ("S", "B", "L"):
        model: Any = build_samples.vit(name.upper()).to(device)
        return Backbone(
            fp.vit_trunk(model),
            model.embed_dim,
            4,
            16,
            torch.zeros(1, 1, 1, device=device),
            torch.ones(1, 1, 1, device=device),
        )
    import timm

    transformer = name.startswith(("vit", "deit", "eva"))
    model = timm.create_model(
        name, pretrained, num_classes=0, **({"img_size": image_size} if transformer else {})
    ).to(device)
    mean, std = (
        torch.tensor(model.pretrained_cfg[key], device=device).reshape(-1, 1, 1)
        for key in ("mean", "std")
    )
    if not transformer:
        return Backbone(fp.freeze(model), model.num_features, 0, image_size, mean, std)
    return Backbone(
        fp.vit_trunk(model), model.embed_dim, model.patch_embed.patch_size[0], image_size, mean, std
    )


def shards(
    labels: np.ndarray,
    *,
    partition: str,
    alpha: float,
    num_clients: int,
    seed: int,
    images: int | None = None,
) -> list[np.ndarray]:
    """Split training images over clients.

    Args:
        labels: Labels of all training images.
        partition: "iid", "dir" (FedHPL's overlapping split) or "noniid" (disjoint Dirichlet).
        alpha: Concentration of the Dirichlet distributions.
        num_clients: Number of clients.
        seed: Seed of the split.
        images: Maximum number of images of a client, drawn at random. If None, all are kept.
    """
    generator, size = np.random.default_rng(seed), len(labels) // num_clients
    if partition == "dir":
        split = fp.dirichlet_overlapping(
            labels, num_clients=num_clients, alpha=alpha, size=size, generator=generator
        )
    elif partition == "noniid":
        split = fp.dirichlet(
            labels, num_clients=num_clients, alpha=alpha, min_size=size // 6, generator=generator
        )
    else:
        split = fp.iid(labels, num_clients=num_clients, generator=generator)
    return [np.sort(generator.permutation(indices)[:images]) for indices in split]
