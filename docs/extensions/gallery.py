"""Write a page for each method of the gallery, from its file and its rows in the tables."""

import ast
import csv
import inspect
import re
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

from fedprompt.methods import METHODS, Entry

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "docs" / "results" / "tables"
SHOWN = {
    "own mix": "own mix",
    "worst client": "worst client",
    "own mix, to local": "to local",
    "own mix, to FedAvg": "to FedAvg",
    "new clients": "new clients",
    "after 10 steps": "after 10 steps",
}
TASKS = {"digits": "digits", "networks": "different networks", "clip": "CLIP"}
SETTINGS = {
    "dirichlet": "label shift",
    "domains": "feature shift",
    "few": "50 images each",
}
NUMBER = re.compile(r"[-+]?\d|$")
NOTES = {
    "personalized": "personal",
    "public data": "needs public images",
    "private": "adds noise for privacy",
    "adapted": "adapted",
}
FAMILIES = {
    "one model": (
        "One network",
        "You need one vision transformer, the same for all clients.",
    ),
    "mixed models": (
        "Different networks",
        "Clients may have different networks, and need only the same classes.",
    ),
    "CLIP": ("CLIP", "You need a CLIP, and the names of your classes."),
}


def files() -> dict[Path, list[Entry]]:
    """Return the methods of each file of the gallery."""
    found: dict[Path, list[Entry]] = {}
    for entry in METHODS.values():
        found.setdefault(Path(inspect.getfile(inspect.unwrap(entry.make))), []).append(
            entry
        )
    return dict(sorted(found.items()))


def page(path: Path, methods: Sequence[Entry]) -> str:
    """Make the page of a file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    first = tree.body[1].lineno  # the page shows the docstring above the code
    parts = [
        f"# {', '.join(method.title for method in methods)}",
        sent_in_lines(text),
        f"```{{literalinclude}} ../../../{path.relative_to(ROOT)}\n"
        f":language: python\n:class: whole-file\n:lines: {first}-\n```",
    ]
    titles = {method.title for method in methods}
    for task, lines in results(titles).items():
        parts += [f"## Results: {task}", markdown(lines)]
    if parts[-1].startswith("|"):
        parts.append(
            "{doc}`/results/gallery` explains the columns, and links to all tables."
        )
    return "\n\n".join(parts) + "\n"


def sent_in_lines(text: str) -> str:
    """Begin a paragraph with each of the marks `Up`, `Down`, `Deviations` and `Compared`."""
    return re.sub(r"\s+(Up|Down|Deviations|Compared): ", r"\n\n**\1:** ", text)


def results(titles: AbstractSet[str]) -> dict[str, list[list[str]]]:
    """Return the header and the rows of methods for each task, one row for each setting."""
    found: dict[str, list[list[str]]] = {}
    for task, partition, header, body in tables():
        columns = [header.index(name) for name in SHOWN if name in header]
        for row in body:
            if row[0] in titles:
                first = ["method", "setting", *(SHOWN[header[i]] for i in columns)]
                lines = found.setdefault(task, [first])
                lines.append([row[0], partition, *(row[i] for i in columns)])
    return found


def tables() -> Iterator[tuple[str, str, list[str], list[list[str]]]]:
    """Yield task, setting, header and rows of each table of the comparison."""
    for task, title in TASKS.items():
        for partition, setting in SETTINGS.items():
            path = TABLES / f"{task}-{partition}.csv"
            header, *body = csv.reader(path.read_text(encoding="utf-8").splitlines())
            yield title, setting, header, body


def overview(found: dict[Path, list[Entry]]) -> str:
    """Make the tables of all methods for `docs/methods/gallery.md`, one for each family."""
    families: dict[str, list[list[str]]] = {family: [] for family in FAMILIES}
    for path, methods in found.items():
        text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        sent = re.search(r"Up: (.*?)\.?\s+Down: ", text, re.DOTALL)
        up = " ".join(sent[1].split()) if sent else ""
        for method in methods:
            link = f"[{method.title}](../../{path.relative_to(ROOT).as_posix()})"
            notes = [note for mark, note in NOTES.items() if mark in method.traits]
            row = [link, sentence(text, method), up, ", ".join(notes)]
            for family in method.families:
                families[family].append(row)
    parts = []
    for family, (title, needs) in FAMILIES.items():
        header = ["method", "in one sentence", "sent by a client", "notes"]
        parts += [f"## {title}", needs, markdown([header, *families[family]])]
    return "\n\n".join(parts) + "\n"


def sentence(text: str, method: Entry) -> str:
    """Return the first sentence of a file, with what its variant adds after a colon."""
    first = " ".join(text.split("\n\n")[0].split())
    own = (inspect.getdoc(inspect.unwrap(method.make)) or "").split("\n")[0]
    variant = own.partition(": ")[2].split(". ")[0].removesuffix(".")
    return f"{first} Here: {variant}." if variant else first


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Lay out rows as a Markdown table with a header. Columns with numbers are to the right."""
    columns = [column[1:] for column in zip(*rows, strict=True)]
    rule = ["---:" if all(map(NUMBER.match, each)) else "---" for each in columns]
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([header, f"|{'|'.join(rule)}|", *body])


def write(app: Any) -> None:
    """Write all pages before Sphinx reads them, and remove those of removed methods."""
    folder = Path(app.srcdir) / "methods" / "gallery"
    folder.mkdir(exist_ok=True)
    found = files()
    texts = {f"{path.stem}.md": page(path, methods) for path, methods in found.items()}
    for stale in set(folder.iterdir()) - {folder / name for name in texts}:
        stale.unlink()
    for name, text in texts.items():
        target = folder / name
        if not target.exists() or target.read_text(encoding="utf-8") != text:
            target.write_text(text, encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Write the pages at the start of each build."""
    app.connect("builder-inited", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
