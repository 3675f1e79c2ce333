"""Methods by their names, from a file, or as functions, and the values that they are given."""

import pickle
import sys

import pytest

from comparisons import digits
from fedprompt import compare, methods
from fedprompt.compare import rows
from fedprompt.compare.command import split
from fedprompt.compare.trials import CompareError
from refusals import refused

TEXT = """
from fedprompt import methods
def first(setting, *, learning_rate=0.1):
    return methods.fedprox(setting, learning_rate=learning_rate)
@methods.register("Second one", families=("CLIP",))
def second(setting):
    return methods.promptfl(setting)
def helper(values):
    return values
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(TEXT)
    return path


def chosen(*names, families=("one model",)):
    return rows.chosen(names, families)


def test_values_are_given_behind_the_name():
    (row,) = chosen("fedprox:learning_rate=0.003,proximal_weight=1e-1")
    assert (row.title, row.given) == (
        "FedProx (learning_rate 0.003, proximal_weight 0.1)",
        ("learning_rate", "proximal_weight"),
    )
    assert row.values == {"learning_rate": 0.003, "proximal_weight": 0.1}
    assert len(chosen("fedprox", "fedprox:learning_rate=0.003")) == 2


def test_training_alone_is_named_by_how_much_longer_it_takes():
    once, twice = (rows.alone("one model", times).title for times in (1, 2))
    assert (once, twice) == (rows.ALONE.title, f"{rows.ALONE.title}, 2 times as long")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("learning_rate=x", "learning_rate of fedlora must be of type float, as 0.01; got 'x'"),
        ("learning_rate=", "learning_rate of fedlora must be of type float"),
        ("learning_rate=inf", "learning_rate of fedlora must be of type float"),
        ("rank=1.5", "rank of fedlora must be of type int, as 2; got '1.5'"),
        ("rank=True", "rank of fedlora must be of type int"),
        ("rank=4, learning_rate=1", "rank of fedlora must be of type int"),
        ("rank=4,rank=8", "a value of fedlora once; got rank=8"),
        ("size=4", "values of fedlora: learning_rate, rank.*; got size"),
    ],
)
def test_a_value_of_another_name_or_type_is_refused(given, message):
    with pytest.raises(CompareError, match=message):
        chosen(f"fedlora:{given}")
    assert chosen("fedlora:learning_rate=1")[0].values["learning_rate"] == 1


def test_commas_divide_methods_and_values():
    text = "fedprox:learning_rate=0.1,proximal_weight=1, mine.py:f ,a/b.py:g:rank=2,size=3,ditto"
    assert split(text) == [
        "fedprox:learning_rate=0.1,proximal_weight=1",
        *("mine.py:f", "a/b.py:g:rank=2,size=3", "ditto"),
    ]
    sizes = "fedlora:sizes={0: 1,1: (2,3)},rank=8"  # commas within brackets divide nothing
    assert split(f"local,{sizes}, sgpt:blocks=[['head'],['groups']]") == [
        *("local", sizes, "sgpt:blocks=[['head'],['groups']]")
    ]
    assert chosen(sizes)[0].values["sizes"] == {0: 1, 1: (2, 3)}
    assert chosen(sizes)[0].personalized  # clients have models of their own sizes


def test_methods_of_a_file_are_its_functions_of_a_setting(file):
    first, second = chosen(
        f"{file}:first:learning_rate=1", f"{file}:second", families=rows.FAMILIES
    )
    assert (first.title, first.values, first.family) == (
        "First (learning_rate 1)",
        {"learning_rate": 1},
        "one model",
    )
    assert (second.title, second.family) == ("Second one", "CLIP")
    assert "second" not in methods.METHODS
    with pytest.raises(CompareError, match=r"'helper' is no method of .*; there are first, second"):
        chosen(f"{file}:helper")


def test_rows_of_a_file_can_be_sent_by_its_text(file):
    (row,) = chosen(f"{file}:first")
    sent = pickle.dumps(row)
    file.write_text("def first(setting): raise ValueError")
    again = pickle.loads(sent)
    assert (again.title, again.values, again.stamp()) == (row.title, row.values, row.stamp())


def test_a_file_that_fails_is_named_by_its_line(tmp_path):
    path = tmp_path / "bad.py"
    for text, said in (
        ("def (", "line 1 cannot be imported: SyntaxError"),
        ("1 / 0", "ZeroDivision"),
    ):
        path.write_text(text)
        with pytest.raises(CompareError, match=said):
            chosen(f"{path}:a")
    assert not [name for name in sys.modules if name.startswith("bad-")]


def test_a_method_that_does_not_fit_is_named_before_anything_runs(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def wrong(setting):\n    return 1 / 0\n")
    with pytest.raises(
        CompareError, match=r"do not fit\. wrong: division by zero \(mine\.py, line 2\)"
    ):
        compare.run(digits(), [f"{path}:wrong"], seeds=1)


def learning(setting, learning_rate):
    return methods.fedprox(setting)


def fedprox(setting):
    return methods.fedprox(setting)


test_refusals = refused(globals())("""
chosen() -> CompareError: `methods` must name at least one method.
chosen("fedprx") -> CompareError: 'fedprx' is no method of the gallery; there are fedprox
chosen("coop") -> CompareError: `methods` must be for one model; got coop, which is for CLIP.
chosen("fedprox", "fedprox") -> CompareError: `methods` must name each once; got 'fedprox' twice.
chosen("fedprox:rank=2") -> CompareError: `methods` must give values of fedprox: learning_rate
chosen("missing.py:a") -> CompareError: `methods` must name an existing Python file; got missing.py.
chosen(3) -> TypeError: `methods` must be names or functions
chosen(learning) -> CompareError: `learning_rate` of learning must be a keyword with a default
chosen(fedprox) -> CompareError: `methods` must have new names; got fedprox.
compare.run(digits(), ["fedprox"], seeds=0) -> ValueError: `seeds` must be at least 1; got 0.
compare.run(digits(), ["fedprox"], tune=0) -> ValueError: `tune` must be at least 1; got 0.
compare.run(digits(), ["fedprox"], shrink=0) -> ValueError: `shrink` must be above 0
compare.run(digits(), ["fedprox"], device="cdua") -> CompareError: `device` must be one of this
compare.run(digits(), ["fedprox"], again=1) -> TypeError: `again` must be True or False
compare.run(1, ["fedprox"]) -> TypeError: `problem` must be one of `compare.folder`
""")
