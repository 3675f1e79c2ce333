"""Records of runs: where they were made, and their lines in a file."""

import json
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import pytest

import fedprompt as fp
from fedprompt.compare import records


@pytest.mark.parametrize(("changed", "end"), [(False, ""), (True, "-dirty")])
def test_a_record_names_the_commit_and_whether_files_of_the_library_differ(
    changed, end, monkeypatch, tmp_path
):
    """Other files may differ, such as those of a page."""
    assert (records.ROOT / "fedprompt" / "compare" / "records.py").samefile(records.__file__)
    monkeypatch.setattr(records, "ROOT", tmp_path)
    assert "commit" not in records.origin.__wrapped__()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    (tmp_path / "fedprompt").mkdir()
    for name in ("fedprompt/a.py", "b.py"):
        (tmp_path / name).touch()
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "a"]):
        subprocess.run([*git, *words], check=True)
    (tmp_path / ("fedprompt/a.py" if changed else "b.py")).write_text("x = 1")
    commit = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    found = records.origin.__wrapped__()
    assert found["commit"] == commit.stdout.strip() + end
    assert (found["version"], found["date"]) == (fp.__version__, str(datetime.now(UTC).date()))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "which", lambda name: None)
        assert "commit" not in records.origin.__wrapped__()
    shutil.rmtree(tmp_path / ".git" / "refs")  # a repository that git cannot read
    assert "commit" not in records.origin.__wrapped__()


@pytest.mark.parametrize("platform", ["linux", "darwin"])
def test_the_processor_is_named_by_its_model_where_there_is_a_list(platform, monkeypatch):
    text = (
        "vendor_id\t: Maker\ncpu family\t: 6\nmodel\t\t: 85\nmodel name\t: Fast\nvendor_id\t: B\n"
    )
    real, given = Path.read_text, Path("/proc/cpuinfo")
    monkeypatch.setattr(
        Path, "read_text", lambda path, **how: text if path == given else real(path, **how)
    )
    monkeypatch.setattr(records.sys, "platform", platform)
    monkeypatch.setattr(records.torch.backends.cpu, "get_cpu_capability", lambda: "AVX9")
    names = " Maker 6 85" if platform == "linux" else ""
    assert records.origin.__wrapped__()["processor"] == f"AVX9{names}"


def test_a_line_that_was_cut_is_replaced_and_the_others_stay(tmp_path):
    path, record = tmp_path / "a" / "r.jsonl", {"row": "é", "own": 0.5}
    line = json.dumps(record) + "\n"
    records.append(path, record)
    assert path.read_text() == line
    cut = f'{line}{{"row": "A", "ow'
    for before, count in ((line, 2), (line[:-1], 2), (cut, 2), ("", 1), (f"{line}{line[:-3]}", 2)):
        path.write_text(before)
        records.append(path, record)
        assert path.read_text() == line * count
    assert [each.name for each in path.parent.glob("[!.]*")] == ["r.jsonl"]


def test_figures_have_six_digits():
    figures = {"own": 0.12345678, "clients": {"a": {"own": 2 / 3}}, "bytes_up": [12345678, 3]}
    expected = {"own": 0.123457, "clients": {"a": {"own": 0.666667}}, "bytes_up": [12345700.0, 3.0]}
    assert records.rounded(figures) == expected
    assert figures["own"] == 0.12345678
