"""The ledger counts bytes, against a list of every message, and continues from its state."""

from itertools import product

import numpy as np
import pytest
import torch

from fedprompt import Ledger, Weighted, load_checkpoint, save_checkpoint

CLIENTS = ("b", 'a, "c"', ("site", 7), 3)
# Rounds, clients, directions, numbers of values, lengths of blobs; round 0 is a round, not "any".
ROWS = [
    (0, "b", "down", 3, 0), (0, "b", "up", 2, 90), (0, 'a, "c"', "up", 5, 20), (0, "b", "up", 0, 0),
    (1, ("site", 7), "up", 3, 12), (1, "b", "up", 1, 0), (4, 3, "up", 2, 0), (4, 3, "up", 1, 30),
]  # fmt: skip


def fill(ledger, rows):
    for server_round, client, direction, count, framed in rows:
        where = {"direction": direction, "client": client, "server_round": server_round}
        ledger.record({"a": torch.zeros(count)} if count else {}, **where, framed=framed)
    return ledger


@pytest.mark.parametrize("field", [3, 4])
def test_totals_are_sums_over_the_matching_messages(field):
    ledger = fill(Ledger(), ROWS)
    for server_round, client, way in product(
        (None, 0, 1, 2, 4), (None, *CLIENTS, "x"), (None, "up", "down")
    ):
        wanted = (server_round, client, way)
        rows = [
            row for row in ROWS if all(w in (None, r) for w, r in zip(wanted, row, strict=False))
        ]
        found = ledger.total(
            server_round=server_round, client=client, direction=way, framed=field == 4
        )
        assert found == sum(row[field] * (4 if field == 3 else 1) for row in rows)


TABLE = """\
client       rounds  bytes up  bytes down  framed up  framed down
b                 2        12          12         90            0
a, "c"            1        20           0         20            0
('site', 7)       1        12           0         12            0
3                 1        12           0         30            0
all               3        56          12        152            0"""


def test_the_table_is_the_one_written_by_hand():
    assert fill(Ledger(), ROWS).table() == TABLE
    unframed = fill(Ledger(), [(*row[:4], 0) for row in ROWS[:2]]).table()
    titles, *rows = unframed.splitlines()
    assert titles == "client  rounds  bytes up  bytes down"
    assert rows == ["b            1         8          12", "all          1         8          12"]
    assert Ledger().table() == f"{titles}\nall          0         0           0"


def test_the_last_message_is_counted_by_name():
    ledger = Ledger()
    rows = Weighted(torch.zeros(3, 4), torch.tensor([2.0, 0.0, 1.0]))
    where = {"direction": "up", "client": 0, "server_round": 0}
    ledger.record({"logits": rows, "keys": torch.zeros(2)}, **where)
    assert ledger.last == {"logits": 44, "keys": 8}
    ledger.record({}, **where)
    assert ledger.last == {}


def test_a_ledger_continues_from_its_checkpoint_and_its_state_does_not_grow(tmp_path):
    whole = fill(Ledger(), ROWS).state_dict()
    for stop in range(len(ROWS)):
        save_checkpoint(fill(Ledger(), ROWS[:stop]).state_dict(), tmp_path)
        again = fill(Ledger(), ROWS)
        again.load_state_dict(load_checkpoint(tmp_path))
        assert fill(again, ROWS[stop:]).state_dict() == whole
    ledger = fill(Ledger(), ROWS * 99)
    assert len(ledger.state_dict()["sent"]) == len(whole["sent"]) == 6
    assert ledger.total() == 99 * 68


ROW = (0, 0, "up", 4, 0)
FIELDS = ([[], torch.nan], [-1, "0"], ["x", 0], [-1, 0.5], [-1, None])
SPOILED = [(*ROW[:k], bad, *ROW[k + 1 :]) for k, wrong in enumerate(FIELDS) for bad in wrong]
WRONG = [None, {}, *([row] for row in (None, (), ROW[:4], "upupu", *SPOILED)), [ROW, ROW]]


@pytest.mark.bad_input
def test_a_spoiled_state_is_refused_and_changes_nothing():
    ledger = fill(Ledger(), ROWS)
    state = ledger.state_dict()
    spoiled = [state | {"sent": value} for value in WRONG]
    spoiled += [state | {"last": value} for value in (None, [], {"a": -1}, {"a": 0.5}, {3: 4})]
    for each in (*spoiled, {}, [], {"sent": []}, state | {"more": 1}):
        with pytest.raises((ValueError, TypeError), match=r"^`state"):
            ledger.load_state_dict(each)
    assert ledger.state_dict() == state


BAD = {
    "message": [{"a": torch.zeros(1), "b": [1.0]}, [torch.zeros(1)], {3: torch.zeros(1)}],
    "direction": ["sideways", np.ones(2), 0],
    "client": [torch.tensor(3), torch.nan, None, (1, [2])],
    "server_round": [-1, "0"],
    "framed": [-1, 11, "1"],
}
GOOD = {"message": {"a": torch.zeros(3)}, "direction": "up", "client": 0, "server_round": 0}


@pytest.mark.bad_input
@pytest.mark.parametrize(("name", "value"), [(name, v) for name in BAD for v in BAD[name]])
def test_wrong_arguments_are_refused_by_name_and_edges_are_taken(name, value):
    ledger = Ledger()
    with pytest.raises((TypeError, ValueError), match=f"^`{name}"):
        ledger.record(**GOOD | {name: value})
    if name == "server_round" or (name in ("direction", "client") and value is not None):
        with pytest.raises((TypeError, ValueError), match=f"^`{name}"):
            ledger.total(**{name: value})
    with pytest.raises(ValueError, match=r"^`framed` must be the length"):
        ledger.record(**GOOD | {"message": {}, "framed": 11})
    assert ledger.state_dict() == {"sent": [], "last": {}}
    ledger.record(**GOOD | {"server_round": np.int64(0), "framed": np.int64(12)})
    assert ledger.state_dict() == {"sent": [(0, 0, "up", 12, 12)], "last": {"a": 12}}
    assert type(ledger.state_dict()["sent"][0][1]) is type(ledger.state_dict()["sent"][0][4]) is int
