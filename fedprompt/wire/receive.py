"""A round's blobs, whoever sends them, in whatever order and state they arrive."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from fedprompt._checks import kind, wrong_type, wrong_value
from fedprompt.interfaces import Message
from fedprompt.wire.encode import check_expected, read_blob
from fedprompt.wire.format import Expected, Slot

Client = TypeVar("Client", int, str)


def receive(
    arrivals: Iterable[tuple[Client, object]],
    *,
    expect: Expected | Mapping[Client, Expected],
    max_bytes: int,
    restore: Callable[[Message], Any] | None = None,
) -> tuple[dict[Client, Any], list[tuple[Client, str]]]:
    """Read the uploads of a round: the first good one of each client, and a reason for every other.

    A blob that :func:`decode_payload` refuses is dropped, and so is one that is not ``bytes``; the
    other clients are unaffected. A second one of a client whose first was good is not even read.
    Arrivals are taken one by one, and of a refused one nothing is kept but the reason.

    Args:
        arrivals: Pairs of a client's id, all integers or all strings, and what it sent. The id is what the channel knows, and the blob must
            come under the same, as text. An iterator that ends when the round does is enough.
        expect: Form, fingerprint and round of the uploads; its `client_id` stays None. Where clients differ in what they send, as in
            FedHPL, or where not all were asked: from each client's id to what it may send. Whoever is not in there is refused.
        max_bytes: As for :func:`decode_payload`, for each blob.
        restore: Called with each message, such as ``partial(codec.decode, like=form)``; its ValueError refuses the upload. None takes
            messages as they are.

    Returns:
        The messages by client, in the order of ids whatever the order of arrival, so that a server that adds in this order gets the same
        bits; and pairs of a client and the reason for which something of it was refused, in the order of arrival.

    Raises:
        TypeError: If an argument or an id is of the wrong kind; never for a blob.
        ValueError: If `expect` names a client, or alone needs more than `max_bytes`; nothing was taken from `arrivals` then.

    Example:
        Client 1 answers twice, client 2 for the round before.

        >>> form, broadcast = {"scale": torch.tensor(0.0)}, {"scale": torch.tensor(4.5)}
        >>> blobs = [encode_payload(broadcast, header=Header({}, server_round, client)) for server_round, client in ((7, "1"), (6, "2"))]
        >>> accepted, refused = receive([(1, blobs[0]), (2, blobs[1]), (1, blobs[0])], expect=Expected(form, {}, 7), max_bytes=1000)
        >>> accepted
        {1: {'scale': tensor(4.5000)}}
        >>> for client, reason in refused:
        ...     print(client, reason)
        2 `blob` must have the server_round 7; got 6.
        1 `blob` must be the first good one of client 1; got another.
    """
    if restore is not None and not callable(restore):
        raise wrong_type("restore", "be a function of a message", kind(restore))
    forms = (
        {client: _checked_form(own, max_bytes) for client, own in expect.items()}
        if isinstance(expect, Mapping)
        else {}
    )
    same = None if isinstance(expect, Mapping) else _checked_form(expect, max_bytes)
    accepted: dict[Client, Any] = {}
    refused: list[tuple[Client, str]] = []
    ids: type = object
    for client, blob in arrivals:
        ids = _checked_kind(client, ids)
        try:
            if client in accepted:
                raise wrong_value("blob", f"be the first good one of client {client}", "another")
            if (asked := same or forms.get(client)) is None:
                raise wrong_value("blob", "come from a client that was asked", repr(client))
            own, slots = asked
            if not isinstance(blob, bytes):
                raise wrong_value("blob", "be bytes", f"a {type(blob).__name__}")
            message, _ = read_blob(blob, own._replace(client_id=str(client)), slots, max_bytes)
            accepted[client] = message if restore is None else restore(message)
        except ValueError as error:
            refused.append((client, str(error)))
    return {client: accepted[client] for client in sorted(accepted)}, refused


def _checked_form(expect: Expected, max_bytes: int) -> tuple[Expected, dict[str, Slot]]:
    slots = check_expected(expect, max_bytes)
    if expect.client_id is not None:
        raise wrong_value(
            "expect.client_id", "be None, as `arrivals` say who sends", repr(expect.client_id)
        )
    return expect, slots


def _checked_kind(client: object, ids: type) -> type:
    if type(client) not in (int, str) or not isinstance(client, ids):
        raise wrong_type(
            "arrivals", "name clients by integers or strings, of one kind", kind(client)
        )
    return type(client)
