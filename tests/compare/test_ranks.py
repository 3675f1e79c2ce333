"""Ranks of a comparison: two processes with the variables of `torchrun`, and one alone."""

import json
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist

from fedprompt.compare import ranks


def together(rank, folder, port):
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    before = ranks.started(), ranks.rank(), ranks.world()
    for _ in range(2):  # the second call changes nothing
        ranks.begin()
    if rank == 0:
        time.sleep(0.2)
        (folder / "first").touch()
    ranks.wait()
    seen = (folder / "first").exists()
    found = before, ranks.rank(), ranks.world(), seen, ranks.summed({"a": 1 + rank, "b": 5})
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def test_two_ranks_wait_for_each_other_and_add_their_numbers(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        arguments = (tmp_path, free.getsockname()[1])
    torch.multiprocessing.start_processes(together, arguments, 2, start_method="fork")
    for rank in range(2):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found == [[True, 0, 1], rank, 2, True, {"a": 3, "b": 10}]


def test_a_process_alone_is_rank_0_and_begins_nothing():
    ranks.begin()
    ranks.wait()
    assert not dist.is_initialized()
    assert (ranks.started(), ranks.rank(), ranks.world()) == (False, 0, 1)
    assert ranks.summed({"a": 3}) == {"a": 3}


@pytest.mark.parametrize(
    ("name", "started", "expected"),
    [
        ("cuda", True, "cuda:1"),
        ("cuda", False, "cuda"),
        ("cpu", True, "cpu"),
        ("cpu", False, "cpu"),
    ],
)
def test_ranks_share_the_devices_of_their_machine(name, started, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "3")
    if started:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    assert ranks.device(name) == expected
