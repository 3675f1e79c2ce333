"""Rows: the function of each method, and files of methods."""

import pickle
import sys

import pytest

from fedprompt import methods
from fedprompt.compare import rows
from fedprompt.compare.rows import Row
from fedprompt.compare.trials import CompareError
from fedprompt.methods import METHODS, Entry
from refusals import refused


def installed(setting, *, learning_rate=0.3, mu=2.0):
    return methods.fedprox(setting)


def short(setting):
    return methods.fedprox(setting)


def test_only_functions_of_a_user_or_of_a_package_are_part_of_a_row(monkeypatch):
    """Records of the library's methods name no code."""
    entry = Entry("installed", "Installed", installed, ("CLIP",), (), {}, "")
    monkeypatch.setitem(METHODS, "installed", entry)
    monkeypatch.setattr(rows, "ENTRIES", {})
    usual = METHODS["fedprox"].defaults
    expected = {
        "fedprox": Row("FedProx", "fedprox", usual),
        methods.fedprox: Row("FedProx", "fedprox", usual),
        "longer": Row("Training alone", "longer", {"learning_rate": 0.01, "times": 1}),
        "installed": Row("Installed", "installed", entry.defaults, make=installed),
        installed: Row("Installed", "installed", entry.defaults, make=installed),
        short: Row("Short", "short", {}, make=short),
    }
    for method, row in expected.items():
        assert Row.of(method) == row
        assert (rows.code(row) is None) == (row.make is None)
        assert row.entry.title == row.title
    assert Row.of(installed, mu=3.0).values == {"learning_rate": 0.3, "mu": 3.0}
    found = rows.entry_of(short)
    assert (found.search, found.families, found.traits) == ({}, rows.FAMILIES, ("personalized",))
    assert rows.entry_of(short) is found
    assert "short" not in METHODS
    kinds = [Row.of(name).personalized for name in ("fedprox", "ditto", short)]
    assert kinds == [False, True, True]


def positional(setting, learning_rate=0.1):
    return methods.fedprox(setting)


def without_default(setting, *, learning_rate):
    return methods.fedprox(setting)


test_wrong_functions_are_refused = refused(globals())("""
Row.of(positional) -> CompareError: `learning_rate` of positional must be a keyword with a default,
Row.of(without_default) -> CompareError: `learning_rate` of without_default must be a keyword with
""")

FILE = """
from fedprompt.methods import fedprox, register

def plain(setting, *, learning_rate=0.1):
    return helper(setting, learning_rate)

def helper(given, setting):
    return fedprox(given)

@register("My own", families=("CLIP",))
def other(given, *, learning_rate=0.5):
    return fedprox(given)
"""


def test_another_process_gets_the_text_of_a_file_which_registers_nothing(tmp_path, monkeypatch):
    path, before = tmp_path / "mine.py", {**METHODS}
    others = {name: each for name, each in sys.modules.items() if not name.startswith("mine-")}
    for name, value in (("path", [*sys.path]), ("modules", others)):
        monkeypatch.setattr(sys, name, value)
    for name in ("SOURCES", "ENTRIES"):
        monkeypatch.setattr(rows, name, {})
    path.write_text(f"{FILE}\n1 / 0")
    for _ in range(2):
        with pytest.raises(
            CompareError, match=r"mine.py cannot be imported: ZeroDivisionError: di"
        ):
            rows.read_methods(path)
    assert not [name for name in (*rows.SOURCES, *sys.modules) if name.startswith("mine-")]
    path.write_text(FILE)
    plain, other = rows.chosen([f"{path}:plain", f"{path}:other", ""], "CLIP")
    assert list(rows.read_methods(path)) == ["plain", "other"]
    assert before == METHODS
    assert sys.path.count(str(tmp_path)) == 1
    assert rows.files([f"{path}:plain", "fedprox", f"{path}:other"]) == [path]
    assert (plain.title, plain.values) == ("Plain", {"learning_rate": 0.1})
    assert (other.title, other.entry.families) == ("My own", ("CLIP",))
    code, sent = rows.code(plain), pickle.dumps(plain)
    assert code == rows.code(other)
    path.write_text(f"{FILE}\n# another text")
    assert rows.code(*rows.chosen([f"{path}:plain"], "CLIP")) != code
    path.unlink()
    rows.SOURCES.clear()
    rows.ENTRIES.clear()
    found = pickle.loads(sent)
    assert found.make is not plain.make
    assert (rows.code(found), found.make.__code__) == (code, plain.make.__code__)
    assert (found.title, found.method, found.values) == (plain.title, "plain", plain.values)
