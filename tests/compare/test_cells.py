"""Runs of cells: their records, kills, failures and devices."""

import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from types import SimpleNamespace

import pytest
import torch

from fedprompt import methods, samples
from fedprompt.compare import Problem, cells, measure, prompts, records
from fedprompt.compare.cells import Cell
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import CompareError
from other_device import other_device
from studies import TASKS, digits
from studies.core import Machine


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
    usual = {"device": "cpu", "shrink": 1}
    assert one.key() == cells.key(one.named() | usual, one.problem) != other.key()


def test_the_order_of_values_and_defaults_of_rows_that_cannot_run_do_not_count():
    listed = [Row("Paper", None), Row.of("local"), Row.of("fedprox", mu=0.5)]
    problem = Problem(title="", partitions={"": ""}, rows=lambda _: listed, make=dict)

    def key(title, **values):
        record = {"task": "", "partition": "", "row": title, "seed": 0, "trial": None}
        return cells.key(record | {"values": values}, problem)

    assert key("Paper", a=1, b=2) == key("Paper", b=2, a=1) != key("Paper")
    assert key("FedProx", mu=0.5, learning_rate=0.1) == key("FedProx", learning_rate=0.1, mu=0.5)
    assert len({key("FedProx"), key("FedProx", mu=0.5), key("Local training", mu=0.1)}) == 3


@pytest.mark.unhooked  # parts of a trial are enough
@pytest.mark.parametrize("method", ["fedprox", "ditto"])
@pytest.mark.parametrize("tuning", [False, True])
def test_a_run_is_measured_as_its_problem_says_in_one_thread(method, tuning, monkeypatch, tmp_path):
    made, measured, saved = [], [], []

    def make(partition, row, **where):
        made.append((partition, row, where))
        trial = SimpleNamespace(setting=SimpleNamespace(device="meta"))
        trial.on = lambda device: [trial, made.append(device)][0]
        return trial

    def run(method, trial, **options):
        options["finished"](trial, method, "the last round")
        measured.append((method, torch.get_num_threads(), options))
        return {"own": 0.5}

    monkeypatch.setattr(measure, "run", run)
    monkeypatch.setattr(prompts, "save", lambda *given: saved.append(given))
    problem = Problem(
        title="",
        partitions={"p": ""},
        rows=lambda _: [],
        make=make,
        method=lambda row, trial: torch.zeros(1).device.type,
        columns={"own": ""} | ({"rise": ""} if tuning else {}),
        last_rounds=lambda partition, row: [partition, row],
        causes=lambda partition, row: [row, partition],
    )
    row, place = Row.of(method), None if tuning else tmp_path
    machine = Machine("cuda", 0.5)
    cell = Cell(problem, "p", row, 7, 0 if tuning else None, machine, place)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert cells.run(cell, print) == {"own": 0.5}
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(threads)
    assert made == [("p", row, {"seed": 7, "machine": machine, "validate": tuning}), "cuda"]
    ((found, count, options),) = measured
    shared = method == "fedprox"
    assert (found, count, options.pop("finished") is not None) == ("meta", 1, True)
    asked = {"last_rounds": ["p", row], "rise": tuning, "causes": [row, "p"], "progress": print}
    assert options == asked | {"shared": shared}
    assert [each[:3] for each in saved] == ([] if tuning else [(tmp_path, cell.stem, shared)])


# Processes


def no_problem(**fields):
    return Problem(title="", partitions={"": ""}, rows=lambda _: [], make=dict, **fields)


def seeds(count, trial=None):
    row = Row("Local training", "local")
    return [Cell(no_problem(), "", row, seed, trial, Machine()) for seed in range(count)]


@pytest.fixture
def pools(monkeypatch):
    """Threads take the place of processes. The list has the numbers of workers."""
    counts = []

    def pool(workers):
        counts.append(workers)
        return ThreadPoolExecutor(workers)

    monkeypatch.setattr(cells, "_pool", pool)
    return counts


def test_workers_run_what_has_no_record_and_records_are_in_the_order_of_cells(
    pools, monkeypatch, tmp_path
):
    monkeypatch.setattr(cells, "run", lambda cell: {"own": 1 / (1 + cell.seed)})
    path, listed = tmp_path / "r.jsonl", seeds(5)
    cells.run_all(listed[3:], path, workers=3)
    ran = []
    monkeypatch.setattr(cells, "run", lambda cell: ran.append(cell.seed) or {"own": 0.123456789})
    found = cells.run_all(listed, path, workers=2)
    assert sorted(ran) == [0, 1, 2]
    assert [record["seed"] for record in found] == [0, 1, 2, 3, 4]
    assert [record["own"] for record in found] == [0.123457] * 3 + [0.25, 0.2]
    assert sorted(map(repr, records.read(path))) == sorted(map(repr, found))
    monkeypatch.setattr(cells, "run", None)
    assert cells.run_all(listed, path, workers=8) == found
    assert pools == [2, 2, 1]
    assert cells.run_all([], path, workers=1) == []


def test_the_first_rank_writes_before_the_others_go_on(monkeypatch, tmp_path):
    path, written = tmp_path / "r.jsonl", []
    monkeypatch.setattr(cells, "run", lambda cell, progress: {"own": 0.5})
    monkeypatch.setattr(cells.ranks, "wait", lambda: written.append(path.exists()))
    for rank in (1, 0):
        monkeypatch.setattr(cells.ranks, "rank", lambda rank=rank: rank)
        assert len(cells.run_all(seeds(1), path, workers=1)) == 1
    assert written == [False, True]


def test_a_missing_file_stops_the_cells_that_wait(pools, monkeypatch, tmp_path):
    ran = []

    def run(cell):
        ran.append(cell.seed)
        if len(ran) == 1:
            raise FileNotFoundError("no weights")
        time.sleep(0.02)
        return {"own": 1.0}

    monkeypatch.setattr(cells, "run", run)
    with pytest.raises(FileNotFoundError, match="no weights"):
        cells.run_all(seeds(20), tmp_path / "r.jsonl", workers=2)
    assert len(ran) < 20


ERRORS = {
    "no such number": ValueError("no such number"),
    "RuntimeError": RuntimeError("it must be finite"),
    "SystemExit: 3": SystemExit(3),
}


@pytest.mark.parametrize("text", ERRORS)
def test_only_numbers_that_are_not_finite_are_a_trial_without_accuracy(text, monkeypatch, tmp_path):
    def run(cell, progress):
        raise ERRORS[text]

    monkeypatch.setattr(cells, "_run", run)
    with pytest.raises(cells.RunsError, match=r"1 runs failed, the first is \{'task': ''") as error:
        cells.run_all(seeds(1, trial=0), tmp_path / "r.jsonl", workers=1)
    ((cell, reason),) = error.value.failed
    assert (cell.seed, error.value.__cause__) == (0, reason)
    assert text in repr(reason)
    assert not (tmp_path / "r.jsonl").exists()


def test_a_worker_process_that_ended_is_named(pools, monkeypatch, tmp_path):
    def run(cell):
        raise BrokenProcessPool

    monkeypatch.setattr(cells, "run", run)
    with pytest.raises(CompareError, match="A worker process ended, perhaps without memory"):
        cells.run_all(seeds(2), tmp_path / "r.jsonl", workers=2)


def test_functions_are_sent_if_another_process_has_the_same_ones(pools, monkeypatch):
    imported = Row("B", "b", make=methods.ditto)
    here, sent = cells.code, []
    monkeypatch.setattr(cells, "_code", lambda text: [here(imported), sent.append(text)][0])
    cells.check_sent(no_problem(again=dict), [Row.of("local"), imported])
    assert [pickle.loads(text) for text in sent] == [imported]
    monkeypatch.setattr(cells, "_code", lambda text: "other")
    with pytest.raises(CompareError, match=r"b has other code there.* needs `if __name__ == "):
        cells.check_sent(no_problem(again=dict), [imported])
    with pytest.raises(CompareError, match="`workers` must be 1 for functions that another proces"):
        cells.check_sent(no_problem(again=dict), [Row("C", "c", make=lambda setting: None)])
    with pytest.raises(CompareError, match="`workers` must be 1 for functions that another proces"):
        cells.check_sent(no_problem(), [])


def test_a_worker_ends_with_its_parent():
    (read, write), (started, ready) = os.pipe(), os.pipe()

    def work():
        cells.end_with_parent()
        os.write(write, b"alive")
        os.write(ready, b".")
        time.sleep(20)
        os.write(write, b"too long")

    parent = os.fork()
    if parent == 0:
        get_context("fork").Process(target=work).start()
        os.read(started, 1)
        os._exit(0)
    os.close(write)
    os.waitpid(parent, 0)
    os.close(started)
    os.close(ready)
    with open(read, "rb") as text:
        assert text.read() == b"alive"
