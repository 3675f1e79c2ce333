"""Who sent how many bytes, when and for what."""

import csv
from collections.abc import Hashable, Mapping
from itertools import chain, repeat
from os import PathLike
from typing import Any, Literal, NamedTuple, get_args

from fedprompt._checks import check_count, kind, wrong_type, wrong_value
from fedprompt.exchange.payload import bytes_by_name
from fedprompt.interfaces import Message

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


class Ledger:
    """Counts the bytes of messages, per client, round, direction and name.

    Attributes:
        entries: For each name of each recorded message, in the order of recording, a named tuple
            (server_round, client, direction, name, num_bytes, framed).

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

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, message: Message, *, direction: Direction, client: Hashable, server_round: int, framed: int = 0) -> None:
        """Add a message.

        Args:
            message: What travels; counted as by :func:`num_bytes`.
            direction: "up" from the client, "down" to it.
            client: Its id.
            server_round: 0-based.
            framed: Length of the blob, ``len(encode_payload(message, ...))``; 0 where there is none.

        Raises:
            TypeError: If `message` does not map names to tensors or :class:`Weighted`; nothing is recorded then.
            ValueError: If `direction` is another word, `server_round` is negative, or `framed` is less than the message needs.
        """
        _check_direction("direction", direction)
        check_count("server_round", server_round, at_least=0)
        check_count("framed", framed, at_least=0)
        sizes = bytes_by_name(message)
        if framed and (not sizes or framed < sum(sizes.values())):
            raise wrong_value("framed", f"be the length of a blob that holds the {sum(sizes.values())} bytes of `message`", framed)
        frames = chain([framed], repeat(0))
        self.entries += [Entry(server_round, client, direction, *own, frame) for own, frame in zip(sizes.items(), frames, strict=False)]

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
        wanted = {"direction": direction, "client": client, "server_round": server_round, "name": name}
        given = {field: value for field, value in wanted.items() if value is not None}
        chosen = [entry for entry in self.entries if all(getattr(entry, field) == value for field, value in given.items())]
        return sum(entry.framed if framed else entry.num_bytes for entry in chosen)

    def table(self) -> str:
        """Lay out the bytes of each client and of all together, as text; lengths of blobs too, where any was recorded."""
        entries: dict[Hashable, list[Entry]] = {}
        for entry in self.entries:
            entries.setdefault(entry.client, []).append(entry)
        titles = ("client", "rounds", "bytes up", "bytes down", "framed up", "framed down")
        rows = [titles, *(_summary(client, own) for client, own in entries.items()), _summary("all", self.entries)]
        if not any(entry.framed for entry in self.entries):
            rows = [row[:4] for row in rows]
        widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
        lines = ("  ".join([str(row[0]).ljust(widths[0]), *map(_right, row[1:], widths[1:])]) for row in rows)
        return "\n".join(lines)

    def state_dict(self) -> dict[str, list[Any]]:
        """Hand out everything that was recorded: from each field of an entry to its values, in the order of recording.

        Returns:
            Lists of equal length, for :meth:`load_state_dict` and :func:`save_checkpoint`, which asks for ids that are strings or numbers.

        Example:
            >>> ledger = Ledger()
            >>> ledger.record({"head": torch.zeros(5)}, direction="up", client=0, server_round=0)
            >>> again = Ledger()
            >>> again.load_state_dict(ledger.state_dict())
            >>> again.entries == ledger.entries
            True
        """
        return {field: [getattr(entry, field) for entry in self.entries] for field in Entry._fields}

    def load_state_dict(self, state: Mapping[str, list[Any]], /) -> None:
        """Take in what :meth:`state_dict` of a ledger gave, in place of everything that was recorded so far.

        Args:
            state: From each field of an entry to a list of its values.

        Raises:
            TypeError: If `state` is not a mapping to lists, or an entry's field is of another kind; nothing changes then.
            ValueError: If `state` has other fields, lists of unequal length or values that no entry can have; nothing changes then.
        """
        if not isinstance(state, Mapping):
            raise wrong_type("state", "map the fields of an entry to lists", kind(state))
        if set(state) != set(Entry._fields):
            raise wrong_value("state", f"have the keys {', '.join(Entry._fields)}", ", ".join(map(repr, state)) or "none")
        for field in Entry._fields:
            if not isinstance(state[field], list):
                raise wrong_type(f"state[{field!r}]", "be a list", kind(state[field]))
        sizes = {field: len(values) for field, values in state.items()}
        if len({*sizes.values()}) > 1:
            raise wrong_value("state", "hold lists of equal length", sizes)
        entries = [Entry(*values) for values in zip(*(state[field] for field in Entry._fields), strict=True)]
        for position, entry in enumerate(entries):
            _check_entry(position, entry)
        self.entries = entries

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Write every entry to a CSV file with a header.

        Args:
            path: Where to; an existing file is replaced.
        """
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(Entry._fields)
            writer.writerows(self.entries)


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
    try:
        hash(entry.client)
    except TypeError as error:
        raise wrong_type(f"state['client'][{position}]", "be hashable", kind(entry.client)) from error


def _summary(label: object, entries: list[Entry]) -> tuple[object, ...]:
    up, down = ([entry for entry in entries if entry.direction == direction] for direction in get_args(Direction))
    content, framed = ([sum(getattr(entry, field) for entry in way) for way in (up, down)] for field in ("num_bytes", "framed"))
    return label, len({entry.server_round for entry in entries}), *content, *framed


def _right(cell: object, width: int) -> str:
    return str(cell).rjust(width)
