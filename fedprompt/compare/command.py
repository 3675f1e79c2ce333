"""Compare methods on a folder of images.

fedprompt compare photos --vit vit_base_patch16_224 --methods fedprox,fedvpt,mine.py:my_method
fedprompt compare photos --clip ViT-B-16-quickgelu:openai --methods promptfl,fedotp --shots 16
fedprompt compare domains --vit NAME=FILE --methods fedprox --clients domains --leave-one-out
torchrun --nproc-per-node 2 -m fedprompt.compare photos --vit NAME --methods fedprox

The folder has images as CLASS/*, {train,test}/CLASS/*, DOMAIN/CLASS/*,
CLIENT/{train,test}/CLASS/*, {train,test}/DOMAIN/CLASS/*, or as a list (CSV, or split_zhou_*.json of
CoOp). Each finished run is a line of OUT/records.jsonl, so a killed command continues. Several
commands may write to one OUT. Each runs all that has no record when it starts, so give them
different methods.
"""

import argparse
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NoReturn

import torch

from fedprompt.compare import ranks
from fedprompt.compare.folder import folder
from fedprompt.compare.problems import Problem
from fedprompt.compare.results import check_device, check_folder, run
from fedprompt.compare.rows import chosen
from fedprompt.compare.trials import CompareError

NAME = "fedprompt compare"


class OneLine(argparse.ArgumentParser):
    """Parser whose mistakes end with one line."""

    def error(self, message: str) -> NoReturn:
        """End the program."""
        self.exit(2, f"{self.prog}: {message}\n")


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLine(NAME, description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("folder", type=Path, help="images, or a list of them")
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--vit", help="vision transformer: NAME, or NAME=FILE")
    network.add_argument("--clip", help="CLIP: NAME, or NAME=FILE")
    add("--methods", required=True, help="names, or FILE:NAME of your own, separated by commas")
    add("--clients", help="domains, iid:N, dirichlet:ALPHA:N or pathological:K:N")
    add("--layout", help="layout of the folder, if it can be read in two ways")
    add("--skip-damaged", action="store_true", help="leave out damaged images")
    add("--size", type=count, help="side of the images in pixels")
    add("--template", default="a photo of a {}.", help="sentence around a class name")
    protocols = parser.add_argument_group("protocols")
    protocols.add_argument("--shots", type=count, help="training images of each class")
    protocols.add_argument("--base-to-new", action="store_true", help="half of the classes train")
    protocols.add_argument("--leave-one-out", action="store_true", help="each domain in turn")
    protocols.add_argument("--test", type=Path, help="folder of further tests")
    protocols.add_argument("--newcomers", type=count, default=0, help="clients that never train")
    budget = parser.add_argument_group("budget, the same for all methods")
    budget.add_argument("--rounds", type=count, default=10)
    budget.add_argument("--steps", type=count, help="batches of a client; default: an epoch")
    budget.add_argument("--batch-size", type=count, help="default: a quarter of a client, 4 to 32")
    budget.add_argument("--cohort-size", type=count, help="clients in a round; default: at most 10")
    budget.add_argument("--seeds", type=count, default=3, help="number of seeds, from 0 on")
    budget.add_argument("--tune", type=count, default=1, help="trials of each method")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="cpu")
    machine.add_argument("--workers", type=count, help="processes; default: cores of the CPU")
    machine.add_argument("--autocast", choices=["bfloat16"], help="dtype of the batches")
    machine.add_argument("--shrink", type=share, default=1.0, help="share of a run, to try it")
    machine.add_argument("--out", type=Path, help="folder of results; default: FOLDER-results")
    return parser


def count(text: str) -> int:
    """Read a number of at least 1."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1; got {text}")
    return int(text)


def share(text: str) -> float:
    """Read a number above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1; got {text}")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = flags()
    for flag, text in pairwise(["folder", *given, "."]):
        if text == "" or (flag.startswith("--") and flag.endswith("=")):
            parser.error(f"argument {flag.rstrip('=')}: must not be empty")
    args = parser.parse_args(given)
    args.out = args.out or Path(f"{args.folder.resolve().name}-results")
    say = print if int(os.environ.get("RANK", 0)) == 0 else lambda text: None
    try:
        check_folder(args.out)
        check_device(args.device)
        methods = [name.strip() for name in args.methods.split(",")]
        chosen(methods, "one model" if args.vit else "CLIP")  # before anything is read
        problem = problem_of(args, say)
        ranks.begin()
        compare(problem, methods, args, shlex.join([*NAME.split(), *given]))
    except (CompareError, ValueError, OSError, ModuleNotFoundError) as error:
        first = str(error).strip().replace("\n", " ").replace("`skip=True`", "--skip-damaged")
        print(f"{NAME}: {first or type(error).__name__}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print(f"{NAME}: stopped; the same command continues.", file=sys.stderr)
        sys.exit(130)


def problem_of(args: argparse.Namespace, say: Callable[[str], object]) -> Problem:
    """Read the folder and the network."""
    same = inspect.signature(folder).parameters.keys() & vars(args).keys()
    given = {name: getattr(args, name) for name in same}
    given["autocast"] = torch.bfloat16 if args.autocast else None
    where = {"skip": args.skip_damaged, "cache": args.out / "cache"}
    return folder(args.folder, **given, **where, say=say)


def compare(problem: Problem, methods: Sequence[str], args: argparse.Namespace, line: str) -> None:
    """Run the methods, and print and write the results."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    one = ranks.started() or torch.device(args.device).type != "cpu"
    workers = 1 if one else args.workers or cores or 1
    how = {name: getattr(args, name) for name in ("seeds", "out", "tune", "device", "shrink")}
    results = run(problem, methods, workers=workers, **how)
    if ranks.rank() > 0:
        return
    print(f"\n{results}\n")
    print(results.save(args.out, command=line))
    if results.failed:
        sys.exit(1)


def command() -> None:
    """Run `fedprompt compare ...`."""
    if sys.argv[1:2] != ["compare"]:
        print("usage: fedprompt compare FOLDER ...; see fedprompt compare --help", file=sys.stderr)
        sys.exit(2)
    main(sys.argv[2:])
