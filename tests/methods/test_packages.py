"""Methods of other packages are found by the entry-point group ``fedprompt.methods``."""

import sys

import pytest

from fedprompt.methods import METHODS, registry

METHOD = """
from fedprompt.methods import fedprox, register

@register("FedPaper", families=("one model",))
def fedpaper(setting, *, learning_rate=0.01):
    return fedprox(setting, learning_rate=learning_rate)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a distribution with one module, as pip would."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))

    def install(name, code):
        (tmp_path / f"{name}.py").write_text(code)
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[fedprompt.methods]\n{name} = {name}\n")
        monkeypatch.delitem(sys.modules, name, raising=False)

    yield install
    for name in ("its_paper", "its_fault"):
        sys.modules.pop(name, None)


def test_a_method_of_an_installed_package_is_in_the_list(install):
    install("its_paper", METHOD)
    registry.import_packages()
    assert registry.METHODS["fedpaper"].title == "FedPaper"
    assert registry.METHODS["fedpaper"].defaults == {"learning_rate": 0.01}


def test_a_package_that_fails_is_warned_of_and_the_others_are_found(install):
    install("its_fault", "raise RuntimeError('no GPU')")
    install("its_paper", METHOD)
    text = r"^Methods of the package its_fault are left out: its_fault raised RuntimeError\('no GPU"
    with pytest.warns(UserWarning, match=text):
        registry.import_packages()
    assert "fedpaper" in registry.METHODS
