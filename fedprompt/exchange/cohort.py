"""Who takes part in a round."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from fedprompt._checks import check_count, check_generator, kind, wrong_type, wrong_value

Client = TypeVar("Client")


def cohort(clients: Sequence[Client], *, size: int, generator: torch.Generator) -> list[Client]:
    """Draw the clients of a round, without replacement.

    Args:
        clients: All of them, in the order of their ids.
        size: How many; 0, as a rounded share may be, still draws one. For a share write ``size=round(0.05 * len(clients))``.
        generator: Source of randomness, on the CPU.

    Returns:
        At least one client, in the order of ids; a server that adds in this order gets the same bits whoever answers first.

    Raises:
        TypeError: If `size` is not an integer, or `generator` not a ``torch.Generator``.
        ValueError: If there are no clients, or `size` is negative or larger than their number.

    Example:
        >>> drawn = cohort(range(100), size=10, generator=torch.Generator().manual_seed(0))
        >>> len(set(drawn)), drawn == sorted(drawn)
        (10, True)
    """
    if not (hasattr(clients, "__getitem__") and hasattr(clients, "__len__")) or isinstance(clients, Mapping):
        raise wrong_type("clients", "be a sequence, such as range(100)", kind(clients))
    check_count("size", size, at_least=0)
    if not 0 < max(1, size) <= len(clients):
        raise wrong_value("size", f"be at most the number of clients, {len(clients)}, of which there must be one", size)
    check_generator(generator)
    drawn = torch.randperm(len(clients), generator=generator)[: max(1, size)]
    return [clients[index] for index in sorted(drawn.tolist())]
