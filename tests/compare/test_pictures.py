"""The picture of a comparison has the means, intervals and clients of the records."""

import pytest
from matplotlib.figure import Figure

from fedprompt.compare import Problem, pictures


def record(row, seed, own, partition="x", **clients):
    at = {"row": row, "seed": seed, "partition": partition, "trial": None, "values": {}}
    return at | {"own": own, "clients": {name: {"own": value} for name, value in clients.items()}}


def test_bars_are_means_with_intervals_and_dots_are_means_of_clients(monkeypatch, tmp_path):
    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **how: saved.append((figure, path)))
    alone = [
        record("Alone", seed, 0.4 + 0.1 * seed, a=0.2, b=0.6 + 0.1 * seed) for seed in range(3)
    ]
    found = [*alone, record("Mine", 0, 0.8, a=0.9), record("Mine", 1, 0.6, a=0.7, c=0.1)]
    other = [record("Alone", seed, 0.3, "y") for seed in range(2)]
    problem = Problem(
        title="",
        partitions={"x": "first", "y": "second"},
        rows=list,
        make=dict,
        references={"alone": ["Alone"]},
    )
    views = {"x": (found, problem), "y": (found + other, problem)}
    pictures.bars(views, tmp_path / "bars.png")
    ((figure, path),) = saved
    axes, second = figure.axes
    assert path == tmp_path / "bars.png"
    assert [each.get_title() for each in figure.axes] == ["first", "second"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["Mine", "Alone"]
    assert [text.get_text() for text in second.get_yticklabels()] == ["Alone"]
    assert axes.get_xlabel() == "own mix, %"
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the best is above
    mine, bar = sorted(axes.patches, key=lambda each: each.get_y())
    assert [(each.get_width(), each.get_y() + each.get_height() / 2) for each in (mine, bar)] == [
        pytest.approx((70, 0)),
        pytest.approx((50, 1)),
    ]
    assert mine.get_facecolor() != bar.get_facecolor() == second.patches[0].get_facecolor()
    half = 4.30265 * 10 / 3**0.5  # Student's t of two degrees of freedom, and a deviation of 10
    (lines,) = axes.collections  # two seeds have no interval
    assert lines.get_segments()[0].tolist() == [
        pytest.approx([50 - half, 1], abs=1e-3),
        pytest.approx([50 + half, 1], abs=1e-3),
    ]
    dots = [(*line.get_xdata(), *line.get_ydata()) for line in axes.lines if line.get_alpha()]
    assert dots == [pytest.approx((80, 10, 0, 0)), pytest.approx((20, 70, 1, 1))]


def test_a_client_has_the_figure_of_its_own_tests_where_it_has_any():
    figures = {"a": {"h": 0.1, "own": 0.2, "full": 0.3}, "b": {"own": 0.2, "full": 0.3}}
    seeds = [{"clients": figures | {"c": {"full": 0.3}, "d": {"received": 1}}}, {}]
    assert pictures.of_clients(seeds, "h") == pytest.approx({"a": 10, "b": 20, "c": 30})
