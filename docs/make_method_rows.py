"""Update the rows of results on the pages of methods from the tables of the gallery.

python docs/make_method_rows.py
"""

import csv
from pathlib import Path

DOCS = Path(__file__).parent
TASKS = {"digits": "digits", "different networks": "networks", "CLIP": "clip"}
SETTINGS = {
    "label shift": "dirichlet",
    "feature shift": "domains",
    "50 images each": "few",
}
WORDS = {"to local": "own mix, to local", "to FedAvg": "own mix, to FedAvg"}


def table(task: str, partition: str) -> dict[str, dict[str, str]]:
    """Read the rows of a table by their title."""
    with (DOCS / "results" / "tables" / f"{task}-{partition}.csv").open() as file:
        return {row["row"]: row for row in csv.DictReader(file)}


def updated(text: str) -> str:
    """Return a page with the figures of the tables."""
    lines, task, columns = [], "", list[str]()
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            task = TASKS.get(line.removeprefix("## Results: "), "")
        if line.startswith("| method | setting |"):
            columns = cells[2:]
        elif task and line.startswith("|") and cells[1] in SETTINGS:
            row = table(task, SETTINGS[cells[1]])[cells[0]]
            figures = [row[WORDS.get(column, column)] for column in columns]
            line = f"| {' | '.join([*cells[:2], *figures])} |".replace("|  |", "| |")
        lines.append(line)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    for page in (DOCS / "methods" / "gallery").glob("*.md"):
        page.write_text(updated(page.read_text()))
