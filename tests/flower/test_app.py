"""The example app in this process: a file of one's own, no new clients, and a failed evaluation."""

from types import SimpleNamespace

import pytest

import client_app
import fedprompt as fp
import server_app
import task
from fedprompt import methods
from flower_grid import InProcessGrid
from flower_runs import assert_equal

pytestmark = pytest.mark.flower

MINE = """
from fedprompt import methods


@methods.register("Registered", families=("CLIP",))
def registered(setting):
    return methods.promptfl(setting, learning_rate=0.02)


def plain(setting, *, rate=0.02):
    return methods.fedprox(setting, learning_rate=rate)


def of_clip(setting: methods.ClipSetting):
    return methods.promptfl(setting)


number = 3
"""
CONFIG = {"clients": 2, "cohort": 2, "rounds": 2, "newcomers": 0, "out": ""}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    yield str(tmp_path / "mine.py")
    task.module_of.cache_clear()
    methods.METHODS.pop("registered", None)


def run(config):
    """Run the apps of the server and of two nodes; return the last round in one process."""
    grid = InProcessGrid(Configured(config), range(2))
    server_app.main(grid, SimpleNamespace(run_config=config, run_id=7))
    method, federation, *_ = task.load(config)
    *_, now = fp.run_rounds(method, federation)
    return now


class Configured:
    """The client app, whose context has the configuration of the run."""

    def __init__(self, config):
        self.config = config

    def __call__(self, message, context):
        context.run_config = self.config
        return client_app.app(message, context)


@pytest.mark.parametrize("name", ["plain", "registered"])
def test_a_method_of_a_file_runs_with_as_many_clients_as_shards(name, mine, tmp_path, capsys):
    now = run(CONFIG | {"method": f"{mine}:{name}"})
    found = fp.load_checkpoint(tmp_path / "fedprompt-7")
    assert_equal(tuple(found), tuple(now._replace(clients={})))
    assert f"{name}: a client classifies" in capsys.readouterr().out


def test_the_family_of_a_plain_function_is_that_of_its_setting(mine):
    families = [task.entry_of(f"{mine}:{name}").families for name in ("plain", "of_clip")]
    assert families == [("one model",), ("CLIP",)]


def test_models_on_nodes_are_not_tested_and_a_failed_test_does_not_lose_the_run(
    mine, tmp_path, capsys, monkeypatch
):
    run(CONFIG | {"method": "local"})
    assert "local: the models of clients are on their nodes" in capsys.readouterr().out
    monkeypatch.setattr(fp.Round, "model", None)
    with pytest.raises(TypeError):
        run(CONFIG | {"method": "fedprox", "out": str(tmp_path / "out")})
    assert fp.load_checkpoint(tmp_path / "out/server").server_round == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "none.py:plain",
            "`method` must name a file next to task.py, or its full path; got .*none.py",
        ),
        ("MINE:number", "`method` must name a function of .*mine.py; got 'number'"),
        ("fedprocks", "`method` must be one of .*, or FILE:NAME; got 'fedprocks'"),
    ],
)
def test_a_wrong_name_is_refused(name, message, mine):
    with pytest.raises(ValueError, match=message):
        task.load(CONFIG | {"method": name.replace("MINE", mine)})
