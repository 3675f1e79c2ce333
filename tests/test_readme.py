"""The README: its loop runs, CI runs its commands, and it quotes and names what exists."""

import re
from operator import attrgetter
from pathlib import Path
from textwrap import indent

import fedprompt
from fedprompt import methods

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_is_the_program_of_the_samples():
    ((quickstart, printed),) = re.findall(
        r"<!-- quickstart -->\n```python\n(.*?)```\n.*?```text\n(.*?)```", README, re.DOTALL
    )
    assert "<!-- quickstart -->" in (ROOT / ".ci" / "run").read_text()  # CI runs it with the wheel
    program = (ROOT / "fedprompt" / "samples" / "__main__.py").read_text()
    assert f"# fmt: off\n{quickstart}# fmt: on\n" in program
    landing = (ROOT / "docs" / "index.md").read_text()
    assert "```{literalinclude} ../fedprompt/samples/__main__.py\n" in landing
    assert f"```text\n{printed}```" in landing


def test_the_readme_is_short_and_every_link_exists():
    assert README.count("\n") <= 110
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


def test_the_table_of_starts_has_existing_names():
    section = README.split("## What you have")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) == 6
    names = re.findall(r"`([\w.]+)`", "".join(row[3] for row in rows))
    assert len(names) > 15
    assert all(attrgetter(name)(fedprompt) for name in names)


def test_the_methods_exist_and_the_client_of_fedprox_is_quoted_from_its_file():
    landing = (ROOT / "docs" / "index.md").read_text()
    source = (ROOT / "fedprompt" / "methods" / "fedprox.py").read_text()
    for page in (README, landing):
        named = re.findall(r"--methods ([\w,.:]+)", page)
        names = {name for each in named for name in each.split(",") if ":" not in name}
        assert len(names) > 3
        assert names <= set(methods.METHODS)
        assert "more than 70 methods" in page
        assert len(methods.METHODS) > 70
        (client,) = re.findall(r"```py(?:thon)?\n(fp\.load_values.*?)```", page, re.DOTALL)
        assert indent(client, 8 * " ") in source
