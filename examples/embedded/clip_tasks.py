"""Tasks of the CLIP examples: digits on cluttered canvases, CIFAR or folders of images.

The image tokens of the frozen CLIP are computed once.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, islice, repeat
from typing import NamedTuple

import numpy as np
import open_clip
import torch
import torch.nn as nn
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.data import ConcatDataset

import fedprompt as fp
from embedded import data
from embedded.clip import DIGITS, load_clip, preprocess, tokenize
from embedded.tasks import Recipe, image_sets

CANVASES = Recipe(1, 32, 8, 15, torch.optim.Adam, 5e-3, decay=True)
FEDOTP = Recipe(
    1, 32, None, 10, partial(torch.optim.SGD, momentum=0.9, weight_decay=5e-4), 1e-3, decay=False
)


class Part(NamedTuple):
    """Image tokens of a frozen CLIP, with the classes and domains of the images.

    The pooled token is first, followed by the tokens of the patches.
    """

    tokens: Float[Tensor, "images tokens dim"]
    labels: Int[Tensor, "images"]
    domains: Int[Tensor, "images"]

    def first(self, count: int) -> "Part":
        """Return the part with the first `count` images only."""
        return Part(*(each[:count] for each in self))

    def training(
        self,
        indices: Sequence[int],
        device: torch.device,
        *,
        size: int,
        steps: int | None,
        epochs: int,
        generator: torch.Generator,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield shuffled batches of tokens and labels.

        There are `epochs` epochs, or `steps` batches if `steps` is given.
        """
        owned = torch.as_tensor(indices)
        orders = (
            owned[torch.randperm(len(owned), generator=generator)]
            for _ in repeat(None, epochs if steps is None else steps)
        )
        for batch in islice(chain.from_iterable(order.split(size) for order in orders), steps):
            yield self.tokens[batch].to(device), self.labels[batch].to(device)


class ClipTask(NamedTuple):
    """Frozen CLIP, names of the classes, and images of one or several domains.

    `look` returns a test image.
    """

    tower: fp.TextTower
    names: fp.interfaces.ClassNames
    scale: float
    domains: Sequence[str]
    train: Part
    test: Part
    look: Callable[[int], Float[Tensor, "channels height width"]]
    recipe: Recipe

    def cells(self, part: Part) -> Int[Tensor, "images"]:
        """Return the cell of each image: the index of its pair of domain and class."""
        return part.domains * len(self.names.names) + part.labels

    def counts(
        self, part: Part, indices: Sequence[int] | slice = slice(None)
    ) -> Int[Tensor, "cells"]:
        """Count the images of each cell."""
        return torch.bincount(
            self.cells(part)[indices], minlength=len(self.domains) * len(self.names.names)
        )

    @torch.no_grad()
    def accuracy(
        self, predict: Callable[[Tensor], Tensor], device: torch.device
    ) -> Float[Tensor, "cells"]:
        """Measure the accuracy of logits on the test images of each cell."""
        predicted = torch.cat(
            [predict(tokens.to(device)).argmax(1).cpu() for tokens in self.test.tokens.split(256)]
        )
        correct = (predicted == self.test.labels).float()
        return fp.class_means(
            correct, self.cells(self.test), num_classes=len(self.counts(self.test))
        ).value

    def shards(self, args: Namespace) -> list[np.ndarray]:
        """Split the training images over clients.

        The partition is by labels ("iid", "dirichlet", "pathological"), by domain ("domain") or
        by both ("both").
        """
        generator, labels = np.random.default_rng(args.seed), self.train.labels.numpy()
        dirichlet = partial(fp.dirichlet, alpha=args.alpha, generator=generator)
        if args.partition == "dirichlet":
            return dirichlet(
                labels, num_clients=args.clients, min_size=len(labels) // args.clients // 6
            )
        if args.partition == "pathological":
            return fp.pathological(
                labels,
                num_clients=args.clients,
                classes_per_client=args.classes_per_client,
                generator=generator,
            )
        if args.partition == "iid":
            return fp.iid(labels, num_clients=args.clients, generator=generator)
        owned, halves = fp.by_domain(self.train.domains), args.partition == "both"
        return [
            each[part]
            for each in owned
            for part in dirichlet(labels[each], num_clients=1 + halves, min_size=len(each) // 6)
        ]


def load_task(args: Namespace) -> ClipTask:
    """Load the digits with the embedded CLIP, or other data with a model of open_clip."""
    return embedded_task(args) if args.dataset == "digits" else open_clip_task(args)


def embedded_task(args: Namespace) -> ClipTask:
    """Put the digits on canvases and compute their tokens once with the embedded CLIP.

    The split of the digits depends on the seed.
    """
    model = load_clip().to(args.device)
    tower = fp.TextTower(model, tokenize)
    digits = data.digits(args.seed, domain=data.raw)
    generator = fp.stream_generator(args.seed, server_round=0, purpose="canvases")
    put = partial(
        data.on_canvases,
        generator=generator,
        domains=args.domains,
        smallest=args.smallest,
        largest=args.largest,
    )
    parts, canvases = [], []
    for images, labels in (
        (digits.train_images, digits.train_labels),
        (digits.test_images, digits.test_labels),
    ):
        images, domains = put(images)
        canvases.append(images)
        parts.append(
            Part(
                fp.precompute(partial(_tokens, model), preprocess(images), batch_size=256),
                labels,
                domains,
            )
        )
    return ClipTask(
        tower,
        tower.class_names(DIGITS),
        model.logit_scale.exp().item(),
        args.domains,
        *parts,
        canvases[1].__getitem__,
        CANVASES,
    )


def open_clip_task(args: Namespace) -> ClipTask:
    """Compute the tokens of CIFAR or image folders once with a model of open_clip.

    Commas in `args.dataset` separate domains. All domains have the same classes.
    """
    # The weights were trained with this activation.
    quick_gelu = open_clip.get_pretrained_cfg(args.model, args.pretrained or "").get(
        "quick_gelu", False
    )
    model, _, transform = open_clip.create_model_and_transforms(
        args.model, args.pretrained, force_image_size=args.image_size, force_quick_gelu=quick_gelu
    )
    model = fp.freeze(model.to(args.device))
    tower = fp.TextTower(model, open_clip.get_tokenizer(args.model))
    names = args.dataset.split(",")
    sets = [image_sets(name, args.root, transform) for name in names]
    classes, parts = sets[0][0].classes, []
    for images in zip(*sets, strict=True):
        if any(each.classes != classes for each in images):
            raise ValueError(
                f"`--dataset` must name domains of the classes {classes}; "
                f"got {[each.classes for each in images]}."
            )
        tokens = fp.precompute(
            partial(_tokens, model), ConcatDataset(images), batch_size=32, dtype=torch.float16
        )
        domains = torch.arange(len(images)).repeat_interleave(
            torch.tensor([len(each) for each in images])
        )
        parts.append(
            Part(tokens, torch.cat([torch.as_tensor(each.targets) for each in images]), domains)
        )
    test = ConcatDataset([test for _, test in sets])
    return ClipTask(
        tower,
        tower.class_names(classes),
        model.logit_scale.exp().item(),
        names,
        *parts,
        lambda index: test[index][0],
        FEDOTP,
    )


def _tokens(model: nn.Module, images: Tensor) -> Tensor:
    """Return the pooled feature of each image and those of its patches, on the CPU."""
    pooled, patches = fp.image_tokens(model, images.to(model.logit_scale.device))
    return torch.cat([pooled[:, None], patches], 1).cpu()
