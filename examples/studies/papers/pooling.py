"""Held-out test images of settings that pool all images of a data set."""

import numpy as np
import torch

from studies.tasks import Images, Task


def held_out(task: Task, share: float, *, generator: np.random.Generator) -> Task:
    """Pool training and test images, and hold out a share of each class and domain.

    Args:
        task: Data set.
        share: Share of the new test images, between 0 and 1.
        generator: Source of randomness.

    Returns:
        The data set with the new training and test images.
    """
    images = Images(*(torch.cat(pair) for pair in zip(task.train, task.test, strict=True)))
    cells = images.domains * len(task.class_names) + images.labels
    order = torch.from_numpy(generator.permutation(len(cells)))
    order = order[cells[order].argsort(stable=True)]
    sizes = torch.bincount(cells)
    first = sizes.cumsum(0) - sizes
    place = torch.arange(len(order)) - first[cells[order]]
    held = place < (share * sizes).round()[cells[order]]
    sides = (order[chosen].sort().values for chosen in (~held, held))
    train, test = (Images(*(each[side] for each in images)) for side in sides)
    return task._replace(train=train, test=test)
