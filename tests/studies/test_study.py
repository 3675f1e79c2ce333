"""The program that makes our tables: flags, records, and that a check finds a difference."""

import json
import re
import sys
from contextlib import nullcontext
from functools import cache, partial
from inspect import signature
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

import compare
import fedprompt as fp
import private
from fedprompt.compare import cells, records, rows, tables
from fedprompt.compare.cells import Cell
from fedprompt.compare.hyperparameters import TUNING_SEED
from fedprompt.compare.rows import Row
from studies import TASKS, codecs, digits, pages, papers, privacy
from studies.core import Machine

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


@pytest.mark.parametrize("row", codecs.ROWS[-2:], ids=lambda row: row.title)
def test_numbers_that_no_client_sends_stay_as_they_are(row):
    trial = codecs.make("dirichlet", row, seed=0, machine=Machine(shrink=0.01), validate=False)
    method = codecs.method(row, trial)
    before = method.server.state["values"]
    after = next(fp.run_rounds(method, trial.federation.data, trial.setting.cohorts())).server
    moved = torch.cat([(after["values"][name] != before[name]).flatten() for name in before])
    assert 0 < moved.sum() < 0.1 * len(moved)  # five clients send a hundredth each


def test_rows_with_an_epsilon_have_its_noise_for_all_steps(monkeypatch):
    monkeypatch.setattr(privacy, "noise", lambda epsilon, steps: 100 * epsilon + steps)
    setting = privacy.Setting(num_classes=2, rounds=3, steps=4)
    found = [privacy.multiplier_of(row, setting) for row in privacy.ROWS]
    assert found == [0, 0, 812, 312, 112]
    assert privacy.causes("iid", privacy.ROWS[2])(SimpleNamespace(setting=setting), 0, 0) == {
        "noise": 812
    }


def test_a_private_step_takes_clipped_gradients():
    """Three images have gradients of norm 50 in one direction, and each counts with norm 0.5."""
    model = torch.nn.Linear(2, 1, bias=False)
    copies = fp.privacy.per_sample(model, 3)
    (10 * copies(torch.tensor([[3.0, 4.0]] * 3))).sum().backward()
    noise = {"multiplier": 0.0, "max_norm": 0.5, "expected_batch_size": 2}
    private.private_step(torch.optim.SGD(model.parameters(), 1.0), model, copies, **noise)
    torch.testing.assert_close(model.weight.grad, 3 * 0.5 / 2 * torch.tensor([[0.6, 0.8]]))


@cache
def recorded(name):
    task = TASKS[name.removesuffix("-defaults")]
    return [*cells.load(compare.RECORDS / f"{name}.jsonl", task).values()]


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_committed_tables_are_those_of_the_records(name):
    task = compare.shown(name.removesuffix("-defaults"), name)
    found = recorded(name)
    assert found
    reported = [record for record in found if record["trial"] is None]
    cells = {(record["partition"], record["row"], record["seed"]) for record in reported}
    assert len(cells) == len(reported)  # tuned and default values are in files of their own
    rows = {(each, row.title) for each in task.partitions for row in task.rows(each)}
    assert {cell[:2] for cell in cells} <= rows  # a check draws the records of rows alone
    for partition in {record["partition"] for record in found}:
        text = (DOCS / f"{name}-{partition}.md").read_text()
        assert text == tables.report(found, task, partition) + "\n"


@pytest.mark.parametrize("name", sorted(RECORDED & pages.PAIRS.keys()))
def test_differences_below_a_table_are_those_of_a_paired_t_test(name):
    found = recorded(name)
    for partition, pairs in pages.PAIRS[name].items():
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


@pytest.fixture
def figures(monkeypatch):
    """Let each run have the figures of a record, and return them."""
    found = recorded("digits")[0]
    figures = {name: found[name] for name in found.keys() - pages.UNCOMPARED}
    monkeypatch.setattr(cells, "run", lambda cell, progress=None: dict(figures))
    return figures


@pytest.mark.parametrize("name", [name for name in TASKS if name not in papers.PAPERS])
def test_hours_are_estimated_without_data_or_weights(name, run, capsys):
    run("--estimate", "--task", name)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines()[2:]]
    hours = {cells[1].strip(): float(cells[-2]) for cells in lines if len(cells) > 1}
    assert hours.keys() == TASKS[name].partitions.keys()
    assert min(hours.values()) > 0


def test_a_cell_runs_once_and_a_shrunk_one_says_so(run, capsys, figures, monkeypatch):
    folder = run("--methods", "fedprox,local", *FEW)
    assert "0.01 of the rounds and images" in capsys.readouterr().out
    lines = (folder / "records" / "digits-shrunk.jsonl").read_text().splitlines()
    written = [json.loads(line) for line in lines]
    assert [each["row"] for each in written] == ["FedProx", "Local training"]
    assert all(each.items() >= figures.items() for each in written)
    assert {"commit", "version", "torch", "date"} <= {*written[0], "commit"}
    assert (folder / "digits-shrunk-few.csv").exists()
    monkeypatch.setattr(cells, "run", None)  # a finished cell is not run again
    run("--methods", "fedprox,local", *FEW)


def test_a_method_of_a_file_takes_part(run, tmp_path, capsys, figures, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
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
        (["--check", "-1"], "argument --check: must be at least 1; got -1"),
        (["--tables", "--records", "none"], "`--records` must be a folder of records; got none."),
        (["--device", "cdua"], "`device` must be one of this machine; got cdua: "),
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
def test_a_check_runs_recorded_cells_again_and_finds_a_difference(stem, tmp_path, capsys, figures):
    row = Row("Local training", "local", {"learning_rate": 0.01})
    record = Cell(TASKS["digits"], "few", row, 0, None, Machine()).named() | figures
    for change, said in (
        ({}, "agrees"),
        ({"own": 0.5}, "own 0.5, now"),
        ({"inputs": ["others"]}, "not run: digits, other images or weights"),
    ):
        (tmp_path / f"{stem}.jsonl").write_text(json.dumps(record | change) + "\n")
        with pytest.raises(SystemExit) if change else nullcontext():
            compare.main(["--check", "1", "--records", str(tmp_path)])
        assert said in capsys.readouterr().out


def test_tuning_takes_the_best_stable_values_and_the_first_of_equal_ones(tmp_path, monkeypatch):
    accuracy = {0.003: 0.5, 0.01: 0.9, 0.03: 0.7}
    monkeypatch.setattr(
        cells,
        "run",
        lambda cell, progress: {"own": accuracy.get(cell.row.values["learning_rate"], 0)},
    )
    args = compare.flags().parse_args(["--task", "digits", "--workers", "1"])
    row = next(row for row in TASKS["digits"].rows("few") if row.method == "local")
    path = tmp_path / "digits.jsonl"

    def tuned():
        return compare.tuned([row], args, "few", path)[0].values

    assert tuned() == {"learning_rate": 0.01, "head_rate": 0.01}  # three trials have this rate
    best = Cell(TASKS["digits"], "few", row, 0, None, Machine()).named() | {"values": dict(tuned())}
    records.append(path, best | cells.DIVERGED)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("ablations")])
def test_every_row_of_an_ablation_runs(name, tmp_path):
    task = TASKS[name]
    for partition in task.partitions:
        listed = [
            Cell(task, partition, row, 0, None, Machine(shrink=0.02))
            for row in task.rows(partition)
        ]
        assert len(cells.run_all(listed, tmp_path / "r.jsonl", workers=1)) == len(listed)


def test_the_best_eight_points_of_a_figure_are_in_its_legend(monkeypatch, tmp_path):
    """All ten methods send the same bytes, and their points are next to each other."""
    sent = {"bytes_up": 1000, "bytes_down": 1000}
    by_row = {f"method {n}": [{"own": 0.8 - 0.001 * n} | sent] for n in range(10)}
    drawn = []
    monkeypatch.setattr(pages, "save", lambda figure, path: drawn.append(figure))
    pages.scatter(by_row, TASKS["digits"], tmp_path / "figure.png")
    (axes,) = drawn[0].axes
    assert axes.get_legend() is not None
    best, titles = axes.get_legend_handles_labels()
    assert titles == [f"method {n}" for n in range(8)]
    heights = [points[0].get_ydata().item() for points in best]
    assert heights == pytest.approx([80 - 0.1 * n for n in range(8)])
    assert len({points[0].get_color() for points in best}) == 8
    assert len({line.get_xdata().item() for line in axes.lines}) == 10


def test_lines_of_a_figure_are_the_intervals_of_the_tables(monkeypatch, tmp_path):
    seeds = [{"own": own, "bytes_up": 1000, "bytes_down": 1000} for own in (0.7, 0.8, 0.9)]
    drawn = []
    monkeypatch.setattr(pages, "save", lambda figure, path: drawn.append(figure))
    pages.scatter({"one": seeds}, TASKS["digits"], tmp_path / "figure.png")
    (lines,) = drawn[0].axes[0].collections
    half = 4.30265 * 10 / 3**0.5  # Student's t of two degrees of freedom, and a deviation of 10
    assert lines.get_segments()[0][:, 1] == pytest.approx([80 - half, 80 + half], abs=1e-3)


def test_a_figure_that_is_nan_or_missing_in_a_new_run_differs_from_its_record():
    record = {"row": "A", "own": 0.9, "worst": 0.5}
    found = pages.differences(record, {"own": float("nan")}, TASKS["digits"])
    assert found == ["own 0.9, now nan", "worst 0.5, now missing"]


def test_bytes_may_differ_by_a_hundredth_between_processors_and_trained_numbers_may_not():
    record = {"processor": "A", "torch": "2", "bytes_up": 396.8, "trained": 1000}
    for processor, expected in (("B", []), ("A", ["bytes_up 396.8, now 400.0"])):
        again = record | {"processor": processor, "bytes_up": 400.0}
        assert pages.differences(record, again, TASKS["mnist"]) == expected
    again = record | {"processor": "B", "trained": 1001, "bytes_up": 401.0}
    found = pages.differences(record, again, TASKS["mnist"])
    assert found == ["bytes_up 396.8, now 401.0", "trained 1000, now 1001"]


@pytest.mark.parametrize("name", sorted(RECORDED & {*TASKS}))
def test_methods_still_take_the_values_of_their_records(name):
    """A record with the old name of an argument could not be run again."""
    args = compare.flags().parse_args(["--records", str(compare.RECORDS)])
    for cell, record in compare.recorded(name, args):
        if TASKS[name].method is rows.plain_method:
            known = {*signature(cell.row.entry.make).parameters, rows.HEAD_RATE}
            assert set(record["values"]) <= known, record
