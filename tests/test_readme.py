"""What the README promises holds: its loop runs, its commands are the ones that CI calls, its table names what exists."""

import re
from pathlib import Path

import fedprompt
from test_docs import names_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_loop_runs_and_says_what_was_sent(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert code.count("\n") <= 45
    exec(compile(code, "README.md", "exec"), {})
    last = capsys.readouterr().out.splitlines()[-1].split()
    # 12 layers x 3 prompts x 192 floats, a head of 10 x 192 + 10; two clients in two rounds, with a weight for each of three names upwards.
    down = (12 * 3 * 192 + 10 * 192 + 10) * 4 * 2 * 2
    assert last == ["all", "2", str(down + 3 * 4 * 2 * 2), str(down)]


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


def test_the_table_of_components_names_what_exists():
    section = README.split("## Components")[1]
    names = set(
        re.findall(
            r"`(\w+)`",
            "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `")),
        )
    )
    assert len(names) > 25
    assert not [name for name in names if not hasattr(fedprompt, name)]
    assert set(re.findall(r"`flower\.(\w+)`", section)) == set(names_of("flower"))


def test_no_figure_is_left_to_be_filled_in():
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        assert "<!-- figures -->" not in page.read_text(), page
