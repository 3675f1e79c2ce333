"""Tables from records: intervals, differences and stars."""

import pytest
from matplotlib.axes import Axes

from fedprompt.compare import Problem, own, tables
from fedprompt.compare.pictures import bars
from fedprompt.compare.trials import CompareError
from tasks import TASKS, pages


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


def test_a_cost_that_a_seed_lacks_is_left_out():
    told = {"partition": "styles", "row": "PromptFL", "trial": None, "values": {}, "own": 0.5}
    seeds = [told | {"seed": 0, "bytes_up": 4.0, "kept": 8.0}, told | {"seed": 1, "bytes_up": 4.0}]
    header, _ = tables.rows(seeds, TASKS["emoji"], "styles")
    assert "bytes up" in header
    assert "bytes kept" not in header


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
