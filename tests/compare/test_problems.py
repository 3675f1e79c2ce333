"""A problem that is made by hand: its trials, its references, titles of rows, and seeds."""

from dataclasses import replace

import pytest

from comparisons import digits, trial_of
from fedprompt import compare

DIGITS = digits(seeds_differ=True)
COLUMNS = {"own": "own tests", "full": "all tests"}


class Rounds:
    """Number of rounds so far, of this run alone."""

    def __init__(self):
        self.count = 0

    def __call__(self, trial, method, now):
        self.count += 1
        return {"rounds": self.count}


def trial(partition, row, *, seed, machine):
    """Make the trial of a row, whose title can have the number of rounds."""
    made = trial_of(DIGITS, seed=seed)
    setting = replace(made.setting, rounds=int(row.title[-1]) if row.title[-1].isdigit() else 2)
    return made._replace(setting=setting, figures=Rounds())


def by_hand(**changes):
    given = {"title": "T", "partitions": {"a": "words"}, "trial": trial, "columns": COLUMNS}
    return compare.Problem(**{**given, "references": {"one": ["FedProx 1"]}, **changes})


def rows(*numbers, rate=0.02):
    return [compare.Row(f"FedProx {n}", "fedprox", {"learning_rate": rate}) for n in numbers]


def test_rows_of_one_method_have_titles_and_only_the_given_values(tmp_path):
    results = compare.run(by_hand(), rows(1, 2), seeds=[3, 1], out=tmp_path)
    found = {(each["row"], each["seed"]): each for each in results.found}
    assert {*found} == {(row, seed) for row in ("FedProx 1", "FedProx 2", "Most frequent class")
                        for seed in (1, 3)}  # fmt: skip
    record = found["FedProx 2", 1]
    assert record["values"] == {"learning_rate": 0.02}
    assert record["rounds"] == 1.5  # the mean of 1 and 2, of this run alone
    whole = compare.run(DIGITS, ["fedprox:learning_rate=0.02"], seeds=[1]).found
    other = next(each for each in whole if each["row"].startswith("FedProx"))
    assert (record["own"], record["clients"]) == (other["own"], other["clients"])
    assert "own tests, to one" in results.views()["a"].lines()[0]
    again = compare.Results.read(
        tmp_path / "records.jsonl", columns=COLUMNS, partitions={"a": "words"}
    )
    assert again.views()["a"].figure("FedProx 2", "own").parts is not None  # it has the bits
    assert again.hyperparameters().count("learning_rate 0.02") == 2


def test_figures_of_a_problem_begin_anew_in_each_run():
    found = compare.run(digits(figures=Rounds()), ["fedprox"], seeds=2).found
    assert {record["rounds"] for record in found if record["row"] != "Most frequent class"} == {1.5}


def test_without_references_clients_train_alone():
    found = compare.run(by_hand(references=None), rows(2), seeds=1).found
    assert {each["row"] for each in found} == {"FedProx 2", "Training alone", "Most frequent class"}
    found = compare.run(by_hand(references={}), rows(2), seeds=1).found
    assert {each["row"] for each in found} == {"FedProx 2", "Most frequent class"}


def test_an_edited_row_runs_again_and_other_data_are_refused(tmp_path):
    problem = by_hand(made=lambda: {"data": "y"})
    for rate in (0.02, 0.03):
        compare.run(problem, rows(1, rate=rate), seeds=1, out=tmp_path)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 3
    other = by_hand(made=lambda: {"data": "x"})
    with pytest.raises(ValueError, match=r"which differs in data \(y there, x here\)"):
        compare.run(other, rows(1), seeds=1, out=tmp_path)


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tune": 2}, "`tune` must be 1 for a problem whose `trial` has no `validate`; got 2"),
        ({"seeds": [1, 1]}, "`seeds` must have each seed once"),
        ({"seeds": [-1]}, "`seeds` must be at least 0"),
        ({"seeds": 0}, "`seeds` must be at least 1"),
    ],
)
def test_wrong_arguments_are_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        compare.run(by_hand(), rows(1), **changes)
