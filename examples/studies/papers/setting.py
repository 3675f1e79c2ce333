"""Vocabulary of the papers' settings, which are data; their rows are methods of the gallery."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Family = Literal["one model", "mixed models", "networks", "CLIP"]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """How the training images are divided over the clients.

    Attributes:
        kind: "iid"; "dirichlet", disjoint; "overlapping", shards of equal size that may share
            images, by Dirichlet; "classes", a few classes a client; "domains", clients of one
            domain each.
        alpha: Concentration of the Dirichlet distribution. With "domains", the images of a domain
            are divided over its clients by it, or evenly if it is None.
        classes: Number of classes of a client, for "classes". If None, with `disjoint`, all classes
            are divided evenly over the clients.
        disjoint: Whether no two clients have a class in common, for "classes".
        shots: Maximum number of training images of each class, drawn before the division. If None,
            all are used.
        shots_each: Maximum number of training images of each class of each client, drawn after the
            division. If None, all are used.
        min_share: Smallest share of all training images that a client has, for "dirichlet". Draws
            below it are repeated.
    """

    kind: Literal["iid", "dirichlet", "overlapping", "classes", "domains"]
    alpha: float | None = None
    classes: int | None = None
    disjoint: bool = False
    shots: int | None = None
    shots_each: int | None = None
    min_share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Local training.

    Attributes:
        optimizer: Name of a class of ``torch.optim``.
        values: Its arguments other than the learning rate, which each row has.
        cosine: Whether the learning rate decreases to 0 along a cosine over the rounds.
        epochs: Number of epochs of a client in a round.
        batch_size: Number of images in a batch.
        drop_last: Whether an epoch has full batches only. A client with fewer images than a batch
            keeps its only one.
        crop: Smallest share of an image in a random crop; 1 for none.
        flip: Whether images are flipped at random.
    """

    optimizer: str = "SGD"
    values: Mapping[str, Any] = field(default_factory=dict)
    cosine: bool = False
    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    crop: float = 1.0
    flip: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of a table.

    Attributes:
        title: Name of the row in the paper.
        method: Function of the gallery, or None if the gallery does not have the row.
        figures: The paper's figures in percent, by column: "full", the mean over clients on all
            test images; "lowest" and "highest", of a client on all test images; "own", on the
            client's own mix of classes and domains; "worst", the lowest of these; "clusters", the
            share of test images whose superclass is the most frequent one of their group; or the
            name of a domain, the mean over its clients on their own mixes.
        spread: The paper's standard deviations, by column, where it prints them.
        values: Hyperparameters of the method.
        changes: Fields of the setting that this row changes. A changed `family` is that of the
            row's method.
    """

    title: str
    method: str | None
    figures: Mapping[str, float]
    spread: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)
    changes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One column, or a few, of one table of a paper.

    Attributes:
        name: Name on the command line, such as "fedhpl-1-cifar10-dirichlet".
        source: Paper and table.
        task: Name of the data set in ``studies.tasks.TASKS``.
        family: Family of the methods. "networks" are networks trained from scratch, whose methods
            are those of "mixed models".
        backbones: Names of timm or open_clip, or of a network of ``papers/backbones.py``. Clients
            have them in turn. Pretrained convolutional networks have prompts of pixels around the
            image.
        partition: Division over the clients.
        num_clients: Number of clients.
        cohort_size: Number of clients in a round.
        rounds: Number of rounds.
        recipe: Local training.
        rows: Rows of the table.
        choices: Choices where the paper leaves something open, one sentence each.
        image_size: Side of the input images in pixels.
        num_prompts: Number of prompts at a layer, or pixels of a border on each side.
        num_features: Width of the features after a learned projection, or None.
        length: Number of learnable tokens of a context, for CLIP.
        template: Sentence around a class name, for CLIP.
        last_rounds: Number of last rounds whose accuracies are averaged.
        test_share: Share of each class that is held out as test images before the division, after
            the training and test images of the data set are pooled. If None, the test images are
            those of the data set.
    """

    name: str
    source: str
    task: str
    family: Family
    backbones: tuple[str, ...]
    partition: Partition
    num_clients: int
    cohort_size: int
    rounds: int
    recipe: Recipe
    rows: tuple[Row, ...]
    choices: tuple[str, ...] = ()
    image_size: int = 224
    num_prompts: int = 8
    num_features: int | None = None
    length: int = 16
    template: str = "a photo of a {}."
    last_rounds: int = 1
    test_share: float | None = None
