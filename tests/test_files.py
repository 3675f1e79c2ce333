"""Files with one writer at a time, which no link, mode or killed process breaks."""

import json
import multiprocessing
import os
import socket

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
ways = pytest.mark.parametrize("flock", [True, False])
writers = pytest.mark.parametrize(("lock", "save"), WRITERS.items())


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(files, "WAIT", 0.2)


def hold(lock, ready, done):
    """Hold a lock in another process, until it may go."""
    path = lock.parent if lock.name == ".lock" else lock.with_name(lock.name[1:-5])
    with files.locked(path):
        ready.set()
        done.wait(20)


@ways
@writers
def test_a_second_writer_waits_and_is_told_who_writes(lock, save, flock, tmp_path, monkeypatch):
    if not flock:
        monkeypatch.setattr(files, "fcntl", None)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / lock, ready, done))
    other.start()
    assert ready.wait(20)
    who = f"is written by process {other.pid} on {socket.gethostname()}; waited 0.2 s"
    with pytest.raises(TimeoutError, match=who):
        save(tmp_path)
    done.set()
    other.join()
    save(tmp_path)
    assert not (tmp_path / lock).exists()


@ways
@writers
def test_the_lock_of_a_killed_process_is_taken_over(lock, save, flock, tmp_path, monkeypatch):
    if not flock:
        monkeypatch.setattr(files, "fcntl", None)
    context = multiprocessing.get_context("fork")
    dead = context.Process(target=os._exit, args=(0,))
    dead.start()
    dead.join()
    holder = {"process": dead.pid, "host": socket.gethostname()}
    (tmp_path / lock).write_text(json.dumps(holder))
    save(tmp_path)
    assert not list(tmp_path.glob(".*"))
    if not flock:  # of another host nobody knows
        (tmp_path / lock).write_text(json.dumps(holder | {"host": "elsewhere"}))
        with pytest.raises(TimeoutError, match="on elsewhere"):
            save_payload({"x": torch.ones(1)}, tmp_path / "other", header=Header()) or save(
                tmp_path
            )


def test_a_lock_without_a_name_blocks_nobody_for_ever(tmp_path, monkeypatch):
    """A process was killed, or its disk was full, before it wrote its name."""
    monkeypatch.setattr(files, "fcntl", None)
    lock = tmp_path / ".prompts.lock"
    lock.touch()
    saved_prompts(tmp_path)
    monkeypatch.setattr(files, "_me", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        saved_prompts(tmp_path)
    assert not lock.exists()


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
