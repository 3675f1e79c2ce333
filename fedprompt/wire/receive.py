"""Reading all blobs of a round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import fedprompt._refusals as check
from fedprompt.interfaces import Message
from fedprompt.wire._decode import read_blob
from fedprompt.wire._format import Expected, Slot, check_expected

_Client = TypeVar("_Client", int, str)
_Form = tuple[Expected, dict[str, Slot]]


def receive(
    arrivals: Iterable[tuple[_Client, object]],
    *,
    expect: Expected | Mapping[_Client, Expected],
    max_bytes: int,
    restore: Callable[[Message], Any] | None = None,
) -> tuple[dict[_Client, Any], list[tuple[_Client, str]]]:
    """Read the blobs of a round: the first valid one of each client, and a reason for every other.

    A blob that :func:`decode_payload` refuses is dropped, and so is one that is not ``bytes``; the
    other clients are unaffected. Once a client has sent a valid blob, its further ones are not
    read. Arrivals are read one by one. Of a refused blob, only the reason is kept.

    Args:
        arrivals: Pairs of a client's id and its blob. Ids are all integers or all strings. The id
            is the one that the channel has for the client; the `client_id` of the blob must be
            equal to it as text. An iterator that ends with the round is enough.
        expect: Requirements for every blob, without a `client_id`. If clients differ in the form
            of their messages, or only some were asked: a mapping from client id to requirements.
            Clients that are not in the mapping are refused.
        max_bytes: Maximum size in bytes of each blob, as for :func:`decode_payload`.
        restore: Function of each message, such as ``partial(codec.decode, like=form)``. If it
            raises a ValueError, the blob is refused. If None, messages are returned as they are.

    Returns:
        The messages by client, and the refusals as pairs of a client and a reason. Messages are in
        the order of ids, so a server's sums do not depend on the order of arrival. Refusals are in
        the order of arrival.

    Raises:
        TypeError: If an id is neither an integer nor a string. Blobs never cause one.
        ValueError: If `expect` names a client or needs more than `max_bytes`. Nothing has been
            taken from `arrivals` then.

    Example:
        Client 1 answers twice. Client 2 answers for the previous round.

        >>> broadcast = {"scale": torch.tensor(4.5)}
        >>> first = encode_payload(broadcast, header=Header(server_round=7, client_id="1"))
        >>> late = encode_payload(broadcast, header=Header(server_round=6, client_id="2"))
        >>> expect = Expected({"scale": torch.tensor(0.0)}, server_round=7)
        >>> accepted, refused = receive(
        ...     [(1, first), (2, late), (1, first)], expect=expect, max_bytes=1000
        ... )
        >>> accepted
        {1: {'scale': tensor(4.5000)}}
        >>> for client, reason in refused:
        ...     print(client, reason)
        2 `blob` must be of round 7; got one of round 6.
        1 Client 1 already sent a valid blob for this round; this one is ignored.
    """
    check.optional(check.function, "restore", restore, "be a function of a message")
    asked = expect if isinstance(expect, Mapping) else {}
    forms = {client: _form_of(form, max_bytes) for client, form in asked.items()}
    common = None if isinstance(expect, Mapping) else _form_of(expect, max_bytes)
    check.iterable("arrivals", arrivals, "pairs (client, blob)")
    accepted: dict[_Client, Any] = {}
    refused: list[tuple[_Client, str]] = []
    ids: type = object
    for arrival in arrivals:
        check.pair("arrivals", arrival, "contain pairs (client, blob)")
        client, blob = arrival
        fits = type(client) in (int, str) and isinstance(client, ids)
        check.typed(fits, "arrivals", "name clients by integers alone or by strings alone", client)
        ids = type(client)
        try:
            if client in accepted:
                ignored = "already sent a valid blob for this round; this one is ignored."
                raise ValueError(f"Client {client} {ignored}")
            message = _read(client, blob, common or forms.get(client), max_bytes)
            accepted[client] = message if restore is None else restore(message)
        except ValueError as error:
            refused.append((client, str(error)))
    return {client: accepted[client] for client in sorted(accepted)}, refused


def _read(client: object, blob: Any, form: _Form | None, max_bytes: int) -> Message:
    if form is None:
        raise ValueError(f"Client {client} was not asked in this round; its blob is ignored.")
    check.require(isinstance(blob, bytes), "blob", "be bytes", f"a {type(blob).__name__}")
    expect, slots = form
    return read_blob(blob, expect._replace(client_id=str(client)), slots, max_bytes)[0]


def _form_of(expect: Expected, max_bytes: int) -> _Form:
    slots = check_expected(expect, max_bytes)
    rule = "be None, because `arrivals` names the clients"
    check.require(expect.client_id is None, "expect.client_id", rule, repr(expect.client_id))
    return expect, slots
