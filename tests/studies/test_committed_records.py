"""Committed records belong to the committed code, so that a study continues from them.

A change of this code makes its records useless. Run the study again, and remove the old lines.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from studies import compare, mechanisms
from studies.gallery import jobs, registry, tables
from studies.gallery.tasks import TASKS, Settings
from studies.mechanism_settings import SETTINGS as MECHANISMS
from studies.photo.runs import Run
from studies.photo.settings import SETTINGS as PHOTOGRAPHS
from studies.photo.settings import Sources

RESULTS = Path(__file__).parents[2] / "docs" / "results"
MEASURED = "0.2.0"  # the version of the library that made the records


@pytest.fixture(autouse=True)
def version_of_the_records(monkeypatch):
    monkeypatch.setattr(jobs, "version", lambda: MEASURED)


def committed(name: str, *keys: str) -> list[dict[str, Any]]:
    """Read a file of records; of those that agree in the keys, return one."""
    records = map(json.loads, (RESULTS / name).read_text().splitlines())
    return list({tuple(each[key] for key in (*keys, "digest")): each for each in records}.values())


def job_of(record: dict[str, Any], settings: Settings) -> tuple[Any, ...]:
    """Arguments of the job of a record; a trial has half of the rounds."""
    if record["trial"] is not None:
        settings = replace(settings, rounds=-(-settings.rounds // 2))
    path = registry.gallery()[record["method"]].path
    names = ("task", "partition", "seed", "trial", "values")
    return record["method"], str(path), *(record[name] for name in names), settings


@pytest.mark.parametrize("task", TASKS)
def test_of_the_gallery(task):
    stale = [
        record["method"]
        for record in committed(f"compare/{task}.jsonl", "method")
        if jobs.Job(*job_of(record, Settings())).digest != record["digest"]
    ]
    assert not stale


@pytest.mark.parametrize("task", TASKS)
def test_the_study_runs_nothing_again_and_writes_the_committed_tables(task, tmp_path, monkeypatch):
    names = {record["method"] for record in committed(f"compare/{task}.jsonl", "method")}
    methods = [name for name in registry.gallery() if name in names]
    flags = ["--task", task, "--methods", ",".join(methods), "--workers", "1"]
    monkeypatch.setattr("sys.argv", ["compare.py", *flags, "--out", str(tmp_path)])
    monkeypatch.setattr(jobs, "run", lambda job, _: pytest.fail(f"{job} would run"))
    monkeypatch.setattr(tables, "figure", lambda *_: None)
    compare.main()
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(written) == 7  # Markdown and CSV for each of three settings; hyperparameters
    assert written == {name: (RESULTS / "compare" / name).read_text() for name in written}


@pytest.mark.parametrize("task", ["solar", "mnist"])
def test_of_photographs(task):
    stale = []
    for record in committed(f"photographs/{task}.jsonl", "partition", "method"):
        own = job_of(record, PHOTOGRAPHS[record["partition"]].budget(quick=False))
        if Run(*own, Sources()).digest != record["digest"]:
            stale.append((record["partition"], record["method"]))
    assert not stale


def test_of_the_mechanisms():
    rows = {(name, row.title): row for name, each in MECHANISMS.items() for row in each.rows}
    records = committed("mechanisms.jsonl", "setting", "row")
    stale = [
        (record["setting"], record["row"])
        for record in records
        if mechanisms.digest(rows[record["setting"], record["row"]]) != record["digest"]
    ]
    assert not stale
    assert {record["setting"] for record in records} == MECHANISMS.keys()
