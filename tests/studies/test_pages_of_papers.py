"""Pages of the four papers: one call with the paper's values, and a place for each of its parts."""

import inspect
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

import fedprompt
from fedprompt.methods import METHODS, ClipSetting, NetworkSetting, VitSetting
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
PART = re.compile(
    r"`methods\.(?P<method>\w+)`|`(?P<argument>\w+)=[^`]*`"
    r"|`(?P<name>\w+(\.\w+)*)`|`(?P<setting>[\w.*-]+)`"
)
REASON = "not here, because "


def section(page, title):
    text = (FOLDER / f"{page}.md").read_text()
    assert f"\n## {title}\n" in text, f"{page}.md must have a section {title!r}."
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


def found(name):
    """Return the object of a name in the library, or a field of a dataclass, or None."""
    thing = fedprompt
    for part in name.split("."):
        if part in getattr(thing, "__annotations__", {}):
            return thing
        if not hasattr(thing, part):
            return None
        thing = getattr(thing, part)
    return thing


def matched(page, cell):
    """Require that all parts of a cell exist, and return them and the names of its settings."""
    makers = [
        *(METHODS[name].make for name in PAGES[page]),
        VitSetting,
        NetworkSetting,
        ClipSetting,
    ]
    parts, names, last = [], set(), None
    for part in PART.finditer(cell):
        kind, text = part.lastgroup, part[part.lastgroup]
        if kind == "argument":
            known = [each for each in (last, *makers) if callable(each)]
            assert any(text in inspect.signature(each).parameters for each in known), part[0]
        elif kind == "setting":
            chosen = {name for name in papers.settings(page) if fnmatch(name, text)}
            if not chosen:  # code of the page, such as a name of its blocks
                assert not text.startswith(f"{page}-"), part[0]
                continue
            names |= chosen
        elif kind == "method":
            last = METHODS[text].make if text in METHODS else found(f"methods.{text}")
            assert last is not None, part[0]
        else:
            last = found(text)
            if last is None:  # code of the page, such as a name of its blocks
                continue
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
