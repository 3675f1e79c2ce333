"""Every method of the gallery is short, described and self-contained."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

from fedprompt.methods import METHODS, fedprox, register, registry
from tiny_federations import federation_of, last, mixed_federation

FILES = sorted({Path(inspect.getfile(inspect.unwrap(method.make))) for method in METHODS.values()})
FAMILIES = {"one model", "mixed models", "CLIP"}
TRAITS = {"personalized", "public data", "different models", "private", "adapted"}
ALLOWED = {"collections", "copy", "dataclasses", "functools", "itertools", "math", "typing"}
ALLOWED |= {"einops", "fedprompt", "jaxtyping", "numpy", "torch"}
RUNS = [(name, family) for name, method in METHODS.items() for family in method.families]


EXTENDS = {
    "fedivlp": "fedmaple", "flexlora": "fedex_lora", "flora": "fedex_lora",
    "fedmvp": "fedmaple", "fedtgp": "fedproto", "hetlora": "fedlora", "promptfl_fedamp": "fedamp",
    "promptsrc": "fedivlp",
}  # fmt: skip
"""Method from which a file takes a class or a server."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_imports_shared_parts_and_no_other_method_but_the_one_that_it_extends(path):
    shared = {
        "models",
        "registry",
        "setting",
        "sizes",
        "steps",
        "whole_networks",
        EXTENDS.get(path.stem),
    }
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            assert name.split(".")[0] in ALLOWED, name
            if name.startswith("fedprompt.methods"):
                assert name.rpartition(".")[2] in shared, name
            assert "._" not in name
    assert not re.search(r"\bfp\.(\w+\.)*_", path.read_text())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_docstring_gives_the_source_what_is_sent_the_deviations_and_a_dated_comparison(path):
    text = ast.get_docstring(ast.parse(path.read_text()))
    assert re.search(r"\b(19|20)\d\d\b", text) or path.stem in ("local", "head", "zero_shot")
    parts = r"\nUp: .*Down: .*\n\nDeviations: .*\n\nCompared: .*\s\(20\d\d-[01]\d\)\.$"
    assert re.search(parts, text, re.DOTALL)


@pytest.mark.parametrize("name", METHODS)
def test_ranges_and_traits_are_those_of_the_method(name):
    method = METHODS[name]
    assert set(method.traits) <= TRAITS
    assert set(method.families) <= FAMILIES
    assert set(method.search) <= set(method.defaults)
    for key, values in method.search.items():
        low, high = values if isinstance(values, tuple) else (1, 2)
        assert 0 < low < high, key
        inside = values if isinstance(values, list) else [low, high]
        default = method.defaults[key]
        assert default in inside or min(inside) <= default <= max(inside), key


@pytest.mark.parametrize("name", [name for name, family in RUNS if family != "CLIP"])
def test_several_trunks_are_refused_by_the_methods_of_one_model_alone(name):
    method, made = METHODS[name], mixed_federation()
    if "different models" in method.traits:
        method.make(made)
        return
    with pytest.raises(ValueError, match=r"^`trunks` must have one trunk, .*; got 2\.$"):
        method.make(made)


@pytest.mark.parametrize("name", ["ditto", "fedkd", "fedtpg", "fml"])
def test_clients_count_equally_where_the_code_of_the_authors_does_so(name):
    found = []
    for count in (lambda client: 1, lambda client: 10**client):
        made = federation_of(METHODS[name], METHODS[name].families[0], rounds=1)
        made.num_examples = count
        found.append(last(METHODS[name].make, made).received(5))
    assert parameters_equal(*found)


def parameters_equal(first, second):
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


CELL = """
from fedprompt.methods import register

@register({title!r}, families=["one model"])
def edited(setting): ...
"""


def test_a_cell_that_runs_again_replaces_its_method(monkeypatch):
    monkeypatch.setattr(registry, "METHODS", dict(METHODS))
    for title in ("First", "Second"):
        exec(CELL.format(title=title), {"__name__": "notebook"})
        assert registry.METHODS["edited"].title == title
    with pytest.raises(ValueError, match="`name` must be new among the methods; got 'edited'"):
        exec(CELL.format(title="Third"), {"__name__": "another"})
    with pytest.raises(TypeError, match="`edited` must return a Method; got None"):
        registry.METHODS["edited"].make(None)


@pytest.mark.bad_input
def test_a_known_name_and_a_text_in_place_of_names_are_refused():
    def inner(setting): ...

    inner.__name__, inner.__module__ = "fedprox", fedprox.__module__
    for make in (fedprox, inner):  # the method itself, and a function within another one
        with pytest.raises(ValueError, match="`name` must be new among the methods; got 'fedprox'"):
            register("FedProx", families=["one model"])(make)
    with pytest.raises(TypeError, match="`families` must be a sequence of names of families; got"):
        register("FedProx", families="one model")
    with pytest.raises(TypeError, match="`traits` must be a sequence of names of traits; got"):
        register("FedProx", families=["one model"], traits="private")
