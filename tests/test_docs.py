"""The documentation: every public name stands on the page of its room, every page in the contents, and every code block runs."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from io import StringIO
from itertools import zip_longest
from pathlib import Path
from types import GenericAlias
from typing import NamedTuple

import pytest

import fedprompt

DOCS = Path(__file__).parents[1] / "docs"
PAGES = {page.relative_to(DOCS).with_suffix("").as_posix(): page.read_text() for page in sorted(DOCS.rglob("[!_]*.md"))}
ROOMS = [page.removeprefix("reference/") for page in PAGES if page.startswith("reference/") and page != "reference/models"]
PUBLIC = sorted(
    name
    for name in getattr(fedprompt, "__all__", dir(fedprompt))
    if not name.startswith("_") and not inspect.ismodule(getattr(fedprompt, name))
)

FENCE = re.compile(r"^```(\S+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^\.\. (?:auto(?:function|class)|py:type):: (\w+)$", re.MULTILINE)


class Block(NamedTuple):
    """A fenced block, the line it starts on, and the text block right after it."""

    code: str
    line: int
    output: str


def blocks(page: str) -> Iterator[Block]:
    text = PAGES[page]
    fences = list(FENCE.finditer(text))
    for fence, after in zip_longest(fences, fences[1:]):
        if fence[1] == "python":
            shown = after is not None and after[1] == "text" and not text[fence.end() : after.start()].strip()
            yield Block(fence[2], text.count("\n", 0, fence.start(2)), after[2] if shown else "")


def names_of(room: str) -> list[str]:
    """What a room makes public; Flower's is read, not imported, because flwr is an extra."""
    if room != "flower":
        return importlib.import_module(f"fedprompt.{room}").__all__
    tree = ast.parse((Path(fedprompt.__file__).parent / room / "__init__.py").read_text())
    (names,) = (line.value for line in tree.body if isinstance(line, ast.Assign) and line.targets[0].id == "__all__")
    return ast.literal_eval(names)


def is_function_or_class(name: str) -> bool:
    """Whether an example is due: not for protocols, tuples and names of types."""
    thing = getattr(fedprompt, name)
    return not (isinstance(thing, GenericAlias) or getattr(thing, "_is_protocol", False) or hasattr(thing, "_fields"))


@pytest.mark.parametrize("room", ROOMS)
def test_the_page_of_a_room_holds_its_public_names_once(room):
    assert sorted(DIRECTIVE.findall(PAGES[f"reference/{room}"])) == sorted(names_of(room))


def test_every_public_name_stands_on_exactly_one_page():
    on_pages = [name for page in PAGES.values() for name in DIRECTIVE.findall(page)]
    assert sorted(on_pages) == sorted([*PUBLIC, *names_of("flower"), *names_of("plots")])


@pytest.mark.parametrize("name", PUBLIC)
def test_public_names_are_documented(name):
    thing = getattr(fedprompt, name)
    if isinstance(thing, GenericAlias):  # has the docstring of what it is an alias of
        return
    text = inspect.getdoc(thing) or ""
    assert text
    if is_function_or_class(name):
        assert "\nExample:\n" in text, "needs an example"
        assert ">>> " in text, "needs an example that runs"


@pytest.mark.parametrize("name", [name for name in PUBLIC if is_function_or_class(name)])
def test_results_are_not_taken_for_types(name):
    """In `Returns`, Sphinx takes what stands before the first colon as a type, and prints the sentence torn in two."""
    returns = re.search(r"^Returns:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(getattr(fedprompt, name))}\n", re.MULTILINE)
    if returns:
        assert ": " not in re.sub(r"``.*?``|:\w+:`.*?`", "", returns[1])


def test_every_page_is_in_the_contents():
    listed = []
    for page, text in PAGES.items():
        for kind, body in FENCE.findall(text):
            if kind == "{toctree}":
                entries = [line for line in body.splitlines() if line and not line.startswith(":")]
                listed += [(Path(page).parent / entry).as_posix() for entry in entries]
    assert sorted([*listed, "index"]) == sorted(PAGES)


@pytest.mark.parametrize("page", [page for page in PAGES if any(blocks(page))])
def test_code_blocks_run_and_print_what_the_page_shows(page):
    names = {"__name__": "docs"}
    for block in blocks(page):
        printed = StringIO()
        with redirect_stdout(printed):  # line numbers of errors are those of the page
            exec(compile("\n" * block.line + block.code, DOCS / f"{page}.md", "exec"), names)
        assert printed.getvalue() == block.output, f"{page}.md, line {block.line + 1}"


def test_a_wrong_output_would_be_noticed(monkeypatch):
    monkeypatch.setitem(PAGES, "wrong", "```python\nprint(1 + 1)\n```\n\n```text\n3\n```\n")
    with pytest.raises(AssertionError, match=r"wrong\.md, line 2"):
        test_code_blocks_run_and_print_what_the_page_shows("wrong")
