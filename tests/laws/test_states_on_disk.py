"""States in the files of a folder are those in memory, and every kept round has its own."""

import copy
import itertools
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

import fedprompt as fp
import small_method
from fedprompt.codecs import int8
from fedprompt.methods import METHODS, Federation, HeldOut, evaluate
from method_runs import CHANGES
from same import assert_same
from small_method import COHORTS, Data, method
from tiny_federations import federation_of


def run(cohorts=COHORTS, made=None, **options):
    return fp.run_rounds(made or method(), Data, cohorts, **options)


def files(folder):
    return {path.name for path in folder.glob("client-*")}


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert_same(tuple(one), tuple(other), ordered=False)
        assert (one.stateful, one.images) == (other.stateful, other.images)


@pytest.mark.parametrize("name", ["scaffold", "ditto", "fedper", "fedamp", "pfedmoap", "local"])
def test_methods_have_the_bits_of_states_in_memory(name, tmp_path):
    family = METHODS[name].families[0]
    federation = federation_of(METHODS[name], family, **CHANGES)
    parts = federation.inputs, federation.labels

    def last(states):
        made = fp.rounds.coded(METHODS[name].make(federation), int8())
        *_, now = fp.run_rounds(made, federation.data, federation.cohorts(), states=states)
        whole, tests = Federation(*parts, federation.shards), HeldOut(*parts, mixes="classes")
        return now, evaluate(made, whole, now, tests, clients=[0, 2])

    (expected, figures), (now, found) = last(None), last(tmp_path)
    assert expected.stateful
    assert_equal([now], [expected])
    assert (found, found.clients) == (figures, figures.clients)


def test_kept_rounds_and_older_checkpoints_have_their_states(tmp_path):
    """A run continues from each of them, also on the same folder, and in memory."""
    states, expected, kept = tmp_path / "states", list(run()), []
    for now in run(states=states):
        fp.save_checkpoint(now, tmp_path / f"{now.server_round}")
        fp.save_checkpoint(now, tmp_path / "last")
        kept.append(now)
    assert len(files(tmp_path / "last")) == 6 < len(files(states))
    for after in range(1, len(COHORTS)):
        loaded = fp.load_checkpoint(tmp_path / f"{after - 1}")
        for start in (loaded, kept[after - 1]):
            for where in ({"states": states}, {"states": tmp_path / f"new-{after}"}, {}):
                assert_equal(run(start=start, **where), expected[after:])
        assert_equal([loaded], [expected[after - 1]])
    assert_equal(kept, expected)
    del kept[:], loaded, start, now
    next(run([[2]], states=states))
    assert [name[:11] for name in files(states)] == ["client-2-0-"]


def test_files_of_rounds_that_nobody_kept_are_removed(tmp_path):
    for now in run(COHORTS * 3, states=tmp_path / "states"):
        fp.save_checkpoint({"now": now, "best": [now]}, tmp_path / "checkpoint")
        assert len(files(tmp_path / "states")) <= 9  # six clients, and three before this round
        assert len(files(tmp_path / "checkpoint")) == len(now.clients)


def test_a_checkpoint_needs_no_other_folder(tmp_path):
    """It may be moved or copied, and a later save removes no file of a round that is loaded."""
    *_, now = run(states=tmp_path / "states")
    fp.save_checkpoint(now, tmp_path / "here")
    start, expected = fp.load_checkpoint(tmp_path / "here"), fp.load_checkpoint(tmp_path / "here")
    expected = expected._replace(clients=dict(expected.clients))
    shutil.copytree(tmp_path / "here", tmp_path / "copy")
    *_, now = run(COHORTS * 2, start=start, states=tmp_path / "others")
    fp.save_checkpoint(now, tmp_path / "here")
    assert_equal([start], [expected])
    shutil.rmtree(tmp_path / "states")
    shutil.rmtree(tmp_path / "here")
    assert_equal([fp.load_checkpoint(tmp_path / "copy")], [expected])
    assert_equal([now], [list(run(COHORTS * 2))[-1]])  # its files have names of their own
    assert_equal([copy.deepcopy(now)], [now])


def test_another_disk_has_copies(tmp_path, monkeypatch):
    def link(source, target):
        raise OSError("EXDEV")

    monkeypatch.setattr(os, "link", link)
    *_, now = run(states=tmp_path / "states")
    fp.save_checkpoint(now, tmp_path / "checkpoint")
    assert len(files(tmp_path / "checkpoint")) == 6
    assert_equal([fp.load_checkpoint(tmp_path / "checkpoint")], [now])


@pytest.mark.parametrize("operation", ["link", "fsync", "replace"])
def test_a_save_that_fails_at_any_file_leaves_a_complete_checkpoint(
    operation, tmp_path, monkeypatch
):
    real, folder = getattr(os, operation), tmp_path / "checkpoint"
    first, second = run([[0, 1, 2], [2, 1, 3]], states=tmp_path / "states")
    for fatal in itertools.count(1):
        fp.save_checkpoint(first, folder)
        calls = itertools.count(1)

        def failing(*arguments, fatal=fatal, calls=calls):
            if next(calls) == fatal:
                raise KeyboardInterrupt
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, failing)
            try:
                fp.save_checkpoint(second, folder)
            except KeyboardInterrupt:
                now = fp.load_checkpoint(folder)
                assert_equal([now], [second if now.server_round else first])
                assert files(folder) == {file.name for file in now.clients.files.values()}
                del now  # its files stay as long as it does
                continue
        break
    assert fatal > 2
    assert_equal([fp.load_checkpoint(folder)], [second])


def test_a_state_changes_its_keys_is_emptied_or_repeats_its_bytes(tmp_path):
    states = [{"a": torch.ones(2)}, {"b": [1, (torch.zeros(0), None)]}, {}, {}, {"b": -0.0}]
    states += [{"b": -0.0}, {"n": torch.tensor([float("nan")], dtype=torch.bfloat16)}]

    def train(data, answer, state):
        if data.server_round:
            assert_same(state, states[data.server_round - 1])
        return None, states[data.server_round]

    made, cohorts = method(1)._replace(client=train), [[2**63 - 1]] * len(states)
    for now in run(cohorts, made, states=tmp_path / "states"):
        fp.save_checkpoint(now, tmp_path / "checkpoint")
        found = dict(fp.load_checkpoint(tmp_path / "checkpoint").clients)
        assert_same(found, {str(2**63 - 1): states[now.server_round]})
        assert len(files(tmp_path / "checkpoint")) == bool(states[now.server_round])


def test_few_states_are_in_memory_at_a_time(tmp_path):
    made, seen, most = method(), [], [0]

    def train(data, answer, state):
        payload, state = made.client(data, answer, state)
        most[0] = max(most[0], sum(each() is not None for each in seen))
        seen.append(weakref.ref(state["own"]))
        return payload, state

    for now in run([range(40), range(40)], made._replace(client=train), states=tmp_path):
        assert (len(now.clients), most[0] <= 4) == (40, True)


def test_another_process_is_refused_and_what_it_left_is_removed(tmp_path, monkeypatch):
    """The second of two jobs stops; a killed one leaves files, which the next one removes."""
    monkeypatch.setenv("PYTHONPATH", str(Path(small_method.__file__).parent))
    program = "import small_method, sys; small_method.resume(*sys.argv[1:])"
    where = [str(tmp_path / "checkpoint"), str(tmp_path / "states")]
    with subprocess.Popen([sys.executable, "-c", program, *where], stdout=-1) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match="`states` must be a folder that no other process us"):
            next(run(states=where[1]))
        other.kill()
    (tmp_path / "states" / "mine.txt").write_text("mine")
    part = tmp_path / "states" / f"{min(files(tmp_path / 'states'))}.{'0' * 16}.part"
    part.write_bytes(b"of a killed process")
    assert files(tmp_path / "states")
    now = next(run([[0]], states=where[1]))
    assert len(files(tmp_path / "states")) == len(now.clients) == 1
    assert (tmp_path / "states" / "mine.txt").exists()
    assert not part.exists()


def test_wrong_folders_and_damaged_files_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    *_, now = run(states=tmp_path / "states")
    fp.save_checkpoint(now, tmp_path / "checkpoint")
    for states, text in {
        5: "`states` must be a path",
        "": "`states` must be the path of a folder",
        tmp_path / "file": "`states` must be the path of a folder; got the file",
        tmp_path / "checkpoint": "`states` must not be the folder of a checkpoint",
    }.items():
        with pytest.raises((TypeError, ValueError), match=text):
            next(run(states=states))
    with pytest.raises(ValueError, match="`directory` must be another folder than `states`"):
        fp.save_checkpoint(now, tmp_path / "states")
    (file,) = (tmp_path / "checkpoint").glob("client-3-*")
    start = fp.load_checkpoint(tmp_path / "checkpoint")
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole[:-1] + b"\1")
    with pytest.raises(ValueError, match=r"`now\.clients` must have its files as they were"):
        _ = start.clients["3"]
    file.unlink()
    with pytest.raises(ValueError, match=r"`now\.clients` must have the files of its states"):
        _ = start.clients["3"]
    with pytest.raises(
        ValueError, match=r"`directory` must contain the files .* no file 'client-3"
    ):
        fp.load_checkpoint(tmp_path / "checkpoint")
    assert_equal([now], [list(run())[-1]])  # the run has files of its own
