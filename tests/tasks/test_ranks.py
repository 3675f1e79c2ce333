"""Under `torchrun`, two ranks have the figures of one process, bitwise."""

import json
import os
import subprocess
import sys
from pathlib import Path

COMPARE = Path(__file__).parents[2] / "examples" / "compare.py"
FLAGS = ["--task", "digits", "--methods", "ditto,fedprox,local", "--shrink", "0.01"]
FLAGS += ["--partitions", "domains", "--workers", "1"]
CHANGES = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(COMPARE.parents[1])}


def records(folder, *launcher):
    where = ["--records", str(folder), "--out", str(folder / "out")]
    command = [sys.executable, *launcher, str(COMPARE), *FLAGS, *where]
    subprocess.run(command, check=True, env={**os.environ, **CHANGES})
    lines = (folder / "digits-shrunk.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {each.pop("row"): each for each in found}


def test_two_ranks_have_the_figures_of_one_process(tmp_path):
    module = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    alone, together = records(tmp_path / "one"), records(tmp_path / "two", *module)
    assert len(alone) == 3
    assert alone == together
