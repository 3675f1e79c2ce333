"""Type of a federation, and the tiny random parts that all four share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import fedprompt as fp

State = dict[str, Tensor]
"""State of a client between rounds, {} before the first."""

Answers = Mapping[int, fp.interfaces.Message]
"""Messages of the server by client id, one for each client."""

Module = TypeVar("Module", bound=nn.Module)

CLASSES, BATCH, STEPS, CLIENTS, ROUNDS = 4, 8, 2, 3, 2
NUM_EXAMPLES = (30, 50, 41)


class Server(NamedTuple):
    """An ``(init, step)`` pair.

    The step takes payloads by client id and the server's state. It adds in the order of client ids.
    """

    init: Callable[[], tuple[Answers, Any]]
    step: Callable[[Mapping[int, fp.interfaces.Message], Any], tuple[Answers, Any]]


class Federation(NamedTuple):
    """Algorithm without an engine, independent of processes and of how messages are sent.

    Attributes:
        cohort: Function from the round to the ids of its clients, in order.
        client: Function from (client, server_round, broadcast, own state) to a payload and the new
            state.
        server: Server of the algorithm.
        payload_form: Function from a client to a message of the form of its payload.
        broadcast_form: Function from a client to a message of the form of its broadcast.
        fingerprint: Fingerprint of the backbone and its prompts.
        num_clients: Number of clients.
        rounds: Number of rounds.
    """

    cohort: Callable[[int], list[int]]
    client: Callable[[int, int, fp.interfaces.Message, State], tuple[fp.interfaces.Message, State]]
    server: Server
    payload_form: Callable[[int], fp.interfaces.Message]
    broadcast_form: Callable[[int], fp.interfaces.Message]
    fingerprint: Mapping[str, str]
    num_clients: int = CLIENTS
    rounds: int = ROUNDS


def everybody(server_round: int) -> list[int]:
    """Return all clients."""
    return list(range(CLIENTS))


def two_of_three(server_round: int) -> list[int]:
    """Draw two of the three clients."""
    return fp.cohort(
        range(CLIENTS),
        size=2,
        generator=fp.stream_generator(0, server_round=server_round, purpose="cohort"),
    )


def drawn(make: Callable[[], Module], seed: int) -> Module:
    """Make a module from a separate random stream. The global generator is unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def vit(dim: int) -> fp.Trunk:
    """Make a frozen transformer of sixteen patches and two blocks."""
    sizes = {
        "img_size": 16,
        "patch_size": 4,
        "in_chans": 1,
        "num_classes": 0,
        "depth": 2,
        "num_heads": 2,
    }
    return fp.vit_trunk(drawn(lambda: VisionTransformer(embed_dim=dim, **sizes), seed=dim))


def batch(generator: torch.Generator, *, channels: int = 1) -> tuple[Tensor, Tensor]:
    """Draw images and labels."""
    images = torch.randn(BATCH, channels, 16, 16, generator=generator)
    return images, torch.randint(CLASSES, (BATCH,), generator=generator)


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def by_id(payloads: Mapping[int, fp.interfaces.Message]) -> list[fp.interfaces.Message]:
    """Return the payloads in the order of client ids."""
    return [payloads[client] for client in sorted(payloads)]


def for_all(message: fp.interfaces.Message) -> Answers:
    """Answer all clients with the same message."""
    return dict.fromkeys(range(CLIENTS), message)
