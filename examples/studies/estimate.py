"""Arithmetic of the hours that rows take, without data and weights."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedprompt.compare import tables
from studies.backbones import backbone
from studies.core import Row, Task, content
from studies.papers import Setting

GPU = "an A100 at half of its 19.5 TFLOP/s in float32, and at least 10 ms a step"
SPEED = 0.5 * 19.5e12
STEP = 0.01  # seconds that a step takes at least, however small the batch; a guess
BATCH = 256  # test images
NAME_TOKENS = 6  # of a class name with its start, stop and end
SIZES = content("sizes")
"""Numbers of images and classes of each data set."""


def paper_hours(setting: Setting, row: Row) -> float | None:
    """Estimate the hours of a row, or return None if the images cannot be counted.

    A pass backward counts as much as one forward, and twice as much if all weights are trained.
    Evaluation counts: methods with a model for each client encode all test images for each client.
    Second passes of methods that have them are not counted.
    """
    setting, sizes = setting.of(row), SIZES[setting.data]
    images = _images(setting)
    if images is None:
        return None
    tested = sizes["test"]
    if setting.test_share is not None:
        tested = setting.test_share * (tested + sizes["train"])
    count = setting.num_clients
    tests = setting.last_rounds * (count if row.personalized else 1)
    turns = setting.rounds * setting.epochs * setting.cohort_size / count
    steps = turns * count * math.ceil(images / count / setting.batch_size)
    flops = [forward_flops(name, setting.image_size) for name in setting.backbones]
    one = sum(flops) / len(flops)
    if setting.family == "CLIP":
        # Image tokens are computed once; each step encodes all class names for two contexts.
        text = _text_flops(setting.backbones[0]) * (setting.length + NAME_TOKENS) * sizes["classes"]
        before = (images + tested) * one + 2 * tests * math.ceil(tested / BATCH) * text
        total = 2 * 2 * steps * text
    else:
        before = tests * tested * one
        total = (3 if setting.family == "networks" else 2) * turns * images * one
    return (before / SPEED + max(total / SPEED, steps * STEP)) / 3600


def _images(setting: Setting) -> float | None:
    """Count the training images of all clients."""
    partition, sizes = setting.partition, SIZES[setting.data]
    classes, total = sizes.get("classes"), sizes.get("train")
    if partition.shots is not None and classes:
        return partition.shots * classes
    if total is not None and setting.test_share is not None:
        total = (total + sizes["test"]) * (1 - setting.test_share)
    return total


@cache
def forward_flops(name: str, image_size: int) -> int:
    """Count the floating-point operations of a forward pass on one image, without prompts."""
    # open_clip moves its models, so theirs need memory.
    with torch.device("cpu" if name.endswith(":openai") else "meta"):
        model = backbone(name, image_size, random=True).model
        images = torch.zeros(1, 3, image_size, image_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        getattr(model, "visual", model).eval()(images)
    return counter.get_total_flops()


@cache
def _text_flops(name: str) -> int:
    """Count the operations of a CLIP's text blocks on one token, without attention scores."""
    import open_clip

    config = open_clip.get_model_config(name.removesuffix(":openai"))["text_cfg"]
    return 2 * 12 * config["layers"] * config["width"] ** 2


def table_of(name: str, task: Task, partitions: Sequence[str], seeds: int) -> str:
    """Lay out the runs and hours of each partition of a task."""
    body = []
    for partition in partitions:
        rows = [row for row in task.rows(partition) if row.method is not None]
        spent = [task.hours(partition, row) for row in rows]
        total = None if None in spent else sum(spent) * seeds
        body.append([partition, len(rows), seeds * len(rows), _short(total)])
    header = [name, "rows", "runs", "hours"]
    return f"{tables.table(header, body)}\n\nHours are arithmetic, of {task.processor}."


def _short(hours: float | None) -> str:
    if hours is None:
        return "not known"
    return f"{hours:.0f}" if hours >= 10 else f"{hours:.1f}" if hours >= 1 else f"{hours:.2f}"
