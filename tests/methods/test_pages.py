"""Pages of the methods: the rows of every table, with the setting of each."""

import csv
import importlib.util
from itertools import chain
from pathlib import Path

import pytest

from fedprompt.compare.rows import CONSTANT
from studies.controls import CONTROLS
from studies.digits import FIXED

DOCS = Path(__file__).parents[2] / "docs"
TITLES = {row.title for row in (*CONTROLS.values(), *chain(*FIXED.values()))}
CONTROL_ROWS = {CONSTANT, *TITLES}  # no page


@pytest.fixture(scope="module")
def gallery():
    path = DOCS / "extensions" / "gallery.py"
    spec = importlib.util.spec_from_file_location("gallery_pages", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_of_a_table_is_on_one_page(gallery):
    pages = [gallery.page(path, methods) for path, methods in gallery.files().items()]
    for task, title in gallery.TASKS.items():
        for partition, setting in gallery.SETTINGS.items():
            text = (DOCS / "results" / "tables" / f"{task}-{partition}.csv").read_text()
            rows = csv.DictReader(text.splitlines())
            for row in (each for each in rows if each["row"] not in CONTROL_ROWS):
                start = f"| {row['row']} | {setting} | {row['own mix']} | {row['worst client']} |"
                parts = [part for page in pages for part in page.split("## Results: ")]
                found = [part for part in parts if part.startswith(title) and start in part]
                assert len(found) == 1, row["row"]
