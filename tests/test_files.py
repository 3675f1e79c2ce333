"""Files with one writer at a time, which no link, mode or killed process breaks."""

import multiprocessing

import pytest
import torch

import fedprompt as fp
import fedprompt._files as files
from fedprompt.wire import Header, save_payload


def saved_prompts(path):
    save_payload({"x": torch.ones(3)}, path / "prompts", header=Header())


def saved_checkpoint(path):
    fp.save_checkpoint({"x": torch.ones(3)}, path)


def hold(path, ready, done):
    """Hold a lock in another process, until it may go or is killed."""
    with files.locked(path):
        ready.set()
        done.wait(20)


@pytest.mark.parametrize(("name", "save"), [("", saved_checkpoint), ("prompts", saved_prompts)])
@pytest.mark.parametrize("killed", [False, True])
def test_a_second_writer_waits_until_the_first_one_is_done_or_killed(
    name, save, killed, tmp_path, monkeypatch
):
    monkeypatch.setattr(files, "WAIT", 0.2)
    context = multiprocessing.get_context("fork")
    ready, done = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / name, ready, done))
    other.start()
    assert ready.wait(20)
    with pytest.raises(
        TimeoutError, match=r"is written by another process; waited 0.2 s\. See .*lock"
    ):
        save(tmp_path)
    other.kill() if killed else done.set()
    other.join()
    save(tmp_path)


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
    assert set(tmp_path.glob("[!.]*")) == {path, treasure, tmp_path / "prompts.part"}


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
