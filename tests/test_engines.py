"""Engines give bitwise identical results: encoded messages, and a process group."""

import pytest

from federations import FEDERATIONS, assert_bitwise_identical, in_process, parts, through_bytes
from fedprompt import Ledger


@pytest.fixture(params=FEDERATIONS)
def make(request):
    return FEDERATIONS[request.param]


def test_encoded_messages_give_identical_results_and_the_ledger_has_their_sizes(make):
    blobs, ledger = [], Ledger()

    def wire(blob):
        blobs.append(blob)
        return blob

    federation = make()
    assert_bitwise_identical(
        through_bytes(federation, wire=wire, ledger=ledger), in_process(make())
    )
    sent = [
        (server_round, client)
        for server_round in range(federation.rounds)
        for client in federation.cohort(server_round)
    ]
    messages = [
        (server_round, client, direction)
        for server_round, client in sent
        for direction in ("down", "up")
    ]
    assert len(messages) == len(blobs)
    for (server_round, client, direction), blob in zip(messages, blobs, strict=True):
        of = {"server_round": server_round, "client": client, "direction": direction}
        assert ledger.total(**of, framed=True) == len(blob)
        assert ledger.total(**of) == len(blob) - 8 - int.from_bytes(blob[:8], "little")


@pytest.mark.parametrize("position", [0, 1], ids=["down", "up"])
def test_messages_of_another_backbone_are_refused_by_the_part_that_differs(
    make, position, monkeypatch
):
    def recorded(federation, foreign=None):
        blobs = []

        def wire(blob):
            blobs.append(blob if foreign is None or len(blobs) != position else foreign[position])
            return blobs[-1]

        through_bytes(federation, wire=wire)
        return blobs

    sender, drawn = make(), parts.drawn
    monkeypatch.setattr(
        parts, "drawn", lambda make, seed: drawn(make, seed + 100)
    )  # the same architecture with other weights
    receiver = make()
    differing = [
        part for part, text in receiver.fingerprint.items() if sender.fingerprint[part] != text
    ]
    assert differing
    assert all(part.startswith("weights") for part in differing)
    with pytest.raises(
        ValueError, match=rf"^`blob` must come from the same {', '.join(differing)}, "
    ):
        recorded(receiver, recorded(sender))


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_message_of_another_width_is_refused(direction):
    federation, swapped = FEDERATIONS["fedhpl"](), {0: 1, 1: 0, 2: 2}
    field = "payload_form" if direction == "up" else "broadcast_form"
    form = getattr(federation, field)
    with pytest.raises(ValueError, match=r"`blob` must .*'prompts\.tokens"):
        through_bytes(federation._replace(**{field: lambda client: form(swapped[client])}))


def test_a_bit_that_turns_on_the_way_is_refused_or_arrives_in_the_result(make):
    """A changed message changes the result, so the tests above compare what was sent."""
    federation, expected = make(), in_process(make())

    def wire(blob):
        return blob[:-2] + bytes([blob[-2] ^ 1]) + blob[-1:]

    with pytest.raises((AssertionError, ValueError)):
        assert_bitwise_identical(through_bytes(federation, wire=wire), expected)
