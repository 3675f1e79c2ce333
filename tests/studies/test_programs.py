"""Whole runs of the program that makes our tables; too long for every run of pytest."""

import json
import os
import socket
from pathlib import Path

import pytest
import torch

import compare
from studies.papers import PAPERS

pytestmark = pytest.mark.slow
FEW = ["--shrink", "0.01", "--workers", "1"]
TWO = ["--methods", "ditto,fedprox", "--partitions", "few"]
HOURS = Path(__file__).parents[2] / "docs" / "results" / "tables"


def run(folder, task, *arguments):
    """Run the program, and return its records by row."""
    compare.main(["--task", task, *FEW, *arguments, "--out", str(folder)])
    return records(folder, task)


def records(folder, task):
    lines = (folder / "records" / f"{task}-shrunk.jsonl").read_text().splitlines()
    return {each.pop("row"): each for each in map(json.loads, lines)}


def test_patches_are_encoded_and_classified_by_transport(tmp_path, capsys):
    flags = ["--partitions", "shots-4", "--rows", "Transport, mass 1;Mean of patches"]
    found = run(tmp_path, "patches", *flags, "--weights", "random=tiny networks")
    assert "0.01 of the rounds and images" in capsys.readouterr().out
    assert [record["bytes_up"] for record in found.values()] == [4 * 10 * 16 + 4] * 2


def run_rank(rank, folder, port):
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    os.environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    run(folder, "digits", *TWO)


def test_two_ranks_have_the_figures_of_one_process_bitwise(tmp_path):
    """They have the variables of `torchrun`."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        arguments = (tmp_path / "two", free.getsockname()[1])
    # Copies of this process have imported everything already.
    torch.multiprocessing.start_processes(run_rank, arguments, 2, start_method="fork")
    alone = run(tmp_path / "one", "digits", *TWO)
    assert len(alone) == 2
    assert alone == records(tmp_path / "two", "digits")


@pytest.mark.parametrize("name", PAPERS)
def test_hours_of_the_papers_are_those_of_the_pages(name, tmp_path):
    compare.main(["--estimate", "--task", name, "--seeds", "1", "--out", str(tmp_path)])
    table = f"{name}-hours.md"
    assert (tmp_path / table).read_text() == (HOURS / table).read_text()
