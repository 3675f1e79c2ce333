"""Steps that two ranks run in one process group for ``test_gather.py``.

The spawned processes import this module by name.
"""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from federations import FEDERATIONS, distributed
from fedprompt import Weighted
from fedprompt.interfaces import Message
from fedprompt.wire import Expected, Header, gather_messages

ROUND_3 = Header({"backbone": "tiny"}, server_round=3)
NAN = torch.nan


def messages() -> list[Message]:
    """Make the messages of two ranks, with different names, dtypes and lengths.

    The first message has a row of weight 0.
    """
    rows = torch.tensor([[1.0, 2.0], [NAN, NAN], [3.0, -0.0]])
    generator = torch.Generator().manual_seed(0)
    long = torch.randn(3, 1000, generator=generator).bfloat16()
    return [
        {"a": Weighted(rows, torch.tensor([2.0, 0.0, 0.5]))},
        {"b": long, "c": torch.tensor([2**40, -1]), "d": torch.tensor(7.0)},
    ]


def forms() -> list[Expected]:
    """Return the expected message of each rank."""
    return [Expected(message, {"backbone": "tiny"}) for message in messages()]


def exchange(rank: int, **changes: Any) -> list[Message | None]:
    """Gather the messages of both ranks; `changes` replaces arguments on this rank."""
    arguments = {
        "message": messages()[rank],
        "expect": forms(),
        "max_bytes": 10_000,
        "header": ROUND_3,
    } | changes
    return gather_messages(arguments.pop("message"), **arguments)


def on(rank: int, **changes: Any) -> Callable[[int], list[Message | None]]:
    """Change arguments on one rank only."""
    return lambda own: exchange(own, **(changes if own == rank else {}))


def in_groups_of_one(rank: int) -> Any:
    """Make a group for each rank, and gather in both groups.

    In the other rank's group, this rank is not a member.
    """
    groups = [dist.new_group([each]) for each in range(2)]
    own = exchange(rank, group=groups[rank], expect=[forms()[rank]])
    try:
        return own, exchange(rank, group=groups[1 - rank])
    except ValueError as error:
        return own, str(error)


def alone(rank: int) -> Any:
    """Gather on rank 0, while rank 1 never calls."""
    group = dist.new_group(timeout=timedelta(seconds=1))
    return exchange(rank, group=group) if rank == 0 else "elsewhere"


def gone(rank: int) -> Any:
    """Gather on rank 0, after rank 1 left the group."""
    return exchange(rank) if rank == 0 else dist.destroy_process_group()


BROKEN = {"a": torch.tensor([NAN])}
STEPS: dict[str, Callable[[int], Any]] = {
    "ragged": exchange,
    "rank 1 sends nothing": on(1, message=None),
    "no rank sends": lambda rank: exchange(rank, message=None),
    "NaN on rank 1": on(1, message=BROKEN),
    "no message on rank 0": on(0, message=[1.0]),
    "too few expected on rank 1": on(1, expect=forms()[:1]),
    "no limit on rank 0": on(0, max_bytes="many"),
    "no header on rank 1, which sends nothing": on(1, message=None, header="3"),
    "too long for rank 0": on(0, max_bytes=5_000),
    "a limit beyond any integer": lambda rank: exchange(rank, max_bytes=2**70),
    "another round on rank 1": on(1, header=ROUND_3._replace(server_round=4)),
    "another backbone on rank 1": on(1, header=ROUND_3._replace(fingerprint={"backbone": "huge"})),
    "rank 0 expects another backbone": on(
        0, expect=[form._replace(fingerprint={"backbone": "huge"}) for form in forms()]
    ),
    "rank 0 expects nothing of rank 1": on(0, expect=[forms()[0], None]),
    "rank 1 expects another form": on(1, expect=forms()[::-1]),
    "in groups of one": in_groups_of_one,
    "ragged, after all errors": exchange,
    **{name: lambda rank, make=make: distributed(make()) for name, make in FEDERATIONS.items()},
    "rank 1 never calls": alone,
    "rank 1 is gone": gone,
}


def run_steps(rank: int, folder: Path) -> None:
    """Run every step, and save its result or its error."""
    results = {}
    for name, step in STEPS.items():
        try:
            results[name] = step(rank)
        except Exception as error:
            results[name] = error
    torch.save(results, folder / f"{rank}.pt")
