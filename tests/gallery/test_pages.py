"""Pages of the methods: the rows of every table, with the setting of each."""

import csv
import importlib.util
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
COMPARED = DOCS / "results" / "compare"
SETTINGS = {"dirichlet": "label shift", "domains": "feature shift", "few": "50 images each"}


@pytest.fixture(scope="module")
def pages():
    path = DOCS / "extensions" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [module.page(path, methods) for path, methods in module.files().items()]


def test_pages_with_rows_of_changed_methods_say_so(pages):
    shown = {page.splitlines()[0][2:] for page in pages if "show the earlier rules" in page}
    changed = ["DP-FPL", "Ditto", "FML", "FedDistill", "FedKD", "FedMaPLe", "FedTPG", "PromptFolio"]
    assert shown == {*changed, "FedMix", "pFedPT"}


@pytest.mark.parametrize("path", sorted(COMPARED.glob("*.csv")), ids=lambda path: path.stem)
def test_every_row_of_a_table_is_on_one_page(path, pages):
    task, _, partition = path.stem.rpartition("-")
    for row in csv.DictReader(path.read_text().splitlines()):
        shown = [name for name in ("own mix", "worst client", "to local") if name in row]
        start = f"| {row['method']} | {SETTINGS[partition]}"
        end = f"| {' | '.join(row[name] for name in shown)} |"
        found = [
            line
            for page in pages
            for part in page.split("## Results: ")
            if part.startswith(f"{task}\n")
            for line in part.splitlines()
            if line.startswith(start)
        ]
        assert len(found) == 1, row["method"]
        assert end in found[0]
