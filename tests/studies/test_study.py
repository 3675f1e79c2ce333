"""The program of our studies: each runs briefly, and tables come from committed records."""

import json
import re
import socket
import sys
from pathlib import Path

import pytest
import torch

import studies
import study
from fedprompt import compare
from fedprompt.compare import measure
from studies import STUDIES, pages
from studies.core import Machine

CONSTANT = pages.CONSTANT

PARTITIONS = {"codecs": "dirichlet", "privacy": "iid", "which-when": "example", "sizes": "digits"}
PARTITIONS |= {"digits": "few", "networks": "few", "clip": "few", "emoji": "4-shots"}
RANDOM = {"solar": "networks", "mnist": "deep-domains", "patches": "shots-4", "sizes": "solar"}
FEW = ["--shrink", "0.01", "--workers", "1"]
TWO = ["--study", "digits", "--partitions", "few", "--methods", "ditto,fedprox"]


def lines(folder):
    (path,) = (folder / "records").glob("*/*/records.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(folder, *flags):
    study.main([*FEW, *flags, "--out", str(folder)])
    return lines(folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", PARTITIONS)
def test_each_study_runs_briefly_with_all_its_rows(name, tmp_path):
    found = run(tmp_path, "--study", name, "--partitions", PARTITIONS[name])
    rows = [row.title for row in STUDIES[name].rows(PARTITIONS[name])]
    assert [record["row"] for record in found] == [CONSTANT, *rows]
    assert (tmp_path / f"{name}-shrunk-{PARTITIONS[name]}.md").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", RANDOM)
def test_studies_of_photographs_run_with_tiny_networks(name, tmp_path):
    partition = RANDOM[name]
    rows = ";".join(row.title for row in STUDIES[name].rows(partition)[:3])
    flags = ["--partitions", partition, "--rows", rows, "--weights", "random=tiny networks"]
    assert len(run(tmp_path, "--study", name, *flags)) == 4


def test_a_second_call_runs_nothing_and_an_own_method_adds_its_row(tmp_path):
    flags = ["--study", "digits", "--partitions", "few", "--methods"]
    first = run(tmp_path, *flags, "fedprox")
    assert run(tmp_path, *flags, "fedprox") == first
    mine = tmp_path / "mine.py"
    mine.write_text(
        "from fedprompt import methods\ndef mine(setting):\n    return methods.ditto(setting)\n"
    )
    again = run(tmp_path, *flags, f"fedprox,{mine}:mine")
    assert [record["row"] for record in again] == [CONSTANT, "FedProx", "Mine"]


def test_rows_have_the_values_of_the_committed_records():
    (row,) = [row for row in STUDIES["clip"].rows("dirichlet") if row.title == "PromptFL"]
    found = study.committed("clip").found
    known = [r for r in found if (r["partition"], r["row"]) == ("dirichlet", row.title)]
    assert study.recorded(row, "clip", "dirichlet").values == known[-1]["values"]


@pytest.mark.parametrize("name", ["clip", "solar", "ablations-fedl2g"])
def test_tables_are_made_from_committed_records_whatever_their_stamp(name, tmp_path):
    found = compare.Results.read(study.RECORDS / f"{name}.jsonl", bits=tmp_path)
    partition = next(iter(STUDIES[name].partitions))
    shown = pages.view(found, STUDIES[name], partition)
    text = pages.report(shown, name, STUDIES[name], partition)
    assert {len(seeds) for seeds in shown.by_row.values()} <= {5, 10}
    assert "Intervals are over seeds alone" in text
    assert all(title in text for title in shown.by_row)


@pytest.mark.slow
def test_a_recorded_run_has_the_same_figures(capsys):
    study.main(["--check", "1", "--study", "clip"])
    assert capsys.readouterr().out.rstrip().endswith("agrees")


@pytest.mark.parametrize(
    "place",
    [
        "digits/dirichlet",
        "solar/deep-labels",
        "privacy/iid",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("emoji/pairs", "mnist/depths")),
    ],
)
def test_images_are_divided_as_in_the_records(place):
    """The most frequent class needs no training, and its figures show another division."""
    name, partition = place.split("/")
    machine = Machine(weights={"random": Path()})
    problem = studies.problem(name, partition, machine)
    trial = problem.trial(partition, compare.Row(CONSTANT, ""), seed=1, machine=machine)
    now = measure.constant(trial).figures
    (old,) = (
        record
        for record in study.committed(name).found
        if (record["partition"], record["row"], record["seed"]) == (partition, CONSTANT, 1)
    )
    for figure in ("own", "own_balanced", "full", "balanced", "worst"):
        assert now[figure] == pytest.approx(old[figure], rel=1e-5), figure


def test_a_figure_that_differs_from_its_record_is_said(monkeypatch, capsys):
    def wrong(problem, rows, **how):
        found = {**study.committed("clip").found[0], "row": rows[0].title, "own": 2.0}
        return compare.Results([{**found, "processor": "other"}])

    monkeypatch.setattr(compare, "run", wrong)
    with pytest.raises(SystemExit, match="2"):
        study.main(["--check", "1", "--study", "clip"])
    said = capsys.readouterr()
    assert re.search(r"own 0\.\d+, now 2\.0", said.out)
    assert "figures differ from 1 records" in said.err


def _rank(rank, folder, port):
    from os import environ

    environ |= {"TORCHELASTIC_RUN_ID": "test", "MASTER_ADDR": "localhost", "WORLD_SIZE": "2"}
    environ |= {"MASTER_PORT": str(port), "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    study.main([*FEW[:2], *TWO, "--out", str(folder)])  # workers are left out


@pytest.mark.slow
def test_two_ranks_have_the_figures_of_one_process_bitwise(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        arguments = (tmp_path / "two", free.getsockname()[1])
    torch.multiprocessing.start_processes(_rank, arguments, 2, start_method="fork")
    one, two = run(tmp_path / "one", *TWO), lines(tmp_path / "two")
    assert two == one


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--partitions", "none"], "`--partitions` must name dirichlet, domains, few; got 'none'."),
        (["--methods", "coop"], "`--methods` must name "),
        (["--rows", "None"], "`--rows` must name "),
        (["--partitions", "few,few"], "`--partitions` must name each once; got 'few' twice."),
        (["--verify"], "`--verify` needs `--study` fedhpl, sgpt, fedl2g, fedotp; got 'digits'."),
        (["--tables", "--records", "none"], "`--records` must be a folder of records; got none."),
    ],
)
def test_a_wrong_flag_is_refused_in_one_line(flags, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        study.main([*flags])
    assert capsys.readouterr().err.startswith(f"study.py: {said}")


def test_the_program_has_the_help_of_its_flags(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["study.py", "--help"])
    with pytest.raises(SystemExit, match="0"):
        study.main()
    assert "--partitions" in capsys.readouterr().out
