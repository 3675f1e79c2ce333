"""Handwritten digits of several clients: the data of every loop in this folder."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import fedprompt as fp
from fedprompt import samples

Batch = tuple[Tensor, Tensor]  # images and labels


def parser(description: str) -> argparse.ArgumentParser:
    """Make a parser with the one flag that every loop has."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=raw)
    parser.add_argument("--quick", action="store_true", help="two rounds on a few images")
    return parser


@dataclass(frozen=True)
class Federation:
    """Training images of several clients, test images, and the length of a run."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    shards: list[Tensor]  # positions of each client's training images
    rounds: int
    steps: int  # of each client in each round
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = samples.augment
    num_classes: int = 10

    def own(self, client: int) -> Batch:
        """Return all training images of a client, and their labels."""
        return self.images[self.shards[client]], self.labels[self.shards[client]]

    def batches(self, client: int, server_round: int, *, size: int = 64) -> Iterator[Batch]:
        """Yield random training batches; client and round alone decide which."""
        stream = fp.stream_generator(0, server_round=server_round, client=client)
        shard = self.shards[client]
        for _ in range(self.steps):
            chosen = shard[torch.randperm(len(shard), generator=stream)[:size]]
            images, labels = self.images[chosen], self.labels[chosen]
            yield images if self.augment is None else self.augment(images, stream), labels

    def counts(self) -> Tensor:
        """Count the training images of each class, (clients, classes)."""
        size = self.num_classes
        return torch.stack([self.labels[shard].bincount(minlength=size) for shard in self.shards])

    @torch.no_grad()
    def class_accuracy(self, predict: Callable[[Tensor], Tensor]) -> Tensor:
        """Measure the accuracy of logits on the test images of each class, (classes,)."""
        guesses = torch.cat([predict(images).argmax(1) for images in self.test_images.split(256)])
        correct = (guesses == self.test_labels).float()
        return fp.class_means(correct, self.test_labels, num_classes=self.num_classes).value

    def accuracy(self, predict: Callable[[Tensor], Tensor], client: int | None = None) -> float:
        """Measure the accuracy on all test images, or on the class mix of one client."""
        mix = (
            self.test_labels.bincount(minlength=self.num_classes)
            if client is None
            else self.counts()[client]
        )
        return fp.metrics.global_accuracy(self.class_accuracy(predict)[None], mix)


def federation(
    split: Callable[..., list[np.ndarray]],
    *,
    rounds: int,
    steps: int,
    quick: bool,
    domain: Callable[[Tensor], Tensor] = samples.inverted_rotated,
    encode: Callable[[Tensor], Tensor] | None = None,
) -> Federation:
    """Split 1200 real digits of 1 x 16 x 16 pixels over clients; 597 others are for tests.

    Args:
        split: Partition function, called as ``split(labels, generator=generator)``.
        rounds: Number of rounds.
        steps: Number of steps of a client in a round.
        quick: Two rounds of at most four steps on a third of the images, to see that it runs.
        domain: Appearance of the digits; the frozen backbones have seen printed glyphs only.
        encode: Frozen function, computed once for all images. Its outputs replace the images and
            are not augmented.
    """
    torch.set_num_threads(1)  # the models are tiny: more threads are slower
    images, labels, test_images, test_labels = samples.digits(0, domain=domain)
    if quick:
        rounds, steps, images, labels = 2, min(steps, 4), images[:400], labels[:400]
        test_images, test_labels = test_images[:100], test_labels[:100]
    augment = samples.augment
    if encode is not None:
        augment = None
        sides = images, test_images
        images, test_images = (fp.precompute(encode, side, batch_size=256) for side in sides)
    shards = list(map(torch.from_numpy, split(labels, generator=np.random.default_rng(0))))
    return Federation(images, labels, test_images, test_labels, shards, rounds, steps, augment)
