"""The type of a federation, and the tiny random parts that all four share."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn as nn
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

import fedprompt as fp

State = dict[str, Tensor]  # what a client keeps between rounds; {} at first
Answers = Mapping[int, fp.interfaces.Message]  # by client, one for everybody
Module = TypeVar("Module", bound=nn.Module)

CLASSES, BATCH, STEPS, CLIENTS, ROUNDS = 4, 8, 2, 3, 2
NUM_EXAMPLES = (30, 50, 41)


class Server(NamedTuple):
    """An ``(init, step)`` pair whose step adds in the order of client ids."""

    init: Callable[[], tuple[Answers, Any]]
    step: Callable[
        [Mapping[int, fp.interfaces.Message], Any], tuple[Answers, Any]
    ]  # uploads by client id, server state


class Federation(NamedTuple):
    """An algorithm without an engine, independent of processes and of how messages are sent."""

    cohort: Callable[
        [int], list[int]
    ]  # server_round -> ids of the clients that take part, in order
    client: Callable[
        [int, int, fp.interfaces.Message, State], tuple[fp.interfaces.Message, State]
    ]  # (client, server_round, broadcast, own state)
    server: Server
    upload_form: Callable[
        [int], fp.interfaces.Message
    ]  # client -> a message of the form of its upload
    broadcast_form: Callable[
        [int], fp.interfaces.Message
    ]  # client -> a message of the form of what it gets
    fingerprint: Mapping[str, str]
    num_clients: int = CLIENTS
    rounds: int = ROUNDS


def everybody(server_round: int) -> list[int]:
    """Full participation."""
    return list(range(CLIENTS))


def two_of_three(server_round: int) -> list[int]:
    """Leave one client out."""
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
    return torch.randn(BATCH, channels, 16, 16, generator=generator), torch.randint(
        CLASSES, (BATCH,), generator=generator
    )


def descend(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take one step."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def by_id(uploads: Mapping[int, fp.interfaces.Message]) -> list[fp.interfaces.Message]:
    """Uploads in the order of client ids."""
    return [uploads[client] for client in sorted(uploads)]


def for_all(message: fp.interfaces.Message) -> Answers:
    """Answer everybody alike."""
    return dict.fromkeys(range(CLIENTS), message)
