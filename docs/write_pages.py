"""Write into all pages what is computed: figures, tables, the list of methods, and notebooks.

    python docs/write_pages.py

A page marks each place with comments, ``<!-- record KEY -->`` for a figure (see ``figures.py``) or
``<!-- table NAME -->`` for a file of ``results/tables``, and ends it with ``<!-- end -->``. The
table ``methods`` lists the gallery.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path += [str(DOCS), str(DOCS / "extensions")]

import figures  # noqa: E402
import gallery  # noqa: E402
import notebooks  # noqa: E402

TABLE = re.compile(
    r"^(<!-- table ([\w-]+) -->\n).*?^(<!-- end -->)$", re.MULTILINE | re.DOTALL
)
MADE = ("tables", "gallery", "_build")  # folders of files that programs write


def pages() -> list[Path]:
    """Return README and all pages that people write."""
    found = sorted(DOCS.rglob("*.md"))
    return [DOCS.parent / "README.md"] + [
        page for page in found if not {*page.relative_to(DOCS).parts}.intersection(MADE)
    ]


def table(name: str) -> str:
    """Return the text of a table."""
    if name == "methods":
        return gallery.overview(gallery.files())
    return (DOCS / "results" / "tables" / f"{name}.md").read_text(encoding="utf-8")


def filled(text: str) -> str:
    """Return the text of a page with its figures and tables as they are now."""
    return TABLE.sub(
        lambda mark: f"{mark[1]}\n{table(mark[2]).strip()}\n\n{mark[3]}",
        figures.filled(text),
    )


def texts() -> dict[Path, str]:
    """Return each file that this program writes, with its text."""
    found = {page: filled(page.read_text(encoding="utf-8")) for page in pages()}
    return found | {
        DOCS / f"{page}.ipynb": notebooks.text_of(found[DOCS / f"{page}.md"])
        for page in notebooks.PAGES
    }


def main() -> None:
    """Write the files that have changed, and print their names."""
    for path, text in texts().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
