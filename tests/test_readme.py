"""The README: its loop runs, CI runs its commands, and it quotes and names what exists."""

import re
from operator import attrgetter
from pathlib import Path

import torch

import fedprompt
from fedprompt import methods, samples

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_quickstart_is_the_program_of_the_samples():
    ((quickstart, printed),) = re.findall(
        r"<!-- quickstart -->\n```python\n(.*?)```\n.*?```text\n(.*?)```", README, re.DOTALL
    )
    assert "<!-- quickstart -->" in (ROOT / ".ci" / "run").read_text()  # CI runs it with the wheel
    program = (ROOT / "fedprompt" / "samples" / "__main__.py").read_text()
    assert f"# fmt: off\n{quickstart}# fmt: on\n" in program
    assert printed.startswith("accuracy 9")


def test_the_readme_is_short():
    assert README.count("\n") <= 110


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
    assert len(rows) == 5
    names = re.findall(r"`([\w.]+)`", "".join(row[3] for row in rows))
    assert len(names) > 12
    assert all(attrgetter(name)(fedprompt) for name in names)


def test_the_methods_of_commands_and_the_table_exist():
    named = re.findall(r"--methods ([\w,.:]+)", README)
    names = {name for each in named for name in each.split(",") if ":" not in name}
    assert names >= {"local", "fedlora"}
    assert names <= set(methods.METHODS)
    assert "more than 70 methods" in README
    assert len(methods.METHODS) > 70


def test_the_fedprox_of_the_readme_runs_as_that_of_the_gallery(monkeypatch):
    monkeypatch.setattr(methods.registry, "METHODS", dict(methods.METHODS))
    (block,) = re.findall(r"```python\n(import torch\.nn\.functional.*?)```", README, re.DOTALL)
    names = {}
    exec(block, names)
    images, labels, *_ = samples.digits()
    trunk = fedprompt.vit_trunk(samples.vit("S"))
    setting = methods.VitSetting(trunk=trunk, num_classes=10, clients=range(2), rounds=2, steps=2)
    federation = methods.Federation(images, labels, dict(enumerate(torch.arange(60).split(30))))
    ours, gallery = (
        [now.server for now in fedprompt.run_rounds(make(setting), federation)][-1]["values"]
        for make in (names["my_fedprox"], methods.fedprox)
    )
    assert all(torch.equal(ours[name], gallery[name]) for name in gallery)
