"""The documentation: every public name is documented, every page is listed, every block runs."""

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from types import GenericAlias, ModuleType
from typing import NamedTuple

import pytest

import fedprompt
from fedprompt import methods
from signatures import unreadable

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    page.relative_to(DOCS).with_suffix("").as_posix(): page.read_text()
    for page in sorted(DOCS.rglob("[!_]*.md"))
    if page.parent.name not in ("gallery", "tables")  # made by programs
}
# test_notebook.py runs them block by block.
NOTEBOOKS = ("getting-started/first-federation", "getting-started/promptfl-with-clip")

FENCE = re.compile(r"^```(\S+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
CURRENT = re.compile(r"^\.\. currentmodule:: (\S+)$")
DIRECTIVE = re.compile(r"^\.\. (?:auto(?:function|class|data)|py:(?:data|type)):: (\S+)$")


class Block(NamedTuple):
    """A Python block, its first line, and the text block directly after it."""

    code: str
    line: int
    output: str


def blocks(page: str) -> Iterator[Block]:
    text = PAGES[page]
    fences = list(FENCE.finditer(text))
    for fence, after in zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            between = "" if after is None else text[fence.end() : after.start()].strip()
            shown = after is not None and after[1] == "text" and not between
            start = text.count("\n", 0, fence.start(2))
            yield Block(fence[2], start, after[2] if shown else "")


def flower_names() -> list[str]:
    """Read the public names of the adapter without an import, because flwr is an extra."""
    tree = ast.parse((Path(fedprompt.__file__).parent / "flower" / "__init__.py").read_text())
    assignments = [line for line in tree.body if isinstance(line, ast.Assign)]
    (names,) = (line.value for line in assignments if line.targets[0].id == "__all__")
    return ast.literal_eval(names)


def public_names() -> dict[str, object]:
    """Return every public object by its name, such as `weighted_mean` or `transport.newton`."""
    found = {}
    for name in fedprompt.__all__:
        thing = getattr(fedprompt, name)
        if not isinstance(thing, ModuleType):
            found[name] = thing
    flat = {id(thing) for thing in found.values()}
    for family in fedprompt.__all__:
        module = getattr(fedprompt, family)
        if isinstance(module, ModuleType):
            for name in module.__all__:
                if id(getattr(module, name)) not in flat:
                    found[f"{family}.{name}"] = getattr(module, name)
    for family in ("compare", "data.experiments", "interfaces", "privacy.leakage", "samples"):
        module = importlib.import_module(f"fedprompt.{family}")
        for name in module.__all__:
            if id(getattr(module, name)) not in flat:
                found[f"{family}.{name}"] = getattr(module, name)
    for name in methods.papers.__all__:
        found[f"methods.papers.{name}"] = getattr(methods.papers, name)
    for name in set(methods.__all__) - set(methods.METHODS) - {"papers"}:  # one table has the rest
        found[f"methods.{name}"] = getattr(methods, name)
    return found


PUBLIC = public_names()


def entries() -> list[str]:
    """Return all reference entries, as `weighted_mean` or `transport.newton`."""
    found = []
    for page, text in PAGES.items():
        current = "fedprompt"
        for line in text.splitlines():
            if module := CURRENT.match(line):
                current = module[1]
            elif entry := DIRECTIVE.match(line):
                name = entry[1] if entry[1].startswith("fedprompt.") else f"{current}.{entry[1]}"
                found.append(name.removeprefix("fedprompt."))
                assert page.startswith("reference/"), f"{entry[1]} is described in {page}"
    return found


def is_function_or_class(thing: object) -> bool:
    """Return whether an example is required: not for protocols, tuples and type aliases."""
    if isinstance(thing, GenericAlias) or not callable(thing):
        return False
    return not (getattr(thing, "_is_protocol", False) or hasattr(thing, "_fields"))


CALLABLES = [name for name, thing in PUBLIC.items() if is_function_or_class(thing)]


def test_every_public_name_has_exactly_one_reference_entry():
    expected = [*PUBLIC, *(f"flower.{name}" for name in flower_names())]
    assert sorted(entries()) == sorted(expected)


def test_public_names_are_documented_and_functions_and_classes_have_an_example():
    for name, thing in PUBLIC.items():
        if isinstance(thing, GenericAlias):  # has the docstring of the aliased type
            continue
        text = inspect.getdoc(thing) or ""
        assert text, name
        if is_function_or_class(thing):
            assert "\nExample:\n" in text or "` has an example." in text, name


def test_help_prints_short_types_and_defaults_without_addresses():
    """At most 315 characters, or 45 for each argument."""
    made = {f"methods.{name}": entry.make for name, entry in methods.METHODS.items()}
    assert unreadable(PUBLIC | made) == []


def texts(*patterns: str) -> str:
    paths = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return "\n".join(path.read_text() for path in paths)


def words(text: str) -> set[str]:
    """Return all words of a text. A reference entry is not a use."""
    lines = (line for line in text.splitlines() if not DIRECTIVE.match(line))
    return set(re.findall(r"\w+", "\n".join(lines)))


def test_public_names_are_used_on_a_page_or_in_an_example_and_in_a_test():
    pages = words("\n".join(PAGES.values()) + texts("README.md", "examples/**/*.py"))
    tests = words(texts("tests/**/*.py"))
    names = {name.rpartition(".")[2] for name in CALLABLES}
    assert len(names) > 100
    assert names - pages == set()
    assert names - tests == set()


def test_no_returned_value_is_read_as_a_type():
    """In `Returns`, Sphinx reads the text before the first colon as a type."""
    for name in CALLABLES:
        text = f"{inspect.getdoc(PUBLIC[name])}\n"
        returns = re.search(r"^Returns:\n((?:    .*\n|\n)+)", text, re.MULTILINE)
        if returns:
            first = returns[1].splitlines()[0]
            assert ": " not in re.sub(r"``.*?``|:\w+:`.*?`", "", first), name


def test_every_page_is_in_the_contents():
    listed = re.findall(r"^- \[.*?\]\(([\w/-]+)\.md\)", PAGES["index"], re.MULTILINE)
    for kind, body in FENCE.findall(PAGES["reference/index"]):
        if kind == "{toctree}":
            lines = [line for line in body.splitlines() if re.match(r"[^:*]+$", line)]
            listed += [f"reference/{line}" for line in lines]
    assert sorted([*listed, "index"]) == sorted(PAGES)


LONG = "questions", *(  # several seconds each; `.ci/run` runs them
    f"how-to/{page}"
    for page in (
        "differential-privacy", "domains", "export", "lora", "mixed-precision", "new-clients",
        "nothing-learns", "peft-prompts", "run-the-gallery", "segmentation", "train-as-you-like",
        "unlike-clients", "write-your-method",
    )
)  # fmt: skip
# Packages outside of the wheel and its requirements, and how the first lines of a page name them.
NEEDS = {
    "dp_accounting": r"fedprompt\[privacy\]",
    "build_samples": "clone",
    "laws": "clone",
    "matplotlib": r"fedprompt\[plots\]",
    "peft": r"fedprompt\[peft\]",
    "sklearn": "clone",
    "tasks": "clone",
    "transformers": r"fedprompt\[transformers\]|fedprompt\[peft\]",
}


def without_extras(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packages unavailable that the text before the first code block does not name."""
    intro = PAGES[page].split("```python")[0]
    missing = {package for package, named in NEEDS.items() if not re.search(named, intro)}
    for name in {*missing, *(each for each in sys.modules if each.split(".")[0] in missing)}:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow) if page in LONG else page
        for page in PAGES
        if any(blocks(page)) and page not in NOTEBOOKS
    ],
)
def test_code_blocks_run_and_print_what_the_page_shows(page, monkeypatch, tmp_path):
    without_extras(page, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(methods.registry, "METHODS", dict(methods.METHODS))
    names = {"__name__": "docs"}
    for block in blocks(page):
        printed = StringIO()
        with redirect_stdout(printed):  # errors have the line numbers of the page
            code = compile("\n" * block.line + block.code, DOCS / f"{page}.md", "exec")
            exec(code, names)
        assert printed.getvalue() == block.output, f"{page}.md, line {block.line + 1}"
