"""Command-line flags that several studies share, and the settings that follow from them."""

from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

DATA = "digits, cifar10, cifar100, or a folder with train/ and test/"


def new_parser(
    description: str,
    *,
    image_size: int | None = 224,
    data: str = DATA,
    quick: str = "two rounds of two steps, to see that it runs",
    full: str = "the table of the documentation: three seeds, all rows",
) -> ArgumentParser:
    """Make a parser with the flags of seed, data, device and output.

    Args:
        description: Name of the study.
        image_size: Default of ``--image-size``. If None, the default is the model's own size.
        data: Data sets of the study.
        quick: Meaning of ``--quick``.
        full: Meaning of ``--full``.
    """
    parser = ArgumentParser(description=description, formatter_class=ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dataset", default="digits", help=data)
    parser.add_argument("--root", default=".", help="folder of the data sets")
    size = "pixels; default: the model's own" if image_size is None else "pixels, except the digits"
    parser.add_argument("--image-size", type=int, default=image_size, help=size)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--full", action="store_true", help=full)
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for pictures and ledgers"
    )
    return parser


def add_recipe_flags(parser: ArgumentParser) -> None:
    """Add the flags of training whose defaults are in the recipe of the task."""
    usual = "default: the task's recipe"
    parser.add_argument("--rounds", type=int, help=usual)
    parser.add_argument("--steps", type=int, help=f"in a round, for each client; {usual}")
    parser.add_argument("--batch-size", type=int, help=usual)


def completed(args: Namespace, defaults: Mapping[str, Any]) -> Namespace:
    """Set the flags that are missing or None."""
    given = {flag: value for flag, value in vars(args).items() if value is not None}
    return Namespace(**vars(args) | dict(defaults) | given)


def limit_threads(args: Namespace) -> None:
    """Use one thread for the digits, because more threads slow down models of that size."""
    if args.dataset == "digits":
        torch.set_num_threads(1)
