"""A Flower grid in this process, which serializes messages and contexts as Flower does."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.common.serde import context_from_proto, context_to_proto
from flwr.proto.message_pb2 import Context as ContextProto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

Fault = Callable[[Message], list[Message]]
"""Function from a reply to the messages that are received in its place."""


def over_the_wire(message: Message) -> Message:
    """Serialize the objects of a message, and make the message from them again."""
    objects = get_all_nested_objects(message)
    contents = {name: bytes(each.deflate()) for name, each in objects.items()}
    arrived: Any = inflate_object_from_contents(message.object_id, contents)
    arrived.metadata.__dict__["_message_id"] = message.object_id
    return arrived


class InProcessGrid(Grid):
    """Grid of nodes that keep only serialized contexts. Replies are reordered, and may fail."""

    def __init__(
        self, app: ClientApp, clients: Iterable[int], *, fault: Fault = lambda reply: [reply]
    ) -> None:
        self.app, self.fault = app, fault
        self.contexts: dict[int, bytes] = {}
        self.sent: list[tuple[str, int]] = []  # direction and length of each blob in training
        self.asked: list[int] = []
        self.timeouts: list[float | None] = []
        self.silent: set[int] = set()  # nodes that are connected and never answer
        self._replies: list[Message] = []  # not pulled yet
        for client in clients:
            self.join(client, node=1000 - 7 * client)

    def join(self, client: int, *, node: int) -> None:
        """Connect a node."""
        context = Context(1, node, {"partition-id": client, "num-partitions": 3}, RecordDict(), {})
        self.contexts[node] = context_to_proto(context).SerializeToString()

    def context(self, node: int) -> Context:
        """Return the context of a node."""
        return context_from_proto(ContextProto.FromString(self.contexts[node]))

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        """Answer all messages except those to nodes that have left."""
        self.timeouts.append(timeout)
        return self.pull_messages(self.push_messages(messages))

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Deliver messages to the nodes that are connected."""
        # Messages are iterated twice, as over HTTP. A generator would be empty the second time.
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
        there = [
            message
            for message in messages
            if message.metadata.dst_node_id in self.contexts.keys() - self.silent
        ]
        replies = [self._answer(over_the_wire(message)) for message in there]
        self._replies += [
            over_the_wire(each) for reply in reversed(replies) for each in self.fault(reply)
        ]
        return [message.metadata.message_id for message in messages]

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        """Return the replies to some messages, each once."""
        wanted = set(message_ids)
        pulled = [reply for reply in self._replies if reply.metadata.reply_to_message_id in wanted]
        self._replies = [
            reply for reply in self._replies if reply.metadata.reply_to_message_id not in wanted
        ]
        return pulled

    def _answer(self, message: Message) -> Message:
        node = message.metadata.dst_node_id
        training = message.metadata.message_type == "train"
        if training:
            self.sent.append(("down", _length(message)))
        else:
            self.asked.append(node)
        context = self.context(node)
        try:
            reply = self.app(message, context)
        except Exception as error:
            return Message(Error(2, repr(error)), reply_to=message)
        self.contexts[node] = context_to_proto(context).SerializeToString()
        if training and reply.content.array_records:
            self.sent.append(("up", _length(reply)))
        return reply

    def get_node_ids(self) -> list[int]:
        """Return the ids of the connected nodes."""
        return list(self.contexts)

    def set_run(self, run: Any) -> None:
        """Raise an error, because there is only one run."""
        raise NotImplementedError

    @property
    def run(self) -> Any:
        """Return the only run."""
        return SimpleNamespace(run_id=1)

    def create_message(self, *arguments: Any, **options: Any) -> Message:
        """Raise an error, because Flower deprecated this method."""
        raise NotImplementedError


def _length(message: Message) -> int:
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
