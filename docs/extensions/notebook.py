"""Write a page as a Jupyter notebook, so that a reader can download and run it."""

import json
import re
from pathlib import Path
from typing import Any

PAGES = ("getting-started/first-federation",)
FENCE = re.compile(r"^```(\S+)[^\n]*\n(.*?)^```$\n?", re.MULTILINE | re.DOTALL)
TITLED = re.compile(r"\{\w+\}`([^`<]+?)\s*<[^`>]*>`")
PLAIN = re.compile(r"\{\w+\}`([^`]+)`")


def markdown(text: str) -> str:
    """Replace Sphinx roles by their titles, and remove the link to the notebook."""
    kept = (line for line in text.splitlines() if not line.startswith("{download}"))
    return PLAIN.sub(r"`\1`", TITLED.sub(r"\1", "\n".join(kept))).strip()


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

    Args:
        page: Text of the page in MyST Markdown.

    Returns:
        The notebook as a tree that `json.dumps` can write.
    """
    cells: list[dict[str, Any]] = []

    def add(kind: str, text: str) -> None:
        if text:
            cells.append(cell(kind, len(cells), text))

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


def write(app: Any) -> None:
    """Write the notebooks next to their pages, before Sphinx reads the pages."""
    for page in PAGES:
        source = Path(app.srcdir) / f"{page}.md"
        text = json.dumps(
            notebook(source.read_text(encoding="utf-8")), indent=1, ensure_ascii=False
        )
        target = source.with_suffix(".ipynb")
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Write the notebooks at the start of each build."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
