"""Files with one writer at a time, which no link, mode or killed process breaks."""

import fcntl
import importlib.util
import multiprocessing
import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch

import fedprompt as fp
import fedprompt._files as files
from fedprompt.wire import Header, save_payload


def saved_prompts(path):
    save_payload({"x": torch.ones(3)}, path / "prompts", header=Header())


def saved_checkpoint(path):
    fp.save_checkpoint({"x": torch.ones(3)}, path)


def saved_ledger(path, ledger=None):
    ledger = ledger or fp.Ledger(path / "ledger")
    ledger.record({"x": torch.ones(3)}, direction="up", client=0, server_round=0)
    ledger.state_dict()


WRITERS = {".lock": saved_checkpoint, ".prompts.lock": saved_prompts, ".ledger.lock": saved_ledger}
writers = pytest.mark.parametrize(("lock", "save"), WRITERS.items())


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(files, "WAIT", 0.2)


def hold(locked, path, ready, done):
    """Hold a lock in another process, until it may go or is killed."""
    with locked(path):
        ready.set()
        done.wait(20)


def another(path, locked=files.locked):
    """Start a process that holds the lock of a path."""
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(locked, path, ready, done))
    other.start()
    assert ready.wait(20)
    return other, done


@writers
def test_a_second_writer_waits_and_is_told_who_writes(lock, save, tmp_path):
    path = tmp_path if lock == ".lock" else tmp_path / lock[1:-5]
    (tmp_path / lock).write_text("x" * 999)  # of a killed process
    other, done = another(path)
    who = f"is written by process {other.pid} on {socket.gethostname()}; waited 0.2 s"
    with pytest.raises(TimeoutError, match=who):
        save(tmp_path)
    done.set()
    other.join()
    save(tmp_path)
    assert not (tmp_path / lock).exists()


def test_the_writer_of_an_empty_lock_is_not_named(tmp_path):
    other, done = another(tmp_path)
    (tmp_path / ".lock").write_text("")
    with pytest.raises(TimeoutError, match="is written by a process; waited"):
        saved_checkpoint(tmp_path)
    done.set()
    other.join()


@writers
def test_the_lock_of_a_killed_process_is_taken_over(lock, save, tmp_path):
    other, _ = another(tmp_path if lock == ".lock" else tmp_path / lock[1:-5])
    other.kill()
    other.join()
    assert (tmp_path / lock).exists()
    save(tmp_path)
    assert not list(tmp_path.glob(".*"))


def test_on_windows_a_second_writer_waits_as_well(tmp_path, monkeypatch):
    def locking(descriptor, mode, size):  # of a part of the file that nobody reads
        assert (mode, size, os.lseek(descriptor, 0, os.SEEK_CUR)) == ("now", 1, 2**30)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise PermissionError(13, "locked") from error

    spec = importlib.util.spec_from_file_location("files_of_windows", files.__file__)
    windows = importlib.util.module_from_spec(spec)
    fake = SimpleNamespace(LK_NBLCK="now", locking=locking)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "win32")
        patch.setitem(sys.modules, "msvcrt", fake)
        spec.loader.exec_module(windows)
    monkeypatch.setattr(windows, "WAIT", 0.2)
    other, done = another(tmp_path / "prompts", windows.locked)
    with (
        pytest.raises(TimeoutError, match=f"by process {other.pid} on"),
        windows.locked(tmp_path / "prompts"),
    ):
        pass
    done.set()
    other.join()
    with windows.locked(tmp_path / "prompts"):
        assert (tmp_path / ".prompts.lock").stat().st_size < 2**10


def test_planted_links_and_files_of_the_user_are_left_alone(tmp_path):
    path, treasure = tmp_path / "prompts", tmp_path / "treasure"
    treasure.write_text("mine")
    (tmp_path / "prompts.part").symlink_to(treasure)
    saved_prompts(tmp_path)
    assert treasure.read_text() == "mine"
    assert (tmp_path / "prompts.part").is_symlink()
    left = tmp_path / f"prompts.{16 * '0'}.part"  # of a killed save
    left.symlink_to(treasure)
    saved_prompts(tmp_path)
    assert not left.is_symlink()
    assert sorted(tmp_path.iterdir()) == sorted([path, treasure, tmp_path / "prompts.part"])


def test_a_file_that_is_replaced_keeps_its_mode(tmp_path):
    saved_prompts(tmp_path)
    (tmp_path / "new").touch()
    assert (tmp_path / "prompts").stat().st_mode == (tmp_path / "new").stat().st_mode
    (tmp_path / "prompts").chmod(0o600)
    saved_prompts(tmp_path)
    assert (tmp_path / "prompts").stat().st_mode & 0o777 == 0o600
    saved_checkpoint(tmp_path)
    (tmp_path / "state.json").chmod(0o640)
    saved_checkpoint(tmp_path)
    assert (tmp_path / "state.json").stat().st_mode & 0o777 == 0o640


def test_a_file_of_a_newer_format_is_not_replaced(tmp_path):
    for save, name in ((saved_prompts, "prompts"), (saved_checkpoint, "state.json")):
        save(tmp_path)
        newer = (tmp_path / name).read_bytes()
        newer = newer.replace(b"fedprompt-2", b"fedprompt-3").replace(b"nt 2", b"nt 3")
        (tmp_path / name).write_bytes(newer)
        with pytest.raises(ValueError, match="which would be lost; got fedprompt"):
            save(tmp_path)
        assert (tmp_path / name).read_bytes() == newer


def test_two_ledgers_of_one_file_do_not_cut_each_other_short(tmp_path):
    first = fp.Ledger(tmp_path / "ledger")
    saved_ledger(tmp_path, first)
    state = first.state_dict()
    second = fp.Ledger(tmp_path / "ledger")
    second.load_state_dict(state)
    saved_ledger(tmp_path, second)
    with pytest.raises(ValueError, match="so another process writes it"):
        saved_ledger(tmp_path, first)
    again = fp.Ledger(tmp_path / "ledger")
    again.load_state_dict(second.state_dict())
    assert len(again.entries) == 2
