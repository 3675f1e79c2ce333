"""Accounting of the bytes that clients and server send."""

import csv
import os
from collections.abc import Hashable, Mapping
from io import StringIO
from os import PathLike
from typing import Any, get_args

import fedprompt._refusals as check
from fedprompt._files import file_of, locked, path_of, replace_file
from fedprompt.interfaces import Message
from fedprompt.messages import _entries
from fedprompt.messages._entries import MARK, Direction, LedgerEntry, Written
from fedprompt.messages.payload import num_bytes


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
        _entries.check_entry(entry, "{}")
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
        check.optional(_entries.check_direction, "direction", direction)
        check.optional(_entries.check_client, "client", client)
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
            self.entries, self._written = _entries.read_entries(self.path, state)
        else:
            self.entries = _entries.entries_of(state)
            self._written = Written(self._written.path)
        self._last = False

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write every entry to a CSV file with a header.

        Args:
            path: Path of the file. An existing file is replaced.
        """
        file = file_of("path", path)
        text = StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(LedgerEntry._fields)
        writer.writerows(self.entries)
        replace_file(file, text.getvalue().encode())

    def _append(self, path: str | PathLike[str]) -> None:
        """Write the entries that the file lacks, over the remains of an interrupted write."""
        file = file_of("path", path)
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
            lines = [_entries.line_of(entry) for entry in self.entries[self._written.num_entries :]]
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
