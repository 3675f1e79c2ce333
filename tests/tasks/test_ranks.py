"""Two ranks with the variables of `torchrun` have the figures of one process, bitwise."""

import json
import os
import socket

import torch

import compare

FLAGS = ["--task", "digits", "--methods", "ditto,fedprox,local", "--shrink", "0.01"]
FLAGS += ["--partitions", "domains", "--workers", "1"]


def records(folder):
    compare.main([*FLAGS, "--records", str(folder), "--out", str(folder / "out")])
    lines = (folder / "digits-shrunk.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {each.pop("row"): each for each in found}


def run_rank(rank, folder, port):
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    records(folder)


def test_two_ranks_have_the_figures_of_one_process(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        arguments = (tmp_path / "two", free.getsockname()[1])
    # Copies of this process have imported everything already.
    torch.multiprocessing.start_processes(run_rank, arguments, 2, start_method="fork")
    alone, together = records(tmp_path / "one"), records(tmp_path / "two")
    assert len(alone) == 3
    assert alone == together
