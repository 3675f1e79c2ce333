"""The jaxtyping import hook, parallel runs, the names in doctests, and the markers."""

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch  # the process that only starts the workers does without it

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network

# An int is accepted as a float, as in every type checker.
CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"
# torch.compile cannot trace the checks, and a benchmark must not time them.
WITHOUT_HOOK = "benchmark"
MOST_WORKERS = 4


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shapes", action="store_true", help="check the shapes of all signatures in every call"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole default suite on several cores; any narrower call stays in one process."""
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS
    default = config.getoption("markexpr").startswith("not slow")
    worker = "PYTEST_XDIST_WORKER" in os.environ  # a worker must not start workers
    chosen = config.getoption("numprocesses", None) is not None or config.getoption("usepdb")
    if whole and default and not (worker or chosen) and not config.getoption("collectonly"):
        config.option.numprocesses = min(MOST_WORKERS, len(os.sched_getaffinity(0)))
        config.option.dist = "worksteal"
        config.option.benchmark_disable = True  # pytest-benchmark warns about workers otherwise


class DoctestNames:
    """Plugin for the doctests of the package, which do not see the fixtures of this file."""

    @pytest.fixture(autouse=True)
    def names(self, doctest_namespace: dict[str, object]) -> None:
        """Names that the examples in docstrings use without importing them."""
        import numpy
        import torch

        import fedprompt
        from fedprompt import samples

        doctest_namespace.update(torch=torch, nn=torch.nn, np=numpy, samples=samples)
        for name in fedprompt.__all__:
            thing = doctest_namespace[name] = getattr(fedprompt, name)
            if isinstance(thing, ModuleType):
                doctest_namespace.update({inner: getattr(thing, inner) for inner in thing.__all__})


def pytest_configure(config: pytest.Config) -> None:
    """With ``--shapes``, check the shapes of all signatures in every call, by the import hook."""
    config.pluginmanager.register(DoctestNames())
    # Python must collect what was frozen; otherwise some extensions report leaks at the exit. The
    # last cleanup is the first that is added, so the collections of pytest itself stay short.
    config.add_cleanup(gc.unfreeze)
    selected = config.getoption("markexpr")
    if config.getoption("shapes") and not selected.startswith(WITHOUT_HOOK):
        from jaxtyping import install_import_hook

        install_import_hook("fedprompt", CHECKER)


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Prepare a process that runs tests itself; the workers do so if there are any."""
    if session.config.getoption("dist", "no") != "no":
        return (yield)
    import torch
    from hypothesis import find, settings
    from hypothesis.strategies import just

    torch.set_num_threads(1)  # the models are tiny, so more threads do not help
    # Hypothesis creates its generator with the first example, and looks for the owner among all
    # objects. Of what is frozen, it would not find the owner.
    find(just(0), lambda _: True, settings=settings(database=None))
    gc.disable()  # imported modules and collected tests live as long as the process
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect the tests of Flower only when they are selected, because they import flwr."""
    selected = config.getoption("markexpr").startswith("flower")
    needs_flower = collection_path.is_relative_to(Path(__file__).parent / "flower")
    return True if needs_flower and not selected else None


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one data set, ``colors``."""
    from colors import write_images

    root = tmp_path_factory.mktemp("images")
    write_images(root, "colors")
    return root


@pytest.fixture(autouse=True)
def _own_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Disable the import hook for tests marked `bad_input` or `unhooked`."""
    from jaxtyping import config

    if not any(request.node.get_closest_marker(marker) for marker in ("bad_input", "unhooked")):
        yield
        return
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


# A process that has imported torch runs each program in a copy of itself, made in milliseconds.
COPIES = """
import json, os, sys, torch
for line in sys.stdin:
    read, write = os.pipe()
    if os.fork() == 0:
        os.dup2(write, 1)
        exec(json.loads(line), {"__name__": "__main__"})
        sys.stdout.flush()
        os._exit(0)
    os.close(write)
    with open(read) as printed:
        text = printed.read()
    _, status = os.wait()
    print(json.dumps([text, os.waitstatus_to_exitcode(status)]), flush=True)
"""


@pytest.fixture(scope="session")
def in_new_process() -> Iterator[Callable[[str], str]]:
    """Return a function that runs a program where only torch is imported, and gives its output."""
    command = [sys.executable, "-c", COPIES]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:

        def run(program: str) -> str:
            print(json.dumps(program), file=process.stdin, flush=True)
            printed, status = json.loads(process.stdout.readline())
            assert status == 0, printed
            return printed

        yield run


@pytest.fixture
def generator() -> "torch.Generator":
    """A new random generator with the same seed for every test."""
    import torch

    return torch.Generator().manual_seed(0)


@pytest.fixture
def float64() -> Iterator[None]:
    """Make federations and models in float64.

    In float32, two orders of a sum differ by up to 5e-4 of an entry after two steps in a context:
    its tokens are small, and the first norm of the tower divides by their size. The order depends
    on the processor.
    """
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def new_models() -> Iterator[None]:
    """Give a test that changes frozen models new ones, and the tests after it, too."""
    import tiny_federations

    tiny_federations.forget_models()
    yield
    tiny_federations.forget_models()
