"""Compare methods on a folder of images.

fedprompt compare photos --vit vit_base_patch16_224 --methods fedprox,fedvpt,mine.py:my_method
fedprompt compare photos --vit digits-B --methods fedprox:learning_rate=0.003,fedlora:rank=8
fedprompt compare photos --clip ViT-B-16-quickgelu:openai --methods promptfl,fedotp --shots 16
fedprompt compare domains --vit NAME=FILE --methods fedprox --clients domains --leave-one-out
torchrun --nproc-per-node 2 -m fedprompt.compare photos --vit NAME --methods fedprox

The folder has images as CLASS/*, {train,test}/CLASS/*, or in another layout (--layout), or as a
list (CSV, or split_zhou_*.json of CoOp). Each finished run is a line of OUT/records.jsonl, so a
killed command continues, also within a run. A run of other images, network, budget or versions is
refused. Several commands may write to one OUT. Each runs all that has no record when it starts, so
give them different methods.
"""

import argparse
import csv
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch

from fedprompt.compare import leakage as given_away
from fedprompt.compare import ranks
from fedprompt.compare.classifier import BATCH, load
from fedprompt.compare.folder import folder
from fedprompt.compare.problems import Budget, Problem, Protocol
from fedprompt.compare.report import check_device, check_folder, estimate, run
from fedprompt.compare.trials import CompareError, Machine, cores
from fedprompt.data.folders import IMAGES, is_hidden
from fedprompt.data.opening import MAX_PIXELS
from fedprompt.data.wording import few, named

NAME = "fedprompt compare"
OTHERS = {"skip": "skip-damaged"}
"""Arguments of Python whose flag has another name."""


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
    network.add_argument("--vit", help="vision transformer: NAME, or NAME=FILE; digits-B is small")
    network.add_argument("--clip", help="CLIP: NAME, or NAME=FILE; emoji is small")
    add("--methods", required=True, help="NAME, NAME:VALUE=NUMBER, or FILE:NAME, with commas")
    add("--test", type=Path, help="folder of further tests")
    add("--layout", help="layout of the folder")
    add("--skip-damaged", action="store_true", help="leave out damaged images", dest="skip")
    add("--max-pixels", type=count, default=MAX_PIXELS, help="pixels of the largest image")
    add("--allow", default="", help="names of doubts about the folder, with commas")
    add("--size", type=count, help="side of the images in pixels")
    add("--template", default="a photo of a {}.", help="sentence around a class name")
    _add(parser.add_argument_group("protocol"), Protocol)
    budget = parser.add_argument_group("budget, the same for all methods")
    _add(budget, Budget)
    budget.add_argument("--seeds", type=count, default=3, help="number of seeds, from 0 on")
    budget.add_argument("--tune", type=count, default=1, help="trials of each method")
    machine = parser.add_argument_group("machine")
    machine.add_argument("--device", default="cpu")
    machine.add_argument("--workers", type=count, help="processes; default: cores of the CPU")
    machine.add_argument("--shrink", type=share, default=1.0, help="share of a run, to try it")
    machine.add_argument("--out", type=Path, help="folder of results; default: FOLDER-results")
    machine.add_argument("--again", action="store_true", help="begin anew, in a folder beside OUT")
    machine.add_argument("--estimate", action="store_true", help="print time and memory, and stop")
    return parser


def _add(group: Any, kind: type[Protocol] | type[Budget]) -> None:
    """Add a flag for each field of a dataclass."""
    for one in fields(kind):
        group.add_argument(_flag(one.name), help=one.metadata["help"], **_kind_of(one))


def _kind_of(one: "Field[Any]") -> dict[str, Any]:
    if one.default is False:
        return {"action": "store_true"}
    if one.name == "autocast":
        return {"choices": ["bfloat16"]}
    return {"type": str if "str" in str(one.type) else count, "default": one.default}


def _flag(name: str) -> str:
    return f"--{OTHERS.get(name, name).replace('_', '-')}"


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
        problem = problem_of(args, say)
        compare(problem, args, shlex.join([*NAME.split(), *given]))
    except (CompareError, ValueError, OSError, ModuleNotFoundError) as error:
        print(f"{NAME}: {flagged(error, vars(args))}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        where = f" with --out {args.out}" if args.again else ""
        print(f"{NAME}: stopped; the same command{where} continues.", file=sys.stderr)
        sys.exit(130)


def flagged(error: Exception, known: dict[str, object]) -> str:
    """Return an error as one line, in which arguments of Python are flags."""
    text = str(error).strip().replace("\n", " ") or type(error).__name__
    names = "|".join(known.keys() - {"folder"})
    return re.sub(rf"`({names})(=True)?`", lambda found: _flag(found[1]), text)


def problem_of(args: argparse.Namespace, say: Callable[[str], object]) -> Problem:
    """Read the folder and the network."""
    names = [one.name for kind in (Protocol, Budget) for one in fields(kind)]
    names += ["vit", "clip", "test", "layout", "skip", "max_pixels", "size", "template"]
    given = {name: getattr(args, name) for name in names}
    given["allow"] = [name for name in args.allow.split(",") if name]
    given["autocast"] = torch.bfloat16 if args.autocast else None
    return folder(args.folder, **given, cache=args.out / "cache", say=say)


def compare(problem: Problem, args: argparse.Namespace, line: str) -> None:
    """Run the methods, and print the results."""
    gpu = torch.device(args.device).type != "cpu"
    workers = 1 if gpu else args.workers or cores()
    how: dict[str, Any] = {"seeds": args.seeds, "tune": args.tune, "workers": workers}
    methods = split(args.methods)
    if args.estimate:
        print(estimate(problem, methods, **how, machine=Machine(args.device, args.shrink)))
        return
    where = {"out": args.out, "again": args.again, "device": args.device, "shrink": args.shrink}
    results = run(problem, methods, **how, **where, command=line)
    if ranks.rank() > 0:
        return
    print(f"\n{results}\n\nTables: {results.folder}")
    if results.failed:
        sys.exit(1)


def split(text: str) -> list[str]:
    """Divide methods at commas, of which some are between the values of one method."""
    found = list[str]()
    for part in (each.strip() for each in text.split(",")):
        last = found[-1] if found else ""
        inside = len(re.findall(r"[\[({]", last)) > len(re.findall(r"[\])}]", last))
        given = re.match(r"[A-Za-z_]\w*=", part) and re.search(r":[A-Za-z_]\w*=", last)
        if inside or given:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def predict(arguments: Sequence[str] | None = None) -> None:
    """Run ``fedprompt predict FOLDER IMAGES...``, which prints a CSV of probabilities."""
    parser = OneLine("fedprompt predict", description=predict.__doc__)
    parser.add_argument("folder", type=Path, help="folder of a trained classifier")
    parser.add_argument("images", nargs="+", help="images, or folders of images")
    parser.add_argument("--weights", help="file or folder of the network's weights")
    parser.add_argument("--max-pixels", type=count, default=MAX_PIXELS)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    try:
        files, device = files_of(args.images), check_device(args.device)
        model = load(args.folder, weights=args.weights, device=device)
        out = csv.writer(sys.stdout, lineterminator="\n")
        out.writerow(["image", "class", *model.class_names])
        for start in range(0, len(files), BATCH):
            part = files[start : start + BATCH]
            found = model.predict(part, max_pixels=args.max_pixels)
            for path, name, row in zip(part, *found, strict=True):
                out.writerow([named(path), name, *(f"{value:.6g}" for value in row.tolist())])
    except (ValueError, OSError, ModuleNotFoundError) as error:
        text = " ".join(str(error).split())
        print(f"fedprompt predict: {text}", file=sys.stderr)
        sys.exit(2)


def leakage(arguments: Sequence[str] | None = None) -> None:
    """Test whether a trained classifier shows which images it was trained on.

    The score of an image is the confidence of the classifier in its label. AUC 0.5 is guessing. The
    last row is the same attack on a model that has memorized the members: if the attack fails
    there, too, the test shows nothing.
    """
    parser = OneLine("fedprompt leakage", description=leakage.__doc__)
    add = parser.add_argument
    add("folder", type=Path, help="folder of a trained classifier")
    add("--members", type=Path, required=True, help="images that it was trained on, as CLASS/*")
    add("--held-out", type=Path, required=True, help="other images of the same source, as CLASS/*")
    add("--without", type=Path, help="folder of a classifier that was trained without the members")
    add("--weights", help="file or folder of the network's weights")
    add("--device", default="cpu")
    args = parser.parse_args(arguments)
    try:
        how = {"weights": args.weights, "device": check_device(args.device)}
        model, *others = (load(each, **how) for each in (args.folder, args.without) if each)
        found = given_away.rows_of(model, args.members, args.held_out, *others)
        print(given_away.table(found))
    except (CompareError, ValueError, OSError, ModuleNotFoundError) as error:
        print(f"fedprompt leakage: {flagged(error, vars(args))}", file=sys.stderr)
        sys.exit(2)


def files_of(paths: Sequence[str]) -> list[Path]:
    """Return image files, and those of folders, in the order of their names.

    Raises:
        CompareError: If there are none.
    """
    found = list[Path]()
    for path in map(Path, paths):
        inner = [each for each in sorted(path.rglob("*")) if each.suffix.lower() in IMAGES]
        shown = [e for e in inner if not any(map(is_hidden, e.relative_to(path).parts))]
        found += shown if path.is_dir() else [path]
    if not found:
        raise CompareError(f"`images` must have images; got none in {few(map(named, paths))}.")
    return found


def command() -> None:
    """Run `fedprompt compare`, `fedprompt predict` or `fedprompt leakage`."""
    programs = {"compare": main, "predict": predict, "leakage": leakage}
    if not {*sys.argv[1:2]} & programs.keys():
        usage = "fedprompt compare FOLDER ..., fedprompt predict FOLDER IMAGES ..., or fedprompt "
        usage += "leakage FOLDER --members FOLDER --held-out FOLDER"
        print(f"usage: {usage}; see fedprompt compare --help", file=sys.stderr)
        sys.exit(2)
    programs[sys.argv[1]](sys.argv[2:])


if __name__ == "__main__":
    main()
