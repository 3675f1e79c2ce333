"""The messages that a method sends in a federation."""

from typing import Any, NamedTuple

from fedprompt.interfaces import Message
from tiny_federations import Federation


class Sent(NamedTuple):
    """A message with its round, its direction ("up" or "down") and its client."""

    server_round: int
    direction: str
    client: int
    message: Message


class Messages(list[Sent]):
    """All messages in the order in which they were sent."""

    def of(self, direction: str) -> list[tuple[int, int, Message]]:
        """Return round, client and message of each message of one direction."""
        chosen = [each for each in self if each.direction == direction]
        return [(each.server_round, each.client, each.message) for each in chosen]

    def at(self, server_round: int, direction: str) -> dict[int, Message]:
        """Return the messages of one direction in a round, by the client."""
        chosen = [each for each in self.of(direction) if each[0] == server_round]
        return {client: message for _, client, message in chosen}


def sent_by(federation: Federation) -> Messages:
    """Return a list that grows by one with each message of the federation."""
    kept, count = Messages(), federation.sent

    def sent(direction: str, server_round: int, client: int, message: Any) -> None:
        kept.append(Sent(server_round, direction, client, message))
        count(direction, server_round, client, message)

    federation.sent = sent
    return kept
