"""Client sampling, and per-client random generators that need no coordination."""

import hashlib
from collections.abc import Sequence
from typing import SupportsIndex, TypeVar

import numpy as np
import torch

import fedprompt._refusals as check

_Client = TypeVar("_Client")

_STATE = np.dtype("<u8, <i4, <i4, <u8, (624,)<u8, V40")
_STATE.names = ("seed", "left", "seeded", "next", "words", "normal")
"""State of torch's CPU generator (Mersenne Twister).

In a new generator `left` is 1, so its first draw renews all words.
"""


def sample_clients(
    clients: Sequence[_Client], *, size: int, generator: torch.Generator
) -> list[_Client]:
    """Draw the clients of a round, without replacement.

    Args:
        clients: Ids of all clients, in order.
        size: Number of clients to draw. For a fraction, write ``round(0.05 * len(clients))``;
            ``size=0`` (for example from rounding a small fraction) still draws one client.
        generator: Random generator on the CPU.

    Returns:
        At least one client, in the order of ids. A server that sums in this order gets the same
        result for every order of answers.

    Raises:
        ValueError: If there are no clients, or `size` is negative or larger than their number.

    Example:
        >>> drawn = sample_clients(range(100), size=10, generator=torch.manual_seed(0))
        >>> len(set(drawn)), drawn == sorted(drawn)
        (10, True)
    """
    ids: object = clients
    if not isinstance(ids, np.ndarray) or ids.ndim != 1:
        check.sequence("clients", clients, "ids, such as range(100)")
    check.some("clients", len(clients), "have at least one client")
    check.count("size", size, at_least=0, at_most=len(clients), of="the number of clients")
    check.instance("generator", generator, torch.Generator, "be a torch.Generator")
    order = torch.randperm(len(clients), generator=generator, device=generator.device)
    return [clients[index] for index in sorted(order[: max(1, size)].tolist())]


def stream_generator(
    seed: int,
    *,
    server_round: SupportsIndex,
    client: SupportsIndex | None = None,
    purpose: str = "",
) -> torch.Generator:
    """Make the random generator of one client, or of the server, for one purpose in one round.

    The stream depends on the four arguments alone. So a resumed or parallel run draws the same
    numbers as a sequential one, and generators need not be saved.

    All 19,937 bits of the generator are filled from numpy's ``SeedSequence``, whose pool has 128
    bits. (``torch.Generator().manual_seed`` keeps 32 bits of its seed on the CPU.)

    Args:
        seed: Seed of the run, at least 0 and below 2¹²⁸.
        server_round: Round (0-based, below 2⁶⁴).
        client: Id of the client, at least 0 and below 2⁶⁴. If None, the stream belongs to the
            server.
        purpose: Name of the use, such as ``"batches"``. Different names give independent streams.

    Returns:
        A new generator on the CPU.

    Raises:
        ValueError: If a number is negative or too large.

    Example:
        >>> def order(client):
        ...     generator = stream_generator(0, server_round=2, client=client)
        ...     return torch.randperm(50, generator=generator)
        >>> torch.equal(order(7), order(7)), torch.equal(order(7), order(8))
        (True, False)

    References:
        Matsumoto and Nishimura, "Mersenne Twister", ACM TOMACS 1998. O'Neill, "Developing a
        seed_seq Alternative", 2015, on which numpy's ``SeedSequence`` is based.
    """
    check.text("purpose", purpose)
    check.count("seed", seed, at_least=0, below=2**128)
    time = _words("server_round", server_round)
    owner = _words("client", 0 if client is None else client)
    digest = np.frombuffer(hashlib.sha256(purpose.encode()).digest(), "<u4")
    spawn_key = [*time, int(client is not None), *owner, *digest.tolist()]
    sequence = np.random.SeedSequence(seed, spawn_key=spawn_key)
    words = sequence.generate_state(626, np.uint32)
    # Only the top bit of the first word is used. With it, the state is never all zeros.
    words[0] = 2**31
    generator = torch.Generator()
    state = generator.get_state()
    fields = state.numpy().view(_STATE)
    fields["words"] = words[:624]
    fields["seed"] = words[624:].view(np.uint64) >> 1
    generator.set_state(state)
    return generator


def _words(argument: str, given: SupportsIndex) -> tuple[int, int]:
    """Split a number into two words: every number has the same width in the spawn key."""
    check.count(argument, given, at_least=0, below=2**64)
    value = int(given)  # a narrow integer of NumPy would overflow
    return value & 0xFFFFFFFF, value >> 32
