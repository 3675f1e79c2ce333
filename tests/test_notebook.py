"""The notebooks of pages run cell by cell and print what the pages show."""

import json
import subprocess
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import notebooks
import open_clip
import pytest

from test_docs import NOTEBOOKS

DOCS = Path(__file__).parents[1] / "docs"


def code_cells(made):
    return [cell for cell in made["cells"] if cell["cell_type"] == "code"]


def run(code, names, where):
    """Run a cell, and return the text that it prints."""
    printed = StringIO()
    with redirect_stdout(printed):
        exec(compile(code, where, "exec"), names)
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_notebook_runs_cell_by_cell_and_prints_what_it_shows(page, monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [each for each in sys.path if "examples" not in each])
    monkeypatch.chdir(tmp_path)
    made = json.loads(json.dumps(notebooks.notebook((DOCS / f"{page}.md").read_text())))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    names = {"__name__": "__main__"}
    for cell in code_cells(made):
        shown = "".join(line for output in cell["outputs"] for line in output["text"])
        assert run("".join(cell["source"]), names, f"{page}.ipynb, {cell['id']}") == shown


@pytest.mark.slow
def test_the_notebook_of_clip_runs_with_the_layout_of_the_pretrained_one(monkeypatch):
    """Two layers with random weights take the place of the download."""
    sizes = open_clip.get_model_config("ViT-B-32-quickgelu")
    for tower in ("vision_cfg", "text_cfg"):
        sizes[tower] |= {"layers": 2, "width": 64} | ({"heads": 2} if tower == "text_cfg" else {})
    asked = []

    def create_model(name, pretrained):
        asked.append((name, pretrained))
        return open_clip.model.CLIP(**sizes)

    monkeypatch.setattr(open_clip, "create_model", create_model)
    text = (DOCS / "getting-started" / "promptfl-with-clip.md").read_text()
    text = text.replace("pretrained = False", "pretrained = True").replace("range(10)", "range(1)")
    names = {"__name__": "__main__"}
    said = [
        run("".join(cell["source"]), names, "cell") for cell in code_cells(notebooks.notebook(text))
    ]
    assert asked == [("ViT-B-32-quickgelu", "openai")]
    assert names["features"].shape == (812, sizes["embed_dim"])
    assert said[-1].endswith(f"a client sends {4 * 4 * 64 + 4:,} bytes in a round\n")


def test_the_first_cell_installs_the_library_in_colab_only(monkeypatch):
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command))
    code = "".join(code_cells(notebooks.notebook(""))[0]["source"])
    run(code, {}, "cell")
    assert commands == []
    monkeypatch.setitem(sys.modules, "google.colab", sys)
    run(code, {}, "cell")
    address = "git+https://github.com/fedprompt/fedprompt"
    assert commands == [[sys.executable, "-m", "pip", "install", "--quiet", address]]


@pytest.mark.parametrize("page", notebooks.PAGES)
def test_a_page_links_its_notebook_in_colab(page):
    address = "https://colab.research.google.com/github/fedprompt/fedprompt/blob/main/docs"
    assert f"{address}/{page}.ipynb" in (DOCS / f"{page}.md").read_text()


def test_pages_that_the_documentation_tests_leave_out_are_notebooks():
    assert notebooks.PAGES == NOTEBOOKS


def test_cells_keep_the_order_of_the_page_and_links_to_files_become_words():
    text = "# Title\n\nSee [there](../c.md) and [PyPI](https://pypi.org).\n\n"
    page = f"{text}```python\nprint(1)\n```\n\n```text\n1\n```\n\nEnd.\n"
    _, title, code, end = notebooks.notebook(page)["cells"]
    shown = "# Title\n\nSee there and [PyPI](https://pypi.org)."
    assert "".join(title["source"]) == shown
    assert ("".join(code["source"]), code["outputs"][0]["text"]) == ("print(1)", ["1\n"])
    assert "".join(end["source"]) == "End."
