"""Accounting of the bytes that clients and server send."""

import csv
import hashlib
import json
import os
from collections.abc import Hashable, Iterable, Mapping
from io import StringIO
from os import PathLike
from typing import Any, Literal, NamedTuple, get_args

import fedprompt._refusals as check
from fedprompt._files import file_of, locked, path_of, replace_file
from fedprompt._trees import packed, parsed, unpacked
from fedprompt.interfaces import Message
from fedprompt.messages.payload import num_bytes

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


class Ledger:
    """Counts the bytes of messages, per client, round and direction.

    Without `path`, :meth:`state_dict` holds every entry, so it grows from round to round. With
    `path`, it appends the new entries to a file and returns a state of constant size.

    Args:
        path: File for the entries, one line of JSON each. If None, they are part of the state. A
            file that exists must be loaded by :meth:`load_state_dict`; it is not overwritten.

    Attributes:
        entries: For each recorded message that is not empty, in the order of recording, a named
            tuple (server_round, client, direction, num_bytes, framed).
        path: File for the entries, or None.

    Example:
        >>> ledger = Ledger()
        >>> ledger.record({"head": torch.zeros(5)}, direction="up", client=0, server_round=0)
        >>> ledger.record({"head": torch.zeros(5)}, direction="up", client=1, server_round=0)
        >>> ledger.total(direction="up", client=1)
        20
        >>> print(ledger.table())
        client  rounds  bytes up  bytes down
        0            1        20           0
        1            1        20           0
        all          1        40           0
    """

    def __init__(self, path: str | PathLike[str] | None = None) -> None:
        check.optional(path_of, "path", path)
        self.path = path
        self.entries: list[LedgerEntry] = []
        self._written = Written()
        self._last = False  # whether the last write to the file was this ledger's

    def record(
        self,
        message: Message,
        *,
        direction: Direction,
        client: Hashable,
        server_round: int,
        framed: int = 0,
    ) -> None:
        """Add a message.

        Args:
            message: Message that is sent; its bytes are counted as by :func:`num_bytes`.
            direction: "up" from the client, or "down" to it.
            client: Id of the client: a string, a number of Python, or a tuple of these.
            server_round: Round (0-based).
            framed: Length of the blob, ``len(encode_payload(message, ...))``. 0 without a blob.

        Raises:
            ValueError: If `framed` is less than the message needs, or a weight is negative or not
                finite. Nothing is recorded after an error.
        """
        size = num_bytes(message)
        entry = LedgerEntry(server_round, client, direction, size, framed)
        _check_entry(entry, "{}")
        rule = f"be the length of a blob with the {size} bytes of `message`"
        check.require(not framed or (message and framed >= size), "framed", rule, framed)
        if message:
            self.entries.append(entry._replace(server_round=int(server_round), framed=int(framed)))

    def total(
        self,
        *,
        direction: Direction | None = None,
        client: Hashable | None = None,
        server_round: int | None = None,
        framed: bool = False,
    ) -> int:
        """Sum the bytes of the entries that match all given fields.

        Args:
            direction: "up" or "down". If None, both.
            client: Id of a client. If None, all clients.
            server_round: Round (0-based). If None, all rounds.
            framed: Whether to sum the lengths of blobs.
        """
        check.flag("framed", framed)
        check.optional(_check_direction, "direction", direction)
        check.optional(_check_client, "client", client)
        check.optional(check.count, "server_round", server_round, at_least=0)
        return sum(
            entry.framed if framed else entry.num_bytes
            for entry in self.entries
            if direction in (None, entry.direction)
            and client in (None, entry.client)
            and server_round in (None, entry.server_round)
        )

    def table(self) -> str:
        """Return the bytes of each client and of all clients as text, in aligned columns.

        Lengths of blobs have separate columns if any was recorded.
        """
        entries: dict[Hashable, list[LedgerEntry]] = {}
        for entry in self.entries:
            entries.setdefault(entry.client, []).append(entry)
        titles = ("client", "rounds", "bytes up", "bytes down", "framed up", "framed down")
        rows = [titles, *(_summary(client, sent) for client, sent in entries.items())]
        rows.append(_summary("all", self.entries))
        if not any(entry.framed for entry in self.entries):
            rows = [row[:4] for row in rows]
        cells = [list(map(str, row)) for row in rows]
        first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
        aligned = ([row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in cells)
        return "\n".join(map("  ".join, aligned))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that :meth:`load_state_dict` restores.

        With a `path`, new entries are first appended to the file and synchronized to the disk.
        Content after them is replaced, so that a run continues correctly after a kill between this
        call and its checkpoint.

        Returns:
            Without a `path`, a list of values for each field of an entry. With a `path`, the number
            of entries, the length of the file in bytes, and a digest. :func:`save_checkpoint`
            accepts both.

        Raises:
            ValueError: If the file exists, is not empty, and was neither written nor loaded by this
                ledger. So a run that is started again by mistake does not destroy the file. If a
                run was killed before its first checkpoint, delete the file.

        Example:
            >>> ledger = Ledger()
            >>> ledger.record({"head": torch.zeros(5)}, direction="up", client=0, server_round=0)
            >>> again = Ledger()
            >>> again.load_state_dict(ledger.state_dict())
            >>> again.entries == ledger.entries
            True
        """
        if self.path is None:
            fields = LedgerEntry._fields
            return {field: [getattr(entry, field) for entry in self.entries] for field in fields}
        self._append(self.path)
        return self._written.mark()

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Replace all entries by the entries of a state.

        Args:
            state: State of a ledger without a `path`, or of one with the same `path`.

        Raises:
            ValueError: If `state` has other fields, lists of unequal length or impossible values,
                or if the file has other content. The ledger is unchanged then.
        """
        check.instance("state", state, Mapping, "be a state of `state_dict`")
        if set(state) == set(MARK):
            self.entries, self._written = _read_entries(self.path, state)
        else:
            self.entries = _entries_of(state)
            self._written = Written(self._written.path)
        self._last = False

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write every entry to a CSV file with a header.

        Args:
            path: Path of the file. An existing file is replaced.
        """
        file = file_of(path)
        text = StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(LedgerEntry._fields)
        writer.writerows(self.entries)
        replace_file(file, text.getvalue().encode())

    def _append(self, path: str | PathLike[str]) -> None:
        """Write the entries that the file lacks, over the remains of an interrupted write."""
        file = file_of(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file):
            foreign = self._written.path != path
            size = file.stat().st_size if file.exists() else 0
            rule = "be a new file, or one that this ledger wrote or loaded (load_state_dict)"
            check.require(not foreign or not size, "path", rule, f"one of {size} bytes")
            if foreign or self._written.num_entries > len(self.entries):
                self._written = Written(path)
            elif self._last and size != self._written.num_bytes:
                rule = f"have the {self._written.num_bytes} bytes that this ledger wrote"
                raise check.wrong("path", rule, f"{size}, so another process writes it")
            lines = [_line_of(entry) for entry in self.entries[self._written.num_entries :]]
            self._last = False  # a write that fails is repeated
            with file.open("ab") as stream:
                stream.truncate(self._written.num_bytes)
                stream.write(b"".join(lines))
                stream.flush()
                os.fsync(stream.fileno())
            self._written = self._written.followed_by(lines)
            self._last = True


def _summary(label: object, entries: list[LedgerEntry]) -> tuple[object, ...]:
    sums = [
        sum(getattr(entry, field) for entry in entries if entry.direction == direction)
        for field in ("num_bytes", "framed")
        for direction in get_args(Direction)
    ]
    return label, len({entry.server_round for entry in entries}), *sums


def _line_of(entry: LedgerEntry) -> bytes:
    """Write an entry as one line of JSON."""
    return json.dumps(packed(tuple(entry), "entry", {})["tuple"]).encode() + b"\n"


def _read_entries(
    path: str | PathLike[str] | None, state: Mapping[str, Any]
) -> tuple[list[LedgerEntry], Written]:
    """Read the part of a file that a state describes."""
    rule = "contain the entries if `path` is None"
    check.require(path is not None, "state", rule, "the state of a file")
    for field in ("num_entries", "num_bytes"):
        check.count(f"state[{field!r}]", state[field], at_least=0)
    file = file_of(path)
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
    _check_entry(entry, "line.{}")
    return entry


def _entries_of(state: Mapping[str, Any]) -> list[LedgerEntry]:
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
        _check_entry(entry, f"state['{{}}'][{position}]")
    return entries


def _check_direction(argument: str, direction: object) -> None:
    """Require a direction."""
    if not isinstance(direction, str) or direction not in get_args(Direction):
        raise check.wrong(argument, "be 'up' or 'down'", check.kind(direction))


def _check_entry(entry: LedgerEntry, place: str) -> None:
    """Require an entry that :meth:`Ledger.record` could have made."""
    for field in ("server_round", "num_bytes", "framed"):
        check.count(place.format(field), getattr(entry, field), at_least=0)
    _check_direction(place.format("direction"), entry.direction)
    _check_client(place.format("client"), entry.client)


def _check_client(argument: str, client: object) -> None:
    """Require an id that a checkpoint restores: a string, a number, or a tuple of these."""
    for part in client if type(client) is tuple else (client,):
        rule = "be a string, a number of Python, or a tuple of these"
        # NaN is not equal to itself.
        check.typed(type(part) in (str, int, float, bool) and part == part, argument, rule, client)
