"""Lines of code, without docstrings and comments, and those of them that only check arguments.

python .ci/count.py
python .ci/count.py --words  # of README and pages, as ``wc -w`` counts, without generated tables
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

BLANK = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
CHECKS = ("check", "checked", "wrong_", "_check", "_checked", "_wrong", "refus", "_refus")


def code(text: str) -> set[int]:
    """Return the numbers of the lines with code."""
    lines = set[int]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*BLANK, tokenize.ENDMARKER):
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):  # docstrings
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def checks(text: str) -> set[int]:
    """Return the lines of functions that check, of calls of these, and of branches that raise."""
    lines = set[int]()
    for node in ast.walk(ast.parse(text)):
        name = "" if isinstance(node, ast.alias) else getattr(node, "name", "") or ""
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            name = called if called.startswith("check.") else called.rpartition(".")[2]
        raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
        if raises or name.startswith(CHECKS):
            last = node.body[-1] if raises else node
            lines.update(range(node.lineno, last.end_lineno + 1))
    return lines & code(text)


GENERATED = re.compile(r"<!-- (?:table|made) .*?<!-- end -->|<!--.*?-->", re.DOTALL)
PHRASES = {"that of": 2, "own": 8, "you": 60}
"""Bounds in 10,000 words: at most, at most, and at least."""


def words() -> None:
    """Print the words of each page, their sum, and how often some phrases occur."""
    listed = subprocess.run(
        ["git", "ls-files", "README.md", "docs/*.md"], capture_output=True, text=True, check=True
    )
    pages = [Path(each) for each in listed.stdout.split() if "results/tables" not in each]
    texts = {page: GENERATED.sub("", page.read_text()) for page in pages if page.exists()}
    counts = {page: len(text.split()) for page, text in texts.items()}
    for page, count in sorted(counts.items(), key=lambda item: item[1]):
        print(f"{count:7,}  {page}")
    total = sum(counts.values())
    print(f"{total:7,}  words")
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", "\n".join(texts.values()), flags=re.M | re.S)
    for phrase, bound in PHRASES.items():
        found = len(re.findall(rf"\b{phrase}\b", prose, re.IGNORECASE))
        print(f"{10_000 * found / total:7.1f}  {phrase!r} in 10,000 words (bound {bound})")


if __name__ == "__main__" and "--words" in sys.argv:
    words()
elif __name__ == "__main__":
    listed = subprocess.run(["git", "ls-files", "*.py"], capture_output=True, text=True, check=True)
    texts = {path: Path(path).read_text() for path in listed.stdout.split()}
    areas = {
        "library": (
            "fedprompt/",
            ("fedprompt/methods/", "fedprompt/samples/", "fedprompt/compare/"),
        ),
        "methods and samples": (("fedprompt/methods/", "fedprompt/samples/"), ()),
        "compare": ("fedprompt/compare/", ()),
        "examples": ("examples/", ()),
        "tests": ("tests/", ()),
    }
    for area, (inside, outside) in areas.items():
        own = [text for path, text in texts.items() if path.startswith(inside)
               and not path.startswith(tuple(outside))]  # fmt: skip
        print(f"{area:20} {sum(len(code(each)) for each in own):6,}", end="")
        found = sum(len(checks(each)) for each in own)
        if area == "library":
            shared = texts["fedprompt/_refusals.py"]
            found += len(code(shared) - checks(shared))
        print(f"   of these checks {found:6,}")
