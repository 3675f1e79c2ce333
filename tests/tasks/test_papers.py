"""Settings of the papers: every table is there, and a wrong file is refused."""

import copy
import re
import tomllib
from collections import Counter

import pytest
import torch

from tasks import papers, sets
from tasks.papers import PAPERS

SETTINGS = [setting for paper in PAPERS for setting in papers.settings(paper).values()]
ALPHA = ("dirichlet", "overlapping")
# Columns and rows of each printed table, figure (F) and section.
TABLES = {
    "fedhpl": {
        **{"1": (9, 9), "2": (9, 9), "3": (14, 4), "11": (18, 2), "13": (18, 3), "14": (2, 5)},
        **{"C.5.5": (2, 2), "F3b": (3, 2), "F3c": (1, 4), "F11": (1, 8), "F12": (1, 18)},
    },
    "sgpt": {"1": (3, 9), "2": (2, 7), "3": (1, 5), "4": (2, 3), "F4": (1, 11), "F6": (1, 10)},
    "fedl2g": {"1": (8, 8), "2": (7, 8), "3": (3, 8), "4": (5, 2)},
    "fedotp": {
        **{"1": (5, 9), "2": (1, 5), "3": (2, 5), "4": (10, 3)},
        **{"A2": (2, 5), "A3": (1, 5), "A4": (20, 6), "A5": (6, 7)},
        **{"F3": (20, 7), "FA3": (4, 7)},
    },
}


@pytest.mark.parametrize("paper", PAPERS)
def test_every_table_has_its_columns_and_rows(paper):
    found = {}
    for setting in papers.settings(paper).values():
        kind, number = re.search(r"(Table|Figure|Section) ([\w.]+)", setting.source).groups()
        table = "F" * (kind == "Figure") + number
        columns, titles = found.get(table, (0, set()))
        found[table] = columns + 1, titles | {row.title for row in setting.rows}
    counted = {table: (number, len(titles)) for table, (number, titles) in found.items()}
    assert counted == TABLES[paper]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_can_run(setting):
    assert setting.data in sets.SETS
    assert any(row.method for row in setting.rows)
    assert not [text for text in setting.choices if not re.fullmatch(r"[A-Z`].*[.]", text)]
    assert max(Counter(row.title for row in setting.rows).values()) == 1
    for row in setting.rows:
        own = setting.of(row)
        assert 1 <= own.cohort_size <= own.num_clients
        assert 1 <= own.last_rounds <= own.rounds
        assert (own.partition.kind in ALPHA) <= (own.partition.alpha is not None)
        assert (own.family == "one model") <= (len(own.backbones) == 1)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, **own.optimizer_values)
        assert all(0 <= figure <= 100 for figure in (*row.figures.values(), *row.spread.values()))


def content():
    """Return a small file."""
    return tomllib.loads("""
paper = "A paper"
[choices]
seeds = "Seed 0."
[common]
family = "one model"
backbones = ["vit"]
num_clients = 4
cohort_size = 2
rounds = 3
measures = ["full", "own"]
choices = ["seeds"]
[methods]
FedProx = { method = "fedprox", learning_rate = 0.1 }
[[tables]]
table = "Table 1"
rows = { FedProx = "1.5±0.1 2 3 -", Other = "1 2 - -" }
changes = { FedProx = { epochs = 2 } }
[[tables.settings]]
name = "one"
data = "cifar10"
partition = { kind = "iid" }
[[tables.settings]]
name = "two"
data = "cifar10"
partition = { kind = "dirichlet", alpha = 0.5 }
values = { FedProx = { proximal_weight = 0.5 } }
""")


def test_cells_and_fields_of_a_file():
    one, two = papers.read(content())
    first, other = one.rows
    assert (one.source, one.choices) == ("A paper, Table 1", ("Seed 0.",))
    assert (first.figures, first.spread) == ({"full": 1.5, "own": 2.0}, {"full": 0.1})
    assert (other.method, other.figures) == (None, {"full": 1.0, "own": 2.0})
    assert [row.title for row in two.rows] == ["FedProx"]
    assert two.rows[0].values == {"learning_rate": 0.1, "proximal_weight": 0.5}
    assert (two.epochs, two.of(two.rows[0]).epochs) == (1, 2)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("methods", "FedProx", "method"), "fedprx", "`method` must be one of the gallery"),
        (("methods", "FedProx", "rate"), 0.1, "`values` must be hyperparameters of fedprox"),
        (("common", "family"), "CLIP", "`family` must be a family of fedprox; got 'CLIP'."),
        (("common", "round"), 3, "one: .* unexpected keyword argument 'round'"),
        (("common", "choices"), ["seed"], "`choices` must be among those of the file"),
        (("common", "measures"), ["full", "all"], "`measures` must be known; got "),
        (("tables", 0, "rows", "Other"), "1 2", "rows must have 4 cells; not so "),
        (("tables", 0, "changes", "FedProx"), {"epoch": 2}, "keyword argument 'epoch'"),
        (("tables", 0, "settings", 0, "partition"), {"kind": "non-iid"}, "`kind` must be among"),
        (("tables", 0, "settings", 0, "partition"), {}, "one: .* 'kind'"),
        (("tables", 0, "settings", 1, "partition", "alpha"), "class", "`alpha` must be a number"),
        (("extra",), 1, "a file must have no "),
    ],
)
def test_a_wrong_file_is_refused(place, value, message):
    wrong = target = copy.deepcopy(content())
    for key in place[:-1]:
        target = target[key]
    target[place[-1]] = value
    with pytest.raises(ValueError, match=message):
        papers.read(wrong)
