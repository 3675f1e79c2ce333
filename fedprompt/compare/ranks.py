"""Ranks as `torchrun` starts them: each evaluates its own clients, and all get all figures."""

import os

import torch
import torch.distributed as dist

import fedprompt as fp


def started() -> bool:
    """Return whether `torchrun` started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def begin() -> None:
    """Join the other ranks; payloads and checkpoints arrive on the GPU of this one."""
    if started() and not dist.is_initialized():
        dist.init_process_group("gloo")
        if torch.cuda.is_available():
            torch.cuda.set_device(device("cuda"))


def rank() -> int:
    """Return the rank of this process, 0 if it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def wait() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def world() -> int:
    """Return the number of ranks."""
    return dist.get_world_size() if dist.is_initialized() else 1


def device(name: str) -> str:
    """Return the device of this rank: with "cuda", each has a GPU of its own."""
    if name != "cuda" or not started():
        return name
    return f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"


def summed(numbers: dict[str, int]) -> dict[str, int]:
    """Add numbers over all ranks."""
    if not dist.is_initialized():
        return numbers
    gathered = fp.wire.gather_trees(numbers, server_round=0)
    return {name: sum(tree[name] for tree in gathered) for name in numbers}
