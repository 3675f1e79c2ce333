"""Who sent how many bytes, when and for what."""

import csv
import hashlib
import json
import os
from collections.abc import Hashable, Iterable, Mapping
from itertools import chain, repeat
from os import PathLike
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt._trees import packed, unpacked
from fedprompt.interfaces import Message
from fedprompt.messages.payload import bytes_by_name

Direction = Literal["up", "down"]


class Entry(NamedTuple):
    """One name of one message, as a row of the ledger.

    Attributes:
        server_round: 0-based.
        client: Its id.
        direction: "up" from the client or "down" to it.
        name: Of the tensor or :class:`Weighted`.
        num_bytes: As counted by :func:`num_bytes`.
        framed: Length of the blob that carried the whole message, beside its first name alone so that sums are right; 0 beside the
            others, and where none was given.
    """

    server_round: int
    client: Hashable
    direction: Direction
    name: str
    num_bytes: int
    framed: int = 0


class _Kept(NamedTuple):
    """The beginning of a file: whose it is, how much of it counts, and a digest line by line."""

    path: str | PathLike[str] | None = None
    num_entries: int = 0
    num_bytes: int = 0
    sha256: str = ""

    def followed_by(self, lines: Iterable[bytes]) -> "_Kept":
        path, count, length, digest = self
        for line in lines:
            digest = hashlib.sha256(digest.encode() + line).hexdigest()
            count, length = count + 1, length + len(line)
        return _Kept(path, count, length, digest)


_MARK = _Kept._fields[1:]


class Ledger:
    """Counts the bytes of messages, per client, round, direction and name.

    Without `path`, :meth:`state_dict` holds every entry, so a run that saves it in each round
    writes a number of bytes that is quadratic in the number of rounds. With `path`, it appends
    the new entries to a file and returns a state of constant size.

    Args:
        path: File for the entries, one line of JSON each. If None, they are part of the state.

    Attributes:
        entries: For each name of each recorded message, in the order of recording, a named tuple
            (server_round, client, direction, name, num_bytes, framed).
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
        self.path = path
        self.entries: list[Entry] = []
        self._kept = _Kept()

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
            message: What travels; counted as by :func:`num_bytes`.
            direction: "up" from the client, "down" to it.
            client: Its id.
            server_round: 0-based.
            framed: Length of the blob, ``len(encode_payload(message, ...))``; 0 where there is none.

        Raises:
            TypeError: If `message` is not a message or `client` cannot be hashed; nothing is
                recorded then, nor after any other error.
            ValueError: If `direction` is another word, `server_round` is negative, a weight is not
                one, or `framed` is less than the message needs.
        """
        _check_direction("direction", direction)
        check_count("server_round", server_round, at_least=0)
        check_count("framed", framed, at_least=0)
        _check_client("client", client)
        sizes = bytes_by_name(message)
        if framed and (not sizes or framed < sum(sizes.values())):
            raise wrong_value(
                "framed",
                f"be the length of a blob that holds the {sum(sizes.values())} bytes of `message`",
                framed,
            )
        frames = chain([framed], repeat(0))
        self.entries += [
            Entry(server_round, client, direction, *own, frame)
            for own, frame in zip(sizes.items(), frames, strict=False)
        ]

    def total(
        self,
        *,
        direction: Direction | None = None,
        client: Hashable | None = None,
        server_round: int | None = None,
        name: str | None = None,
        framed: bool = False,
    ) -> int:
        """Sum the bytes of the entries that match everything that is given; `framed` sums the lengths of blobs instead.

        Raises:
            ValueError: If `framed` is asked of a single name: a blob carries them all.
        """
        if framed and name is not None:
            raise wrong_value("name", "be None where `framed` is asked for", repr(name))
        wanted = {
            "direction": direction,
            "client": client,
            "server_round": server_round,
            "name": name,
        }
        given = {field: value for field, value in wanted.items() if value is not None}
        chosen = [
            entry
            for entry in self.entries
            if all(getattr(entry, field) == value for field, value in given.items())
        ]
        return sum(entry.framed if framed else entry.num_bytes for entry in chosen)

    def table(self) -> str:
        """Lay out the bytes of each client and of all together, as text; lengths of blobs too, where any was recorded."""
        entries: dict[Hashable, list[Entry]] = {}
        for entry in self.entries:
            entries.setdefault(entry.client, []).append(entry)
        titles = ("client", "rounds", "bytes up", "bytes down", "framed up", "framed down")
        rows = [
            titles,
            *(_summary(client, own) for client, own in entries.items()),
            _summary("all", self.entries),
        ]
        if not any(entry.framed for entry in self.entries):
            rows = [row[:4] for row in rows]
        widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
        lines = (
            "  ".join([str(row[0]).ljust(widths[0]), *map(_right, row[1:], widths[1:])])
            for row in rows
        )
        return "\n".join(lines)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that :meth:`load_state_dict` needs.

        With a `path`, the entries that the file lacks are appended to it first, and are on the disk
        when this returns. Whatever the file held behind the entries of this ledger is replaced, so
        a run that was killed between this call and its checkpoint goes on correctly.

        Returns:
            Without a `path`, from each field of an entry to its values, in the order of recording.
            With one, the number of entries, the length of the file in bytes, and a digest.
            :func:`save_checkpoint` accepts both if ids are strings, numbers or tuples of these.

        Example:
            >>> ledger = Ledger()
            >>> ledger.record({"head": torch.zeros(5)}, direction="up", client=0, server_round=0)
            >>> again = Ledger()
            >>> again.load_state_dict(ledger.state_dict())
            >>> again.entries == ledger.entries
            True
        """
        if self.path is None:
            return {
                field: [getattr(entry, field) for entry in self.entries] for field in Entry._fields
            }
        self._append(self.path)
        return {field: getattr(self._kept, field) for field in _MARK}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Replace all entries by those of a state of :meth:`state_dict`.

        Args:
            state: From a ledger without a `path`, or from one with the same `path`.

        Raises:
            TypeError: If `state` is not such a mapping, or a field is of another kind; nothing
                changes then.
            ValueError: If `state` has other fields, lists of unequal length or values that no entry
                can have, or the file is not what was saved; nothing changes then.
        """
        if not isinstance(state, Mapping):
            raise wrong_type("state", "map the fields of an entry to lists", kind(state))
        if set(state) == set(_MARK):
            self.entries, self._kept = _read(self.path, state)
        else:
            self.entries, self._kept = _listed(state), _Kept()

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write every entry to a CSV file with a header.

        Args:
            path: Where to; an existing file is replaced.
        """
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Entry._fields)
            writer.writerows(self.entries)

    def _append(self, path: str | PathLike[str]) -> None:
        """Write the entries that the file lacks; a line that was cut short earlier is replaced."""
        if self._kept.path != path or self._kept.num_entries > len(self.entries):
            self._kept = _Kept(path)
        lines = [_line(entry) for entry in self.entries[self._kept.num_entries :]]
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.truncate(self._kept.num_bytes)
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        self._kept = self._kept.followed_by(lines)


def _line(entry: Entry) -> bytes:
    return json.dumps(packed(tuple(entry), "entry", {})["tuple"]).encode() + b"\n"


def _read(path: str | PathLike[str] | None, state: Mapping[str, Any]) -> tuple[list[Entry], _Kept]:
    """Read the beginning of a file that a state describes."""
    if path is None:
        raise wrong_value(
            "state", "hold the entries, as this ledger has no `path`", "a part of a file"
        )
    for field in ("num_entries", "num_bytes"):
        check_count(f"state[{field!r}]", state[field], at_least=0)
    found = b""
    if Path(path).exists():
        with open(path, "rb") as file:
            found = file.read(state["num_bytes"])
    lines = found.splitlines(keepends=True)
    kept = _Kept(path).followed_by(lines)
    if [getattr(kept, field) for field in _MARK] != [state[field] for field in _MARK]:
        got = f"{len(lines)} entries in {len(found)} bytes, or another digest"
        raise wrong_value("path", f"hold the {state['num_entries']} entries that were saved", got)
    return [Entry(*(unpacked(field, {}) for field in json.loads(line))) for line in lines], kept


def _listed(state: Mapping[str, Any]) -> list[Entry]:
    """Make the entries of a state that holds them all."""
    if set(state) != set(Entry._fields):
        fields = ", ".join(Entry._fields)
        raise wrong_value("state", f"have the keys {fields}", ", ".join(map(repr, state)) or "none")
    for field in Entry._fields:
        if not isinstance(state[field], list):
            raise wrong_type(f"state[{field!r}]", "be a list", kind(state[field]))
    sizes = {field: len(values) for field, values in state.items()}
    if len({*sizes.values()}) > 1:
        raise wrong_value("state", "hold lists of equal length", sizes)
    columns = (state[field] for field in Entry._fields)
    entries = [Entry(*values) for values in zip(*columns, strict=True)]
    for position, entry in enumerate(entries):
        _check_entry(position, entry)
    return entries


def _check_direction(argument: str, direction: object) -> None:
    if direction not in get_args(Direction):
        raise wrong_value(argument, "be 'up' or 'down'", repr(direction))


def _check_entry(position: int, entry: Entry) -> None:
    """Require of an entry what :meth:`Ledger.record` makes sure of."""
    for field in ("server_round", "num_bytes", "framed"):
        check_count(f"state[{field!r}][{position}]", getattr(entry, field), at_least=0)
    _check_direction(f"state['direction'][{position}]", entry.direction)
    if not isinstance(entry.name, str):
        raise wrong_type(f"state['name'][{position}]", "be a string", kind(entry.name))
    _check_client(f"state['client'][{position}]", entry.client)


def _check_client(argument: str, client: object) -> None:
    try:
        hash(client)
    except TypeError as error:
        raise wrong_type(argument, "be hashable", kind(client)) from error


def _summary(label: object, entries: list[Entry]) -> tuple[object, ...]:
    up, down = (
        [entry for entry in entries if entry.direction == direction]
        for direction in get_args(Direction)
    )
    content, framed = (
        [sum(getattr(entry, field) for entry in way) for way in (up, down)]
        for field in ("num_bytes", "framed")
    )
    return label, len({entry.server_round for entry in entries}), *content, *framed


def _right(cell: object, width: int) -> str:
    return str(cell).rjust(width)
