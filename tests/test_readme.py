"""The README: its loop runs, CI runs its commands, and its module map has existing names."""

import importlib.util
import re
from pathlib import Path

import fedprompt

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_is_the_program_of_the_samples_and_has_at_most_22_lines():
    ((quickstart, printed),) = re.findall(
        r"```python\n(.*?)```\n.*?```text\n(.*?)```", README, re.DOTALL
    )
    assert quickstart.count("\n") <= 22
    program = (ROOT / "fedprompt" / "samples" / "__main__.py").read_text()
    assert f"# fmt: off\n{quickstart}# fmt: on\n" in program
    landing = (ROOT / "docs" / "index.md").read_text()
    assert "```{literalinclude} ../fedprompt/samples/__main__.py\n" in landing
    assert f"```text\n{printed}```" in landing


def test_the_readme_is_short_and_every_link_exists():
    assert README.count("\n") <= 120
    prose = re.sub(r"^```.*?^```$", "", README, flags=re.DOTALL | re.MULTILINE)
    links = re.findall(r"\]\((?!http)([^)#]+)", prose)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def test_both_commands_do_all_of_their_set_up():
    commands = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert [command.split(" && ")[2:] for command in commands] == [
        ['pip install -e ".[examples]"', "python examples/fedhpl.py"],
        ['pip install -e ".[test]"', "pytest"],
    ]
    assert all(
        command.startswith("python3 -m venv .venv && . .venv/bin/activate && ")
        for command in commands
    )
    assert (
        "-F 'pip install -e \".[test]\" && pytest' README.md" in (ROOT / ".ci" / "run").read_text()
    )


def test_the_map_of_modules_has_existing_names():
    rows = [
        line.split("|")
        for line in README.split("## Modules")[1].splitlines()
        if line.startswith("| `")
    ]
    assert len(rows) == 11
    names = set(re.findall(r"`(\w+)`", "".join(row[2] for row in rows)))
    assert len(names) > 25
    assert names <= set(fedprompt.__all__)
    modules = re.findall(r"`(\w+)`", "".join(row[1] for row in rows))
    missing = [name for name in modules if importlib.util.find_spec(f"fedprompt.{name}") is None]
    assert not missing


def test_no_figure_is_left_to_be_filled_in():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert "<!-- figures -->" not in page.read_text(), page
