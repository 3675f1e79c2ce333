"""A run in a folder: it continues, it is refused, and rows of an edited method run again."""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import fedprompt as fp
from comparisons import digits, folder, run_of, setting_of_digits, tiny_vit, trial_of
from fedprompt import compare, methods
from fedprompt.compare import estimate, measure, records, report, rows, runs
from fedprompt.compare.intervals import contributions
from fedprompt.compare.records import Records
from fedprompt.compare.trials import CompareError, Machine
from fedprompt.methods import METHODS, HeldOut, evaluate

FIGURES = ("own", "own_balanced", "full", "balanced", "worst", "bytes_up", "backward", "trained")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Draw no bars: a picture takes as long as a run."""
    monkeypatch.setattr("fedprompt.compare.pictures.bars", lambda views, path: None)


def figures(results):
    """Return the figures of all runs, without the date and the processor."""
    named = [(r["row"], r["seed"], r["partition"]) for r in results.found]
    found = [[r.get(name) for name in (*FIGURES, "clients")] for r in results.found]
    return dict(zip(named, map(json.dumps, found), strict=True))


def lines(out):
    return (Path(out) / "records.jsonl").read_text().splitlines()


def test_figures_are_those_of_a_loop_that_is_written_by_hand(tmp_path):
    problem = digits()
    found = compare.run(problem, ["fedprox"], seeds=2, out=tmp_path).found
    for record in found:
        if record["row"] != "FedProx":
            continue
        trial = trial_of(problem, seed=record["seed"])
        method = methods.fedprox(trial.setting)
        *_, now = fp.run_rounds(method, trial.federation)
        expected = evaluate(method, trial.federation, now, trial.tests, newcomers=())
        for name in ("full", "own", "worst", "balanced", "trained"):
            assert record[name] == pytest.approx(expected[name], rel=1e-5), name
        own = []
        for client in range(3):
            mix = trial.federation.data(trial.setting, client, 0).class_counts
            labels, right = trial.tests.labels, expected.predicted[client] == trial.tests.labels
            recall = [right[labels == k].double().mean() for k in range(10) if mix[k] > 0]
            own.append(np.mean(recall))
        assert record["own_balanced"] == pytest.approx(np.mean(own), rel=1e-5)
        assert record["uses"] == pytest.approx([2 * 2 * 4 / 30] * 2, rel=1e-5)


def test_the_most_frequent_class_is_that_of_a_client_and_of_all():
    images, labels = torch.rand(9, 1, 16, 16), torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 1])
    tests = HeldOut(
        images[:6], torch.tensor([0, 0, 0, 0, 1, 2]), own={0: [0, 1, 4], 1: [2], 2: [5]}
    )
    parts = {0: [0, 1, 3], 1: [2, 4, 5], 2: [6, 7, 8]}
    setting = setting_of_digits()
    problem = compare.problem(images, labels, parts, tests, setting=setting)
    (found,) = [
        each
        for each in compare.run(problem, ["head_tuning"], seeds=1).found
        if each["row"] == rows.CONSTANT
    ]
    assert found["own"] == pytest.approx((2 / 3 + 0 + 1) / 3, rel=1e-5)
    assert found["own_balanced"] == pytest.approx((1 / 2 + 0 + 1) / 3, rel=1e-5)
    assert found["full"] == pytest.approx(1 / 5, rel=1e-5)  # own tests are of five images
    assert found["predicted"] == 1


def test_a_client_whose_classes_no_test_has_ends_the_run_before_anything_is_trained(tmp_path):
    images, labels = torch.rand(9, 1, 16, 16), torch.arange(9) % 2
    parts = {0: [0, 2, 4], 1: [1, 3, 5]}
    setting = setting_of_digits()
    tests = HeldOut(images[:3], torch.zeros(3, dtype=torch.long))
    problem = compare.problem(images, labels, parts, tests, setting=setting)
    with pytest.raises(CompareError, match=r"of each client; got none of clients \[1\]"):
        compare.run(problem, ["head_tuning"], seeds=1, out=tmp_path)
    assert not (tmp_path / "records.jsonl").exists()


def test_uses_of_images_know_incomplete_batches_that_are_left_out():
    trial = trial_of(digits())
    shards = {0: range(3), 1: range(10), 2: range(7)}
    federation = replace(trial.federation, shards=shards)
    given = {"steps": None, "epochs": 3, "rounds": 2, "batch_size": 4, "cohort_size": None}

    def uses(**more):
        setting = replace(trial.setting, clients=range(3), **given, **more)
        made = trial._replace(setting=setting, federation=federation)
        return measure.uses(made)["uses"]

    assert uses() == [6, 6]
    assert uses(drop_last=True) == pytest.approx([6, 6 * 8 / 10])  # a client keeps its only batch


def test_a_run_continues_and_costs_what_is_missing(tmp_path):
    first = compare.run(digits(), ["head_tuning"], seeds=1, out=tmp_path)
    whole = (tmp_path / "records.jsonl").read_bytes()
    (tmp_path / "records.jsonl").write_bytes(whole[:-40])  # a kill within a line
    again = compare.run(digits(), ["head_tuning"], seeds=1, out=tmp_path)
    assert figures(again) == figures(first)
    more = compare.run(digits(), ["head_tuning", "fedprox"], seeds=2, out=tmp_path)
    kept = [json.loads(line) for line in lines(tmp_path) if line.endswith("}")]
    assert len(kept) == 2 + 1 + 5  # two whole lines, the cut one, and five that are new
    assert figures(more).items() >= figures(first).items()
    assert figures(more) == figures(compare.run(digits(), ["head_tuning", "fedprox"], seeds=2))


def test_a_run_of_clients_of_unlike_size_continues(tmp_path):
    """Keys of a file are texts, and sequences are lists."""
    methods = ["fedlora:rank=2,sizes={2: 1, 0: 1}", "fedvpt_d:sizes={0: (1, 2)}"]
    first = compare.run(digits(), methods, seeds=1, out=tmp_path)
    more = compare.run(digits(), methods, seeds=2, out=tmp_path)
    assert len(lines(tmp_path)) == 2 * 4
    assert figures(more).items() >= figures(first).items()
    assert "sizes" in str(more)


def test_another_run_is_refused_in_one_line_and_nothing_is_touched(tmp_path):
    compare.run(digits(), ["head_tuning"], seeds=1, out=tmp_path / "out")
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(CompareError) as error:
        compare.run(digits(rounds=3), ["head_tuning"], seeds=1, out=tmp_path / "out")
    text = f"{tmp_path / 'out'} has another run, which differs in setting.rounds (2 there, 3 here)."
    assert str(error.value) == f"{text} Begin anew beside it by `again`, or choose another `out`."
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    for number in (2, 3):
        given = {"seeds": 1, "out": tmp_path / "out", "again": True}
        found = compare.run(digits(rounds=3), ["head_tuning"], **given)
        assert found.folder == tmp_path / f"out-{number}"


def test_an_edited_method_runs_again_and_the_old_line_stays(tmp_path):
    path, out = tmp_path / "mine.py", tmp_path / "out"
    text = "from fedprompt.methods import {0}\ndef mine(setting):\n    return {0}(setting)\n"
    sent = []
    for name in ("fedvpt_d", "head_tuning", "head_tuning", "fedvpt_d"):
        path.write_text(text.format(name))
        found = compare.run(digits(), [f"{path}:mine"], seeds=1, out=out)
        sent += [record["bytes_up"] for record in found.found if record["row"] == "Mine"]
        others = [str(each) for each in found.others]
    assert sent[1] == sent[2] != sent[0] == sent[3]
    assert len(lines(out)) == 2 + 2  # each version ran once
    assert others == ["Mine: 1 of other versions of it"]


def test_a_function_that_cannot_be_told_runs_again_in_each_call(tmp_path):
    def nested(setting):
        return methods.head_tuning(setting)

    for count in (1, 2):
        compare.run(digits(), [nested], seeds=1, out=tmp_path)
        assert len(lines(tmp_path)) == 2 + count


def test_tables_take_the_newest_line_of_a_row():
    record = {"partition": "", "row": "A", "seed": 0, "trial": None, "values": {}, "own": 0.1}
    old = [record | {"stamp": "1", "seed": seed} for seed in range(3)]
    new = [record | {"stamp": "2", "own": 0.2}, record | {"stamp": "2", "own": 0.3}]
    assert records.newest([*old, *new]) == [new[1]]
    assert records.newest([*new, *old]) == old
    assert len(records.newest([{**each, "stamp": None} for each in old])) == 3  # of our pages


def test_many_records_are_read_fast_and_an_append_reads_nothing(tmp_path, monkeypatch):
    clients = {f"client {k}": {"own": 0.5, "full": 0.25} for k in range(5)}
    record = {"partition": "", "row": "A", "seed": 0, "trial": None, "values": {"rate": 0.1}}
    line = json.dumps({**record, "own": 0.5, "stamp": "0" * 16, "clients": clients}) + "\n"
    path = tmp_path / "records.jsonl"
    path.write_text(line * 20_000)
    began = time.process_time()
    known = Records(path)
    assert time.process_time() - began < 3 / 5 * 2  # 100,000 in 3 s on an idle machine
    monkeypatch.setattr(records, "read", None)
    reads = []
    real = records.os.SEEK_END
    known.add({**record, "seed": 1, "own": 0.5})
    assert path.stat().st_size - len(line) * 20_000 < len(line)
    assert (reads, real) == ([], os.SEEK_END)


@pytest.mark.parametrize(
    "line", [b"[]", b"1", b'{"row": 1}', b"not a line", b'{"own": 1}', b'"', b"{}"]
)
def test_a_line_that_is_no_record_is_refused_by_its_number(line, tmp_path):
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"\n" + line + b"\n")
    with pytest.raises(CompareError, match=r"^Line 2 of .* must be a record with partition, row"):
        records.read(path)


def test_a_killed_run_goes_on_within_itself(tmp_path, monkeypatch):
    problem, made = digits(rounds=5, steps=2), []
    expected = compare.run(problem, ["fedprox"], seeds=1)
    monkeypatch.setattr(measure, "PAUSE", -1.0)  # a checkpoint after each round

    def killed(share):
        made.append(share)
        if len(made) == 4:
            raise KeyboardInterrupt

    (row,) = rows.chosen(["fedprox"], problem.families)
    one = runs.Run(problem, "", row, 0, None, Machine(), "stamp", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        runs.run(one, killed)
    assert [*(tmp_path / "running").iterdir()]
    shares = []
    record, _ = runs.run(one, shares.append)
    assert shares[0] == pytest.approx(3 / 5)
    assert len(shares) == 3  # the rounds before the last checkpoint are not run again
    known = next(each for each in expected.found if each["row"] == "FedProx")
    assert {n: record[n] for n in FIGURES} == {n: known[n] for n in FIGURES}
    assert record["clients"] == known["clients"]


KILLED = """
import os, random, signal, sys, time
sys.path[:0] = {path!r}
import torch; torch.set_num_threads(1)
from comparisons import run_of
from fedprompt.compare import measure
measure.PAUSE = 0.0  # a checkpoint after each round
draw, killed = random.Random(0), 0
for _ in range(20):
    if (child := os.fork()) == 0:
        run_of({root!r}, {out!r})
        os._exit(0)
    time.sleep(draw.uniform(0.05, 1.5))
    os.kill(child, signal.SIGKILL)
    killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
print(killed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["arrays", "images"])
def test_kills_at_random_moments_lose_and_mix_nothing(kind, tmp_path):
    out = tmp_path / "out"
    root = str(folder(tmp_path / "a", "{domain}/{name}", count=3)) if kind == "images" else None
    program = KILLED.format(path=sys.path, root=root, out=str(out))
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    assert int(done.stdout) > 10
    assert figures(run_of(root, out)) == figures(run_of(root, None))
    assert not [*out.glob("running/*"), *out.rglob("*.part")]


def test_workers_and_one_process_have_the_same_figures(tmp_path, monkeypatch):
    """Here they are forked, because an import takes seconds; others start as in a command."""
    monkeypatch.setattr(runs, "get_context", lambda kind: multiprocessing.get_context("fork"))
    root = folder(tmp_path / "images", "{domain}/{name}")
    problem = compare.folder(root, layout="domain/class", vit=tiny_vit(), rounds=1, steps=1)
    one = compare.run(problem, ["head_tuning"], seeds=1)
    two = compare.run(problem, ["head_tuning"], seeds=1, workers=2)
    assert figures(one) == figures(two)


def test_a_log_has_a_line_for_each_finished_run_with_the_time_left(capsys):
    compare.run(digits(), ["head_tuning"], seeds=1)
    said = capsys.readouterr().err.splitlines()
    assert said[1].startswith("1 of 2: Head tuning, seed 0; about ")
    assert said[1].endswith(" s left")


def test_the_time_that_is_left_is_that_of_runs_since_the_start(monkeypatch, tmp_path, capsys):
    compare.run(digits(), ["head_tuning"], seeds=1, out=tmp_path)
    clock = itertools.count(step=10)
    monkeypatch.setattr(runs, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    capsys.readouterr()
    compare.run(digits(), ["head_tuning"], seeds=2, out=tmp_path)
    said = capsys.readouterr().err.splitlines()
    assert "3 of 4: Head tuning, seed 1; about 10 s left" in said


def test_tuning_never_draws_values_that_are_given():
    given, plain = rows.chosen(["fedprox:learning_rate=0.003", "ditto"], ["one model"])
    assert {values["learning_rate"] for values in runs.drawn(given, 5)} == {0.003}
    assert len({values["learning_rate"] for values in runs.drawn(plain, 5)}) == 5
    assert runs.drawn(plain, 5) == runs.drawn(plain, 5)


def test_values_of_the_best_trial_are_taken_and_of_equal_ones_the_first(monkeypatch):
    def run(self, tried, title):
        own = zip(tried, (0.2, 0.5, 0.5, 0.1), strict=True)
        return [{**one.named(), "own": share} for one, share in own]

    monkeypatch.setattr(runs.Runner, "run", run)
    row = rows.chosen(["fedprox"], ["one model"])[0]
    runner = runs.Runner(digits(), Machine(), [], None, 1, None, Records(None))
    (tuned,) = runner.tuned("", [row], 4)
    assert tuned.values == runs.drawn(row, 4)[1]


def test_an_estimate_is_of_all_rows_and_seeds(monkeypatch):
    monkeypatch.setattr(estimate, "seconds_of", lambda one: 60.0)
    how = {"seeds": 3, "tune": 1, "workers": 1, "machine": Machine()}
    said = report.estimate(digits(), ["head_tuning"], **how)
    assert "Training alone: 60 s for each seed\nall rows: 6 min with 1 processes" in said


def test_a_trial_is_moved_to_its_device():
    trial = trial_of(digits(trunks=[fp.vit_trunk(tiny_vit())]))
    assert trial.on("cpu") is trial
    setting = trial.on("meta").setting
    assert setting.device == "meta"
    assert {weight.device.type for weight in setting.trunks[0].model.parameters()} == {"meta"}


def test_further_figures_are_averaged_over_the_rounds_that_have_them():
    def late(trial, method, now):
        return {"round": now.server_round} if now.server_round else {}

    found = compare.run(digits(rounds=4, figures=late), ["head_tuning"], seeds=1).found
    assert {record.get("round") for record in found} == {None, 2.0}


def test_bits_have_the_figures_of_their_run(tmp_path):
    found = compare.run(digits(), ["head_tuning"], seeds=1, out=tmp_path)
    for record in found.found:
        with np.load(tmp_path / "bits" / f"{runs.stem(record)}.npz") as arrays:
            packed = dict(arrays)
        bits = measure.unpacked(packed)
        for name, column in {"own": "own", "full": "full"}.items():
            right, weights, labels, _ = measure.sides(bits, name)
            assert contributions(right, weights)[0] == pytest.approx(record[column], rel=1e-5)
        assert len(labels) == 60
        if record["row"] == "Head tuning":
            assert packed["right"].dtype == np.uint8  # eight flags in a byte


def test_names_of_files_differ_where_names_do():
    names = ("a b", "a/b", "a_b", "é" * 99, "é" * 98, "A b")
    found = [runs.file_name(name).casefold() for name in names]
    record = dict.fromkeys(("values", "stamp", "trial")) | {"partition": "ä", "seed": 0}
    stems = [runs.stem(record | {"row": row}) for row in ("ε = 1", "δ = 1")]
    assert (len({*found[:5]}), len({*stems})) == (5, 2)
    assert len({runs.file_name(chr(0x4E00 + k)) for k in range(3_000)}) == 3_000
    assert "".join(found + stems).isascii()
    assert METHODS["fedprox"].title == "FedProx"


def test_the_error_of_one_failed_run_names_it():
    row = rows.chosen(["head_tuning"], ["one model"])[0]
    one = runs.Run(digits(), "", row, 3, None, Machine(), "stamp", None)
    error = runs.RunsError([(one, ValueError("its reason"))])
    assert str(error).startswith("1 runs failed, the first is ")
    assert "'seed': 3" in str(error)
