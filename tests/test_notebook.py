"""The notebook of the first-federation page runs cell by cell and prints what the page shows."""

import importlib.util
import json
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from test_docs import NOTEBOOKS

DOCS = Path(__file__).parents[1] / "docs"
specification = importlib.util.spec_from_file_location(
    "notebook", DOCS / "extensions" / "notebook.py"
)
extension = importlib.util.module_from_spec(specification)
specification.loader.exec_module(extension)


def code_cells(made):
    return [cell for cell in made["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("page", extension.PAGES)
def test_a_notebook_runs_cell_by_cell_and_prints_what_it_shows(page, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if "examples" not in each])
    monkeypatch.chdir(tmp_path)
    made = json.loads(json.dumps(extension.notebook((DOCS / f"{page}.md").read_text())))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    names = {"__name__": "__main__"}
    for cell in code_cells(made):
        printed = StringIO()
        with redirect_stdout(printed):
            exec(compile("".join(cell["source"]), f"{page}.ipynb, {cell['id']}", "exec"), names)
        assert printed.getvalue() == "".join(
            line for output in cell["outputs"] for line in output["text"]
        ), cell["id"]


def test_pages_that_the_documentation_tests_leave_out_are_notebooks():
    assert extension.PAGES == NOTEBOOKS


def test_cells_keep_the_order_of_the_page_and_roles_become_words():
    text = "# Title\n\nSee {doc}`/a/b` and {doc}`there <c>`.\n\n"
    page = f"{text}```python\nprint(1)\n```\n\n```text\n1\n```\n\nEnd.\n"
    title, code, end = extension.notebook(page)["cells"]
    assert "".join(title["source"]) == "# Title\n\nSee `/a/b` and there."
    assert ("".join(code["source"]), code["outputs"][0]["text"]) == ("print(1)", ["1\n"])
    assert "".join(end["source"]) == "End."
