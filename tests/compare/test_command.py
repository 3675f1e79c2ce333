"""The command: its flags become the arguments of a folder and of a run, and its end is a status."""

import os
import sys
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from fedprompt.compare import command, ranks

pytestmark = pytest.mark.unhooked  # a text takes the place of a problem

USUAL = {
    **{"vit": None, "clip": None, "clients": None, "layout": None, "size": None, "shots": None},
    **{"base_to_new": False, "leave_one_out": False, "test": None, "newcomers": 0, "rounds": 10},
    **{"epochs": None, "steps": None, "batch_size": None, "cohort_size": None, "autocast": None},
    **{"skip": False, "template": "a photo of a {}.", "allow": [], "max_pixels": 180_000_000},
}
FLAGS = """--clip net=file --clients iid:4 --layout class --size 48 --shots 5 --base-to-new
--leave-one-out --test far --newcomers 2 --rounds 3 --steps 4 --batch-size 6 --cohort-size 7
--autocast bfloat16 --skip-damaged --max-pixels 9000 --allow a,b --seeds 5 --tune 8 --workers 9
--shrink 0.5 --out o --again"""
GIVEN = {
    **{"clip": "net=file", "clients": "iid:4", "layout": "class", "size": 48, "shots": 5},
    **{"base_to_new": True, "leave_one_out": True, "test": Path("far"), "newcomers": 2},
    **{"rounds": 3, "steps": 4, "batch_size": 6, "cohort_size": 7, "autocast": torch.bfloat16},
    **{"skip": True, "template": "{}!", "cache": Path("o/cache"), "allow": ["a", "b"]},
    "max_pixels": 9000,
}


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """Arguments of the functions that the command calls."""
    found = []

    @wraps(command.folder)
    def folder(*paths, say, **given):
        say("read")
        found.append((*paths, given))
        return "problem"

    def run(*given, **how):
        found.append((*given, how))
        return SimpleNamespace(failed={}, folder="there")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "folder", folder)
    monkeypatch.setattr(command, "run", run)
    monkeypatch.setattr(os, "cpu_count", lambda: 77)
    return found


def test_flags_are_the_arguments_of_the_folder_and_of_the_run(calls, capsys):
    command.main([*FLAGS.split(), "my photos", "--template", "{}!", "--methods", "promptfl, coop"])
    folder, run = calls
    assert folder == (Path("my photos"), {**USUAL, **GIVEN})
    how = {"seeds": 5, "out": Path("o"), "tune": 8, "device": "cpu", "shrink": 0.5, "workers": 9}
    line = "fedprompt compare " + " ".join(FLAGS.split())
    line += " 'my photos' --template '{}!' --methods 'promptfl, coop'"
    how |= {"again": True, "command": line}
    assert run == ("problem", ["promptfl", "coop"], how)
    assert capsys.readouterr().out.startswith("read\n\nnamespace(")


def test_flags_that_are_left_out_have_the_values_of_the_page(calls, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["fedprompt", "a/photos", "--vit=net", "--methods=fedprox"])
    command.main()
    (place, given), (*_, how) = calls
    out = how["out"]
    assert (place, out) == (Path("a/photos"), Path("photos-results"))
    assert given == USUAL | {"vit": "net", "cache": out / "cache"}
    cores = len(os.sched_getaffinity(0))
    usual = {"seeds": 3, "tune": 1, "device": "cpu", "shrink": 1.0, "again": False}
    line = "fedprompt a/photos --vit=net --methods=fedprox".replace("fedprompt", command.NAME)
    assert how == usual | {"out": out, "workers": cores, "command": line}


@pytest.mark.parametrize(("rank", "printed"), [(0, "read\n"), (1, "")])
def test_one_rank_prints(rank, printed, calls, monkeypatch, capsys):
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(ranks, "rank", lambda: rank)
    command.main(["photos", "--vit", "net", "--methods", "fedprox"])
    said = capsys.readouterr().out
    assert said.startswith(printed)
    assert bool(said) == (rank == 0)


def test_a_method_that_failed_gives_status_1(calls, monkeypatch):
    monkeypatch.setattr(command, "run", lambda *_, **how: SimpleNamespace(failed={"A"}, folder=""))
    with pytest.raises(SystemExit, match="1"):
        command.main(["photos", "--vit", "net", "--methods", "fedprox"])


def test_an_error_is_one_line_in_the_words_of_the_command(calls, monkeypatch, capsys):
    flags = ["photos", "--vit", "net", "--methods", "fedprox"]
    for text, line in ((" `skip=True` leaves\nit", "--skip-damaged leaves it"), ("", "ValueError")):
        monkeypatch.setattr(command, "run", Mock(side_effect=ValueError(text)))
        with pytest.raises(SystemExit, match="2"):
            command.main(flags)
        assert capsys.readouterr().err == f"fedprompt compare: {line}\n"
    calls.clear()
    range_of = "argument --shrink: must be above 0 and at most 1; got"
    for given, line in (
        ([*flags, "--shrink", "x"], f"{range_of} x"),
        ([*flags, "--shrink", "0"], f"{range_of} 0"),
        ([*flags, "--shrink", "1.5"], f"{range_of} 1.5"),
        (["a", *flags[3:]], "one of the arguments --vit --clip is required"),
        (flags[:3], "the following arguments are required: --methods"),
        (["", *flags[1:]], "argument folder: must not be empty"),  # and not this folder
        ([*flags, "--device", "cdua"], "--device must be one of this machine; got cdua: Expected "),
        ([*flags, "--allow"], "argument --allow: expected one argument"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(given)
        assert capsys.readouterr().err.startswith(f"fedprompt compare: {line}")
    assert not calls  # nothing is read
