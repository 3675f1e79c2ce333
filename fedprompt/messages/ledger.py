"""Accounting of the bytes that clients and server send."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Literal, NamedTuple, get_args

import fedprompt._refusals as check
from fedprompt.interfaces import Message
from fedprompt.messages.payload import num_bytes

Direction = Literal["up", "down"]


class Sent(NamedTuple):
    """Bytes of the messages of a client in a round and a direction.

    Attributes:
        num_bytes: Number of bytes, as counted by :func:`num_bytes`.
        framed: Length of the blobs that carried the messages; 0 without blobs.
    """

    num_bytes: int
    framed: int


class Ledger:
    """Counts the bytes of messages, per client, round and direction.

    Attributes:
        sent: Bytes by (client, server_round, direction), in the order of the first messages. Empty
            messages are left out.
        last: Bytes of each entry of the last message, by name.

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
        self.sent: dict[tuple[Hashable, int, Direction], Sent] = {}
        self.last: dict[str, int] = {}

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
        check.names("message", message, "map names to tensors or Weighted")
        sizes = {name: num_bytes({name: entry}) for name, entry in message.items()}
        size = sum(sizes.values())
        _check_row("", client, server_round, direction, size, framed)
        rule = f"be the length of a blob with the {size} bytes of `message`"
        check.require(not framed or (message and framed >= size), "framed", rule, framed)
        self.last = sizes
        if message:
            key = client, int(server_round), direction
            before = self.sent.get(key, Sent(0, 0))
            self.sent[key] = Sent(before.num_bytes + size, before.framed + int(framed))

    def total(
        self,
        *,
        direction: Direction | None = None,
        client: Hashable | None = None,
        server_round: int | None = None,
        framed: bool = False,
    ) -> int:
        """Sum the bytes of all messages that match the given fields.

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
            sent.framed if framed else sent.num_bytes
            for (sender, when, way), sent in self.sent.items()
            if direction in (None, way)
            and client in (None, sender)
            and server_round in (None, when)
        )

    def table(self) -> str:
        """Return the bytes of each client and of all clients as text, in aligned columns.

        Lengths of blobs have separate columns if any was recorded.
        """
        clients = list(dict.fromkeys(client for client, _, _ in self.sent))
        rows: list[tuple[str, ...]] = [
            ("client", "rounds", "bytes up", "bytes down", "framed up", "framed down")
        ]
        for label, client in [*zip(clients, clients, strict=True), ("all", None)]:
            rounds = {when for sender, when, _ in self.sent if client in (None, sender)}
            sums = [
                self.total(direction=direction, client=client, framed=framed)
                for framed in (False, True)
                for direction in get_args(Direction)
            ]
            rows.append((str(label), *map(str, (len(rounds), *sums))))
        if not self.total(framed=True):
            rows = [row[:4] for row in rows]
        first, *widths = (max(map(len, column)) for column in zip(*rows, strict=True))
        aligned = ([row[0].ljust(first), *map(str.rjust, row[1:], widths)] for row in rows)
        return "\n".join(map("  ".join, aligned))

    def state_dict(self) -> dict[str, Any]:
        """Return the state that :meth:`load_state_dict` restores.

        It has one row for each client, round and direction, and :func:`save_checkpoint` accepts it.

        Example:
            >>> ledger = Ledger()
            >>> ledger.record({"head": torch.zeros(5)}, direction="up", client=0, server_round=0)
            >>> ledger.state_dict()
            {'sent': [(0, 0, 'up', 20, 0)], 'last': {'head': 20}}
            >>> again = Ledger()
            >>> again.load_state_dict(ledger.state_dict())
            >>> again.sent == ledger.sent
            True
        """
        return {"sent": [(*key, *sent) for key, sent in self.sent.items()], "last": {**self.last}}

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Replace all counts by the counts of a state.

        Args:
            state: State of :meth:`state_dict`.

        Raises:
            ValueError: If `state` has other fields or impossible values. The ledger is unchanged
                then.
        """
        check.instance("state", state, Mapping, "be a state of `state_dict`")
        if set(state) != {"sent", "last"}:
            raise check.wrong("state", "have the keys sent and last", sorted(map(str, state)))
        check.instance("state['sent']", state["sent"], list, "be a list")
        sent: dict[tuple[Hashable, int, Direction], Sent] = {}
        for position, row in enumerate(state["sent"]):
            place = f"state['sent'][{position}]"
            rule = "be a tuple (client, server_round, direction, num_bytes, framed)"
            check.require(isinstance(row, tuple) and len(row) == 5, place, rule, check.kind(row))
            _check_row(f"{place}.", *row)
            check.require(
                row[:3] not in sent, place, "be of another client, round or direction", row
            )
            sent[row[:3]] = Sent(*row[3:])
        check.names("state['last']", state["last"], "map names to numbers of bytes")
        for name, size in state["last"].items():
            check.count(f"state['last'][{name!r}]", size, at_least=0)
        self.sent, self.last = sent, {**state["last"]}


def _check_row(
    place: str,
    client: object,
    server_round: object,
    direction: object,
    size: object,
    framed: object,
) -> None:
    """Require the fields of a row that :meth:`Ledger.record` could have made."""
    _check_direction(f"{place}direction", direction)
    _check_client(f"{place}client", client)
    numbers = {"server_round": server_round, "num_bytes": size, "framed": framed}
    for field, number in numbers.items():
        check.count(f"{place}{field}", number, at_least=0)


def _check_direction(argument: str, direction: object) -> None:
    """Require a direction."""
    if not isinstance(direction, str) or direction not in get_args(Direction):
        raise check.wrong(argument, "be 'up' or 'down'", check.kind(direction))


def _check_client(argument: str, client: object) -> None:
    """Require an id that a checkpoint restores: a string, a number, or a tuple of these."""
    for part in client if type(client) is tuple else (client,):
        rule = "be a string, a number of Python, or a tuple of these"
        # NaN is not equal to itself.
        check.typed(type(part) in (str, int, float, bool) and part == part, argument, rule, client)
