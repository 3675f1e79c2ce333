"""Settings with fewer rounds and images, to see that the whole path runs."""

import math
from dataclasses import replace

import torch

from studies.papers.setting import Setting
from studies.tasks import Images, Task

NUM_IMAGES = 40
"""Images of an average client, at least: batch normalization needs two in each batch."""


def shrunk(setting: Setting, task: Task, factor: float) -> tuple[Setting, Task]:
    """Return a setting and its images with the same clients, but fewer rounds and images.

    Each class keeps at least four images, and enough for all clients.
    """
    if factor == 1:
        return setting, task
    rows = [
        replace(row, changes={**row.changes, "rounds": _rounds(row.changes["rounds"], factor)})
        if "rounds" in row.changes
        else row
        for row in setting.rows
    ]
    small = replace(setting, rows=tuple(rows), rounds=_rounds(setting.rounds, factor))
    return small, task._replace(
        train=_fewer(task.train, factor, setting.num_clients),
        test=_fewer(task.test, factor, 1),
    )


def _rounds(count: int, factor: float) -> int:
    return max(2, math.ceil(factor * count))


def _fewer(images: Images, factor: float, num_clients: int) -> Images:
    cells = images.domains * (int(images.labels.max()) + 1) + images.labels
    num_classes, sizes = len(images.labels.unique()), torch.bincount(cells)
    smallest = max(4, math.ceil(NUM_IMAGES * num_clients / num_classes))
    kept = [
        torch.nonzero(cells == cell)[: max(smallest, math.ceil(factor * size)), 0]
        for cell, size in enumerate(sizes.tolist())
        if size
    ]
    chosen = torch.cat(kept).sort().values
    return Images(*(each[chosen] for each in images))
