"""The program that makes tables: cells, records, flags, and that a check finds a difference."""

import json
import os
import re
import signal
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

import compare
import fedprompt as fp
import private
import tasks
from fedprompt.methods import METHODS, registry
from other_device import other_device
from tasks import TASKS, core, digits, runs, tables
from tasks.core import Machine, Row
from tasks.runs import Cell
from tasks.tuning import TUNING_SEED

DOCS = Path(__file__).parents[2] / "docs" / "results" / "tables"
RECORDED = {path.stem for path in compare.RECORDS.glob("*.jsonl")}
FEW = ["--shrink", "0.01", "--workers", "1", "--partitions", "few"]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "write-your-own-method.md"
MINE = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[1]


@pytest.fixture
def run(tmp_path):
    def call(*arguments):
        compare.main([*arguments, "--out", str(tmp_path)])
        return tmp_path

    return call


def test_codecs_and_private_steps_run(run, capsys):
    few = ["--shrink", "0.01", "--workers", "1"]
    run("--task", "codecs", "--rows", "top 10 %, error feedback", *few)
    found = capsys.readouterr().out
    assert "| top 10 %, error feedback |" in found
    folder = run("--task", "privacy", "--rows", "no privacy;ε = 3", *few)
    lines = (folder / "records" / "privacy-shrunk.jsonl").read_text().splitlines()
    noise = [json.loads(line)["noise"] for line in lines]
    assert noise[0] == 0 < noise[1]


def test_a_private_step_takes_clipped_gradients():
    """Three images have gradients of norm 50 in one direction, and each counts with norm 0.5."""
    model = torch.nn.Linear(2, 1, bias=False)
    copies = fp.privacy.per_sample(model, 3)
    (10 * copies(torch.tensor([[3.0, 4.0]] * 3))).sum().backward()
    noise = {"multiplier": 0.0, "max_norm": 0.5, "expected_batch_size": 2}
    private.private_step(torch.optim.SGD(model.parameters(), 1.0), model, copies, **noise)
    torch.testing.assert_close(model.weight.grad, 3 * 0.5 / 2 * torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_committed_tables_are_those_of_the_records(name):
    task = compare.shown(name.removesuffix("-defaults"), name)
    found = [*runs.load(compare.RECORDS / f"{name}.jsonl").values()]
    assert found
    reported = [record for record in found if record["trial"] is None]
    cells = {(record["partition"], record["row"], record["seed"]) for record in reported}
    assert len(cells) == len(reported)  # tuned and default values are in files of their own
    rows = {(each, row.title) for each in task.partitions for row in task.rows(each)}
    assert {cell[:2] for cell in cells} <= rows  # a check draws the records of rows alone
    for partition in {record["partition"] for record in found}:
        text = (DOCS / f"{name}-{partition}.md").read_text()
        assert text == tables.report(found, task, partition) + "\n"


@pytest.mark.parametrize("name", sorted(RECORDED & tables.PAIRS.keys()))
def test_differences_below_a_table_are_those_of_a_paired_t_test(name):
    found = [*runs.load(compare.RECORDS / f"{name}.jsonl").values()]
    for partition, pairs in tables.PAIRS[name].items():
        text = (DOCS / f"{name}-{partition}.md").read_text()
        by_row = tables.grouped(found, partition)
        for pair in pairs:
            (column, *_), titles = TASKS[name].compared, re.split(" - | beyond ", pair)
            values = [{each["seed"]: each[column] for each in by_row[row]} for row in titles]
            seeds = sorted(set.intersection(*map(set, values)))
            columns = np.array([[each[seed] for seed in seeds] for each in values])
            one, other = columns if len(columns) == 2 else columns[::2] - columns[1::2]
            test = stats.ttest_rel(one, other)
            low, high = test.confidence_interval()
            written = re.search(rf"^\| {re.escape(pair)} +\| +(\S+) ± (\S+)", text, re.MULTILINE)
            mean, half = map(float, written.groups())
            assert (mean, half) == pytest.approx((50 * (high + low), 50 * (high - low)), abs=0.051)


def test_tables_are_made_from_the_committed_records_if_no_others_are_named(run):
    folder = run("--tables", "--task", "codecs")
    for name in ("codecs-dirichlet.md", "codecs-dirichlet.csv"):
        assert (folder / name).read_text() == (DOCS / name).read_text()
    assert not (folder / "records").exists()


def test_a_program_that_is_killed_at_any_moment_has_the_records_of_a_whole_run(
    tmp_path, monkeypatch
):
    """Each second kill cuts the line that was just written, so that its run is lost."""
    monkeypatch.setattr(runs, "run", lambda cell: {"own": cell.seed})
    row = Row("Local training", "local", {"learning_rate": 0.01})
    cells = [Cell("digits", "few", row, seed, None, Machine()) for seed in range(7)]
    whole = runs.run_all(cells, tmp_path / "whole.jsonl", workers=1)
    for kill in range(12):

        def fatal(file, cut=5 * (kill % 2)):
            os.ftruncate(file, os.fstat(file).st_size - cut)
            os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            os.fsync = fatal
            runs.run_all(cells, tmp_path / "records.jsonl", workers=1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert len(runs.load(tmp_path / "records.jsonl")) == 6
    assert runs.run_all(cells, tmp_path / "records.jsonl", workers=1) == whole


@pytest.mark.parametrize("name", TASKS)
def test_hours_are_estimated_without_data_or_weights(name, tmp_path, capsys):
    partition = next(iter(TASKS[name].partitions))
    flags = ["--estimate", "--task", name, "--partitions", partition, "--out", str(tmp_path)]
    compare.main(flags)
    line = next(line for line in capsys.readouterr().out.splitlines() if f"| {partition} " in line)
    assert float(line.split("|")[-2]) > 0


@pytest.mark.parametrize(
    ("name", "methods"),
    [("digits", "fedprox,local"), ("networks", "fedproto"), ("clip", "promptfl")],
)
def test_a_task_runs_methods_once_and_says_that_it_is_shrunk(
    name, methods, run, capsys, monkeypatch
):
    folder = run("--task", name, "--methods", methods, *FEW)
    assert "0.01 of the rounds and images" in capsys.readouterr().out
    lines = (folder / "records" / f"{name}-shrunk.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert len(records) == methods.count(",") + 1
    assert {"commit", "version", "torch", "date"} <= {*records[0], "commit"}
    assert (folder / f"{name}-shrunk-few.csv").exists()
    monkeypatch.setattr(runs, "run", None)  # a finished cell is not run again
    run("--task", name, "--methods", methods, *FEW)


def test_a_method_of_a_file_takes_part(run, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))
    for module in (tasks, core, digits):
        monkeypatch.setattr(module, "METHODS", registry.METHODS)
    monkeypatch.chdir(tmp_path)  # a cell reads the file again, and finds that it was read
    folder = run("--methods", "mine.py:halfway", *FEW)
    assert "| Halfway " in capsys.readouterr().out
    (path,) = folder.rglob("*.jsonl")
    assert json.loads(path.read_text())["values"]["head_rate"] == 0.01  # as other rows have


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "nothing"], "`--methods` must name ditto, "),
        (["--methods", "local,local"], "`--methods` must name each once; got 'local' twice."),
        (["--partitions", "iid"], "`--partitions` must name dirichlet, domains, few; got 'iid'."),
        (["--methods", "none.py:f"], "`--methods` must name an existing Python file; got none.py."),
        (["--rows", "FedAvg"], "`--rows` must name Ditto, "),
        (["--seeds", "0"], "argument --seeds: must be at least 1; got 0"),
    ],
)
def test_a_mistake_ends_with_one_line_and_exit_code_2(arguments, message, run, capsys):
    with pytest.raises(SystemExit) as error:
        run(*arguments)
    assert error.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(f"compare.py: {message}")
    assert said.count("\n") == 1


@pytest.mark.parametrize("stem", ["digits", "digits-defaults"])
def test_a_check_runs_recorded_cells_again_and_finds_a_difference(stem, tmp_path, capsys):
    cell = Cell(
        "digits",
        "few",
        Row("Local training", "local", {"learning_rate": 0.01}),
        0,
        None,
        Machine(shrink=0.01),
    )
    record = cell.named() | figures_of(cell)
    path = tmp_path / f"{stem}.jsonl"
    arguments = ["--check", "1", "--shrink", "0.01", "--records", str(tmp_path)]
    path.write_text(json.dumps(record) + "\n")
    compare.main(arguments)
    path.write_text(json.dumps(record | {"own": 0.5}) + "\n")
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert "own 0.5, now" in capsys.readouterr().out
    path.write_text(json.dumps(record | {"inputs": ["others"]}) + "\n")
    with pytest.raises(SystemExit):
        compare.main(arguments)
    assert "not run: digits, other images or weights" in capsys.readouterr().out


def figures_of(cell):
    return runs.records.rounded(runs.run(cell))


def test_a_cell_that_fails_does_not_lose_the_others(tmp_path):
    good = Row("Local training", "local", {"learning_rate": 0.01})
    rows = [Row("FedProx", "fedprox", {"learning_rate": -1.0}), good]
    cells = [Cell("digits", "few", row, 0, None, Machine(shrink=0.01)) for row in rows]
    with pytest.raises(RuntimeError, match="1 runs failed"):
        runs.run_all(cells, tmp_path / "r.jsonl", workers=1)
    assert len(runs.load(tmp_path / "r.jsonl")) == 1


def test_a_trial_that_diverges_has_no_accuracy_and_a_reported_run_fails_and_is_left_out(tmp_path):
    row = Row("plain", "plain_steps", {"learning_rate": 1e30})
    trial, reported = (Cell("digits", "few", row, 0, at, Machine(shrink=0.01)) for at in (0, None))
    path = tmp_path / "r.jsonl"
    record = runs.run_all([trial], path, workers=1)[0]
    assert (record["own"], record["diverged"]) == (0, 1)
    assert not runs.unstable(path)
    with pytest.raises(RuntimeError, match="1 runs failed"):
        runs.run_all([reported], path, workers=1)
    assert runs.unstable(path) == {runs.chosen(reported.named())}
    assert list(runs.load(path)) == [trial.key()]


def test_values_of_a_row_name_their_partitions_where_they_differ():
    """The table once had the values of the last partition for all of them."""

    def record(row, partition, rate):
        values = {"learning_rate": rate}
        return {"row": row, "partition": partition, "trial": None, "values": values}

    found = [record("A", "x", 0.1), record("A", "y", 0.3), record("A", "z", 0.1)]
    text = tables.hyperparameters([*found, record("B", "x", 0.2), record("B", "y", 0.2)])
    assert [line.split("|")[1].strip() for line in text.splitlines()[2:]] == [
        "A (x, z)",
        "A (y)",
        "B",
    ]


def test_tuning_takes_the_best_stable_values_and_the_first_of_equal_ones(tmp_path, monkeypatch):
    accuracy = {0.003: 0.5, 0.01: 0.9, 0.03: 0.7}
    monkeypatch.setattr(
        runs, "run", lambda cell: {"own": accuracy.get(cell.row.values["learning_rate"], 0)}
    )
    args = compare.flags().parse_args(["--task", "digits", "--workers", "1"])
    row = next(row for row in TASKS["digits"].rows("few") if row.method == "local")
    path = tmp_path / "digits.jsonl"

    def tuned():
        return compare.tuned([row], [], args, "few", path)[0].values

    assert tuned() == {"learning_rate": 0.01, "head_rate": 0.01}  # three trials have this rate
    best = Cell("digits", "few", row, 0, None, Machine()).named() | {"values": dict(tuned())}
    runs.records.append(path, best | runs.DIVERGED)
    assert tuned()["learning_rate"] == 0.01
    assert tuned()["head_rate"] != 0.01


def test_no_trial_sees_a_test_digit_and_all_seeds_have_the_same_ones():
    make = partial(digits.digits, False, False, inputs="")
    train, public, test = make(0, validate=False)
    again, _, other = make(1, validate=False)
    assert torch.equal(test.pixels, other.pixels)
    assert not torch.equal(train.pixels, again.pixels)
    tried, public, held_out = make(TUNING_SEED, validate=True)
    seen = torch.cat([tried.pixels, public, held_out.pixels])
    assert len(seen) == len(train.pixels) + len(public)
    assert torch.cdist(seen.flatten(1), test.pixels.flatten(1)).min() > 0


def test_a_row_is_compared_with_local_training_of_as_many_passes_and_starred_by_holm():
    def seeds(own, backward):
        return [{"seed": n, "own": each, "backward": backward} for n, each in enumerate(own)]

    by_row = {
        "method": seeds([0.5 + 0.01 * seed for seed in range(5)], 16.0),
        "sure": seeds([0.7 + 0.001 * seed for seed in range(5)], 8.0),
        "local": seeds([0.4] * 5, 8.0),
        "local, 16": seeds([0.5] * 5, 16.0),
    }
    found = tables.differences_to(by_row, ["local", "local, 16"], "own")
    # 2.776 * 1.581 / sqrt(5); p = 0.047 is the larger of two, so 0.05 holds, and 0.025 would not
    assert found == ["+2.0 ± 2.0 *", "+30.2 ± 0.2 *", "", ""]
    assert tables.differences_to(by_row, ["not run"], "own") == [""] * 4
    assert tables.holm([0.04, 0.001, 0.03]) == [False, True, False]
    assert tables.holm([0.02, 0.001, 0.04]) == [True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("ablations")])
def test_every_row_of_an_ablation_runs(name, tmp_path):
    task = TASKS[name]
    for partition in task.partitions:
        cells = [
            Cell(name, partition, row, 0, None, Machine(shrink=0.02))
            for row in task.rows(partition)
        ]
        assert len(runs.run_all(cells, tmp_path / "r.jsonl", workers=1)) == len(cells)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("digits", "fedavgm"),
        ("clip", "promptfl"),
        pytest.param("clip", "fedotp", marks=pytest.mark.slow),
    ],
)
def test_models_and_batches_are_on_the_device_of_the_machine(name, method):
    task = TASKS[name]
    (row,) = (row for row in task.rows("few") if row.method == method)
    with other_device() as device:
        found = runs.run(Cell(name, "few", row, 0, None, Machine(str(device), shrink=0.01)))
    assert 0 <= found["own"] <= 1
    digits.trunk.cache_clear()


def test_the_best_eight_points_of_a_figure_have_titles_that_cover_nothing(monkeypatch, tmp_path):
    """All ten methods send the same bytes, and their accuracies are within a point."""
    sent = {"bytes_up": 1000, "bytes_down": 1000}
    by_row = {f"method {n}": [{"own": 0.8 - 0.001 * n} | sent] for n in range(10)}
    drawn = []
    monkeypatch.setattr(tables, "save", lambda figure, path: drawn.append(figure))
    tables.scatter(by_row, TASKS["digits"], tmp_path / "figure.png")
    (axes,) = drawn[0].axes
    assert [text.get_text() for text in axes.texts] == [f"method {n}" for n in range(8)]
    boxes = [tables.Text.get_window_extent(text) for text in axes.texts]
    assert not any(box.count_overlaps(boxes[:n]) for n, box in enumerate(boxes))
    points = [line.get_transform().transform(line.get_xydata())[0] for line in axes.lines]
    assert len(points) == 10
    assert not any(box.contains(*point) for box in boxes for point in points)


def test_lines_of_a_figure_are_the_intervals_of_the_tables(monkeypatch, tmp_path):
    seeds = [{"own": own, "bytes_up": 1000, "bytes_down": 1000} for own in (0.7, 0.8, 0.9)]
    drawn = []
    monkeypatch.setattr(tables, "save", lambda figure, path: drawn.append(figure))
    tables.scatter({"one": seeds}, TASKS["digits"], tmp_path / "figure.png")
    (lines,) = drawn[0].axes[0].collections
    half = 4.30265 * 10 / 3**0.5  # Student's t of two degrees of freedom, and a deviation of 10
    assert lines.get_segments()[0][:, 1] == pytest.approx([80 - half, 80 + half], abs=1e-3)


def test_a_row_that_equals_its_reference_has_no_star():
    assert tables.holm([float("nan")]) == [False]
    assert tables.holm([0.01, float("nan")]) == [True, False]


def test_seeds_of_a_row_with_different_values_are_no_table():
    def record(seed, rate, images="a"):
        at = {"partition": "few", "row": "A", "trial": None, "seed": seed, "inputs": [images]}
        return at | {"values": {"learning_rate": rate}}

    assert len(tables.grouped([record(0, 0.1), record(1, 0.1)], "few")["A"]) == 2
    for other in (record(1, 0.3), record(1, 0.1, "b")):
        with pytest.raises(core.TaskError, match="'A' in 'few' differ in values or inputs"):
            tables.grouped([record(0, 0.1), other], "few")


def test_a_vague_column_is_no_part_of_a_table_unless_it_is_compared(monkeypatch):
    """Over two of three rows, worst clients and own mixes differ by 40 points, new clients by 2."""

    def record(row, seed):
        near, far = 0.5 + 0.01 * seed, 0.5 + (0.2 if row in "AB" else 0.01) * seed
        at = {"task": "mnist", "partition": "deep-domains", "row": row, "trial": None, "seed": seed}
        return at | {"own": far, "worst": far, "received": near}

    monkeypatch.setitem(tables.PAIRS, "mnist", {"deep-domains": ["A - C"]})
    found = [record(row, seed) for row in "ABC" for seed in (-1, 0, 1)]
    assert [tables.vague(name, [[0.1, 0.5, 0.9]]) for name in ("worst", "noise", "rise")] == [
        True,
        False,
        False,
    ]
    header, body = tables.rows(found, TASKS["mnist"], "deep-domains")
    assert header == ["row", "own mix", "new clients"]
    assert ["A", "50.0 ± 49.7", "50.0 ± 2.5"] in body
    assert ", 2 or 3 seeds\n" in tables.titled(found[:-1], TASKS["mnist"], "deep-domains")
    header, body = tables.rows(found[:-1], TASKS["mnist"], "deep-domains")
    assert [line[header.index("seeds")] for line in body] == ["3", "3", "2"]
    (below,) = tables.quoted(found, TASKS["mnist"], "deep-domains")
    words = below.splitlines()[0].strip("|").split("|")
    assert list(map(str.strip, words)) == ["difference", "own mix", "new clients"]


def test_a_figure_that_is_nan_or_missing_in_a_new_run_differs_from_its_record():
    record = {"row": "A", "own": 0.9, "worst": 0.5}
    found = tables.differences(record, {"own": float("nan")}, TASKS["digits"])
    assert found == ["own 0.9, now nan", "worst 0.5, now missing"]


def test_bytes_may_differ_by_a_hundredth_between_processors_and_trained_numbers_may_not():
    record = {"processor": "A", "torch": "2", "bytes_up": 396.8, "trained": 1000}
    for processor, expected in (("B", []), ("A", ["bytes_up 396.8, now 400.0"])):
        again = record | {"processor": processor, "bytes_up": 400.0}
        assert tables.differences(record, again, TASKS["mnist"]) == expected
    again = record | {"processor": "B", "trained": 1001, "bytes_up": 401.0}
    found = tables.differences(record, again, TASKS["mnist"])
    assert found == ["bytes_up 396.8, now 401.0", "trained 1000, now 1001"]


def test_no_shard_chooses_values_by_its_own_trials_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "run", lambda cell: {"own": 0.5})
    args = compare.flags().parse_args(["--task", "digits", "--workers", "1", "--shard", "1/2"])
    row = next(row for row in TASKS["digits"].rows("few") if row.method == "local")
    with pytest.raises(core.TaskError, match="Other shards have not finished their trials"):
        compare.tuned([row], [], args, "few", tmp_path / "digits.jsonl")


def test_a_record_without_a_later_hyperparameter_is_that_of_its_default():
    row = Row.of("fedhpl")
    cell = Cell("networks", next(iter(TASKS["networks"].partitions)), row, 0, None, Machine())
    old, other = ({**cell.named(), "values": {"share": [], "temperature": t}} for t in (4.5, 2.0))
    assert runs.key({**old, "values": {}}) == runs.key(old) == cell.key() != runs.key(other)
