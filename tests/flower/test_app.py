"""The example app in this process: own files and folders, folders of nodes, and failed tests."""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

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
DEFAULTS = tomllib.loads((Path(task.__file__).parent / "pyproject.toml").read_text())
CONFIG = DEFAULTS["tool"]["flwr"]["app"]["config"] | {"rounds": 2, "newcomers": 0}


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    yield str(tmp_path / "mine.py")
    task.module_of.cache_clear()
    methods.METHODS.pop("registered", None)


def run(config, nodes=({}, {})):
    """Run the apps of the server and of nodes; return the last round in one process."""
    grid = InProcessGrid(Configured(config, nodes), range(len(nodes)))
    server_app.main(grid, SimpleNamespace(run_config=config, run_id=7))
    made = task.load(config)
    return None if any(nodes) else [*fp.run_rounds(made.method, made.federation)][-1]


class Configured:
    """The client app, whose context has the configurations of the run and of the node."""

    def __init__(self, config, nodes):
        self.config, self.nodes = config, nodes

    def __call__(self, message, context):
        client = context.node_config["partition-id"]
        context.run_config = self.config
        context.node_config = {**context.node_config, **self.nodes[client]}
        return client_app.app(message, context)


@pytest.mark.parametrize("name", ["plain", "registered"])
def test_a_method_of_a_file_runs_with_as_many_clients_as_shards(name, mine, tmp_path, capsys):
    now = run(CONFIG | {"method": f"{mine}:{name}"})
    found = fp.load_checkpoint(tmp_path / "fedprompt-7")
    assert_equal(tuple(found), tuple(now._replace(clients={})))
    said = capsys.readouterr().out
    assert f"{name}: clients classify" in said
    assert "a new client" not in said


def test_the_family_of_a_plain_function_is_that_of_its_setting(mine):
    families = [task.entry_of(f"{mine}:{name}").families for name in ("plain", "of_clip")]
    assert families == [("one model",), ("CLIP",)]


def test_personal_models_are_tested_at_their_nodes_and_the_best_round_is_saved(
    mine, tmp_path, capsys
):
    out = tmp_path / "out"
    run(CONFIG | {"method": "local", "out": str(out)})
    assert "local: clients classify" in capsys.readouterr().out
    best = fp.load_checkpoint(out / "server-best").server_round
    assert best <= fp.load_checkpoint(out / "server").server_round == 1


def test_a_failed_test_of_a_new_client_does_not_lose_the_run(mine, tmp_path, monkeypatch):
    monkeypatch.setattr(fp.Round, "model", None)
    with pytest.raises(TypeError):
        run(CONFIG | {"method": "fedprox", "newcomers": 1, "out": str(tmp_path / "out")})
    assert fp.load_checkpoint(tmp_path / "out/server").server_round == 1


def folder_of(root, *names):
    """Write 20 images of two brightnesses for each class."""
    for name in names:
        (root / name).mkdir(parents=True)
        for number in range(20):
            gray = (60 if name == "dark" else 200) + number
            Image.new("L", (16, 16), gray).save(root / name / f"{number}.png")
    return str(root)


def test_a_folder_is_divided_as_in_the_comparison(mine, tmp_path, capsys):
    data = folder_of(tmp_path / "photos", "bright", "dark")
    config = {"data": data, "division": "iid:2", "vit": "digits-S", "method": "fedprox"}
    now = run(CONFIG | config)
    assert_equal(fp.load_checkpoint(tmp_path / "fedprompt-7").server, now.server)
    assert "fedprox: clients classify" in capsys.readouterr().out


def test_each_node_may_have_a_folder_of_its_own_with_some_of_the_classes(mine, tmp_path, capsys):
    first = {"data": folder_of(tmp_path / "a", "bright", "dark")}
    second = {"data": folder_of(tmp_path / "b", "dark")}
    given = {"classes": "bright,dark", "vit": "digits-S", "method": "fedprox"}
    run(CONFIG | given, nodes=(first, second))
    assert "fedprox: clients classify" in capsys.readouterr().out
    with pytest.raises(ValueError, match=r"`classes` must have each class of .*; got none 'dark'"):
        task.load(CONFIG | given | {"classes": "bright,other"}, second | {"partition-id": 1})
    with pytest.raises(ValueError, match="`classes` must name the classes of all nodes"):
        task.load(CONFIG, second)


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
