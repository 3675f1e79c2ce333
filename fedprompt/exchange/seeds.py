"""Random streams that a federation can hand out without talking."""

import numpy as np
import torch

from fedprompt._checks import check_count


def stream_seed(seed: int, server_round: int, client: int) -> torch.Generator:
    """Make the random stream of one client in one round.

    The stream depends on the three numbers alone: not on who else takes part, the order of clients, or what was drawn before. So a resumed
    or parallel run draws what a sequential one draws.

    Args:
        seed: Of the run, at least 0.
        server_round: 0-based.
        client: Id, at least 0.

    Returns:
        A fresh generator on the CPU.

    Raises:
        TypeError: If a number is not an integer.
        ValueError: If a number is negative.

    Example:
        >>> batches = torch.randperm(50, generator=stream_seed(0, server_round=2, client=7))
        >>> torch.equal(batches, torch.randperm(50, generator=stream_seed(0, server_round=2, client=7)))
        True
        >>> torch.equal(batches, torch.randperm(50, generator=stream_seed(0, server_round=2, client=8)))
        False

    References:
        Streams are spawned by numpy's ``SeedSequence``.
    """
    for argument, value in (("seed", seed), ("server_round", server_round), ("client", client)):
        check_count(argument, value, at_least=0)
    words = np.random.SeedSequence(seed, spawn_key=(server_round, client)).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0]) >> 1)
