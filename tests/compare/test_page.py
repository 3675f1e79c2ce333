"""The commands of the page run on the images that it makes."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from fedprompt.compare import command

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "your-folder.md").read_text()
PAGE = PAGE.replace("\\\n", "")  # commands of several lines


def test_commands_of_the_page_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)[1], {})
    lines = re.findall(r"^fedprompt compare (.*(?:tiny.safetensors|emoji).*)$", PAGE, re.MULTILINE)
    for line in lines:
        command.main([*shlex.split(line), "--workers", "1"])
    said = capsys.readouterr().out
    assert len(lines) == 2
    assert "layout domain/class" in said
    for out in ("photos-results", "clip"):
        assert (tmp_path / out / "bars.png").exists()
        assert (tmp_path / out / "table.csv").exists()


def test_every_flag_of_the_page_is_one_of_the_command():
    known = {flag for action in command.flags()._actions for flag in action.option_strings}
    assert set(re.findall(r"(--[a-z][a-z-]+)", PAGE)) - {"--nproc-per-node", "--weights"} <= known


def test_the_command_imports_no_library_of_networks_or_pictures_before_it_needs_one(in_new_process):
    """They take longer than the help and a refusal may."""
    heavy = {"timm", "torchvision", "open_clip", "transformers", "scipy.stats", "matplotlib"}
    program = f"import sys, fedprompt.compare.command; print({heavy} & sys.modules.keys())"
    assert in_new_process(program) == "set()\n"


def test_the_installed_script_runs_the_command_or_says_how(monkeypatch, capsys):
    for given, status in ((["compare", "--help"], 0), ([], 2), (["other", "--help"], 2)):
        monkeypatch.setattr(sys, "argv", ["fedprompt", *given])
        with pytest.raises(SystemExit) as ended:
            command.command()
        assert ended.value.code == status
        assert "fedprompt" in (capsys.readouterr()[bool(status)])


def test_a_command_that_is_stopped_says_how_it_continues(tmp_path, monkeypatch, capsys):
    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "problem_of", stopped)
    with pytest.raises(SystemExit, match="130"):
        command.main(["photos", "--vit", "test_vit", "--methods", "fedprox"])
    assert capsys.readouterr().err == "fedprompt compare: stopped; the same command continues.\n"
