"""Language rules of the project that a machine can check."""

import ast
import doctest
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TRACKED = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
).stdout.splitlines()
TEXTS = [name for name in TRACKED if name.endswith((".py", ".md", ".toml", ".yml", ".yaml", ".sh"))]
TEXTS += [name for name in TRACKED if name == ".ci/run"]
OWN_NAME = Path(__file__).relative_to(ROOT).as_posix()
PYTHON = [name for name in TEXTS if name.endswith(".py")]
PACKAGE = [name for name in PYTHON if name.startswith("fedprompt/")]
PAGES = [name for name in TEXTS if name.endswith(".md")]

WORDS = re.compile(r"\b(rooms?|houses?|whoever|looked at)\b", re.IGNORECASE)
BRITISH = re.compile(
    r"\w*(normalis|summaris|initialis|optimis(?!tic)|personalis|tokenis|generalis|regularis|minimis"
    r"|colour|behaviour|favour|neighbour|centre[sd]?\b|labelled|labelling)\w*",
    re.IGNORECASE,
)
FIRST_WORD = re.compile(r"(What|Of|So|Who|Whose|Where|Nothing|Whoever)\b")


def docstrings(name: str) -> list[tuple[str, str]]:
    """Return the place and the text of each docstring of a file."""
    tree = ast.parse((ROOT / name).read_text())
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            found.append((f"{name}:{getattr(node, 'lineno', 1)}", text))
    return found


def lines_with(pattern: re.Pattern[str], name: str) -> list[str]:
    """Return the lines of a file that match a pattern, with their places."""
    lines = (ROOT / name).read_text().splitlines()
    numbered = enumerate(lines, 1)
    return [f"{name}:{n}: {line.strip()}" for n, line in numbered if pattern.search(line)]


@pytest.mark.parametrize("name", [name for name in TEXTS if name != OWN_NAME])
def test_no_private_vocabulary(name):
    assert lines_with(WORDS, name) == []


@pytest.mark.parametrize("name", [name for name in TEXTS if name != OWN_NAME])
def test_spelling_is_american(name):
    assert lines_with(BRITISH, name) == []


@pytest.mark.parametrize("name", PACKAGE)
def test_docstrings_begin_with_a_verb_or_a_noun(name):
    found = [place for place, text in docstrings(name) if FIRST_WORD.match(text)]
    assert found == []


@pytest.mark.parametrize("name", PACKAGE)
def test_raises_entries_inform(name):
    assert lines_with(re.compile("of the wrong kind"), name) == []


@pytest.mark.parametrize("name", PYTHON)
def test_code_is_at_most_100_columns_wide(name):
    lines = (ROOT / name).read_text().splitlines()
    assert [f"{name}:{n}" for n, line in enumerate(lines, 1) if len(line) > 100] == []


def code_blocks(name: str) -> list[tuple[int, str]]:
    """Return the numbered lines of the code blocks of a page."""
    inside, found = False, []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside and line[3:].split(" ")[0] in ("python", "bash", "sh", "text")
        elif inside:
            found.append((number, line))
    return found


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("docs/")])
def test_code_blocks_of_pages_are_at_most_88_columns_wide(name):
    assert [f"{name}:{n}" for n, line in code_blocks(name) if len(line) > 88] == []


def long_example_lines(name: str) -> list[str]:
    """Return the lines of docstring examples, without indentation, that are too long for a page."""
    found = []
    for place, text in docstrings(name):
        for example in doctest.DocTestParser().get_examples(text):
            source = [f">>> {line}" for line in example.source.splitlines()]
            lines = [*source, *example.want.splitlines()]
            found += [f"{place}: {line}" for line in lines if len(line) > 88]
    return found


@pytest.mark.parametrize("name", PACKAGE)
def test_examples_of_docstrings_are_at_most_88_columns_wide(name):
    assert long_example_lines(name) == []


def test_the_rules_would_notice_an_offense(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    text = (
        '"""What a room is.\n\nTypeError: of the wrong kind; the colour.\n\n'
        f'    >>> {"1" * 85}\n"""\n'
    )
    (tmp_path / "bad.py").write_text(text + "x = " + "1" * 100 + "\n")
    for rule in (
        test_no_private_vocabulary,
        test_spelling_is_american,
        test_docstrings_begin_with_a_verb_or_a_noun,
        test_raises_entries_inform,
        test_code_is_at_most_100_columns_wide,
        test_examples_of_docstrings_are_at_most_88_columns_wide,
    ):
        with pytest.raises(AssertionError):
            rule("bad.py")
    (tmp_path / "bad.md").write_text("```python\n" + "x" * 89 + "\n```\n")
    with pytest.raises(AssertionError):
        test_code_blocks_of_pages_are_at_most_88_columns_wide("bad.md")
