"""Pages of the four papers: one call with the paper's values, and a place for each of its parts."""

import ast
import inspect
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import fedprompt
from fedprompt import interfaces, methods
from fedprompt.methods import METHODS
from studies import papers
from studies.core import content

FOLDER = Path(__file__).parents[2] / "docs" / "methods"
PAGES = {
    "fedhpl": ("fedhpl", "fedhpl_p", "fedhpl_h"),
    "sgpt": ("sgpt",),
    "fedl2g": ("fedl2g_l", "fedl2g_f"),
    "fedotp": ("fedotp", "fedotp_classical", "fedotp_average"),
}
"""Methods of each page, which is named as its paper."""
PART = re.compile(r"`(?P<argument>\w+)=[^`]*`|`(?P<name>[\w.*-]+)`")
REASON = "not here, because "
OURS = ("selector.keys", "private.context")  # parts of modules that the pages make


def section(page, title):
    text = (FOLDER / f"{page}.md").read_text()
    assert f"\n## {title}\n" in text, f"{page}.md must have a section {title!r}."
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def found(name):
    """Return the public object of a dotted name, or a field of a dataclass, or None."""
    if (entry := METHODS.get(name.removeprefix("methods."))) is not None:
        return entry.make
    thing = methods if hasattr(methods, name.split(".")[0]) else fedprompt
    for part in name.split("."):
        if part in getattr(thing, "__annotations__", {}):
            return thing
        thing = getattr(thing, part, getattr(interfaces, part, None))
    return thing


def matched(page, cell):
    """Require that all parts of a cell exist, and return them and the names of its settings."""
    makers = [METHODS[name].make for name in PAGES[page]]
    parts, names, last = [], set(), None
    for part in PART.finditer(cell):
        kind, text = part.lastgroup, part[part.lastgroup]
        chosen = {name for name in papers.settings(page) if fnmatch(name, text)}
        if kind == "argument":
            known = [each for each in (last, *makers) if callable(each)]
            assert any(text in inspect.signature(each).parameters for each in known), part[0]
        elif chosen:
            names |= chosen
        elif (thing := found(text)) is not None:
            last = thing
        else:
            assert text in OURS or cell.startswith(REASON), part[0]
        parts.append(part[0])
    return parts, names


@pytest.mark.parametrize("page", PAGES)
def test_each_part_of_a_paper_and_each_setting_has_its_place(page):
    lines = [line for line in section(page, "Where it is").splitlines() if line.startswith("|")]
    header, rule, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert (header, len(rule)) == (["paper", "here"], 2)
    assert len(rows) > 10
    names = set()
    for row in rows:
        assert len(row) == 2, row
        parts, chosen = matched(page, row[1])
        assert parts or row[1].startswith(REASON), row
        names |= chosen
    assert names == {*papers.settings(page)}


def literals(call):
    """Return the keyword arguments of a call, without functions, which no setting can have."""
    constants = (each for each in call.keywords if not isinstance(each.value, ast.Name))
    return {each.arg: ast.literal_eval(each.value) for each in constants}


def test_what_the_code_of_fedotp_does_is_on_the_page_as_in_the_settings():
    keys = ("optimizer", "class_order", "cifar_images", "last_batch", "precision", "first_round")
    text = (FOLDER / "fedotp.md").read_text()
    for key in (*keys, "classes"):
        sentence = content("fedotp")["choices"][key]
        assert f"- {sentence}\n" in text
        touched = [s for s in papers.settings("fedotp").values() if sentence in s.choices]
        assert touched
        assert (key == "class_order") <= all("domain" in s.partition.kind for s in touched)
        assert ("cifar" in key) <= all("cifar" in s.data for s in touched)
