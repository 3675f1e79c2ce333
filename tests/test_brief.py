"""Scripts that CI runs briefly: every failure is noticed, and every script has its own folder."""

import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
# Without the imports that the scripts of CI share, which take seconds.
PROGRAM = f"import sys; sys.path.insert(0, {str(CI)!r}); import brief; " + (
    "sys.exit(brief.any_failed(sys.stdin))"
)
FAILING = {
    "raises": "print('said'); raise KeyError('a reason')",
    "exits with a text": "print('said'); raise SystemExit('a reason')",
    "exits with a number": "print('said', 'a reason'); raise SystemExit(3)",
    "is killed": "import os; os.write(1, b'said a reason'); os.kill(os.getpid(), 9)",
}


def briefly(folder: Path, *commands: str) -> subprocess.CompletedProcess[str]:
    command, lines = [sys.executable, "-c", PROGRAM], "".join(f"{each}\n" for each in commands)
    return subprocess.run(command, input=lines, capture_output=True, text=True, cwd=folder)


@pytest.mark.parametrize("label", FAILING)
def test_a_failure_is_an_error_with_its_output_and_the_next_script_runs(label, tmp_path):
    (tmp_path / "bad.py").write_text(FAILING[label])
    (tmp_path / "next.py").write_text("raise SystemExit('next ran')")
    ran = briefly(tmp_path, "bad.py --flag", "next.py")
    assert ran.returncode == 1
    assert "bad.py --flag failed:" in ran.stdout
    assert "said" in ran.stdout
    assert "a reason" in ran.stdout
    assert "next ran" in ran.stdout
    (tmp_path / "next.py").write_text("")
    assert briefly(tmp_path, "bad.py", "next.py").returncode == 1


def test_scripts_that_succeed_are_silent_and_leave_no_file(tmp_path):
    (tmp_path / "beside.py").write_text("NUMBER = 3")
    (tmp_path / "good.py").write_text(
        "import sys; from beside import NUMBER; print(NUMBER); open('made', 'w').close()\n"
        "assert __name__ == '__main__' and sys.argv[1:] == ['--name', 'two words']"
    )
    (tmp_path / "ends.py").write_text("raise SystemExit")
    before = sorted(tmp_path.iterdir())
    ran = briefly(tmp_path, "good.py --name 'two words'", "ends.py")
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "", "")
    assert sorted(path for path in tmp_path.iterdir() if path.suffix == ".py") == before
    assert not (tmp_path / "made").exists()
