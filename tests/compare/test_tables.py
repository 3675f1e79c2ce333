"""Tables from records: intervals, differences and stars."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.axes import Axes
from scipy import stats

from fedprompt.compare import Problem, own, tables
from fedprompt.compare.pictures import bars
from fedprompt.compare.trials import CompareError
from studies import TASKS, pages


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
    few = {title: each[:4] for title, each in by_row.items()}
    assert "*" not in "".join(tables.differences_to(few, ["local", "local, 16"], "own"))
    assert tables.holm([0.04, 0.001, 0.03]) == [False, True, False]
    assert tables.holm([0.02, 0.001, 0.04]) == [True, True, True]


def test_a_row_that_equals_its_reference_has_no_star():
    assert tables.holm([float("nan")]) == [False]
    assert tables.holm([0.01, float("nan")]) == [True, False]
    assert np.isnan(tables.p_value([0.0] * 5))
    by_row = {name: [{"seed": n, "own": 0.5} for n in range(5)] for name in "ab"}
    assert tables.differences_to(by_row, ["b"], "own") == ["+0.0 ± 0.0", ""]


def test_intervals_and_p_values_are_those_of_scipy():
    values = [0.1, 0.25, 0.3, -0.22]
    test = stats.ttest_1samp(values, 0)
    low, high = test.confidence_interval()
    assert tables.interval(values) == pytest.approx((high - low) / 2)
    assert tables.p_value(values) == pytest.approx(test.pvalue)
    assert tables.p_value([-each for each in values]) == pytest.approx(test.pvalue)
    assert tables.percent(values) == f"10.8 ± {50 * (high - low):.1f}"
    assert tables.percent([0.1, 0.25], signed=True) == "+17.5"
    assert tables.percent([0.001, -0.0012]) == "0.0"


def test_differences_are_over_the_seeds_that_all_rows_have():
    rows = [
        [{"seed": seed, "own": number + seed**2} for seed in seeds]
        for number, seeds in ((10, (0, 1, 3, 4)), (4, (4, 3, 2, 1)), (7, (1, 3, 5)), (2, (3, 1)))
    ]
    assert tables.gains("own", *rows[:2]) == [6, 6, 6]
    assert tables.gains("own", *rows) == [1, 1]
    assert tables.gains("own", rows[0], [{"seed": 3, "own": 5}]) == [14]


def test_the_reference_has_as_many_passes_or_the_next_number_or_the_most():
    at = {"none": None, "much": 16, "once": 8, "a": 8.4, "b": 8.6, "c": 15.7, "d": 40}
    by_row = {row: [{"backward": each} if each else {}] for row, each in at.items()}
    found = {row: tables.reference_of(by_row, ["much", "once", "lost"], row) for row in at}
    assert list(found.values()) == ["once", None, None, "once", "much", "much", "much"]
    assert (tables.passes([{}]), tables.passes([{"backward": 2}, {"backward": 5}])) == (0, 3.5)
    by_row["zero"] = [{}]
    assert tables.reference_of(by_row, ["once", "zero"], "none") == "zero"


def test_h_of_a_seed_has_the_slopes_of_the_means():
    """By hand: of 0.8 and 0.3, H is 0.48 / 1.1, with slopes 2 * 0.09 / 1.21 and 2 * 0.64 / 1.21."""
    pairs = (0.9, 0.5), (0.7, 0.1)
    seeds = tables.harmonic([{"full": full, "new": new, "h": 0.0} for full, new in pairs])
    change = 0.1 * 0.18 / 1.21 + 0.2 * 1.28 / 1.21
    assert [each["h"] for each in seeds] == pytest.approx(
        [0.48 / 1.1 + change, 0.48 / 1.1 - change]
    )
    assert tables.harmonic([{"h": 0.1, "full": 1}, {}]) == [{"h": 0.1, "full": 1}, {}]


def test_h_of_no_accuracy_is_0():
    seeds = [{"full": 0.0, "new": 0.0, "h": 0.0}] * 2
    assert [each["h"] for each in tables.harmonic(seeds)] == [0, 0]


def test_a_table_has_all_figures_in_their_order(tmp_path):
    """By hand: half of an interval of three values is 4.303 / sqrt(3) of their deviation."""

    def record(row, seed, own, **more):
        at = {"row": row, "seed": seed, "own": own, "full": own / 2, "partition": "p"}
        return at | {"trial": None, "values": {}, "shrink": 0.5, "bytes_up": 1234567.6} | more

    found = [record("a|b", seed, 0.6 + 0.01 * seed, rise=0.5, worst=seed) for seed in (2, 0, 1)]
    found[0]["kept"] = 8  # which the other seeds lack
    found += [record("alone", seed, 0.6 - 0.01 * seed, received=0.4) for seed in (0, 1)]
    others = [record("a|b", 7, 1.0) | {"trial": 3}, record("alone", 7, 1.0) | {"partition": "q"}]
    columns = {"full": "all", "worst": "worst", "own": "mine", "received": "new", "rise": "rise"}
    problem = Problem(
        title="T",
        partitions={"p": "here", "q": "there"},
        rows=list,
        make=dict,
        columns=columns | {"none": "none"},
        references={"alone": ["alone"]},
        compared=("own",),
        notes=lambda problem, found, partition: [f"{len(found)} of {partition}.", "Second."],
    )
    header = ["row", "mine", "mine, to alone", "all", "new", "rise", "bytes up", "seeds"]
    body = [
        ["a|b", "61.0 ± 2.5", "+1.0", "30.5 ± 1.2", "", "50.0 ± 0.0", "1,234,568", "3"],
        ["alone", "59.5", "", "29.8", "40.0", "", "1,234,568", "2"],
    ]
    assert tables.rows(found + others, problem, "p") == (header, body)
    whole = """
T, here, 2 or 3 seeds, 0.5 of the rounds and images

| row   |       mine | mine, to alone |        all |  new |       rise |  bytes up |
| ----- | ---------: | -------------: | ---------: | ---: | ---------: | --------: |
| a\\|b  | 61.0 ± 2.5 |           +1.0 | 30.5 ± 1.2 |      | 50.0 ± 0.0 | 1,234,568 |
| alone |       59.5 |                |       29.8 | 40.0 |            | 1,234,568 |

| row   | seeds |
| ----- | ----: |
| a\\|b  |     3 |
| alone |     2 |

6 of p.

Second.

Below.
"""
    stem = tmp_path / "a" / "b" / "of.it"
    tables.save(found + others, stem, problem, "p", "Below.")
    tables.save(found + others, stem, problem, "p", "Below.")
    assert stem.with_name("of.it.md").read_text(encoding="utf-8") == whole.lstrip()
    lines = csv.reader(stem.with_name("of.it.csv").read_text(encoding="utf-8").splitlines())
    assert [*lines] == [header, *body]
    with_all = tables.rows(found, replace(problem, every=True), "p")[0]
    assert with_all[:6] == ["row", "mine", "mine, to alone", "all", "worst", "new"]
    one = tables.titled(found[3:4], problem, "p").partition("\n")[0]
    assert one == "T, here, 1 seed, 0.5 of the rounds and images"


def test_seeds_of_a_row_with_different_values_or_code_are_no_table():
    def record(seed, rate, images="a", code="c"):
        at = {"partition": "few", "row": "A", "trial": None, "seed": seed, "inputs": [images]}
        return at | {"values": {"learning_rate": rate}, "code": code}

    assert len(tables.grouped([record(0, 0.1), record(1, 0.1)], "few")["A"]) == 2
    for other in (record(1, 0.3), record(1, 0.1, "b"), record(1, 0.1, code="d")):
        with pytest.raises(CompareError, match="'A' in 'few' differ in values, inputs, code"):
            tables.grouped([record(0, 0.1), other], "few")


def test_a_vague_column_is_no_part_of_a_table_unless_it_is_compared(monkeypatch):
    """Over two of three rows, worst clients and own mixes differ by 40 points, new clients by 2."""

    def record(row, seed):
        near, far = 0.5 + 0.01 * seed, 0.5 + (0.2 if row in "AB" else 0.01) * seed
        at = {"task": "mnist", "partition": "deep-domains", "row": row, "trial": None, "seed": seed}
        return at | {"own": far, "worst": far, "received": near}

    assert not tables.vague("worst", [[0.1, 0.9]])  # of two seeds, no interval is shown
    monkeypatch.setitem(pages.PAIRS, "mnist", {"deep-domains": ["A - C"]})
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
    (below,) = pages.quoted(found, TASKS["mnist"], "deep-domains")
    words = below.splitlines()[0].strip("|").split("|")
    assert list(map(str.strip, words)) == ["difference", "own mix", "new clients"]


def test_rows_without_new_classes_have_no_harmonic_mean():
    def record(title, **new):
        told = {"partition": "styles", "row": title, "trial": None, "seed": 0, "values": {}}
        return told | {"own": 0.5, "full": 0.4, "balanced": 0.4, "bytes_up": 4.0} | new

    told, known = record("PromptFL"), record("FedOTP", new=0.4, h=0.4)
    header, _ = tables.rows([told], TASKS["emoji"], "styles")
    assert "H" not in header
    header, body = tables.rows([told, known], TASKS["emoji"], "styles")
    assert {line[0]: line[header.index("H")] for line in body} == {"PromptFL": "", "FedOTP": "40.0"}


def test_cells_order_differences_and_bars_are_of_one_harmonic_mean(tmp_path, monkeypatch):
    """Means of the H of seeds once had another order, and differences of another sign."""
    figures = {
        "A": [(0.9, 0.1), (0.1, 0.9), (0.5, 0.5)],
        "B": [(0.4, 0.4), (0.5, 0.5), (0.45, 0.45)],
    }
    told = {"partition": "", "trial": None, "values": {}}
    found = [
        told | {"row": row, "seed": seed, "full": full, "new": new, "h": 2 / (1 / full + 1 / new)}
        for row, pairs in figures.items()
        for seed, (full, new) in enumerate(pairs)
    ]
    columns = {"h": "H", "new": "new classes", "full": "base classes"}
    names = {
        "columns": columns,
        "compared": ("h", "new"),
        "references": {"B": ["B"]},
        "every": True,
    }
    problem = Problem(title="", partitions={"": ""}, rows=list, make=dict, **names)
    header, body = tables.rows(found, problem, "")
    assert header[:3] == ["row", "H", "H, to B"]
    assert header[-1] == "base classes"  # whose intervals are wide
    assert [(line[0], *(cell.split()[0] for cell in line[1:3] if cell)) for line in body] == [
        ("A", "50.0", "+5.0"),
        ("B", "45.0"),
    ]
    drawn = []
    monkeypatch.setattr(Axes, "barh", lambda axes, place, width, **look: drawn.append(width))
    bars({"": (found, problem)}, tmp_path / "bars.png")
    assert drawn == pytest.approx([50, 45])
    # by hand: H = 2 b n / (b + n), so at b = 0.5, n = 0.5 both slopes are 0.5
    assert [each["h"] for each in tables.grouped(found, "")["A"]] == pytest.approx([0.5] * 3)
    assert [each["h"] for each in tables.grouped(found, "")["B"]] == pytest.approx([0.4, 0.5, 0.45])


def test_each_of_many_columns_is_in_one_of_the_further_tables():
    columns = {f"c{place}": f"column {place}" for place in range(20)}
    record = {"partition": "", "row": "A", "trial": None, "seed": 0} | dict.fromkeys(columns, 0.5)
    fields = {"columns": columns, "compared": ("c0",), "every": True}
    problem = Problem(title="", partitions={"": ""}, rows=list, make=dict, **fields)
    heads = tables.titled([record], problem, "").splitlines()[2::4]
    assert [line.count("|") for line in heads] == [8, 8, 8, 4]
    cells = [cell.strip() for line in heads for cell in line.strip("|").split("|")[1:]]
    assert cells == [*columns.values()]


@pytest.mark.unhooked  # parts of a problem are enough
def test_seeds_recommend_a_method_where_clients_have_tests_of_their_own():
    usual = {"partition": "", "trial": None, "values": {}}
    figures = {"FedProx": (0.9, 0.8), "Training alone": (0.5, 0.4)}
    found = [
        {"row": row, "own": mine, "full": full, "seed": seed, "bytes_up": 8} | usual
        for row, (mine, full) in figures.items()
        for seed in range(5)
    ]
    fields = dict.fromkeys(Problem.__dataclass_fields__)
    plain, base = (Problem(**fields | {"compared": names}) for names in (("own",), ("h", "new")))
    (text,) = own.recommended(plain, found, "")
    assert text.startswith("**Use** FedProx (+40.0 ± 0.0 points to training alone) for a client's")
    assert own.recommended(base, found, "") == own.recommended(plain, found[1:], "") == []
