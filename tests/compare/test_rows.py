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
    assert [Row.of(name).personalized for name in ("fedprox", "ditto", short)] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("families", "family", "expected"),
    [
        (("mixed models",), "one model", True),
        (("one model",), "one model", True),
        (("CLIP",), "one model", False),
        (("one model",), "mixed models", False),
        (("mixed models", "CLIP"), "CLIP", True),
    ],
)
def test_methods_of_mixed_models_run_where_all_clients_have_the_models_of_one(
    families, family, expected
):
    assert rows.fits(Entry("a", "A", short, families, (), {}, ""), family) == expected


def positional(setting, learning_rate=0.1):
    return methods.fedprox(setting)


def without_default(setting, *, learning_rate):
    return methods.fedprox(setting)


test_wrong_functions_are_refused = refused(globals())("""
Row.of(positional) -> CompareError: `learning_rate` of positional must be a keyword with a default,
Row.of(without_default) -> CompareError: `learning_rate` of without_default must be a keyword with
""")

FILE = """
from fedprompt import methods
from fedprompt.methods import fedprox, register
from fedprompt.methods.registry import LEARNING_RATE

def plain(setting, *, learning_rate=0.1):
    return helper(setting, learning_rate)

def helper(given, setting):
    return fedprox(given)

@register("My own", families=("CLIP",), search=LEARNING_RATE)
def other(given, *, learning_rate=0.5):
    return fedprox(given)
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    """A file of methods, whose folder and module are forgotten later."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setattr(rows, "SOURCES", {})
    monkeypatch.setattr(rows, "ENTRIES", {})
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def test_methods_of_a_file_are_registered_ones_and_those_whose_first_argument_is_a_setting(file):
    before = {**METHODS}
    found = rows.read_methods(file)
    assert list(found) == ["plain", "other"]
    assert before == METHODS
    assert sys.path[-1] == str(file.parent)
    assert sys.path.count(str(file.parent)) == 1
    names = [f"{file}:plain", f"{file}:other", "fedprox", f"{file}:plain"]
    assert rows.files(names) == [file]
    plain, other = rows.chosen([names[0], names[1], ""], "CLIP")
    assert plain == Row("Plain", "plain", {"learning_rate": 0.1}, make=found["plain"])
    assert other == Row("My own", "other", {"learning_rate": 0.5}, make=found["other"])
    assert plain.entry.search == other.entry.search == rows.LEARNING_RATE
    assert rows.code(plain) == rows.code(other)
    file.write_text(f"{FILE}\n# another text")
    again = rows.chosen(names[:1], "CLIP")[0]
    assert rows.code(again) != rows.code(plain)
    assert again.make is not plain.make


def test_another_process_gets_the_text_of_a_file(file, monkeypatch):
    (row,) = rows.chosen([f"{file}:plain"], "CLIP")
    code, sent = rows.code(row), pickle.dumps(row)
    file.unlink()
    for known in (rows.SOURCES, rows.ENTRIES):
        known.clear()
    found = pickle.loads(sent)
    assert (found.title, found.method, found.values) == (row.title, row.method, row.values)
    assert found.make is not row.make
    assert (found.make.__code__, rows.code(found)) == (row.make.__code__, code)
    assert pickle.loads(pickle.dumps(Row.of("fedprox"))) == Row.of("fedprox")


def test_a_file_that_cannot_be_imported_leaves_nothing(file):
    file.write_text(f"{FILE}\n1 / 0")
    before = {**METHODS}
    for _ in range(2):
        with pytest.raises(
            CompareError, match=r"mine.py cannot be imported: ZeroDivisionError: di"
        ):
            rows.read_methods(file)
    assert before == METHODS
    assert not rows.SOURCES
    assert not any(name.startswith("mine-") for name in sys.modules)
    for other in (file.with_suffix(".txt"), file.parent):
        with pytest.raises(CompareError, match="must name an existing Python file; got "):
            rows.read_methods(other)
