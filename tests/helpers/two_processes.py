"""Two processes of one group on this machine.

The spawned processes import their tasks by name.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as distributed
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from fedprompt import vit_trunk
from models import Client, build, draw_images, row_named

WORLD, BATCH = 2, 4


def run(task: Callable[[int, Path], None], folder: Path) -> None:
    """Run ``task(rank, folder)`` in two processes that write their results to the folder."""
    torch.multiprocessing.spawn(_start, (task, folder), nprocs=WORLD)


def _start(rank: int, task: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD
    )
    task(rank, folder)
    if distributed.is_initialized():  # the task may have left the group
        distributed.destroy_process_group()


def make_client() -> Client:
    """Build the same client in every process."""
    return Client(
        vit_trunk(build(row_named("vit_tiny_patch16_224"))), torch.Generator().manual_seed(0)
    )


def make_data() -> tuple[Tensor, Tensor]:
    """Return the images and labels of the full batch."""
    return draw_images(build(row_named("vit_tiny_patch16_224")), BATCH), torch.tensor([0, 1, 2, 1])


def data_parallel_step(rank: int, folder: Path) -> None:
    """Run one backward pass on this rank's part of the batch, and save the gradients."""
    client = DistributedDataParallel(make_client())
    images, labels = (tensor.chunk(WORLD)[rank] for tensor in make_data())
    nn.functional.cross_entropy(client(images), labels).backward()
    torch.save(
        {name: parameter.grad for name, parameter in client.module.named_parameters()},
        folder / f"{rank}.pt",
    )
