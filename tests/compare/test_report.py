"""Tables, advice and pictures, from records and bits that are written by hand."""

import csv
from dataclasses import replace

import numpy as np
import pytest

from fedprompt.compare import Results, intervals, records, tables
from fedprompt.compare.intervals import Figure
from fedprompt.compare.rows import CONSTANT
from fedprompt.compare.tables import View, table

COLUMNS = {"own": "own", "own_balanced": "own, bal", "full": "all", "balanced": "all, bal"}
ALONE = "Training alone"


def listed(row, own, full=None, *, chance=None, **more):
    """Make the records of a row; balanced accuracies are the same, or `chance`."""
    found = []
    for seed, value in enumerate(own):
        other = value if full is None else full[seed]
        pair = (value, other) if chance is None else (chance, chance)
        scores = {"own": value, "full": other, "own_balanced": pair[0], "balanced": pair[1]}
        named = {"partition": "", "row": row, "seed": seed, "trial": None, "values": {}}
        found.append({**named, **scores, "backward": 4.0, "bytes_up": 8.0, **more})
    return found


def view(*rows, **more):
    given = {"title": "T", "partition": "", "columns": COLUMNS, "compared": ["own", "full"]}
    return View(found=[each for row in rows for each in row], **{**given, **more})


FIVE = np.array([0.0, 0.01, 0.02, 0.03, 0.04])
LOW = listed(CONSTANT, [0.2] * 5, chance=0.1, backward=0.0, bytes_up=0.0)


def test_means_intervals_and_differences_are_those_of_student():
    shown = view(listed("A", 0.5 + FIVE), listed(ALONE, 0.4 + FIVE[::-1]), LOW)
    header, body = shown.lines()
    first = dict(zip(header, body[0], strict=True))
    assert first["row"] == "A"
    half = 2.7764451 * np.std(FIVE, ddof=1) / 5**0.5
    assert first["own"] == f"52.0 ± {100 * half:.1f}"
    assert first["own, to training alone"] == f"+10.0 ± {200 * half:.1f} *"
    assert dict(zip(header, body[1], strict=True))["own, to training alone"] == ""


def test_a_gain_that_is_class_frequency_has_no_star_and_no_advice():
    constant = listed("A", [0.67] * 5, chance=0.25, predicted=1)
    base = listed(CONSTANT, [0.67] * 5, chance=0.25, backward=0.0)
    shown = view(constant, listed(ALONE, 0.5 + FIVE), base)
    assert "*" not in shown.starred("own", "training alone")["A"]
    assert "**Use**" not in shown.text()
    assert "no row is shown to be better than the most frequent class" in shown.advice()
    assert "Models of these rows predict one class for every image: A." in shown.notes()
    once = listed("A", [0.67] * 5)
    once[0]["predicted"] = 1
    assert view(once).notes()[0].endswith("one class for every image: A (in 1 of 5 seeds).")
    balanced = view(listed("A", 0.7 + FIVE, chance=0.25), listed(ALONE, 0.5 + FIVE), base)
    assert "*" not in balanced.starred("own", "training alone")["A"]


def test_a_loss_has_its_star_without_the_constant():
    shown = view(listed("A", 0.3 + FIVE), listed(ALONE, 0.5 + FIVE[::-1]))
    assert shown.starred("own", "training alone")["A"].endswith(" *")
    gain = view(listed("A", 0.7 + FIVE), listed(ALONE, 0.5 + FIVE[::-1]))
    assert not gain.starred("own", "training alone")["A"].endswith(" *")


def test_advice_is_the_cheapest_row_that_is_not_shown_to_be_worse_than_the_best():
    rows = listed("A", 0.60 + FIVE), listed("B", 0.59 + FIVE[::-1], bytes_up=1.0)
    shown = view(*rows, listed("C", 0.4 + FIVE, bytes_up=0.5), listed(ALONE, 0.3 + FIVE), LOW)
    assert shown.advice().startswith("**Use** B (+29.0 ± ")
    assert shown.advice().endswith("points to training alone) for the images of all clients.")
    few = view(*(each[:4] for each in (*rows, LOW)))
    assert few.advice() == "With 5 seeds, the last line recommends a row."


def test_a_row_is_compared_with_the_reference_of_as_many_passes():
    long = listed(f"{ALONE}, 2 times as long", 0.5 + FIVE, backward=8.0)
    rows = listed("A", 0.6 + FIVE, backward=7.0), listed("B", 0.6 + FIVE, backward=4.4)
    tower = listed(f"{ALONE}, image tower", 0.1 + FIVE, tower=True)
    head = listed("Head", 0.2 + FIVE, tower=True)
    shown = view(*rows, listed(ALONE, 0.3 + FIVE), long, tower, head)
    found = {title: shown.reference_of(title, "training alone") for title in shown.by_row}
    assert found["A"] == long[0]["row"]
    assert found["B"] == ALONE
    assert found["Head"] == tower[0]["row"]
    assert [found[title] for title in (ALONE, long[0]["row"])] == [None, None]


def test_bits_widen_an_interval_that_is_exact_over_seeds_alone():
    found = listed("A", [0.75] * 3)
    right = np.array([[True, True, False, True]])
    bits = {"right": right, "weights": np.ones((1, 4)), "labels": np.array([0, 0, 1, 1])}
    bits = {records.key(each): {**bits, "places": np.arange(4)} for each in found}
    alone, both = view(found), view(found, bits=bits)
    assert alone.figure("A", "own").percent() == "75.0 ± 0.0"
    expected = Figure.of([(right, np.ones((1, 4)))] * 3)
    assert both.figure("A", "own").percent() == expected.percent() != "75.0 ± 0.0"
    assert "Intervals are over seeds alone" in " ".join(alone.notes())
    assert not both.notes()


def test_seeds_that_test_other_images_have_these_at_their_places():
    found, places = listed("A", [1.0, 0.5]), [[0, 2], [2, 3]]
    rights = [np.array([[True, True]]), np.array([[False, True]])]
    same = {"weights": np.ones((1, 2)), "labels": np.array([0, 1])}
    bits = {
        records.key(each): {**same, "right": right, "places": np.array(place)}
        for each, right, place in zip(found, rights, places, strict=True)
    }
    parts = view(found, bits=bits).figure("A", "own").parts
    assert parts.shape == (2, 3)
    assert [parts[0, 2], parts[1, 0]] == [0, 0]
    assert parts[1, 1] == -parts[1, 2] != 0


def test_h_is_that_of_the_means_over_seeds():
    found = [
        {**each, "new": new, "h": 2 * each["full"] * new / (each["full"] + new)}
        for each, new in zip(listed("A", [0.9, 0.5]), (0.6, 0.8), strict=True)
    ]
    shown = view(found, columns={"h": "H", "full": "base", "new": "new"}, compared=["h"])
    assert shown.figure("A", "h").values.mean() == pytest.approx(0.7)
    assert shown.figure("A", "h").percent() == "70.0"


def test_a_title_has_the_share_of_rounds_and_images_if_they_were_shrunk():
    whole, half = (view(listed("A", [0.5] * 3, **more)).text() for more in ({}, {"shrink": 0.5}))
    assert whole.splitlines()[0] == "T, 3 seeds"
    assert half.splitlines()[0] == "T, 3 seeds, 0.5 of the rounds and images"


def test_seeds_of_a_row_with_other_values_are_refused():
    other = [{**each, "values": {"rate": 1}} for each in listed("A", [0.1, 0.2])[1:]]
    with pytest.raises(ValueError, match="Seeds of 'A' differ in values, inputs, code"):
        view(listed("A", [0.1, 0.2])[:1], other).by_row  # noqa: B018


def test_cells_of_a_table_are_escaped_and_aligned():
    assert table(["a", "b|c"], [["x", 1]]).splitlines()[0] == r"| a | b\|c |"


def test_values_are_named_by_partition_where_they_differ():
    one = {"row": "A", "trial": None, "values": {"rate": 1}, "partition": "x"}
    two = {**one, "values": {"rate": 2}, "partition": "y"}
    found = tables.hyperparameters([one, two, {**one, "trial": 3}])
    assert [line.split("|")[1:3] for line in found.splitlines()[2:]] == [
        [" A (x) ", "          rate 1 "],
        [" A (y) ", "          rate 2 "],
    ]


@pytest.fixture
def results():
    clients = {"clients": {"0": {"own": 0.4, "full": 0.3}, "1": {"own": 0.6, "full": 0.3}}}
    found = [*listed("A", 0.5 + FIVE, **clients), *listed(ALONE, 0.4 + FIVE, **clients), *LOW]
    return Results(found, "T", columns=COLUMNS, compared=["own", "full"])


def test_files_have_the_tables_and_the_figures_of_clients_and_seeds(results, tmp_path):
    assert results.save(tmp_path, command="run me") == f"Tables and picture: {tmp_path}"
    text = (tmp_path / "table.md").read_text()
    assert text.startswith(str(results).split("\n\n**Use**")[0][:40])
    assert "\n\n    run me\n\n" in text
    with (tmp_path / "clients.csv").open() as file:
        lines = [*csv.DictReader(file)]
    assert len(lines) == 2 * 5 * 2
    assert lines[0] == {**lines[0], "method": "A", "seed": "0", "client": "0", "own": "0.4"}
    with (tmp_path / "seeds.csv").open() as file:
        assert len([*csv.DictReader(file)]) == 15
    with (tmp_path / "table.csv").open() as file:
        header, *body = csv.reader(file)
    assert [header[0], *(line[0] for line in body)] == ["row", "A", ALONE, CONSTANT]


def test_the_picture_has_both_accuracies_a_line_and_dots(results, tmp_path, monkeypatch):
    from matplotlib.figure import Figure as Drawing

    drawn = []
    monkeypatch.setattr(Drawing, "savefig", lambda self, path, **how: drawn.append(self))
    results.plot(tmp_path / "bars.png")
    own, full = drawn[0].axes
    assert (own.get_xlabel(), full.get_xlabel()) == ("own, %", "all, %")
    assert [bar.get_width() for bar in own.patches] == pytest.approx([52, 42])
    lines = [line for line in own.lines if line.get_label() == "most frequent class"]
    assert lines[0].get_xdata()[0] == pytest.approx(20)
    dots = [line.get_xdata() for line in own.lines if line.get_marker() == "o"]
    assert sorted(dots[0]) == pytest.approx([40, 60])
    replace(results, columns={"own": "own"}, compared=["own"]).plot(tmp_path / "bars.png")
    assert [axes.get_xlabel() for axes in drawn[1].axes] == ["own, %"]


def test_partitions_have_a_first_table_of_their_means(results):
    two = [{**each, "partition": name} for each in results.found for name in ("a", "b")]
    two = [{**each, "own": each["own"] + 0.1 * (each["partition"] == "b")} for each in two]
    found = replace(results, found=two, partitions={"a": "x", "b": "y"}, compared=["own"])
    first, *others = found.views().values()
    assert [each.partition for each in (first, *others)] == ["", "a", "b"]
    assert first.figure("A", "own").values == pytest.approx(0.55 + FIVE)
    assert first.figure("A", "own b").values == pytest.approx(0.6 + FIVE)
    assert first.starred("own", "training alone")["A"] == "+10.0 ± 0.0 *"


def test_a_result_without_runs_has_no_picture_and_no_classifier(results, tmp_path):
    empty = Results([], failed={"A": "it broke"})
    assert str(empty) == "A failed: it broke"
    assert empty.save(tmp_path) == f"No run finished, so {tmp_path} has no table."
    with pytest.raises(ValueError, match="No run finished"):
        empty.plot(tmp_path / "bars.png")
    with pytest.raises(ValueError, match="`out` must be a folder"):
        results.classifier("A")


def test_stars_are_those_of_holm_over_the_rows_of_a_column():
    noise = np.random.default_rng(0).normal(0, 0.02, (4, 5))
    rows = [listed(str(k), 0.48 + 0.02 * k + noise[k]) for k in range(4)]
    shown = view(*rows, listed(ALONE, 0.48 + 0 * FIVE), LOW)
    found = shown.differences("own", "training alone")
    stars = dict(zip(found, intervals.starred([*found.values()]), strict=True))
    texts = shown.starred("own", "training alone")
    assert {title: text.endswith("*") for title, text in texts.items()} == stars
    assert {*stars.values()} == {True, False}
