"""Runs of cells: their records, kills, failures and devices."""

import os
import signal
import subprocess
import sys

import pytest

from fedprompt import samples
from fedprompt.compare import cells, measure, records
from fedprompt.compare.cells import Cell
from fedprompt.compare.rows import Row
from other_device import other_device
from tasks import TASKS, digits
from tasks.core import Machine


@pytest.fixture(autouse=True)
def few_digits(monkeypatch):
    """A quarter of the digits, which no other test has divided before."""
    few = samples.digits()
    few = few._make(part[::4] for part in few)
    monkeypatch.setattr(samples, "digits", lambda *_, **__: few)
    monkeypatch.setattr(digits, "digits", digits.digits.__wrapped__)
    monkeypatch.setattr(measure, "OWN_STEPS", 1)


def test_a_program_that_is_killed_at_any_moment_has_the_records_of_a_whole_run(
    tmp_path, monkeypatch
):
    """Each second kill cuts the line that was just written, so that its run is lost."""
    monkeypatch.setattr(cells, "run", lambda cell, progress: {"own": cell.seed})
    row = Row("Local training", "local", {"learning_rate": 0.01})
    listed = [Cell(TASKS["digits"], "few", row, seed, None, Machine()) for seed in range(5)]
    whole = cells.run_all(listed, tmp_path / "whole.jsonl", workers=1)
    for kill in range(8):

        def fatal(file, cut=5 * (kill % 2)):
            os.ftruncate(file, os.fstat(file).st_size - cut)
            os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            os.fsync = fatal
            cells.run_all(listed, tmp_path / "records.jsonl", workers=1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(cells.load(tmp_path / "records.jsonl", TASKS["digits"])) == 4
    assert cells.run_all(listed, tmp_path / "records.jsonl", workers=1) == whole


PROGRAM = """
import os, time, torch
from multiprocessing import parent_process
from fedprompt import compare, methods, samples, vit_trunk

def mine(setting):
    if parent_process() is not None:
        print(os.getpid(), flush=True)
        time.sleep(900)
    return methods.fedprox(setting)

if __name__ == "__main__":
    images, labels, tests, test_labels = samples.digits()
    setting = methods.VitSetting(trunk=vit_trunk(samples.vit("S")), num_classes=10, rounds=1)
    held_out = methods.HeldOut(tests, test_labels)
    problem = compare.problem(images, labels, {0: range(20)}, held_out, setting=setting)
    compare.run(problem, [mine], seeds=2, workers=2)
"""


@pytest.mark.slow
def test_a_function_of_a_program_runs_in_workers_which_end_when_it_is_killed(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert len({int(program.stdout.readline()) for _ in range(2)} - {program.pid}) == 2
        program.kill()
        program.communicate(timeout=60)  # the output ends with the last process that has it


def test_a_cell_that_fails_does_not_lose_the_others(tmp_path):
    good = Row("Local training", "local", {"learning_rate": 0.01})
    rows = [Row("FedProx", "fedprox", {"learning_rate": -1.0}), good]
    listed = [Cell(TASKS["digits"], "few", row, 0, None, Machine(shrink=0.01)) for row in rows]
    with pytest.raises(RuntimeError, match="1 runs failed"):
        cells.run_all(listed, tmp_path / "r.jsonl", workers=1)
    assert len(cells.load(tmp_path / "r.jsonl", TASKS["digits"])) == 1


def test_a_trial_that_diverges_has_no_accuracy_and_a_reported_run_fails_and_is_left_out(tmp_path):
    row = Row("plain", "plain_steps", {"learning_rate": 1e30})
    trial, reported = (
        Cell(TASKS["digits"], "few", row, 0, at, Machine(shrink=0.01)) for at in (0, None)
    )
    path = tmp_path / "r.jsonl"
    record = cells.run_all([trial], path, workers=1)[0]
    assert (record["own"], record["diverged"]) == (0, 1)
    assert not cells.unstable(path, TASKS["digits"])
    with pytest.raises(RuntimeError, match="1 runs failed"):
        cells.run_all([reported], path, workers=1)
    assert cells.unstable(path, TASKS["digits"]) == {
        cells.chosen(reported.named(), TASKS["digits"])
    }
    assert list(cells.load(path, TASKS["digits"])) == [trial.key()]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("digits", "fedavgm"),
        ("clip", "promptfl"),
        pytest.param("clip", "fedotp", marks=pytest.mark.slow),
    ],
)
def test_models_and_batches_are_on_the_device_of_the_machine(name, method, monkeypatch):
    (row,) = (row for row in TASKS[name].rows("few") if row.method == method)
    run, seen = measure.run, set()

    def watched(method, trial, **options):
        batch, _ = next(iter(trial.federation.data(0, 0).batches()))
        seen.update(part.device for part in (batch, *method.server.state["values"].values()))
        return run(method, trial, **options)

    monkeypatch.setattr(measure, "run", watched)
    with other_device() as device:
        found = cells.run(Cell(TASKS[name], "few", row, 0, None, Machine(str(device), shrink=0.01)))
    assert seen == {device}
    assert 0 <= found["own"] <= 1
    digits.trunk.cache_clear()


def test_a_record_names_the_commit_of_the_clone():
    git = ["git", "--git-dir", str(records.ROOT / ".git"), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    assert records.origin().get("commit", "").removesuffix("-dirty") == commit


def test_a_record_without_a_later_hyperparameter_is_that_of_its_default():
    row = Row.of("fedhpl")
    cell = Cell(
        TASKS["networks"], next(iter(TASKS["networks"].partitions)), row, 0, None, Machine()
    )
    old, other = ({**cell.named(), "values": {"share": [], "temperature": t}} for t in (4.5, 2.0))
    bare, old, other = (
        cells.key(each, cell.problem) for each in (old | {"values": {}}, old, other)
    )
    assert bare == old == cell.key() != other


def test_a_device_is_part_of_a_key_and_a_record_without_one_was_made_on_the_cpu():
    row = Row.of("local")
    one, other = (Cell(TASKS["digits"], "few", row, 0, None, Machine(of)) for of in ("cpu", "cuda"))
    assert "device" not in one.named()
    assert one.key() == cells.key(one.named() | {"device": "cpu"}, one.problem) != other.key()
