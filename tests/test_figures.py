"""Figures in prose: they are those of the tables, and no page has one that is written by hand."""

import csv
import re
from pathlib import Path

import figures
import pytest
import write_pages

from fedprompt.compare import records
from fedprompt.methods import METHODS

DOCS = Path(__file__).parents[1] / "docs"
TABLES = DOCS / "results" / "tables"
COLUMNS = {"own mix": "own", "bytes up": "bytes_up"}


STUDIES = {path.stem for path in figures.RECORDS.glob("*.jsonl")} - {"leakage"}
"""Records with a table for each partition. Those of attacks are compared with test_examples.py."""


@pytest.mark.parametrize("name", sorted(STUDIES))
def test_figures_are_those_of_the_tables(name):
    found = records.read(figures.RECORDS / f"{name}.jsonl")
    partitions = {record["partition"] for record in found}
    compared = 0
    for partition in partitions:
        with (TABLES / f"{name}-{partition}.csv").open() as file:
            for row in csv.DictReader(file):
                for column in [name for name in COLUMNS if row.get(name)]:
                    key = f"{name}/{partition}; {row['row']}; {COLUMNS[column]}"
                    assert figures.figure(key) == row[column], key
                    compared += 1
        text = (TABLES / f"{name}-{partition}.md").read_text()
        for body in re.findall(r"^\| difference .*?\n\| -.*?\n((?:\|.*\n)+)", text, re.MULTILINE):
            header = re.search(r"^\| difference +\| +(.*?) +\|", text, re.MULTILINE)[1]
            for line in body.splitlines():
                pair, written = (cell.strip() for cell in line.split("|")[1:3])
                if header in COLUMNS:
                    key = f"{name}/{partition}; {pair}; {COLUMNS[header]}; signed"
                    assert figures.figure(key) == written, key
                    compared += 1
    assert compared > 3


def test_ratios_and_short_forms():
    place = "mnist/deep-domains"
    assert figures.figure(f"{place}; LoRA, rank 4 / Norms; bytes_up") == f"{285_832 / 83_168:.1f}"
    assert figures.figure(f"{place}; Norms; bytes_up; kB") == "83 kB"
    assert figures.figure(f"{place}; Full tuning; bytes_up; MB") == "78 MB"
    assert figures.figure(f"{place}; Norms; own; round") == "88"
    assert figures.figure(f"{place}; Norms; own; mean") == "88.4"


def test_a_trace_names_the_line_of_each_run():
    first, *lines = figures.trace("mnist/deep-domains; Norms - FedVPT-D; own").splitlines()
    assert first.split()[:3] == ["9.0", "±", "1.2"]
    assert len(lines) == 10
    written = (figures.RECORDS / "mnist.jsonl").read_text().splitlines()
    for line in lines:
        seed = re.search(r"seed (\d+)", line)[1]
        for value, number in re.findall(r"([\d.]+) \(line (\d+),", line):
            assert f'"seed": {seed},' in written[int(number) - 1]
            assert f'"own": {value},' in written[int(number) - 1]


def test_every_result_has_the_most_frequent_class():
    """The row stands in each table of rows, and its figures can be quoted."""
    for path in sorted(TABLES.glob("*.csv")):
        lines = list(csv.DictReader(path.read_text().splitlines()))
        rows = [line["row"] for line in lines if "row" in line]  # leakage has no accuracies
        assert not rows or "Most frequent class" in rows, path
    assert figures.figure("solar/deep-labels; Most frequent class; full") == "59.9 ± 0.4"


def test_a_figure_of_runs_with_bits_has_the_error_of_test_images():
    key = "which-when/example; FedLoRA"
    shown, *_ = figures.parts(key)
    assert shown.figure("FedLoRA", "own").parts is not None
    assert figures.figure(key) == "52.9 ± 6.0"  # over seeds alone 5.5


def test_a_stale_figure_is_replaced():
    mark = "<!-- record mnist/deep-domains; Norms; own; round -->"
    assert write_pages.filled(f"{mark}1<!-- end --> %") == f"{mark}88<!-- end --> %"


def test_no_interval_or_count_is_written_by_hand():
    for page in write_pages.pages():
        prose = write_pages.TABLE.sub("", figures.WRITTEN.sub("", page.read_text()))
        assert not re.search(r"\d\.\d+ ± \d|\b(\d+|none) of \d+ (published )?methods", prose), page


@pytest.mark.parametrize("place", ["digits/few", "networks/few", "clip/domains"])
def test_counts_are_of_the_stars_of_methods_that_send_something(place):
    text = (figures.TABLES / f"{place.replace('/', '-')}.md").read_text()
    starred = re.findall(r"^\| (.*?) +\|[^|]*\| +\+[^|]* \* \|", text, re.MULTILINE)
    published = {entry.title for entry in METHODS.values()}
    gains = str(len(published.intersection(starred)))  # nothing that is alone has a star
    assert figures.count(f"{place}; gains") == gains
    assert f">{gains} of " in figures.filled(f"<!-- count {place} -->99<!-- end -->")
