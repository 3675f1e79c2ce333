"""The jaxtyping import hook, the doctest names, and what markers do."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may need the network
torch.set_num_threads(1)  # tiny models: more threads only wait for one another

CHECKER = "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))"  # an int is a float, as for every type checker
WITHOUT_HOOK = (
    "compiled",
    "benchmark",
)  # torch.compile cannot trace the checks, and a benchmark must not time them


def pytest_configure(config: pytest.Config) -> None:
    """Check every shape that a signature states, in every call that a test makes."""
    asked = config.getoption("markexpr")
    if asked == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    if not asked.startswith(WITHOUT_HOOK):
        from jaxtyping import install_import_hook

        install_import_hook("fedprompt", CHECKER)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Flower's tests import flwr, which is installed where they are asked for."""
    return (
        True
        if collection_path.name == "test_flower.py" and config.getoption("markexpr") != "flower"
        else None
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one data set, ``colors``."""
    from colors import write_images

    root = tmp_path_factory.mktemp("images")
    write_images(root, "colors")
    return root


@pytest.fixture(autouse=True)
def _own_errors(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let tests marked `bad_input` see the library's own errors instead of the hook's; `unhooked` ones have other reasons."""
    from jaxtyping import config

    if not any(request.node.get_closest_marker(marker) for marker in ("bad_input", "unhooked")):
        yield
        return
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True)
def _doctest_names(doctest_namespace: dict[str, object]) -> None:
    """What every example in a docstring may use without importing it."""
    import fedprompt

    doctest_namespace.update(
        torch=torch,
        nn=nn,
        np=np,
        **{name: getattr(fedprompt, name) for name in dir(fedprompt) if name[0].isalpha()},
    )


@pytest.fixture
def generator() -> torch.Generator:
    """A fresh random stream; the same for every test."""
    return torch.Generator().manual_seed(0)
