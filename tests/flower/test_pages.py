"""The blocks of the reference page and the examples of the docstrings run."""

import doctest
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, RecordDict

import fedprompt as fp
from fedprompt import flower
from flower_grid import InProcessGrid
from signatures import unreadable

pytestmark = pytest.mark.flower


def test_the_blocks_of_the_reference_page_run(capsys, monkeypatch, tmp_path):
    """The page has a client app, a strategy, its loop, and a strategy that saves each round."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    page = Path(__file__).parents[2] / "docs" / "reference" / "flower.md"
    for block in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
        exec(compile(block, page, "exec"), names)
    for main in ("main", "main_with_a_loop", "main_of_a_long_run"):
        names[main](InProcessGrid(names["app"], range(3)), None)
    assert fp.load_checkpoint("checkpoint").server_round == 1
    draws = [
        fp.stream_generator(0, server_round=server_round, purpose="cohort")
        for server_round in range(2)
    ]
    drawn = [fp.sample_clients(range(3), size=2, generator=draw) for draw in draws]
    first = sum(10 * (client + 1) for client in drawn[0]) / 20
    weights = {client: 20 if client in drawn[0] else 10 for client in drawn[1]}
    second = first + sum(weight * (client + 1) for client, weight in weights.items()) / sum(
        weights.values()
    )
    shown = f"{torch.full((3,), second)}\n"
    assert capsys.readouterr().out == shown * 3
    assert len(names["ledger"].sent) == 8
    grid = InProcessGrid(names["private_app"], range(3))
    private = names["main_with_noise"](grid, None).server["values"]["head"]
    assert private.std() > 0
    assert private.norm() < 3  # two rounds of changes of norm 1 with a little noise
    context = Context(1, 1, {}, RecordDict(), {})
    grid = InProcessGrid(names["secret_app"], range(3))
    (found,) = names["main_with_secure_aggregation"](grid, context).values()
    *_, now = fp.run_rounds(names["method"], names["data"], [range(3)] * 2)
    assert found.numpy() == pytest.approx(now.server["values"]["head"].numpy(), abs=2e-3)


def test_help_prints_short_types_and_defaults_without_addresses():
    assert unreadable({name: getattr(flower, name) for name in flower.__all__}) == []


def test_the_examples_of_the_docstrings_run():
    names = {name: getattr(fp, name) for name in dir(fp) if name[0].isalpha()}
    names |= {"torch": torch, "RecordDict": RecordDict}
    names |= {"Expected": fp.wire.Expected, "Header": fp.wire.Header}
    names |= {name: getattr(flower, name) for name in flower.__all__}
    for name in flower.__all__:
        for test in doctest.DocTestFinder(recurse=False).find(
            getattr(flower, name), name, globs=names
        ):
            assert doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test).failed == 0, name
