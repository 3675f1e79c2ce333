"""Resumed runs are bitwise identical to uninterrupted ones, and no crash spoils a checkpoint."""

import errno
import hashlib
import itertools
import json
import os
import random
import signal
import stat
import subprocess
import sys
from collections import Counter, OrderedDict, namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import fedprompt as fp
from blobs import flipped
from fedprompt import Weighted, load_checkpoint, save_checkpoint
from same import assert_same

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
]


# Trees.

SHAPES = st.lists(st.integers(0, 3), max_size=3)
TENSORS = st.builds(
    lambda shape, dtype, seed: (
        9 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    ).to(dtype),
    SHAPES,
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-(2**200), 2**200)
    | st.floats()
    | st.text(st.characters(codec="utf-8"))
    | TENSORS
)
KEYS = st.text(st.characters(codec="utf-8"), max_size=3) | st.integers()
TREES = st.recursive(
    LEAVES,
    lambda trees: (
        st.lists(trees, max_size=3)
        | st.lists(trees, max_size=3).map(tuple)
        | st.dictionaries(KEYS, trees, max_size=3)
        | st.builds(Weighted, TENSORS, TENSORS)
    ),
    max_leaves=8,
)


@given(TREES)
def test_a_tree_is_restored_exactly(tmp_path_factory, tree):
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(tree, directory)
    assert_same(load_checkpoint(directory), tree)


def test_loaded_tensors_share_no_memory(tmp_path):
    values = torch.arange(6.0).reshape(2, 3)
    state = {
        "values": values,
        "transposed": values.T,
        "again": values,
        "part": values[:, 1],
        "parameter": nn.Parameter(values),
    }
    save_checkpoint(state, tmp_path)
    values += 100
    loaded = load_checkpoint(tmp_path)
    expected = torch.arange(6.0).reshape(2, 3)
    assert_same(
        loaded,
        {
            "values": expected,
            "transposed": expected.T,
            "again": expected,
            "part": expected[:, 1],
            "parameter": expected,
        },
    )
    loaded["values"].zero_()
    assert loaded["again"].equal(expected)
    assert load_checkpoint(tmp_path)["values"].equal(expected)


def test_restored_generators_continue_their_streams(tmp_path):
    generator, numpy_generator = torch.Generator().manual_seed(3), np.random.default_rng(4)
    torch.rand(5, generator=generator), numpy_generator.random(5)
    state = {
        "torch": generator.get_state(),
        "numpy": numpy_generator.bit_generator.state,
        "python": random.Random(5).getstate(),
    }
    save_checkpoint(state, tmp_path)
    expected = (
        torch.rand(3, generator=generator),
        numpy_generator.random(3),
        random.Random(5).random(),
    )
    loaded = load_checkpoint(tmp_path)
    again, numpy_again, python_again = torch.Generator(), np.random.default_rng(), random.Random()
    again.set_state(loaded["torch"])
    numpy_again.bit_generator.state = loaded["numpy"]
    python_again.setstate(loaded["python"])
    assert torch.rand(3, generator=again).equal(expected[0])
    assert (numpy_again.random(3) == expected[1]).all()
    assert python_again.random() == expected[2]


def test_an_ordered_dict_is_a_dict(tmp_path):
    save_checkpoint(OrderedDict(b=1, a=2), tmp_path)
    assert_same(load_checkpoint(tmp_path), {"b": 1, "a": 2})


# A federation that is killed between any two rounds.


def federate(directory, stop, rounds=5):
    """Train two clients with persistent optimizers, private heads, keys, guides and one stream."""
    model = nn.ModuleDict(
        {
            "selector": fp.SelectionKeys(3, 4, generator=torch.Generator().manual_seed(0)),
            "head": nn.Linear(4, 3, bias=False),
        }
    )
    nn.init.eye_(model["head"].weight)
    private, stream = [nn.Linear(3, 3), nn.Linear(3, 3)], torch.Generator().manual_seed(7)
    for layer in private:
        nn.init.eye_(layer.weight), nn.init.zeros_(layer.bias)
    make = partial(torch.optim.AdamW, lr=0.1)
    optimizers = [make([*model.parameters(), *layer.parameters()]) for layer in private]
    rules = {
        "selector": fp.ema(decay=0.5),
        "head": fp.descend(partial(torch.optim.SGD, lr=0.01, momentum=0.9)),
    }
    server, values = fp.update_by_name(rules), fp.snapshot(model)
    state = {
        "round": 0,
        "values": values,
        "server": server.init(values),
        "usage": torch.zeros(3),
        "stream": stream.get_state(),
        "private": [layer.state_dict() for layer in private],
        "optimizers": [one.state_dict() for one in optimizers],
    }
    state = load_checkpoint(directory, default=state)
    stream.set_state(state["stream"])
    for layer, optimizer, own, memory in zip(
        private, optimizers, state["private"], state["optimizers"], strict=True
    ):
        layer.load_state_dict(own)
        optimizer.load_state_dict(memory)
    for server_round in range(state["round"], min(stop, rounds)):
        payloads = []
        for layer, optimizer in zip(private, optimizers, strict=True):
            fp.load_values(model, state["values"])
            model["selector"].start_round(state["usage"])
            for _ in range(2):
                query, labels = (
                    torch.randn(8, 4, generator=stream),
                    torch.randint(3, (8,), generator=stream),
                )
                chosen = model["selector"](query).indices
                loss = F.cross_entropy(layer(model["head"](query)), labels) + fp.key_loss(
                    query, model["selector"].keys, chosen
                )
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            payloads.append(
                fp.collect(model, weight=8, rows={"selector.keys": model["selector"].counts})
            )
        mean = fp.weighted_mean(payloads)
        values, memory = server.step(state["values"], mean, state["server"])
        state = {
            "round": server_round + 1,
            "values": values,
            "server": memory,
            "usage": state["usage"] + mean["selector.keys"].weight,
            "stream": stream.get_state(),
            "private": [layer.state_dict() for layer in private],
            "optimizers": [one.state_dict() for one in optimizers],
        }
        save_checkpoint(state, directory)
    return state


def test_a_run_that_is_resumed_after_any_round_ends_bitwise_identical(tmp_path):
    whole = federate(tmp_path / "whole", stop=5)
    for stop in range(1, 5):
        federate(tmp_path / str(stop), stop=stop)
        resumed = federate(tmp_path / str(stop), stop=5)
        save_checkpoint(whole, tmp_path / "saved")
        save_checkpoint(resumed, tmp_path / "resumed")
        assert_same(load_checkpoint(tmp_path / "resumed"), load_checkpoint(tmp_path / "saved"))
    assert not whole["values"]["head.weight"].equal(torch.eye(3, 4))


# Crashes.

OPERATIONS = [(os, "fsync"), (os, "replace"), (os, "open"), (Path, "open"), (Path, "unlink")]


def snapshot_of(number):
    return {"number": number, "values": torch.full((50,), float(number))}


@pytest.mark.parametrize(
    ("owner", "name"), OPERATIONS, ids=[f"{owner.__name__}.{name}" for owner, name in OPERATIONS]
)
def test_a_save_that_fails_anywhere_leaves_a_complete_state(tmp_path, monkeypatch, owner, name):
    save_checkpoint(snapshot_of(1), tmp_path)
    real, calls = getattr(owner, name), 0
    for fatal in range(1, 20):
        calls = 0

        def failing(*args, fatal=fatal, **options):
            nonlocal calls
            calls += 1
            if calls == fatal:
                raise OSError("no space left on device")
            return real(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            try:
                save_checkpoint(snapshot_of(2), tmp_path)
            except OSError:
                failed = True
            else:
                failed = False
        loaded = load_checkpoint(tmp_path)
        assert_same(loaded, snapshot_of(loaded["number"]))
        if not failed:
            break
        save_checkpoint(snapshot_of(1), tmp_path)
        assert len(list(tmp_path.iterdir())) == 2
    assert calls == fatal - 1 > 0  # each call of the operation has failed once
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


SAVER = """
import sys, torch
from fedprompt import load_checkpoint, save_checkpoint
start = load_checkpoint(sys.argv[1], default={"number": 0})["number"]
for number in range(start + 1, 10**6):
    values = torch.full((200_000,), float(number))
    save_checkpoint({"number": number, "values": values}, sys.argv[1])
    print(number, flush=True)
"""


def killed_at_random(directory, times, seed):
    """Kill a process that saves all the time, at random moments; a complete state must remain."""
    moments, last = random.Random(seed), 0
    for _ in range(times):
        with subprocess.Popen(
            [sys.executable, "-c", SAVER, str(directory)], stdout=subprocess.PIPE, text=True
        ) as process:
            reached = [process.stdout.readline() for _ in range(moments.randrange(1, 6))]
            try:
                process.wait(moments.uniform(0, 0.02))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
            reached += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL
        state, said = load_checkpoint(directory), int(reached[-1])
        assert state["number"] in (said, said + 1)  # saved, but killed before it was printed
        assert said > last
        assert state["values"].equal(torch.full((200_000,), float(state["number"])))
        last = said


@pytest.mark.slow
def test_a_process_killed_while_saving_leaves_a_complete_state(tmp_path):
    killed_at_random(tmp_path, 2, seed=0)


@pytest.mark.slow
def test_a_process_killed_at_thirty_moments_leaves_a_complete_state(tmp_path):
    killed_at_random(tmp_path, 30, seed=1)


# Full disks.


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """Make a directory on a disk of ``disk.size`` bytes."""

    class Disk:
        folder, size = tmp_path / "disk", 10**9

        def used(self):
            return sum(path.stat().st_size for path in self.folder.iterdir())

    disk, real = Disk(), Path.open
    disk.folder.mkdir()

    def opened(path, mode="r", **options):
        file = real(path, mode, **options)
        if path.parent != disk.folder or "r" in mode:
            return file

        class Limited:
            def __enter__(self):
                return self

            def __exit__(self, *error):
                file.close()

            def write(self, content):
                file.flush()
                free = max(0, disk.size - disk.used())
                file.write(content[:free])
                file.flush()
                if free < len(content):
                    raise OSError(errno.ENOSPC, "No space left on device")
                return len(content)

            def __getattr__(self, name):
                return getattr(file, name)

        return Limited()

    monkeypatch.setattr(Path, "open", opened)
    return disk


def large(number, size):
    return {"number": number, "values": torch.full((size,), float(number))}


@pytest.mark.parametrize("size", [100, 10_000, 1_000_000])
def test_saves_that_fail_on_a_full_disk_leave_no_files(disk, size):
    save_checkpoint(large(0, size), disk.folder)
    whole = disk.used()
    for free in (
        0,
        100,
        3 * size,
        4 * size + 200,
    ):  # the last has space for the tensors, but not for the state
        disk.size = whole + free
        for number in range(1, 7):
            with pytest.raises(OSError, match="No space left"):
                save_checkpoint(large(number, size), disk.folder)
            assert disk.used() == whole
            assert load_checkpoint(disk.folder)["number"] == 0
    disk.size = 2 * whole + 100
    for number in range(1, 7):
        save_checkpoint(large(number, size), disk.folder)
        assert load_checkpoint(disk.folder)["number"] == number


@pytest.mark.parametrize("size", [100, 10_000, 1_000_000])
def test_a_first_save_that_fails_on_a_full_disk_leaves_an_empty_directory(disk, size):
    for free in (0, 100, 3 * size, 4 * size + 200):
        disk.size = free
        with pytest.raises(OSError, match="No space left"):
            save_checkpoint(large(1, size), disk.folder)
        assert disk.used() == 0
        assert load_checkpoint(disk.folder, default=None) is None


KILLER = """
import os, pathlib, signal, sys, torch
from fedprompt import save_checkpoint
size, operation, last = int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
torch.set_num_threads(1)
real, calls = getattr(os, operation), 0

def fatal(*args):
    global calls
    calls += 1
    if calls == last:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)

for number in range(1, 7):
    child = os.fork()
    if child == 0:
        setattr(os, operation, fatal)
        values = torch.full((size,), float(number))
        save_checkpoint({"number": number, "values": values}, sys.argv[1])
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


@pytest.mark.parametrize(
    ("size", "operation", "last"),
    [
        (100, "fsync", 1),
        pytest.param(10_000, "replace", 1, marks=pytest.mark.slow),
        pytest.param(1_000_000, "replace", 2, marks=pytest.mark.slow),
    ],
)
def test_six_killed_saves_leave_the_files_of_one(disk, size, operation, last):
    save_checkpoint(large(0, size), disk.folder)
    whole = disk.used()
    subprocess.run(
        [sys.executable, "-c", KILLER, str(disk.folder), str(size), operation, str(last)],
        check=True,
    )
    assert whole < disk.used() <= 2 * whole + 100
    disk.size = 2 * whole + 100
    for number in range(1, 4):
        save_checkpoint(large(number, size), disk.folder)
        assert load_checkpoint(disk.folder)["number"] == number
        assert len(list(disk.folder.iterdir())) == 2


# Refusals.


def test_tensors_without_their_state_are_an_error(tmp_path):
    save_checkpoint(snapshot_of(1), tmp_path)
    state = (tmp_path / "state.json").read_bytes()
    (tmp_path / "state.json").unlink()
    for call in (
        load_checkpoint,
        partial(load_checkpoint, default=None),
        partial(save_checkpoint, snapshot_of(2)),  # it would delete the tensors
    ):
        with pytest.raises(
            ValueError,
            match=r"`directory` must contain state\.json, which names its tensors; got tensors",
        ):
            call(tmp_path)
    # The file of a later save that was killed.
    later = json.loads(state) | {"tensors": f"tensors-{16 * '0'}.safetensors"}
    (tmp_path / "state.json.part").write_text(json.dumps(later))
    with pytest.raises(ValueError, match="got tensors alone"):
        load_checkpoint(tmp_path, default=None)
    (tmp_path / "state.json").write_bytes(state)
    assert_same(load_checkpoint(tmp_path), snapshot_of(1))


@pytest.mark.parametrize(("operation", "calls"), [("fsync", 4), ("replace", 2)])
def test_a_run_whose_first_save_was_killed_starts_again(tmp_path, monkeypatch, operation, calls):
    """The save is killed at every moment before it is complete, and cannot clean up."""
    real = getattr(os, operation)
    for last in range(1, calls + 1):
        count, directory = itertools.count(1), tmp_path / f"{operation}{last}"

        def fatal(*args, count=count, last=last):
            if next(count) == last:
                raise KeyboardInterrupt
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(os, operation, fatal)
            patch.setattr(Path, "unlink", lambda *_, **__: None)
            with pytest.raises(KeyboardInterrupt):
                save_checkpoint(snapshot_of(1), directory)
        if (operation, last) == ("fsync", 4):  # the state is complete
            assert_same(load_checkpoint(directory), snapshot_of(1))
        else:
            assert load_checkpoint(directory, default=None) is None
        save_checkpoint(snapshot_of(2), directory)
        assert_same(load_checkpoint(directory), snapshot_of(2))
        assert len(list(directory.iterdir())) == 2


def test_without_a_checkpoint_the_default_is_returned_or_an_error_raised(tmp_path):
    assert load_checkpoint(tmp_path, default=None) is None
    assert load_checkpoint(tmp_path / "nowhere", default=7) == 7
    with pytest.raises(FileNotFoundError, match="`directory` must hold a checkpoint"):
        load_checkpoint(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.bad_input
@pytest.mark.parametrize(
    ("thing", "where"),
    [
        ({"a": [1, object()]}, r"`state\['a'\]\[1\]` must be a dict, list, tuple, .*; got"),
        (np.zeros(2), "`state` must be .*; got a float64 array of shape"),
        ({"a": np.float64(1)}, r"`state\['a'\]` must be .*; got .*float64"),
        (Counter("aab"), "`state` must be .*; got a Counter of length 2"),
        (namedtuple("Pair", "a b")(1, 2), "`state` must be .*; got a Pair"),
        (torch.zeros(2, dtype=torch.complex64), "`state` must be .*; got"),
        (torch.zeros(2).to_sparse(), "`state` must be .*; got"),
        (torch.zeros(2, device="meta"), "`state` must be .*; got"),
        ({(1, 2): 3}, "`state` must have strings and integers as keys; got .*tuple"),
        ({True: 3}, "`state` must have strings and integers as keys; got .*bool"),
    ],
)
def test_other_types_are_refused_before_anything_is_written(tmp_path, thing, where):
    save_checkpoint(snapshot_of(1), tmp_path)
    with pytest.raises(TypeError, match=where):
        save_checkpoint(thing, tmp_path)
    assert_same(load_checkpoint(tmp_path), snapshot_of(1))


def test_damage_is_refused(tmp_path):
    save_checkpoint(snapshot_of(1), tmp_path)
    state = tmp_path / "state.json"
    (tensors,) = tmp_path.glob("tensors-*")
    whole, record = (
        {path: path.read_bytes() for path in (state, tensors)},
        json.loads(state.read_bytes()),
    )
    outside = tmp_path.parent / "outside.safetensors"
    outside.write_bytes(whole[tensors])
    for path, content, reason in [
        (tensors, whole[tensors][:-1], "other content"),
        (tensors, whole[tensors][:-1] + b"\1", "other content"),
        (state, whole[state][:-1], "damaged content"),
        (state, b"", "damaged content"),
        (state, b"[]", "damaged content"),
        (state, b"{}", "damaged content"),
        (
            state,
            json.dumps(record | {"format": "fedprompt checkpoint 999"}).encode(),
            "got fedprompt checkpoint 999",
        ),
        (state, json.dumps(record | {"tensors": "tensors-0.safetensors"}).encode(), "no file"),
        (state, json.dumps(record | {"tensors": "../outside.safetensors"}).encode(), "no file"),
        (state, json.dumps(record | {"tensors": "state.json"}).encode(), "no file"),
        (
            state,
            json.dumps(record | {"tensors": 5}).encode(),
            r"damaged content \(str, int, str, str\)",
        ),
        (
            state,
            json.dumps(record | {"state": {}}).encode(),
            r"damaged content \(str, str, str, dict\)",
        ),
        (
            state,
            json.dumps(record | {"state": record["state"].replace("1", "7", 1)}).encode(),
            "digest; got other content",
        ),
        (
            state,
            json.dumps(record | {"state": record["state"].replace("tensor", "tenzor", 1)}).encode(),
            "digest; got other content",
        ),
        (state, json.dumps(record | {"state": "\ud800"}).encode(), "digest; got other content"),
        (state, b"[" * 100_000, "damaged content"),
        (state, b"\xff" * 1000, "damaged content .{,200}$"),
    ]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason):
            load_checkpoint(tmp_path)
        path.write_bytes(whole[path])
    assert_same(load_checkpoint(tmp_path), snapshot_of(1))


def nested(levels):
    tree = [torch.ones(1)]
    for _ in range(levels - 1):
        tree = [tree]
    return tree


def test_a_tree_that_is_too_deep_or_contains_itself_is_refused(tmp_path):
    save_checkpoint(nested(100), tmp_path)
    cycle = {}
    cycle["again"] = [cycle]
    for tree in (nested(101), nested(500), cycle):
        with pytest.raises(
            ValueError, match=r"`state` must have at most 100 levels, and no cycle; got more\.$"
        ):
            save_checkpoint(tree, tmp_path)
    assert_same(load_checkpoint(tmp_path), nested(100))


@pytest.mark.parametrize(
    "tree",
    [
        [1],
        {},
        {"evil": [1]},
        {"tensor": "1", "list": []},
        {"tensor": "7"},
        {"tensor": [0]},
        {"float": 1},
        {"float": "one"},
        {"list": 5},
        {"list": {"a": 1}},
        {"dict": [5]},
        {"dict": [["a"]]},
        {"dict": [[["a"], 1]]},
        {"weighted": [{"tensor": "0"}]},
        {"weighted": []},
        "[" * 100_000,
        '{"list": [' * 300 + "]}" * 300,
        "{",
    ],
    ids=lambda tree: str(tree)[:30],
)
def test_a_crafted_tree_with_the_right_digest_is_refused(tmp_path, tree):
    save_checkpoint(snapshot_of(1), tmp_path)
    state, (tensors,) = tmp_path / "state.json", tmp_path.glob("tensors-*")
    text = tree if isinstance(tree, str) else json.dumps(tree)
    digest = hashlib.sha256(text.encode() + tensors.read_bytes()).hexdigest()
    record = json.loads(state.read_bytes())
    state.write_text(json.dumps(record | {"state": text, "sha256": digest}))
    with pytest.raises(ValueError, match="`directory` must contain a state as `save_checkpoint`"):
        load_checkpoint(tmp_path)


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_changed_bit_of_the_tree_is_detected(step, tmp_path):
    """A changed bit of ``state.json`` is refused by a ValueError or without effect."""
    tree = {
        "round": 3,
        "rate": 0.5,
        7: torch.ones(2),
        "w": [Weighted(torch.ones(1), torch.ones(1)), (None, True, "\U0001f600"), torch.inf],
    }
    save_checkpoint(tree, tmp_path)
    state = tmp_path / "state.json"
    whole, refused = state.read_bytes(), 0
    bits = range(0, 8 * len(whole), step)  # by default two or three bits of every byte
    for bit in bits:
        state.write_bytes(flipped(whole, bit))
        try:
            assert_same(load_checkpoint(tmp_path), tree)
        except ValueError:
            refused += 1
    assert refused > 0.93 * len(bits)


# Other files and other processes.


def test_other_files_are_kept_and_an_empty_path_is_refused(tmp_path, monkeypatch):
    mine = {"thesis.part", "tensors-mine.pt", "tensors-0.safetensors", "tensors-0.part"}
    for name in mine:
        (tmp_path / name).write_text("mine")
    (tmp_path / "tensors-x").mkdir()
    for leftover in ("state.json.part", f"tensors-{16 * '0'}.safetensors.part"):
        (tmp_path / leftover).write_text("of a save that was killed")
    for number in (2, 1):
        save_checkpoint(snapshot_of(number), tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names > mine | {"tensors-x", "state.json"}
    assert len(names) == 7
    monkeypatch.chdir(tmp_path)
    for call in (partial(save_checkpoint, snapshot_of(2)), load_checkpoint):
        with pytest.raises(
            ValueError, match="`directory` must be the path of a directory; got an empty"
        ):
            call("")
    assert_same(load_checkpoint("."), snapshot_of(1))


@pytest.mark.bad_input
def test_a_directory_is_a_path(tmp_path):
    for call in (partial(save_checkpoint, snapshot_of(2)), load_checkpoint):
        with pytest.raises(TypeError, match=r"`directory` must be a path \(.*\); got 5"):
            call(5)


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
