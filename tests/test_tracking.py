"""The blocks of loggers on the page "Track a run", with stand-ins that write down all calls."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

PAGE = (Path(__file__).parents[1] / "docs" / "how-to" / "tensorboard.md").read_text()
SETUP, *BLOCKS = re.findall(r"^```py(?:thon)?\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
ROUNDS = 2


def stand_ins(logged, closed):
    """Modules of the loggers, of which each has the calls and the arguments of the real one."""

    def log(figures, step=None):
        logged[step] = dict(figures)

    def finish():
        closed.append(True)

    def start_run():
        return nullcontext(closed.append(True))

    class SummaryWriter:
        def __init__(self, log_dir=None):
            self.log_dir = log_dir

        def add_scalar(self, tag, scalar_value, global_step=None):
            logged.setdefault(global_step, {})[tag] = scalar_value

        def close(self):
            finish()

    def started(project, config, id, resume):
        assert (config, resume) == ({"rounds": ROUNDS}, "allow")
        return SimpleNamespace(log=log, finish=finish)

    return {
        "wandb": SimpleNamespace(init=started),
        "torch.utils.tensorboard": SimpleNamespace(SummaryWriter=SummaryWriter),
        "mlflow": SimpleNamespace(start_run=start_run, log_params=dict, log_metrics=log),
    }


@pytest.fixture(scope="module")
def names():
    names = {}
    exec(SETUP, names)
    first, *rest = names["tracked"]()
    now = next(names["fp"].run_rounds(names["method"], names["federation"]))
    assert [number for number, _ in names["tracked"](start=now)] == [1]  # a resumed run
    figures = [first, *rest]
    return names | {"expected": dict(figures), "tracked": lambda: iter(figures)}


@pytest.mark.parametrize("package", ["wandb", "torch.utils.tensorboard", "mlflow"])
def test_each_logger_gets_the_figures_of_all_rounds(package, names, monkeypatch):
    logged, closed = {}, []
    monkeypatch.setitem(sys.modules, package, stand_ins(logged, closed)[package])
    (block,) = [each for each in BLOCKS if package in each]
    exec(block, dict(names))
    assert closed == [True]
    assert logged == names["expected"]
    assert len(logged) == ROUNDS
    first, last = logged[0], logged[1]
    assert last["bytes_up"] == 2 * first["bytes_up"] > 0
    assert 0 < last["movement"] != first["movement"] > 0
