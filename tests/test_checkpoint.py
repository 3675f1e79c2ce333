"""Resumed runs are bitwise identical to uninterrupted ones, and no crash spoils a checkpoint."""

import hashlib
import itertools
import json
import os
import resource
import stat
from collections import OrderedDict, namedtuple
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

import fedprompt as fp
from blobs import flipped
from fedprompt import Weighted, load_checkpoint, save_checkpoint
from refusals import check_refused, refusals
from same import assert_same

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES += [torch.int64, torch.uint8, torch.bool]

# Trees.

SHAPES = st.lists(st.integers(0, 3), max_size=3)


def drawn(shape, dtype, seed):
    return (9 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


TENSORS = st.builds(drawn, SHAPES, st.sampled_from(DTYPES), st.integers(0, 99))
LEAVES = st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats()
LEAVES |= st.text(st.characters(codec="utf-8")) | TENSORS
KEYS = st.text(st.characters(codec="utf-8"), max_size=3) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda trees: (
        st.lists(trees, max_size=3)
        | st.lists(trees, max_size=3).map(tuple)
        | st.dictionaries(KEYS, trees, max_size=3)
        | TENSORS.filter(torch.is_floating_point).map(lambda value: Weighted(value, value))
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=40)
@given(TREES)
def test_a_tree_is_restored_exactly(tmp_path_factory, tree):
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tree, directory)
    assert_same(load_checkpoint(directory), tree)


def test_loaded_tensors_share_no_memory(tmp_path):
    values = torch.arange(6.0).reshape(2, 3)

    def views(values):
        named = {"values": values, "transposed": values.T, "again": values, "part": values[:, 1]}
        return named | {"parameter": values.detach()}

    save_checkpoint(views(values) | {"parameter": nn.Parameter(values)}, tmp_path)
    values += 100
    loaded, expected = load_checkpoint(tmp_path), torch.arange(6.0).reshape(2, 3)
    assert_same(loaded, views(expected))
    loaded["values"].zero_()
    assert loaded["again"].equal(expected)
    assert load_checkpoint(tmp_path)["values"].equal(expected)


def test_an_ordered_dict_is_a_dict(tmp_path):
    save_checkpoint(OrderedDict(b=1, a=2), tmp_path)
    assert_same(load_checkpoint(tmp_path), {"b": 1, "a": 2})


# A federation that is killed between any two rounds.


def federate(directory, stop):
    """Train a client with a persistent optimizer, with server momentum and one random stream."""
    model, stream = nn.Linear(4, 3), torch.Generator().manual_seed(7)
    nn.init.eye_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    server, values = fp.aggregation.adam(learning_rate=0.1), fp.snapshot(model)
    state = {"round": 0, "values": values, "server": server.init(values)}
    state |= {"stream": stream.get_state(), "optimizer": optimizer.state_dict()}
    state = load_checkpoint(directory, default=state)
    stream.set_state(state["stream"])
    optimizer.load_state_dict(state["optimizer"])
    for server_round in range(state["round"], stop):
        fp.load_values(model, state["values"])
        optimizer.zero_grad()
        model(torch.randn(8, 4, generator=stream)).square().mean().backward()
        optimizer.step()
        mean = fp.collect(model, weight=8)
        values, memory = server.step(state["values"], mean, state["server"])
        state = {"round": server_round + 1, "values": values, "server": memory}
        state |= {"stream": stream.get_state(), "optimizer": optimizer.state_dict()}
        save_checkpoint(state, directory)


def test_a_run_that_is_resumed_after_any_round_ends_bitwise_identical(tmp_path):
    federate(tmp_path / "whole", stop=5)
    for stop in range(1, 5):
        federate(tmp_path / str(stop), stop=stop)
        federate(tmp_path / str(stop), stop=5)
        assert_same(load_checkpoint(tmp_path / str(stop)), load_checkpoint(tmp_path / "whole"))


# Crashes.

OPERATIONS = [(os, "fsync"), (os, "replace"), (os, "open"), (Path, "open"), (Path, "unlink")]


def snapshot_of(number):
    return {"number": number, "values": torch.full((50,), float(number))}


@pytest.mark.parametrize(("owner", "name"), OPERATIONS, ids=[name for _, name in OPERATIONS])
def test_a_save_that_fails_anywhere_leaves_a_complete_state(tmp_path, monkeypatch, owner, name):
    save_checkpoint(snapshot_of(1), tmp_path)
    real = getattr(owner, name)
    for fatal in range(1, 20):
        calls, failed = itertools.count(1), False

        def failing(*args, fatal=fatal, calls=calls, **options):
            if next(calls) == fatal:
                raise OSError("no space left on device")
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            try:
                save_checkpoint(snapshot_of(2), tmp_path)
            except OSError:
                failed = True
        loaded = load_checkpoint(tmp_path)
        assert_same(loaded, snapshot_of(loaded["number"]))
        if not failed:
            break
        save_checkpoint(snapshot_of(1), tmp_path)
        assert len(list(tmp_path.glob("[!.]*"))) == 2
    assert next(calls) == fatal > 1  # each call of the operation has failed once
    assert load_checkpoint(tmp_path)["number"] == 2


def test_contents_are_synchronized_before_names_and_tensors_before_the_state(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        events.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        fsync(descriptor)

    def replaced(old, new):
        events.append(Path(new).suffix)
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    save_checkpoint(snapshot_of(1), tmp_path)
    assert events == ["content", "content", ".safetensors", "directory", ".json", "directory"]


# Full disks.


def large(number, size, text=""):
    return {"number": number, "values": torch.full((size,), float(number)), "text": text}


def used(folder):
    return sum(path.stat().st_size for path in folder.glob("[!.]*"))


@contextmanager
def longest_file(num_bytes):
    """Let the writing of longer files fail after this number of bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.mark.parametrize("limit", [0, 100, 3000])
@pytest.mark.parametrize("state", [large(1, 1000), large(1, 100, text="x" * 4000)])
def test_saves_that_fail_on_a_full_disk_leave_no_files(tmp_path, limit, state):
    """The disk has no space for the tensors, or for the text next to the tensors."""
    for before in (None, large(0, 10)):
        if before is not None:
            save_checkpoint(before, tmp_path)
        whole = used(tmp_path)
        for _ in range(2):
            with longest_file(limit), pytest.raises(OSError, match="too large"):
                save_checkpoint(state, tmp_path)
            assert used(tmp_path) == whole
            assert_same(load_checkpoint(tmp_path, default=None), before)
    save_checkpoint(state, tmp_path)
    assert_same(load_checkpoint(tmp_path), state)


@contextmanager
def killed(monkeypatch, operation, last):
    """Interrupt a save at the `last` call of an operation of `os`; then it cannot clean up."""
    real, calls = getattr(os, operation), itertools.count(1)
    with monkeypatch.context() as patch:

        def fatal(*args):
            if next(calls) == last:
                patch.setattr(Path, "unlink", lambda *_, **__: None)
                raise KeyboardInterrupt
            return real(*args)

        patch.setattr(os, operation, fatal)
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize(("operation", "last"), [("fsync", 1), ("replace", 1), ("replace", 2)])
def test_six_killed_saves_leave_the_files_of_one(tmp_path, monkeypatch, operation, last):
    """They are removed before the next save, so the disk never needs more than two states."""
    save_checkpoint(large(0, 10_000), tmp_path)
    whole, most, replace = used(tmp_path), [], os.replace
    for number in range(1, 7):
        with killed(monkeypatch, operation, last):
            save_checkpoint(large(number, 10_000), tmp_path)
    assert whole < used(tmp_path) <= 2 * whole + 100
    monkeypatch.setattr(os, "replace", lambda *a: (most.append(used(tmp_path)), replace(*a)))
    for number in range(1, 4):
        save_checkpoint(large(number, 10_000), tmp_path)
        assert max(most) <= 2 * whole + 100
        assert load_checkpoint(tmp_path)["number"] == number
        assert len(list(tmp_path.glob("[!.]*"))) == 2


# Refusals.


def test_tensors_without_their_state_are_an_error(tmp_path):
    save_checkpoint(snapshot_of(1), tmp_path)
    state = (tmp_path / "state.json").read_bytes()
    (tmp_path / "state.json").unlink()
    # A save would delete the tensors.
    load = partial(load_checkpoint, default=None)
    for call in (load_checkpoint, load, partial(save_checkpoint, snapshot_of(2))):
        with pytest.raises(ValueError, match=r"must contain state\.json, .* got tensors"):
            call(tmp_path)
    # The file of a later save that was killed.
    later = json.loads(state) | {"tensors": f"tensors-{16 * '0'}.safetensors"}
    (tmp_path / f"state.json.{16 * '0'}.part").write_text(json.dumps(later))
    with pytest.raises(ValueError, match="got tensors alone"):
        load_checkpoint(tmp_path, default=None)
    (tmp_path / "state.json").write_bytes(state)
    assert_same(load_checkpoint(tmp_path), snapshot_of(1))


def test_a_killed_save_over_a_damaged_state_keeps_the_tensors(tmp_path, monkeypatch):
    save_checkpoint(snapshot_of(1), tmp_path)
    state = (tmp_path / "state.json").read_bytes()
    (tmp_path / "state.json").write_bytes(b"[]")
    with killed(monkeypatch, "fsync", 1):
        save_checkpoint(snapshot_of(2), tmp_path)
    (tmp_path / "state.json").write_bytes(state)
    assert_same(load_checkpoint(tmp_path), snapshot_of(1))


@pytest.mark.parametrize(("operation", "calls"), [("fsync", 4), ("replace", 2)])
def test_a_run_whose_first_save_was_killed_starts_again(tmp_path, monkeypatch, operation, calls):
    """The save is killed at every moment before it is complete, and cannot clean up."""
    for last in range(1, calls + 1):
        directory = tmp_path / f"{operation}{last}"
        with killed(monkeypatch, operation, last):
            save_checkpoint(snapshot_of(1), directory)
        if (operation, last) == ("fsync", 4):  # the state is complete
            assert_same(load_checkpoint(directory), snapshot_of(1))
        else:
            assert load_checkpoint(directory, default=None) is None
        save_checkpoint(snapshot_of(2), directory)
        assert_same(load_checkpoint(directory), snapshot_of(2))
        assert len(list(directory.glob("[!.]*"))) == 2


def test_without_a_checkpoint_the_default_is_returned_or_an_error_raised(tmp_path):
    assert load_checkpoint(tmp_path, default=None) is None
    assert load_checkpoint(tmp_path / "nowhere", default=7) == 7
    with pytest.raises(FileNotFoundError, match="`directory` must hold a checkpoint"):
        load_checkpoint(tmp_path)
    assert not list(tmp_path.glob("[!.]*"))


Pair = namedtuple("Pair", "a b")
REFUSED = """
save({'a': [1, object()]}) -> TypeError: `state['a'][1]` must be a dict, list, tuple, Weighted
save(torch.zeros(2).numpy()) -> TypeError: `state` must be a dict
save({'a': torch.ones(1).double().numpy()[0]}) -> TypeError: `state['a']` must be a dict
save(type('Own', (dict,), {})()) -> TypeError: `state` must be a dict
save(Pair(1, 2)) -> TypeError: `state` must be a dict
save(torch.zeros(2, dtype=torch.complex64)) -> TypeError: `state` must be a dict
save(torch.zeros(2).to_sparse()) -> TypeError: `state` must be a dict
save(torch.zeros(2, device='meta')) -> TypeError: `state` must be a dict
save({(1, 2): 3}) -> TypeError: `state` must have strings and integers as keys; got
save({True: 3}) -> TypeError: `state` must have strings and integers as keys; got
save(nested(101)) -> ValueError: `state` must have at most 100 levels, and no cycle; got more.
save(nested(500)) -> ValueError: `state` must have at most 100 levels, and no cycle; got more.
save(CYCLE) -> ValueError: `state` must have at most 100 levels, and no cycle; got more.
save_checkpoint(1, 5) -> TypeError: `directory` must be a path
save_checkpoint(1, '') -> ValueError: `directory` must be the path of a directory; got an empty
load_checkpoint(5) -> TypeError: `directory` must be a path
load_checkpoint('') -> ValueError: `directory` must be the path of a directory; got an empty
"""


def nested(levels):
    tree = [torch.ones(1)]
    for _ in range(levels - 1):
        tree = [tree]
    return tree


CYCLE = {}
CYCLE["again"] = [CYCLE]


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_before_anything_is_written(tmp_path, call, error, message):
    folder = tmp_path / "new" / "newer"
    save = partial(save_checkpoint, directory=folder)
    save(nested(100))
    check_refused(call, error, message, globals() | {"save": save})
    assert_same(load_checkpoint(folder), nested(100))


def test_damage_is_refused(tmp_path):
    save_checkpoint(snapshot_of(1), tmp_path)
    state = tmp_path / "state.json"
    (tensors,) = tmp_path.glob("tensors-*")
    whole = {path: path.read_bytes() for path in (state, tensors)}
    record = json.loads(whole[state])
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(whole[tensors])

    def changed(**fields):
        return state, json.dumps(record | fields).encode()

    damaged = "damaged content"
    for (path, content), reason in [
        ((tensors, whole[tensors][:-1]), "other content"),
        ((tensors, whole[tensors][:-1] + b"\1"), "other content"),
        ((state, whole[state][:-1]), damaged),
        ((state, b"[]"), damaged),
        ((state, b"{}"), damaged),
        (changed(format="fedprompt checkpoint 999"), "got fedprompt checkpoint 999"),
        (changed(tensors="tensors-0.safetensors"), "no file"),
        (changed(tensors=f"tensors-{16 * '0'}.safetensors"), "no file"),
        (changed(tensors="../outside.safetensors"), "no file"),
        (changed(tensors=5), r"damaged content \(str, int, str, str\)"),
        (changed(state={}), r"damaged content \(str, str, str, dict\)"),
        (changed(state=record["state"].replace("1", "7", 1)), "digest; got other content"),
        (changed(state="\ud800"), "digest; got other content"),
        ((state, b"[" * 100_000), damaged),
        ((state, b"\xff" * 1000), "damaged content .{,200}$"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            load_checkpoint(tmp_path)
        path.write_bytes(whole[path])
    assert_same(load_checkpoint(tmp_path), snapshot_of(1))


CRAFTED = """
[1] | {} | {"evil": [1]} | {"tensor": "1", "list": []} | {"tensor": "7"} | {"tensor": [0]} | {
{"float": 1} | {"float": "one"} | {"list": 5} | {"list": {"a": 1}} | {"dict": [5]}
{"dict": [["a"]]} | {"dict": [[["a"], 1]]} | {"weighted": [{"tensor": "0"}]} | {"dict": ["ab"]}
{"weighted": []}
""".replace("\n", " | ").strip(" |")


DEEP = ["[" * 100_000, '{"list": [' * 102 + "]}" * 102, '{"dict": [[1, ' * 102 + "1" + "]]}" * 102]


@pytest.mark.parametrize("text", [*CRAFTED.split(" | "), *DEEP])
def test_a_crafted_tree_with_the_right_digest_is_refused(tmp_path, text):
    save_checkpoint(snapshot_of(1), tmp_path)
    state, (tensors,) = tmp_path / "state.json", tmp_path.glob("tensors-*")
    digest = hashlib.sha256(text.encode() + tensors.read_bytes()).hexdigest()
    record = json.loads(state.read_bytes())
    state.write_text(json.dumps(record | {"state": text, "sha256": digest}))
    with pytest.raises(ValueError, match="`directory` must contain a state as `save_checkpoint`"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_changed_bit_of_the_tree_is_detected(step, tmp_path):
    """A changed bit of ``state.json`` is refused by a ValueError or without effect."""
    weighted = Weighted(torch.ones(1), torch.ones(1))
    tree = {
        "round": 3,
        "rate": 0.5,
        7: torch.ones(2),
        "w": [weighted, (None, True, "😀"), torch.inf],
    }
    save_checkpoint(tree, tmp_path)
    state = tmp_path / "state.json"
    whole, refused = state.read_bytes(), 0
    bits = range(0, 8 * len(whole), step)  # by default one or two bits of every byte
    for bit in bits:
        state.write_bytes(flipped(whole, bit))
        try:
            assert_same(load_checkpoint(tmp_path), tree)
        except ValueError:
            refused += 1
    assert refused > 0.93 * len(bits)


# Other files and other processes.


def test_other_files_are_kept(tmp_path, monkeypatch):
    mine = {"thesis.part", "tensors-mine.pt", "tensors-0.safetensors", "tensors-0.part"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "tensors-x").mkdir()
    for name in ("state.json", f"tensors-{16 * '0'}.safetensors"):
        (tmp_path / f"{name}.{16 * 'a'}.part").write_text("of a save that was killed")
    for number in (2, 1):
        save_checkpoint(snapshot_of(number), tmp_path)
    names = {path.name for path in tmp_path.glob("[!.]*")}
    assert names > mine | {"tensors-x", "state.json"}
    assert len(names) == 7
    monkeypatch.chdir(tmp_path)
    assert_same(load_checkpoint("."), snapshot_of(1))


def test_a_reader_whose_tensors_were_replaced_reads_the_new_state(tmp_path, monkeypatch):
    """Another process saves between the two files that a reader opens, three times in a row."""
    save_checkpoint(snapshot_of(0), tmp_path)
    read, saved, saving = Path.read_bytes, iter([1, 2, 3]), False

    def late(path):
        nonlocal saving
        content = read(path)
        if path.name == "state.json" and not saving and (number := next(saved, None)) is not None:
            saving = True  # a save reads the state, too
            save_checkpoint(snapshot_of(number), tmp_path)
            saving = False
        return content

    monkeypatch.setattr(Path, "read_bytes", late)
    assert_same(load_checkpoint(tmp_path), snapshot_of(3))
