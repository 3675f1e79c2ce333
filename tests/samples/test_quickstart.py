"""The quickstart learns, prints what a client sends, and draws a picture."""

import re
import runpy

import pytest
import torch


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run the program in an empty folder, and return its lines."""
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        runpy.run_module("fedprompt.samples", run_name="__main__")
    return capsys.readouterr().out.splitlines()


@pytest.mark.slow
def test_it_learns_and_draws_a_picture_where_it_runs(run, tmp_path):
    first, last = run
    found = re.fullmatch(r"accuracy (\d+)%, 10,804 bytes from a client", first)
    assert int(found[1]) >= 90
    assert last == "Picture: quickstart.png"
    assert (tmp_path / "quickstart.png").stat().st_size > 10_000
