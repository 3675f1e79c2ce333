"""A loop over rounds that may be killed at any moment: what ``--checkpoint`` does."""

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
"""Flags that say where things are written and which rows are run; a row's figures do not depend on them."""


def add_checkpoint_flag(parser: ArgumentParser) -> None:
    text = "folder that keeps every round; a run that was killed goes on from there when it is started again with the same flags"
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help=text)


def rounds(memory: Namespace, count: int, name: str, args: Namespace) -> tqdm:
    """Count the rounds of a row. With `args.checkpoint`, save `memory` after each of them, and begin where a killed run stopped.

    Args:
        memory: All that the loop knows from earlier rounds, each thing an attribute. Modules, ledgers and random streams take in what
            they were when the run was killed and stay the same objects; other attributes are replaced by what they were. A ledger
            appends its entries to a file of its name beside the checkpoint, which so stays small.
        count: How many rounds there are.
        name: Of the row, and of its folder.
        args: The flags; a run with others cannot go on.
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
    """Restore `memory` and the global random streams; return the number of saved rounds."""
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
    """Change some flags; where there are checkpoints, those of the variant lie in a folder named after them."""
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
