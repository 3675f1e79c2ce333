"""Estimates count every pass of a method, and the rows and seeds that will run."""

import pytest

import study
from studies import STUDIES, estimate


@pytest.mark.parametrize(
    ("family", "method", "values", "expected"),
    [
        ("mixed models", "local", "{}", (2, 1)),
        ("mixed models", "fedhpl", "{}", (3, 1)),  # a client classifies all its images
        ("one model", "sgpt", "{}", (5, 2)),  # two blocks, and the queries of the second
        ("one model", "fedbabu", "{}", (4, 1)),  # clients train once more at the end
        ("networks", "local", "{}", (3, 1)),
        ("networks", "fml", "{}", (6, 1)),  # two networks
        ("CLIP", "promptfl", "{}", (2, 1)),
        ("CLIP", "fedotp", "{}", (4, 1)),  # two contexts
        ("CLIP", "zero_shot", "{}", (0, 0)),
    ],
)
def test_passes_are_those_of_the_method(family, method, values, expected):
    operations, steps = estimate.passes(family, method, values)
    assert operations == pytest.approx(expected[0], rel=0.1)
    assert steps == pytest.approx(expected[1], abs=0.3)


def test_rows_and_seeds_are_those_that_run(tmp_path, capsys):
    flags = ["--study", "sgpt", "--estimate", "--partitions", "sgpt-1-cifar100-s10"]
    found = []
    for seeds in "12":
        more = ["--rows", "Head-Tune;FedVPT", "--seeds", seeds, "--out", str(tmp_path)]
        study.main([*flags, *more])
        text = capsys.readouterr().out
        (line,) = [each for each in text.splitlines() if "sgpt-1-cifar100-s10" in each]
        found.append([cell.strip() for cell in line.strip("|").split("|")][1:])
    rows = [row for row in STUDIES["sgpt"].rows("sgpt-1-cifar100-s10") if "Tune" in row.title]
    assert [row[:2] for row in found] == [["2", "2"], ["2", "4"]]
    assert float(found[1][2]) == pytest.approx(2 * float(found[0][2]), rel=0.1)
    assert len(rows) == 1
    assert "2 seeds" in text
