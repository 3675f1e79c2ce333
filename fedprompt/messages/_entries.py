"""Entries of a ledger, in its state and in its file."""

import hashlib
import json
from collections.abc import Hashable, Iterable, Mapping
from os import PathLike
from typing import Any, Literal, NamedTuple, get_args

import fedprompt._refusals as check
from fedprompt._files import file_of
from fedprompt._trees import packed, parsed, unpacked

Direction = Literal["up", "down"]


class LedgerEntry(NamedTuple):
    """Row of a :class:`Ledger`: one message.

    Attributes:
        server_round: Round (0-based).
        client: Id of the client.
        direction: "up" from the client, or "down" to it.
        num_bytes: Number of bytes, as counted by :func:`num_bytes`.
        framed: Length of the blob that carried the message; 0 without a blob.
    """

    server_round: int
    client: Hashable
    direction: Direction
    num_bytes: int
    framed: int = 0


class Written(NamedTuple):
    """Part of a file that has been written: its path, its length and a digest line by line."""

    path: str | PathLike[str] | None = None
    num_entries: int = 0
    num_bytes: int = 0
    sha256: str = ""

    def followed_by(self, lines: Iterable[bytes]) -> "Written":
        """Add lines to the part that has been written."""
        path, count, length, digest = self
        for line in lines:
            digest = hashlib.sha256(digest.encode() + line).hexdigest()
            count += 1
            length += len(line)
        return Written(path, count, length, digest)

    def mark(self) -> dict[str, Any]:
        """Return length and digest, without the path: the state of a ledger with a file."""
        return {field: getattr(self, field) for field in MARK}


MARK = Written._fields[1:]


def line_of(entry: LedgerEntry) -> bytes:
    """Write an entry as one line of JSON."""
    return json.dumps(packed(tuple(entry), "entry", {})["tuple"]).encode() + b"\n"


def read_entries(
    path: str | PathLike[str] | None, state: Mapping[str, Any]
) -> tuple[list[LedgerEntry], Written]:
    """Read the part of a file that a state describes."""
    rule = "contain the entries if `path` is None"
    check.require(path is not None, "state", rule, "the state of a file")
    for field in ("num_entries", "num_bytes"):
        check.count(f"state[{field!r}]", state[field], at_least=0)
    file = file_of("path", path)
    lines = []
    if file.exists():
        with file.open("rb") as stream:
            found = stream.read(min(state["num_bytes"], file.stat().st_size))
        lines = found.splitlines(keepends=True)
    written = Written(path).followed_by(lines)
    rule = f"contain the {state['num_entries']} entries that were saved"
    got = f"{len(lines)} entries in {written.num_bytes} bytes, or another digest"
    check.require(written.mark() == dict(state), "path", rule, got)
    try:
        return [_entry_of(line) for line in lines], written
    except (ValueError, TypeError) as error:
        raise check.wrong("path", "contain entries as a ledger writes them", error) from error


def _entry_of(line: bytes) -> LedgerEntry:
    fields = parsed(line)
    rule = f"be a list of {len(LedgerEntry._fields)} fields"
    fits = isinstance(fields, list) and len(fields) == len(LedgerEntry._fields)
    check.require(fits, "line", rule, check.kind(fields))
    entry = LedgerEntry(*(unpacked(field, {}) for field in fields))
    check_entry(entry, "line.{}")
    return entry


def entries_of(state: Mapping[str, Any]) -> list[LedgerEntry]:
    """Make the entries of a state without a file."""
    if set(state) != set(LedgerEntry._fields):
        fields = ", ".join(LedgerEntry._fields)
        raise check.wrong("state", f"have the keys {fields}", ", ".join(map(str, state)) or "none")
    columns = [state[field] for field in LedgerEntry._fields]
    for field, column in zip(LedgerEntry._fields, columns, strict=True):
        check.instance(f"state[{field!r}]", column, list, "be a list")
    sizes = {len(column) for column in columns}
    got = f"lengths from {min(sizes)} to {max(sizes)}"
    check.require(len(sizes) == 1, "state", "have lists of equal length", got)
    entries = [LedgerEntry(*values) for values in zip(*columns, strict=True)]
    for position, entry in enumerate(entries):
        check_entry(entry, f"state['{{}}'][{position}]")
    return entries


def check_direction(argument: str, direction: object) -> None:
    """Require a direction."""
    if not isinstance(direction, str) or direction not in get_args(Direction):
        raise check.wrong(argument, "be 'up' or 'down'", check.kind(direction))


def check_entry(entry: LedgerEntry, place: str) -> None:
    """Require an entry that :meth:`Ledger.record` could have made."""
    for field in ("server_round", "num_bytes", "framed"):
        check.count(place.format(field), getattr(entry, field), at_least=0)
    check_direction(place.format("direction"), entry.direction)
    check_client(place.format("client"), entry.client)


def check_client(argument: str, client: object) -> None:
    """Require an id that a checkpoint restores: a string, a number, or a tuple of these."""
    for part in client if type(client) is tuple else (client,):
        rule = "be a string, a number of Python, or a tuple of these"
        # NaN is not equal to itself.
        check.typed(type(part) in (str, int, float, bool) and part == part, argument, rule, client)
