"""Results of a comparison: its runs, and the tables and files of their records."""

import csv
import json

import pytest
import torch

import fedprompt as fp
from fedprompt import compare, methods, samples
from fedprompt.compare import cells, pictures, records, results, tables
from fedprompt.compare.cells import Cell
from fedprompt.compare.hyperparameters import drawn
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import CompareError, Machine
from refusals import refused


def problem_of(**fields):
    fields = {"title": "T", "partitions": {"x": "first", "y": "second"}, "make": dict} | fields
    return compare.Problem(rows=lambda partition: [], **fields)


def cell(problem, row, seed, partition="x"):
    return Cell(problem, partition, Row(row, "fedprox"), seed, None, Machine())


def finished(problem, row, seed, partition, own, up=8, **more):
    """Return the record of a run, with a client "a" that has its own tests and "b/" without."""
    clients = {"a": {"own": own, "full": 1.0}, "b/": {"full": 0.25}}
    costs = {"backward": 20 * own, "trained": 6, "bytes_up": up, "bytes_down": 2}
    figures = {"own": own, "full": own / 2, "worst": own / 4, "clients": clients}
    return cell(problem, row, seed, partition).named() | figures | costs | more


@pytest.fixture
def found():
    """Two rows with two seeds in two partitions. One run failed."""
    problem = problem_of(notes=lambda problem, found, partition: [f"{len(found)} records."])
    listed = [
        finished(problem, "A", 0, "x", 0.2),
        finished(problem, "A", 1, "x", 0.4),
        finished(problem, "B", 0, "x", 0.6),
        finished(problem, "B", 1, "x", 0.8),
        finished(problem, "A", 0, "y", 0.4, up=10),
        finished(problem, "A", 1, "y", 0.8),
        finished(problem, "B", 0, "y", 0.9),
    ]
    return compare.Results(problem, listed, {"B": "no memory"})


def test_the_mean_over_partitions_is_of_the_seeds_that_ran_in_all_of_them(found):
    views = found.views()
    assert list(views) == ["", "x", "y"]
    listed, problem = views[""]
    names = ("row", "seed", "partition", "own", "own x", "own y", *results.MEANS)
    assert [tuple(each[name] for name in names) for each in listed] == [
        pytest.approx(("A", 0, "", 0.3, 0.2, 0.4, 6.0, 6.0, 9.0, 2.0)),
        pytest.approx(("A", 1, "", 0.6, 0.4, 0.8, 12.0, 6.0, 8.0, 2.0)),
        pytest.approx(("B", 0, "", 0.75, 0.6, 0.9, 15.0, 6.0, 8.0, 2.0)),
    ]
    assert {name: each.get("own") for name, each in listed[0]["clients"].items()} == {
        **{"x/a": 0.2, "x/b/": None, "y/a": 0.4, "y/b/": None}  # dots of the picture
    }
    words = {"own": "own mix, mean", "own x": "on x", "own y": "on y"}
    assert (problem.columns, problem.compared) == (words, ["own"])
    assert views["x"] == (found.found, found.problem)
    only = compare.Results(found.problem, found.found[:4])
    assert list(only.views()) == ["x"]
    never_both = compare.Results(found.problem, [found.found[0], found.found[-1]])
    assert list(never_both.views()) == ["x", "y"]


def test_tables_are_in_the_text_and_in_the_files(found, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "bars", lambda views, path: path.write_text(" ".join(views)))
    reports, failed = found.reports(), "B failed: no memory"
    assert list(reports) == ["", "x", "y"]
    assert reports[""].startswith("T, each in turn, 1 or 2 seeds\n\n| row | own mix, mean | on x |")
    assert reports["x"].endswith("\n\n4 records.")
    assert str(found) == "\n\n".join([*reports.values(), failed])
    tuned = compare.Results(found.problem, found.found, found.failed, tune=2)
    best = f"Best of 2 trials of each row:\n\n{tables.hyperparameters(found.found)}"
    assert str(tuned) == "\n\n".join([*reports.values(), best, failed])
    place = tmp_path / "a" / "b"
    assert tuned.save(place, command="compare me") == f"Tables and picture: {place}"
    assert (place / "bars.png").read_text() == " x y"
    told = ", ".join(f"{name} {value}" for name, value in records.origin().items())
    below = "\n\n".join([best, failed, "    compare me", results.LOAD, told])
    for name, end in (("", ""), ("x", "-x"), ("y", "-y")):
        assert (place / f"table{end}.md").read_text() == f"{reports[name]}\n\n{below}\n"
    assert (place / "table.csv").read_text().splitlines()[1] == "B,75.0,60.0,90.0,8,2,6,15,1"
    compare.Results(found.problem, found.found).save(place)
    assert (place / "table.md").read_text() == f"{reports['']}\n\n{results.LOAD}\n\n{told}\n"


def test_lines_of_clients_and_of_seeds_have_the_figures_and_the_files(found, tmp_path, monkeypatch):
    monkeypatch.setattr(compare.Results, "plot", lambda *_: None)
    shared, own = cell(found.problem, "A", 0).stem, cell(found.problem, "B", 1).stem
    (tmp_path / "prompts").mkdir()
    for name in (shared, f"{own}-a"):
        (tmp_path / "prompts" / f"{name}.safetensors").touch()
    assert found.save(tmp_path) == f"Tables and picture: {tmp_path}"
    (tmp_path / "records.jsonl").touch()
    lost = "A (seed 1), B (seed 0), A (seed 0), A (seed 1), B (seed 0)"
    told = "are missing. Delete these lines of records.jsonl to train again"
    assert found.save(tmp_path).endswith(f"{tmp_path}. Prompts of {lost} {told}")
    clients, seeds = (
        [*csv.reader((tmp_path / f"{name}.csv").read_text().splitlines())]
        for name in ("clients", "seeds")
    )
    assert clients[0] == ["method", "seed", "partition", "client", "own", "full", "prompts"]
    assert len(clients) == 15
    assert clients[1:3] == [
        ["A", "0", "x", "a", "0.2", "1.0", f"prompts/{shared}.safetensors"],
        ["A", "0", "x", "b/", "", "0.25", f"prompts/{shared}.safetensors"],
    ]
    assert clients[7:10] == [
        ["B", "1", "x", "a", "0.8", "1.0", f"prompts/{own}-a.safetensors"],
        ["B", "1", "x", "b/", "", "0.25", ""],
        ["A", "0", "y", "a", "0.4", "1.0", ""],
    ]
    place = dict(zip(seeds[0], seeds[5], strict=True))
    assert len(seeds) == 8
    assert place == {"method": "A", "seed": "0", "partition": "y", "own": "0.4", "full": "0.2"} | {
        "worst": "0.1", "backward": "8.0", "trained": "6", "bytes_up": "10", "bytes_down": "2",
    }  # fmt: skip


def test_without_a_run_there_is_no_table_and_no_picture(tmp_path):
    empty = compare.Results(problem_of(), [], {"A": "no"}, tune=2)
    assert (empty.views(), str(empty)) == ({}, "A failed: no")
    assert empty.save(tmp_path) == f"No run finished, so {tmp_path} has no table."
    assert [*tmp_path.iterdir()] == []
    with pytest.raises(CompareError, match="No run finished, so there is no picture"):
        empty.plot(tmp_path / "bars.png")


# Runs


@pytest.fixture
def ran(monkeypatch):
    """Cells that ran. Each takes a number of backward passes that its row and seed decide."""
    passes = {"fedprox": 16.4, "ditto": 17.0, "longer": 8.0, "pfedme": 4.0}
    cells_of = []

    def run(cell, progress=None):
        cells_of.append(cell)
        rate, times = cell.row.values["learning_rate"], cell.row.values.get("times", 1)
        backward = passes[cell.row.method] * times + (2 * cell.seed - 1)
        return {"own": 0.9 if rate == 0.01 else 0.5 + rate, "full": 0.1, "backward": backward}

    monkeypatch.setattr(cells, "run", run)
    monkeypatch.setattr(cells, "check_sent", None)  # which one worker does not need
    return cells_of


@pytest.mark.parametrize("tune", [1, 2])
def test_training_alone_takes_as_many_passes_as_each_row(ran, tmp_path, tune):
    rows = [Row.of(name, learning_rate=0.003) for name in ("fedprox", "ditto", "pfedme")]
    runner = results._Runner(problem_of(), Machine(), [], tmp_path, 1, save=tune == 1)
    runner.partition("x", rows, range(2), tune)
    reported = [cell for cell in ran if cell.trial is None]
    once = reported[3].row
    best = [max(drawn(row, tune), key=lambda values: values["learning_rate"]) for row in rows]
    assert [cell.row.values for cell in reported[:3]] == best
    assert (once.method, once.values["times"]) == ("longer", 1)
    titles = ["FedProx", "Ditto", "pFedMe", "Training alone"]
    longer = [f"Training alone, {times} times as long" for times in (2, 3)]
    expected = [(row, seed) for seed in (0, 1) for row in titles]
    expected += [(row, seed) for seed in (0, 1) for row in longer]
    assert [(cell.row.title, cell.seed) for cell in reported] == expected
    assert [(record["row"], record["seed"]) for record in runner.found] == expected
    assert [cell.row.values for cell in reported[8:10]] == [
        {**once.values, "times": times} for times in (2, 3)
    ]
    assert {cell.save for cell in reported} == {tmp_path / "prompts" if tune == 1 else None}
    assert sum(cell.trial is not None for cell in ran) == (0 if tune == 1 else 8)
    assert len(records.read(tmp_path / "records.jsonl")) == len(ran)


def test_without_training_alone_no_longer_one_runs_and_the_error_is_kept(
    ran, tmp_path, monkeypatch
):
    run = cells.run

    def failing(cell, progress=None):
        return run(cell) if cell.row.method == "fedprox" else {}["nothing"]

    monkeypatch.setattr(cells, "run", failing)
    runner = results._Runner(problem_of(), Machine(), [], tmp_path, 1, save=False)
    runner.partition("x", [Row.of("fedprox"), Row.of("ditto")], range(2), 1)
    assert [each["row"] for each in runner.found] == ["FedProx"] * 2
    assert runner.failed == dict.fromkeys(("Ditto", "Training alone"), "KeyError: 'nothing'")
    assert (runner.passes("x", "FedProx"), runner.passes("x", "Ditto")) == (16.4, 0.0)


@pytest.fixture
def digits():
    """A problem of three clients, the first without tests."""
    images, labels, tests, test_labels = (part[:60] for part in samples.digits())
    trunk = fp.vit_trunk(samples.vit("S"))
    setting = methods.VitSetting(trunk=trunk, num_classes=10, rounds=3, steps=2, batch_size=16)
    own = {1: torch.arange(30), 2: torch.arange(30, 60)}
    held_out = methods.HeldOut(tests, test_labels, own=own)
    clients = dict(enumerate(torch.arange(60).split(20)))
    return compare.problem(images, labels, clients, held_out, setting=setting)


def test_a_method_is_tried_for_one_step_of_a_client_that_has_tests(digits):
    seen = []

    def mine(setting):
        seen.append((setting.rounds, setting.steps, setting.cohort_size, setting.batch_size))
        method = methods.fedprox(setting)

        def client(data, answer, state):
            seen.extend([data.id, data.server_round, setting.seed])
            return method.client(data, answer, state)

        def predict(*where):
            model = method.predict(*where)
            model.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
            return model

        return method._replace(client=client, predict=predict)

    row = Row("Mine", "mine", make=mine)
    results.rehearse(digits, row, Machine())
    assert seen[:4] == [(1, 1, 1, 4), 1, 0, 0]
    assert seen[-1] == 2


def test_three_seeds_run_next_to_training_alone(digits, ran, tmp_path):
    found = compare.run(digits, ["fedprox", "local"])
    expected = [(row, seed) for seed in range(3) for row in ("FedProx", "Training alone")]
    expected += [("Training alone, 2 times as long", seed) for seed in range(3)]
    assert [(cell.row.title, cell.seed) for cell in ran] == expected
    assert {(cell.trial, cell.machine, cell.save) for cell in ran} == {(None, Machine(), None)}
    assert (found.tune, found.failed, len(found.found)) == (1, {}, 9)
    ran.clear()
    out = tmp_path / "a" / "b"
    few = Machine(shrink=0.5)
    compare.run(digits, ["pfedme"], seeds=1, out=out, shrink=0.5)
    assert [(cell.row.title, cell.machine, cell.save) for cell in ran] == [
        ("pFedMe", few, out / "prompts"),
        ("Training alone", few, out / "prompts"),
    ]
    lines = (out / "records.jsonl").read_text().splitlines()
    assert [json.loads(line)["row"] for line in lines] == ["pFedMe", "Training alone"]
    assert [path.name for path in out.glob("[!.]*")] == ["records.jsonl"]


def test_several_workers_get_problems_and_functions_that_can_be_sent(digits, monkeypatch):
    seen = []
    monkeypatch.setattr(cells, "check_sent", lambda problem, listed: seen.append(listed))
    monkeypatch.setattr(cells, "run_all", lambda cells, path, workers, title: 1 / (workers - 2))
    with pytest.raises(ZeroDivisionError):
        compare.run(digits, ["fedprox", "local"], seeds=1, workers=2)
    assert seen == [[Row.of("fedprox")]]


test_wrong_numbers_are_refused = refused(globals())("""
compare.run(problem_of(), ['local'], seeds=0) -> ValueError: `seeds` must be at least 1; got 0.
compare.run(problem_of(), ['local'], tune=0) -> ValueError: `tune` must be at least 1; got 0.
compare.run(problem_of(), ['local'], workers=0) -> ValueError: `workers` must be at least 1; got 0.
""")
