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
    r"(normalis|summaris|initialis|optimis(?!tic)|personalis|tokenis|generalis|regularis|minimis"
    r"|colour|behaviour|favour|neighbour|centre[sd]?\b|labelled|labelling)",
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


def private_vocabulary(name: str) -> list[str]:
    return lines_with(WORDS, name)


def british_spelling(name: str) -> list[str]:
    return lines_with(BRITISH, name)


def docstrings_without_a_verb_or_a_noun(name: str) -> list[str]:
    return [place for place, text in docstrings(name) if FIRST_WORD.match(text)]


def raises_entries_without_information(name: str) -> list[str]:
    return lines_with(re.compile("of the wrong kind"), name)


def lines_of_more_than_100_columns(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [f"{name}:{n}" for n, line in enumerate(lines, 1) if len(line) > 100]


def lines_of_more_than_88_columns_in_code_blocks(name: str) -> list[str]:
    inside, found = False, []
    for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
        if line.startswith("```"):
            inside = not inside and line[3:].split(" ")[0] in ("python", "bash", "sh", "text")
        elif inside and len(line) > 88:
            found.append(f"{name}:{number}")
    return found


def lines_of_more_than_88_columns_in_examples(name: str) -> list[str]:
    """Check docstrings, without their indentation, because pages show them."""
    found = []
    for place, text in docstrings(name):
        for example in doctest.DocTestParser().get_examples(text):
            source = [f">>> {line}" for line in example.source.splitlines()]
            lines = [*source, *example.want.splitlines()]
            found += [f"{place}: {line}" for line in lines if len(line) > 88]
    return found


OTHERS = [name for name in TEXTS if name != OWN_NAME]
RULES = {
    private_vocabulary: OTHERS,
    british_spelling: OTHERS,
    docstrings_without_a_verb_or_a_noun: PACKAGE,
    raises_entries_without_information: PACKAGE,
    lines_of_more_than_100_columns: PYTHON,
    lines_of_more_than_88_columns_in_code_blocks: [n for n in PAGES if n.startswith("docs/")],
    lines_of_more_than_88_columns_in_examples: PACKAGE,
}
# One file breaks all rules of Python files.
BAD = (
    '"""What a room is.\n\nTypeError: of the wrong kind; the colour.\n\n'
    f'    >>> {"1" * 85}\n"""\nx = {"1" * 100}\n'
)
BAD_PAGE = "```python\n" + "x" * 89 + "\n```\n"


@pytest.mark.parametrize("offenses", RULES, ids=lambda rule: rule.__name__)
def test_no_file_has(offenses):
    assert RULES[offenses]
    assert [offense for name in RULES[offenses] for offense in offenses(name)] == []


@pytest.mark.parametrize("offenses", RULES, ids=lambda rule: rule.__name__)
def test_an_offense_would_be_noticed(offenses, tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "bad").write_text(BAD_PAGE if "blocks" in offenses.__name__ else BAD)
    assert len(offenses("bad")) == 1
