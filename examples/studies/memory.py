"""A loop over rounds that may be killed at any moment, for the flag ``--checkpoint``."""

import re
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from tqdm import tqdm

import fedprompt as fp

NO_MATTER = {"checkpoint", "out", "full", "all", "methods", "local"}
"""Flags for output paths and the choice of rows; the figures of a row do not depend on them."""


def add_checkpoint_flag(parser: ArgumentParser) -> None:
    text = "directory of checkpoints; started again with the same flags, a killed run continues"
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=text)


def rounds(memory: Namespace, count: int, name: str, args: Namespace) -> tqdm:
    """Count the rounds of a row; with `args.checkpoint`, save and restore `memory`.

    `memory` is saved after each round. A killed run begins after its last saved round.

    Args:
        memory: State that the loop keeps between rounds, as attributes. Modules, ledgers and random
            generators are restored in place. Other attributes are replaced. A ledger appends its
            entries to a separate file, so that checkpoints stay small.
        count: Number of rounds.
        name: Name of the row and of its directory.
        args: Parsed flags; a run with other flags cannot continue.
    """
    directory = None if args.checkpoint is None else args.checkpoint / _folder(name)
    made = {flag: str(value) for flag, value in vars(args).items() if flag not in NO_MATTER}
    made["memory"] = ", ".join(vars(memory))
    start = 0 if directory is None else _resume(memory, made, directory)

    def remembered() -> Iterator[int]:
        for server_round in range(start, count):
            yield server_round
            if directory is not None:
                _save(memory, made, server_round + 1, directory)

    return tqdm(remembered(), desc=name, unit="round", total=count, initial=start)


def _resume(memory: Namespace, made: dict[str, str], directory: Path) -> int:
    """Restore `memory` and the global random states; return the number of saved rounds."""
    saved = fp.load_checkpoint(directory, default=None)
    for attribute, thing in vars(memory).items():
        if isinstance(thing, fp.Ledger):
            thing.path = directory / f"{attribute}.jsonl"
    if saved is None:
        return 0
    before = saved["made"]
    differ = {
        flag: before.get(flag) for flag in made | before if before.get(flag) != made.get(flag)
    }
    if differ:
        now = {flag: made.get(flag) for flag in differ}
        rule = f"hold a run with the flags of this one, {now}"
        raise ValueError(f"`--checkpoint` must {rule}; got {differ} in {directory}.")
    for attribute, state in saved["memory"].items():
        setattr(memory, attribute, _restored(getattr(memory, attribute), state))
    torch.set_rng_state(saved["streams"][0])
    torch.cuda.set_rng_state_all(saved["streams"][1])
    return saved["rounds"]


def _save(memory: Namespace, made: dict[str, str], done: int, directory: Path) -> None:
    on_gpus = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    state = {
        "made": made,
        "rounds": done,
        "streams": (torch.get_rng_state(), on_gpus),
        "memory": {attribute: _state(thing) for attribute, thing in vars(memory).items()},
    }
    fp.save_checkpoint(state, directory)


def variant(args: Namespace, **flags: Any) -> Namespace:
    """Change some flags; checkpoints of the variant have a directory named after the changes."""
    folder = _folder(" ".join(f"{flag}={value}" for flag, value in flags.items()))
    return Namespace(
        **vars(args)
        | flags
        | {"checkpoint": None if args.checkpoint is None else args.checkpoint / folder}
    )


def _folder(name: str) -> str:
    return re.sub(r"[^\w.=+-]+", "_", name)


def _state(thing: Any) -> Any:
    for method in ("state_dict", "get_state"):
        if hasattr(thing, method):
            return getattr(thing, method)()
    return thing


def _restored(begun: Any, state: Any) -> Any:
    for method in ("load_state_dict", "set_state"):
        if hasattr(begun, method):
            getattr(begun, method)(state)
            return begun
    device = next((leaf.device for leaf in tree_leaves(begun) if isinstance(leaf, Tensor)), "cpu")
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), state)
