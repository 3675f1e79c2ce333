"""Trials of a row, and the search for the best one with its neighbors."""

import numpy as np
import pytest

from fedprompt.compare import Problem, records
from fedprompt.compare.cells import DIVERGED, Cell
from fedprompt.compare.hyperparameters import (
    TUNING_SEED,
    draw,
    drawn,
    half_decades,
    neighbor,
    tuned,
)
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import Machine
from fedprompt.methods import METHODS

ROW = Row.of("fedprox", learning_rate=0.5)


def test_numbers_are_drawn_log_uniformly_with_three_digits_and_choices_as_they_are():
    low, high = 1e-3, 0.2
    shares = np.random.default_rng(3).random(50)
    rng = np.random.default_rng(3)
    for share in shares:
        number = draw((low, high), rng)
        assert number == float(f"{number:.3g}") == pytest.approx(low * (high / low) ** share, 5e-3)
    choices = [draw(["a", "b", "c"], rng) for _ in range(60)]
    assert {*choices} == {"a", "b", "c"}


def test_the_first_trial_has_the_values_of_the_row_and_the_others_are_in_the_ranges_of_its_method():
    row, search = Row.of("fedgen", learning_rate=0.5), METHODS["fedgen"].search
    first, *others = drawn(row, 4)
    assert (first, len(others)) == (row.values, 3)
    for values in others:
        assert all(low <= values[name] <= high for name, (low, high) in search.items())
        assert {**values, **dict.fromkeys(search, 0)} == {**row.values, **dict.fromkeys(search, 0)}
    assert len({values["learning_rate"] for values in others}) == 3
    assert drawn(row, 4) == [first, *others] == [*drawn(row, 3), others[2]]
    assert drawn(row, 1) == [first]
    assert drawn(Row.of("ditto"), 2)[1]["learning_rate"] != others[0]["learning_rate"]
    assert drawn(Row.of("zero_shot"), 3) == [METHODS["zero_shot"].defaults]  # without ranges


def test_rates_are_powers_of_ten_and_three_times_them_and_the_higher_neighbor_is_first():
    assert half_decades(0.003, 1.0) == [0.003, 0.01, 0.03, 0.1, 0.3, 1.0]
    assert half_decades(10.0, 30.0) == [10.0, 30.0]
    tried = [{"learning_rate": rate} for rate in (0.01, 0.1)]
    assert neighbor(tried[0], tried) == {"learning_rate": 0.03}


def search(tmp_path, scores, neighbors):
    """Tune one row by given scores of rates, and return its best rate and the cells that ran."""
    problem = Problem(
        title="",
        partitions={"few": ""},
        rows=lambda partition: [ROW],
        make=dict,
        trials=lambda partition, row: [{**row.values, "learning_rate": r} for r in (0.1, 0.3)],
        tuned_on="few",
    )
    path, ran = tmp_path / "r.jsonl", []

    def run_all(cells):
        ran.append([(cell.trial, cell.row.values["learning_rate"]) for cell in cells])
        assert {(cell.partition, cell.seed, cell.machine.shrink) for cell in cells} == {
            ("few", TUNING_SEED, 0.5)
        }
        own = [scores.get(cell.row.values["learning_rate"], 0.0) for cell in cells]
        return [cell.named() | {"own": each} for cell, each in zip(cells, own, strict=True)]

    unstable = Row.of("fedprox", learning_rate=3.0)
    record = Cell(problem, "few", unstable, 0, None, Machine()).named()
    records.append(path, record | DIVERGED)
    given = {"machine": Machine(shrink=0.5)} | ({} if neighbors else {"neighbors": False})
    (row,) = tuned(problem, "another", [ROW], run_all, path, **given)
    assert {**row.values, "learning_rate": 0.5} == ROW.values
    return row.values["learning_rate"], ran


def test_the_best_stable_trial_and_its_neighbors_are_run(tmp_path):
    """At 3, a reported run diverged. Of equal trials, the first counts."""
    start, more = [(0, 0.1), (1, 0.3)], [(2, 1.0), (3, 3.0)]
    scores = {0.1: 0.5, 0.3: 0.7, 1.0: 0.8, 3.0: 0.9}
    best, ran = search(tmp_path, scores, neighbors=True)
    assert (best, ran) == (1.0, [start, [*start, more[0]], [*start, *more]])
    best, ran = search(tmp_path, {0.1: 0.7, 0.3: 0.7}, neighbors=False)
    assert (best, ran) == (0.1, [start])
    best, ran = search(tmp_path, {0.1: 0.7, 0.3: 0.7}, neighbors=True)
    assert (best, ran) == (0.1, [start, [*start, (2, 0.03)]])
    assert search(tmp_path, {0.3: 1.0}, neighbors=False)[0] == 0.3
