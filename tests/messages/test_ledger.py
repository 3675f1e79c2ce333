"""The ledger counts bytes, and continues from its state and its file."""

import csv
import hashlib
import os
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch

from fedprompt import Ledger, Weighted, load_checkpoint, save_checkpoint
from refusals import check_refused, refusals


@pytest.fixture
def ledger():
    ledger = Ledger()
    down = {"prompts": torch.zeros(10), "head": torch.zeros(5)}  # 40 and 20 bytes
    for server_round, clients in enumerate([["b", 'a, "c"'], ["b"]]):
        for client in clients:
            ledger.record(down, direction="down", client=client, server_round=server_round)
            up = {"prompts": Weighted(torch.zeros(10), torch.tensor(1.0))}  # 44 bytes
            ledger.record(up, direction="up", client=client, server_round=server_round)
    return ledger


ENTRIES = [
    (0, "b", "down", 60, 0), (0, "b", "up", 44, 0), (0, 'a, "c"', "down", 60, 0),
    (0, 'a, "c"', "up", 44, 0), (1, "b", "down", 60, 0), (1, "b", "up", 44, 0),
]  # fmt: skip


def test_ledger_keeps_one_entry_for_each_message_with_content(ledger):
    ledger.record({}, direction="up", client="b", server_round=1)
    assert ledger.entries == ENTRIES
    assert ledger.entries[0].num_bytes == 60


def test_totals_are_sums_over_the_matching_entries(ledger):
    assert ledger.total() == 3 * 104
    assert ledger.total(direction="up") == 3 * 44
    assert ledger.total(direction="down", client="b") == 2 * 60
    assert ledger.total(server_round=0) == 2 * 104  # round 0 is a round, not "any"
    assert ledger.total(server_round=0, client='a, "c"') == 104
    assert ledger.total(client="nobody") == 0


TABLE = """\
client  rounds  bytes up  bytes down
b            2        88         120
a, "c"       1        44          60
all          2       132         180"""
FRAMED = """\
client  rounds  bytes up  bytes down  framed up  framed down
b            3       148         140        200           90
a, "c"       1        44          60          0            0
all          3       192         200        200           90"""


def test_the_table_is_the_one_written_by_hand(ledger):
    assert ledger.table() == TABLE
    empty = "client  rounds  bytes up  bytes down\nall          0         0           0"
    assert Ledger().table() == empty


def test_a_csv_file_contains_the_entries(ledger, tmp_path):
    path = tmp_path / "bytes.csv"
    path.write_text("old")
    ledger.to_csv(path)
    with open(path, newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["server_round", "client", "direction", "num_bytes", "framed"]
    assert [(int(row[0]), row[1], row[2], int(row[3]), int(row[4])) for row in rows] == ENTRIES


def test_the_length_of_a_blob_is_counted_once_for_each_message(ledger):
    message = {"prompts": torch.zeros(10), "head": torch.zeros(5)}
    ledger.record(message, direction="up", client="b", server_round=2, framed=200)
    ledger.record({"head": torch.zeros(5)}, direction="down", client="b", server_round=2, framed=90)
    # A blob of this length is possible: the tensor has 20 bytes.
    Ledger().record({"head": torch.zeros(5)}, direction="up", client=0, server_round=0, framed=20)
    sizes = [(entry.num_bytes, entry.framed) for entry in ledger.entries[len(ENTRIES) :]]
    assert sizes == [(60, 200), (20, 90)]
    assert ledger.total(framed=True) == 290
    assert ledger.total(direction="up", client="b", server_round=2, framed=True) == 200
    assert ledger.total(direction="up") == 3 * 44 + 60
    assert ledger.table() == FRAMED


def test_the_state_of_a_ledger_is_the_one_written_by_hand():
    ledger = Ledger()
    where = {"direction": "up", "client": ("site", 7), "server_round": 4}
    ledger.record({"a": torch.zeros(3)}, **where, framed=50)
    ledger.record({"b": torch.zeros(2)}, **where)
    assert ledger.state_dict() == STATE
    assert list(Ledger().state_dict().values()) == [[]] * 5
    again = Ledger()
    again.load_state_dict(dict(reversed(STATE.items())))
    assert again.entries == ledger.entries


STATE = {
    "server_round": [4, 4], "client": [("site", 7), ("site", 7)], "direction": ["up", "up"],
    "num_bytes": [12, 8], "framed": [50, 0],
}  # fmt: skip


REFUSED = """
record({'a': torch.zeros(1), 'b': [1.0]}) -> TypeError: `message['b']` must be a tensor or a
record([torch.zeros(1)]) -> TypeError: `message` must map names to tensors or Weighted; got a list
num_bytes({'a': Weighted(zeros(3), tensor([1.0, -1.0, 0.0]))}) -> ValueError: finite and at least 0;
record({}, direction='sideways') -> ValueError: `direction` must be 'up' or 'down'; got 'sideways'
record({}, client=torch.tensor(3)) -> TypeError: `client` must be a string, a number
record({}, client=float('nan')) -> TypeError: `client` must be a string, a number
record({}, client=None) -> TypeError: `client` must be a string, a number
record({}, server_round=-1) -> ValueError: `server_round` must be at least 0; got -1
record({'a': torch.zeros(3)}, framed=11) -> ValueError: `framed` must be the length of a blob with
record({}, framed=11) -> ValueError: `framed` must be the length of a blob with the 0 bytes
record({}, framed=-1) -> ValueError: `framed` must be at least 0; got -1
load([]) -> TypeError: `state` must be a state of `state_dict`; got a list of length 0
load({}) -> ValueError: `state` must have the keys server_round, client, direction, num_bytes
load(STATE | {'more': [1, 2]}) -> ValueError: `state` must have the keys
load(STATE | {'num_bytes': None}) -> TypeError: `state['num_bytes']` must be a list; got None
load(STATE | {'framed': [50]}) -> ValueError: `state` must have lists of equal length; got lengths
load(STATE | {'server_round': [4, -1]}) -> ValueError: `state['server_round'][1]` must be at least 0
load(STATE | {'num_bytes': [12, -1]}) -> ValueError: `state['num_bytes'][1]` must be at least 0
load(STATE | {'direction': ['up', 'upp']}) -> ValueError: `state['direction'][1]` must be 'up' or
load(STATE | {'client': [0, (1, [2])]}) -> TypeError: `state['client'][1]` must be a string
total(direction=np.ones(2)) -> ValueError: `direction` must be 'up' or 'down'; got a float
total(client=torch.tensor(3)) -> TypeError: `client` must be a string, a number
total(server_round='0') -> TypeError: `server_round` must be an integer; got '0'
total(framed=1) -> TypeError: `framed` must be
Ledger(b'ledger') -> TypeError: `path` must be a path
Ledger('') -> ValueError: `path` must be the path of a file
"""


@pytest.mark.bad_input
@pytest.mark.parametrize(("call", "error", "message"), refusals(REFUSED))
def test_wrong_calls_are_refused_by_name_and_leave_the_ledger_unchanged(
    ledger, call, error, message
):
    record = partial(ledger.record, direction="up", client=0, server_round=0)
    bound = {"record": record, "load": ledger.load_state_dict, "total": ledger.total}
    check_refused(call, error, message, globals() | bound)
    assert ledger.entries == ENTRIES


@pytest.mark.unhooked
def test_integers_of_numpy_are_saved_as_those_of_python(tmp_path):
    ledger = Ledger()
    numbers = {"server_round": np.int64(3), "framed": np.int64(90)}
    ledger.record({"a": torch.zeros(1)}, direction="up", client=0, **numbers)
    save_checkpoint(ledger.state_dict(), tmp_path)
    assert load_checkpoint(tmp_path) == ledger.state_dict()


def rounds_of(path, count):
    ledger, message = Ledger(path), {"head": torch.zeros(5), "keys": torch.zeros(2)}
    for server_round in range(count):
        for client in ("b", ("site", 7)):
            ledger.record(message, direction="up", client=client, server_round=server_round)
        yield ledger


def test_a_save_of_a_ledger_with_a_file_costs_the_same_in_every_round(tmp_path):
    """A save appends the new entries; the state has their number and not the entries."""
    path, sizes = tmp_path / "new" / "folder" / "ledger.jsonl", []
    for ledger in rounds_of(path, 300):
        before = path.stat().st_size if path.exists() else 0
        state = str(ledger.state_dict())
        sizes.append((path.stat().st_size - before, len(state)))
    (appended, state), (late_appended, late_state) = sizes[10], sizes[-1]
    assert 0 < late_appended <= appended + 2 * 1  # a round number has one more digit
    assert late_state <= state + 4  # and the counts have up to two


def test_a_ledger_with_a_file_continues_from_any_checkpoint(tmp_path):
    """The process is killed after a part of a line was appended, before the next checkpoint."""
    whole = list(rounds_of(tmp_path / "whole.jsonl", 6))[-1]
    expected = whole.state_dict()
    for stop in range(6):
        path, saved = tmp_path / f"{stop}.jsonl", Ledger(tmp_path / f"{stop}.jsonl").state_dict()
        for number, ledger in enumerate(rounds_of(path, 5)):
            if number < stop:
                saved = ledger.state_dict()
        ledger.state_dict()
        with path.open("ab") as file:
            file.write(b'[9, "b", "up')
        again = Ledger(path)
        again.load_state_dict(saved)
        assert again.entries == whole.entries[: 2 * stop]
        for server_round, client, direction, length, _ in whole.entries[2 * stop :]:
            sent = {"a": torch.zeros(length // 4)}
            again.record(sent, direction=direction, client=client, server_round=server_round)
        assert again.state_dict() == expected
        assert path.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_changed_file_is_refused_and_the_ledger_is_unchanged(tmp_path):
    path = tmp_path / "ledger.jsonl"
    saved, good = list(rounds_of(path, 2))[-1].state_dict(), path.read_bytes()
    ledger = Ledger(path)
    ledger.load_state_dict(saved)
    before = list(ledger.entries)
    rule = "`path` must contain the 4 entries that were saved; got "
    for content in (b"", good[:-1], good.replace(b"28", b"29", 1), b"\n" + good[:-1]):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rule):
            ledger.load_state_dict(saved)
    path.unlink()
    with pytest.raises(ValueError, match=f"{rule}0 entries in 0 bytes"):
        ledger.load_state_dict(saved)
    for field in ("num_bytes", "num_entries"):
        with pytest.raises(ValueError, match=rf"`state\['{field}'\]` must be at least 0; got -1"):
            ledger.load_state_dict(saved | {field: -1})
    with pytest.raises(ValueError, match="`state` must contain the entries if `path` is None; got"):
        Ledger().load_state_dict(saved)
    assert ledger.entries == before
    path.write_bytes(good)
    ledger.load_state_dict(saved)
    ledger.load_state_dict(STATE)  # without a file: the whole file is written again
    ledger.state_dict()
    assert path.read_bytes().count(b"\n") == len(STATE["client"])


def test_a_file_of_another_run_is_kept(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    ledger = next(rounds_of(path, 1))
    with pytest.raises(ValueError, match=r"`path` must be a new file, or .*; got one of 4 by"):
        ledger.state_dict()
    assert path.read_text() == "mine"
    ledger.path = tmp_path / "new.jsonl"
    saved = ledger.state_dict()
    again = next(rounds_of(ledger.path, 1))
    with pytest.raises(ValueError, match="`path` must be a new file"):
        again.state_dict()
    again.load_state_dict(saved)
    assert again.state_dict() == saved


CRAFTED = rb"""[1]
[
{"evil": 1}
[0, 0, "up", 4]
[0, {"evil": 1}, "up", 4, 0]
[0, 0, "upp", 4, 0]
[0, 0, "up", "4", 0]""".splitlines()


@pytest.mark.parametrize("line", [*CRAFTED, b"[" * 10_000])
def test_crafted_entries_with_the_right_digest_are_refused(tmp_path, line):
    path, line = tmp_path / "ledger.jsonl", line + b"\n"
    path.write_bytes(line)
    digest = hashlib.sha256(line).hexdigest()
    state = {"num_entries": 1, "num_bytes": len(line), "sha256": digest}
    with pytest.raises(ValueError, match="`path` must contain entries as a ledger writes them"):
        Ledger(path).load_state_dict(state)
    with pytest.raises(ValueError, match="`path` must contain the 1 entries that were saved"):
        Ledger(path).load_state_dict(state | {"num_bytes": 10**18})


@contextmanager
def no_space(monkeypatch):
    """Let the disk be full when a file is written, and expect the error."""
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError("No space")))
        with pytest.raises(OSError, match="No space"):
            yield


def test_a_csv_file_that_cannot_be_written_leaves_the_old_one(ledger, tmp_path, monkeypatch):
    path = tmp_path / "bytes.csv"
    path.write_text("old")
    with no_space(monkeypatch):
        ledger.to_csv(path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


def test_a_failed_append_is_repaired_by_the_next(tmp_path, monkeypatch):
    path = tmp_path / "ledger.jsonl"
    expected = list(rounds_of(path, 2))[-1].state_dict()
    good = path.read_bytes()
    path.unlink()
    first = rounds_of(path, 2)
    next(first).state_dict()
    second = next(first)
    with no_space(monkeypatch):
        second.state_dict()
    assert second.state_dict() == expected
    assert path.read_bytes() == good
