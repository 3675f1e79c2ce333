"""Settings of the papers: every table is there, and every name in them is known."""

import re
import tomllib
from collections import Counter

import pytest
import torch

from fedprompt.methods import METHODS
from studies import papers, sets
from studies.core import content
from studies.papers import PAPERS
from studies.sets.folders import DOMAINNET, OFFICE

SETTINGS = [setting for paper in PAPERS for setting in papers.settings(paper).values()]
ALPHA = ("dirichlet", "overlapping")
KINDS = {*ALPHA, "iid", "classes", "domains"}
MEASURES = {"full", "own", "worst", "pooled", "lowest", "highest", "clusters", *OFFICE, *DOMAINNET}
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


@pytest.mark.parametrize("paper", PAPERS)
def test_rows_have_a_cell_for_each_column_and_nothing_else_is_in_a_file(paper):
    file = content(paper)
    assert {*file} <= {"paper", "choices", "backbones", "common", "methods", "tables"}
    for table in file["tables"]:
        listed = [{**file["common"], **table, **setting} for setting in table["settings"]]
        count = sum(len(values["measures"]) for values in listed)
        assert {len(cells.split()) for cells in table["rows"].values()} == {count}
        named = [table.get("changes", {})]
        named += [values.get(key, {}) for values in listed for key in ("changes", "values")]
        assert {title for titles in named for title in titles} <= {*table["rows"]}


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_can_run(setting):
    assert setting.data in sets.SETS
    assert any(row.method for row in setting.rows)
    assert not [text for text in setting.choices if not re.fullmatch(r"[A-Z`].*[.]", text)]
    assert max(Counter(row.title for row in setting.rows).values()) == 1
    assert setting.partition.kind in KINDS
    assert setting.partition.alpha in ("classes", "clients", None) or setting.partition.alpha > 0
    for row in setting.rows:
        own = setting.of(row)
        assert {*row.figures} <= MEASURES
        if row.method is not None:
            assert {*row.values} <= METHODS[row.method].defaults.keys()
            families = {papers.FAMILIES.get(own.family, own.family)}
            families |= {"one model"} if len(own.backbones) == 1 else set()
            assert families & {*row.entry.families}
        assert 1 <= own.cohort_size <= own.num_clients
        assert 1 <= own.last_rounds <= own.rounds
        assert (own.partition.kind in ALPHA) <= (own.partition.alpha is not None)
        assert (own.family == "one model") <= (len(own.backbones) == 1)
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, **own.optimizer_values)
        assert all(0 <= figure <= 100 for figure in (*row.figures.values(), *row.spread.values()))


SMALL = """
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
"""


def test_cells_and_fields_of_a_file():
    one, two = papers.read(tomllib.loads(SMALL))
    first, other = one.rows
    assert (one.source, one.choices) == ("A paper, Table 1", ("Seed 0.",))
    assert (first.figures, first.spread) == ({"full": 1.5, "own": 2.0}, {"full": 0.1})
    assert (other.method, other.figures) == (None, {"full": 1.0, "own": 2.0})
    assert [row.title for row in two.rows] == ["FedProx"]
    assert two.rows[0].values == {"learning_rate": 0.1, "proximal_weight": 0.5}
    assert (two.epochs, two.of(two.rows[0]).epochs) == (1, 2)
