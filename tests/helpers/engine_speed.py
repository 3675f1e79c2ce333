"""Seconds and memory of the engines, measured in processes of their own.

Spawned processes import this module by name.
"""

import json
import resource
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fedprompt as fp
from fedprompt import methods, samples

CLIENTS, SEED = 15, 0


def federation(
    clients: int, cohort: int, rounds: int, steps: int
) -> tuple[methods.Setting, methods.Federation]:
    """Divide the sample digits over clients with the sample ViT."""
    split = samples.digits(SEED)
    setting = methods.VitSetting(
        trunk=fp.vit_trunk(samples.vit("S")),
        clients=range(clients),
        num_classes=10,
        rounds=rounds,
        steps=steps,
        cohort_size=cohort,
        batch_size=32,
        seed=SEED,
    )
    shards = dict(enumerate(torch.arange(len(split.train_labels)).chunk(clients)))
    return setting, methods.Federation(split.train_images, split.train_labels, shards)


def timed(
    made: tuple[methods.Setting, methods.Federation], share: bool = False
) -> tuple[float, fp.Round]:
    """Run FedAvg of prompts and head, and return the seconds of all rounds but the first."""
    group = dist.group.WORLD if dist.is_initialized() else None
    setting, federation = made
    method = methods.fedvpt_d(setting, learning_rate=0.01)
    rounds = fp.run_rounds(method, federation, group=group, share=share)
    next(rounds)  # it warms up
    began = time.perf_counter()
    *_, now = rounds
    return time.perf_counter() - began, now


def time_rank(rank: int, folder: Path) -> None:
    """Time the rounds on this rank, and save the seconds and the values."""
    sizes = json.loads((folder / "sizes.json").read_text())
    share = sizes.pop("share")
    seconds, now = timed(federation(**sizes), share)
    torch.save((seconds, now.server["values"]), folder / f"{rank}.pt")


class Own(NamedTuple):
    """Client that has no inputs."""

    id: int
    server_round: int


def many_clients(index: int, registered: int, folder: Path) -> None:
    """Run rounds of 1,000 clients, and save the seconds and the peak memory in bytes."""
    torch.set_num_threads(1)
    values = {"prompts": torch.zeros(8, 64), "head": torch.zeros(10, 64)}

    def train(data: Any, answer: Any, state: Any) -> Any:
        entries = {
            name: fp.Weighted(each + data.id, torch.tensor(1.0)) for name, each in answer.items()
        }
        return entries, {"seen": state.get("seen", 0) + 1}

    method = fp.Method(train, fp.averaging_server(values), predict=lambda *all: None)
    draw, ledger = torch.Generator().manual_seed(SEED), fp.Ledger()
    cohorts = [fp.sample_clients(range(registered), size=1000, generator=draw) for _ in range(6)]
    rounds = fp.run_rounds(fp.rounds.counted(method, ledger), Own, cohorts)
    next(rounds)
    began = time.perf_counter()
    *_, now = rounds
    seconds = time.perf_counter() - began
    for client in range(registered):  # all may ask for an answer
        method.server.answer(client, now.server)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    (folder / f"{registered}.json").write_text(json.dumps([seconds, peak]))
