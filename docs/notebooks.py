"""Write pages as Jupyter notebooks, so that a reader can download and run them.

They are committed, because Colab opens them from the repository. After you change such a page, run
``python docs/write_pages.py``.
"""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = ("getting-started/first-federation", "getting-started/promptfl-with-clip")
INSTALL = """import subprocess
import sys

if "google.colab" in sys.modules:  # Colab has PyTorch, and lacks this library
    command = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*command, "git+{address}"], check=True)"""
FENCE = re.compile(r"^```(\S+)[^\n]*\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[([^\]]+)\]\((?!https?:)[^)]*\)")


def markdown(text: str) -> str:
    """Replace links to other files by their titles, and remove the link to the notebook."""
    kept = (line for line in text.splitlines() if ".ipynb)" not in line)
    return LINK.sub(r"\1", "\n".join(kept)).strip()


def cell(kind: str, number: int, text: str) -> dict[str, Any]:
    """Make one cell of the notebook format 4.5."""
    made = {
        "cell_type": kind,
        "id": f"cell-{number}",
        "metadata": {},
        "source": text.splitlines(keepends=True),
    }
    return made | ({"execution_count": None, "outputs": []} if kind == "code" else {})


def notebook(page: str) -> dict[str, Any]:
    """Make a notebook of a page, with its Python blocks as cells and their printed outputs.

    In Colab, the first cell installs the library from its repository. It does nothing elsewhere.

    Args:
        page: Text of the page in MyST Markdown.

    Returns:
        The notebook as a tree that `json.dumps` can write.
    """
    cells: list[dict[str, Any]] = []
    project = tomllib.loads(
        (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    )
    install = INSTALL.format(address=project["project"]["urls"]["Repository"])

    def add(kind: str, text: str) -> None:
        if text:
            cells.append(cell(kind, len(cells), text))

    add("code", install)
    position = 0
    for fence in FENCE.finditer(page):
        before = markdown(page[position : fence.start()])
        shown = (
            fence[1] == "text"
            and not before
            and bool(cells)
            and cells[-1]["cell_type"] == "code"
        )
        if shown:
            lines = fence[2].splitlines(keepends=True)
            cells[-1]["outputs"] = [
                {"output_type": "stream", "name": "stdout", "text": lines}
            ]
        else:
            add("markdown", before)
            add("code" if fence[1] == "python" else "markdown", fence[2].rstrip("\n"))
        position = fence.end()
    add("markdown", markdown(page[position:]))
    language = {
        "kernelspec": {
            "display_name": "Python 3",
            "language": "python",
            "name": "python3",
        }
    }
    return {"cells": cells, "metadata": language, "nbformat": 4, "nbformat_minor": 5}


def text_of(page: str) -> str:
    """Return the text of the notebook file of a page."""
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"
