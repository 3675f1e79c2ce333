"""Laws of the papers' settings: they name methods, data sets and figures that exist."""

import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from studies import papers
from studies.gallery import registry
from studies.papers.setting import Partition, Recipe, Row, Setting

METHODS = registry.gallery()
PAPERS = [
    importlib.import_module(f"{papers.__name__}.{path.stem}")
    for path in sorted(Path(papers.__path__[0]).glob("[!_]*.py"))
    if "\nSETTINGS" in path.read_text(encoding="utf-8")
]
SETTINGS = [setting for paper in PAPERS for setting in paper.SETTINGS]
TASKS = {
    *("digits", "mnist-5k", "mnist-5k-domains", "solar-cells", "cifar10", "cifar100", "svhn"),
    *("dtd", "flowers102", "food101", "pets", "caltech101", "tiny-imagenet", "fashion-mnist"),
    *("dtd-coop", "flowers102-coop", "food101-coop", "pets-coop", "caltech101-coop"),
    *("five-dataset", "office-caltech10", "domainnet"),
}
MEASURES = {"full", "lowest", "highest", "own", "worst", "clusters"}
NEEDED = {"dirichlet": "alpha", "overlapping": "alpha", "classes": "classes"}


def faults(setting: Setting) -> Iterator[str]:
    """Yield what is wrong with a setting, in words."""
    name = re.fullmatch(r"(fedhpl|sgpt|fedl2g|fedotp)-([a-z]?\d+)(-[a-z0-9.]+)+", setting.name)
    if name is None:
        yield "name"
    elif not re.match(rf"{name[1]}\b.*\bTable {name[2]}\b", setting.source, re.IGNORECASE):
        yield "source"
    if setting.task not in TASKS:
        yield "task"
    if not any(row.method for row in setting.rows):
        yield "no method"
    if any(not re.fullmatch(r"[A-Z`].*[.]", sentence) for sentence in setting.choices):
        yield "choices"
    for row in setting.rows:
        yield from faults_of_row(setting, row)


def faults_of_row(setting: Setting, row: Row) -> Iterator[str]:
    try:
        changed = replace(setting, **row.changes)
    except TypeError:
        yield "changes"
        return
    yield from faults_of_run(changed)
    if row.method is not None:
        method = METHODS.get(row.method)
        family = "mixed models" if changed.family == "networks" else changed.family
        if method is None or family not in method.families:
            yield "method"
        elif not set(row.values) <= set(method.defaults):
            yield "values"
        if changed.family == "one model" and len(changed.backbones) != 1:
            yield "backbones"
    measures = set(row.figures) - MEASURES
    if not row.figures or (measures and changed.partition.kind != "domains"):
        yield "measures"
    if not all(0 <= figure <= 100 for figure in (*row.figures.values(), *row.spread.values())):
        yield "figures"
    if not set(row.spread) <= set(row.figures):
        yield "spread"


def faults_of_run(setting: Setting) -> Iterator[str]:
    if not (1 <= setting.cohort_size <= setting.num_clients and setting.backbones):
        yield "clients"
    if not 1 <= setting.last_rounds <= setting.rounds:
        yield "rounds"
    if not 0 < (setting.test_share or 0.5) < 1:
        yield "test share"
    partition = setting.partition
    needed = NEEDED.get(partition.kind)
    if needed and getattr(partition, needed) is None and not partition.disjoint:
        yield "partition"
    recipe = setting.recipe
    try:
        optimizer = getattr(torch.optim, recipe.optimizer)
        optimizer([torch.zeros(1, requires_grad=True)], lr=0.1, **recipe.values)
    except (AttributeError, TypeError):
        yield "optimizer"
    if min(recipe.epochs, recipe.batch_size) < 1 or not 0 < recipe.crop <= 1:
        yield "recipe"


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_a_setting_names_what_exists(setting):
    assert list(faults(setting)) == []


def test_names_are_unique_and_titles_are_unique_in_a_setting():
    twice = [name for name, count in Counter(each.name for each in SETTINGS).items() if count > 1]
    assert twice == []
    for setting in SETTINGS:
        titles = [row.title for row in setting.rows]
        assert len(titles) == len(set(titles)), setting.name


@pytest.mark.parametrize(
    ("paper", "tables"),
    [
        ("fedhpl", "1 2 3 11 13 14"),
        ("sgpt", "1 2 3 4"),
        ("fedl2g", "1 2 3"),
        ("fedotp", "1 2 3 4 a2 a3 a5"),
    ],
)
def test_every_table_has_a_setting(paper, tables):
    names = [setting.name.split("-") for setting in SETTINGS]
    assert {name[1] for name in names if name[0] == paper} == set(tables.split())


GOOD = Setting(
    name="sgpt-1-cifar100",
    source="SGPT, Table 1",
    task="cifar100",
    family="one model",
    backbones=("vit",),
    partition=Partition(kind="dirichlet", alpha=0.3),
    num_clients=10,
    cohort_size=5,
    rounds=3,
    recipe=Recipe(),
    rows=(Row(title="SGPT", method="sgpt", figures={"full": 50.0}),),
    choices=("The paper gives no seeds: seed 0.",),
)
ROW = GOOD.rows[0]
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("name", {"name": "sgpt-cifar100"}),
    ("source", {"source": "SGPT, Table 2"}),
    ("source", {"source": "FedHPL, Table 1"}),
    ("task", {"task": "cifar"}),
    ("choices", {"choices": ("seed 0",)}),
    ("no method", {"rows": (replace(ROW, method=None),)}),
    ("method", {"rows": (replace(ROW, method="sgtp"),)}),
    ("method", {"family": "mixed models"}),
    ("method", {"rows": (replace(ROW, changes={"family": "networks"}),)}),
    ("values", {"rows": (replace(ROW, values={"rate": 0.1}),)}),
    ("changes", {"rows": (replace(ROW, changes={"epochs": 2}),)}),
    ("backbones", {"backbones": ("small", "base")}),
    ("measures", {"rows": (replace(ROW, figures={"local": 1.0}),)}),
    ("measures", {"rows": (replace(ROW, figures={}),)}),
    ("figures", {"rows": (replace(ROW, figures={"full": 8672.0}),)}),
    ("spread", {"rows": (replace(ROW, spread={"own": 1.0}),)}),
    ("clients", {"cohort_size": 11}),
    ("rounds", {"last_rounds": 4}),
    ("test share", {"test_share": 25.0}),
    ("partition", {"partition": Partition(kind="dirichlet")}),
    ("optimizer", {"recipe": Recipe(values={"beta": 0.9})}),
    ("recipe", {"rows": (replace(ROW, changes={"recipe": Recipe(epochs=0)}),)}),
]


@pytest.mark.parametrize(("fault", "changes"), WRONG)
def test_a_wrong_setting_is_found(fault, changes):
    assert list(faults(GOOD)) == []
    assert list(faults(replace(GOOD, **changes))) == [fault]
