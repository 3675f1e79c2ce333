"""The studies of our pages: methods of the gallery, controls, and your own, under one budget.

All rows of a study have the same rounds, clients, batches and initial values, and the values that
the committed records have. Each finished run is one line of a JSON-lines file, so a killed program
continues::

    python examples/study.py --study digits --methods fedprox,local --seeds 5
    python examples/study.py --study clip --methods mine.py:my_method,promptfl
    torchrun --nproc-per-node 2 examples/study.py --methods fedprox,local
    python examples/study.py --check 3
    python examples/study.py --study fedotp --verify --partitions fedotp-1-dtd --root DIR

For your images, use ``fedprompt compare``.
"""

import argparse
import random
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import studies
from fedprompt.compare import ranks, records, rows, runs
from fedprompt.compare.command import OneLine, count, share, split
from fedprompt.compare.records import Record, Records
from fedprompt.compare.report import check_device, check_folder
from fedprompt.compare.runs import RunsError
from fedprompt.compare.stamps import UntoldError
from fedprompt.compare.trials import CompareError
from studies import estimate, pages, papers, verify
from studies.core import HEAD_RATE, Cell, Machine, Row, Task, content
from studies.photos import RANDOM
from studies.tuning import two_rates

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "records"


def main(arguments: Sequence[str] | None = None) -> None:
    args = flags().parse_args(arguments)
    wanted = list(studies.TASKS) if args.study is None else [args.study]
    args.study = args.study or "digits"
    if args.records is None:
        committed = args.tables or args.check is not None
        args.records = RECORDS if committed else args.out / "records"
    if ranks.started():
        args.workers = 1
        ranks.begin()
    try:
        if args.weights:
            check_weights(args, [args.study] if args.check is None else wanted)
        if args.list:
            for name in wanted:
                print(name, *studies.TASKS[name].partitions, sep="\n    ")
        elif args.check is not None:
            check(args, wanted)
        elif args.tables:
            write_tables(args, wanted)
        elif args.estimate:
            estimates(args)
        elif args.verify:
            verify_settings(args)
        else:
            compare(args)
    except (CompareError, OSError, RunsError) as error:
        cause = f": {error.__cause__}" if isinstance(error, RunsError) else ""
        print(f"study.py: {error}{cause}", file=sys.stderr)
        sys.exit(2)


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    form = argparse.RawDescriptionHelpFormatter
    parser = OneLine("study.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--list", action="store_true", help="print the studies and their partitions, and stop")
    add("--study", choices=list(studies.TASKS), help="digits, if not --check, --list or --tables")
    add("--methods", help="names, or FILE:NAME for your own, separated by commas")
    add("--rows", help="titles of rows, separated by semicolons")
    add("--partitions", help="names, separated by commas")
    add("--seeds", type=count, default=5, help="number of seeds, from 0 on")
    add("--workers", type=count, default=2, help="number of processes")
    add("--device", default="cpu")
    add("--root", type=Path, default=Path(), help="folder of data sets")
    add("--weights", type=_file_of, action="append", default=[], help="NETWORK=FILE, of a study")
    add("--pretrained", action="store_true", help="solar, mnist, patches: timm downloads weights")
    add("--defaults", action="store_true", help="default values of all rows")
    add("--shrink", type=share, default=1.0, help="share of rounds, steps and images")
    add("--check", type=count, help="run so many recorded runs again, and compare")
    add("--estimate", action="store_true", help="print runs and hours, and stop")
    add("--verify", action="store_true", help="check a paper's setting, and stop")
    add("--tables", action="store_true", help="write tables from records, and stop")
    add("--out", type=Path, default=Path("out"), help="folder of the tables")
    add("--records", type=Path, help="OUT/records, or the committed ones with --check or --tables")
    return parser


def _file_of(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"must have the form NETWORK=FILE; got {text}")
    return name, Path(path)


def machine_of(args: argparse.Namespace) -> Machine:
    """Return where runs are."""
    return Machine(args.device, args.shrink, args.root, dict(args.weights), args.pretrained)


def check_weights(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Require that each file of weights is read by a row that runs.

    Raises:
        CompareError: If no row has a network of this name, if a name is there twice, or without a
            file.
    """
    read = dict[str, None]()
    unread = args.tables or args.estimate or args.list
    for task in () if unread else map(studies.named, names):
        places = list(task.partitions)
        for partition in places if args.check else named("partitions", args.partitions, places):
            for row in task.rows(partition) if args.check else chosen(args, task, partition):
                read |= dict.fromkeys(task.networks(partition, row))
    given = [name for name, _ in args.weights]
    for name, path in args.weights:
        if name not in read or given.count(name) > 1:
            rule = f"name each of {', '.join(read)} at most once" if read else "be left out here"
            raise CompareError(f"`--weights` must {rule}; got {name}.")
        if name != RANDOM and not path.exists():
            raise CompareError(f"`--weights` must name a file that exists; got {path}.")


def compare(args: argparse.Namespace) -> None:
    """Run the rows of a study, and print and write its tables."""
    check_folder(args.out)
    check_device(args.device)
    task = studies.TASKS[args.study]
    stem = f"{args.study}{'-shrunk' if args.shrink != 1 else ''}"
    known, found = Records(args.records / f"{stem}.jsonl"), list[Record]()
    args.records.mkdir(parents=True, exist_ok=True)
    for partition in named("partitions", args.partitions, list(task.partitions)):
        listed = [row if args.defaults else recorded_values(row, args.study, partition)
                  for row in chosen(args, task, partition)]  # fmt: skip
        seeds = range(1 if args.shrink != 1 else args.seeds)
        listed = [Row(rows.CONSTANT, ""), *listed]
        wanted = [cell(task, partition, row, seed, args) for seed in seeds for row in listed]
        found += runs.run_all(wanted, known, {}, workers=args.workers, title=partition)
        if ranks.rank() == 0:
            shown = pages.view(found, task, partition, args.records / stem)
            print(f"\n{pages.report(shown, task, partition)}")
    if ranks.rank() == 0:
        pages.save_all(found, stem, task, args.out, args.records / stem)
        print(f"\nTables and figures: {args.out}/")


def cell(task: Task, partition: str, row: Row, seed: int, args: argparse.Namespace) -> Cell:
    """Return a run; that of a method that cannot be told from others is never found again."""
    try:
        stamp = row.stamp()
    except UntoldError:
        stamp = secrets.token_hex(8)
    stem = f"{task.name}{'-shrunk' if args.shrink != 1 else ''}"
    where = machine_of(args), stamp, args.records / stem
    return Cell(task, partition, row, seed, None, *where)


@cache
def committed(name: str) -> list[Record]:
    """Return the reported records of a study that are committed."""
    every = records.read(RECORDS / f"{name}.jsonl")
    return [record for record in every if record["trial"] is None]


def recorded_values(row: Row, name: str, partition: str) -> Row:
    """Return a row with the values that were chosen for it, if it has committed records."""
    for record in reversed(committed(name)):
        if (record["partition"], record["row"]) == (partition, row.title):
            return replace(row, values=values_of(record, row))
    return row


def values_of(record: Record, row: Row) -> dict[str, Any]:
    """Return the values of a record, with the defaults of its time."""
    return {**content("records").get(str(row.method), {}), **record["values"]}


def estimates(args: argparse.Namespace) -> None:
    """Print and write the runs and hours of a study by arithmetic."""
    task = studies.TASKS[args.study]
    partitions = named("partitions", args.partitions, list(task.partitions))
    rows = {partition: chosen(args, task, partition) for partition in partitions}
    text = estimate.table_of(args.study, task, rows, args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.study}-hours.md").write_text(f"{text}\n")
    print(text)


def verify_settings(args: argparse.Namespace) -> None:
    """Check the first chosen row of a paper's settings; without `--partitions`, of the first one.

    Raises:
        CompareError: If the study is not that of a paper, or a check fails.
    """
    if args.study not in papers.PAPERS:
        raise CompareError(
            f"`--verify` needs `--study` {', '.join(papers.PAPERS)}; got {args.study!r}."
        )
    task = studies.TASKS[args.study]
    partitions = list(task.partitions)
    for partition in named("partitions", args.partitions or partitions[0], partitions):
        row = chosen(args, task, partition)[0]
        verify.climb(verify.Case(args.study, partition, row, machine_of(args)))


def named(flag: str, given: str | None, allowed: Sequence[str], by: str = ",") -> list[str]:
    """Return the given names, or all that are allowed.

    Raises:
        CompareError: If a name is not allowed, or twice.
    """
    names = list(allowed) if given is None else given.split(by)
    for name in names:
        if name not in allowed:
            raise CompareError(f"`--{flag}` must name {', '.join(allowed)}; got {name!r}.")
        if names.count(name) > 1:
            raise CompareError(f"`--{flag}` must name each once; got {name!r} twice.")
    return names


def chosen(args: argparse.Namespace, task: Task, partition: str) -> list[Any]:
    """Return the rows of a partition that are wanted."""
    found: list[Any] = [row for row in task.rows(partition) if row.method is not None]
    given = [] if args.methods is None else split(args.methods)
    if own := [name for name in given if ":" in name]:
        both = any(HEAD_RATE in row.values for row in found)
        new = [Row(row.title, row.method, row.values, make=row.make)
               for row in rows.chosen(own, [task.family(partition)])]  # fmt: skip
        found += map(two_rates, new) if both else new
    if given:
        names = [name.rpartition(":")[2] for name in given]
        methods = dict.fromkeys(str(row.method) for row in found)
        wanted = named("methods", ",".join(names), list(methods))
        found = [row for row in found if row.method in wanted]
    titles = named("rows", args.rows, [row.title for row in found], ";")
    return [row for row in found if row.title in titles]


def write_tables(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Write the tables and figures of all records of some studies, whatever their stamps.

    Raises:
        CompareError: If there is no folder of records.
    """
    if not args.records.is_dir():
        raise CompareError(f"`--records` must be a folder of records; got {args.records}.")
    for name in names:
        task = studies.TASKS[name]
        for stem in (name, f"{name}-defaults"):
            found = records.read(args.records / f"{stem}.jsonl")
            title = f"{task.title}{' (defaults)' if stem != name else ''}"
            if found:
                where = args.out, args.records / stem
                pages.save_all(found, stem, replace(task, title=title), *where)


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Run recorded runs again, chosen at random, and require the same figures.

    Runs whose data or weights are missing are left out.

    Raises:
        CompareError: If a figure differs from its record, or nothing can run.
    """
    pairs = [pair for name in names for pair in recorded(name, args)]
    random.Random(args.seeds).shuffle(pairs)
    differ, done = [], 0
    for one, record in pairs:
        if done == args.check:
            break
        try:
            again, _ = runs.run(one)
        except (CompareError, OSError) as error:
            print(f"not run: {one.problem.name}, {error}")
            continue
        done += 1
        found = pages.differences(record, again, one.problem)
        print(f"{one.named()}: {'; '.join(found) or 'agrees'}")
        differ += found
    if differ or not done:
        raise CompareError(f"{len(differ)} figures differ from {done} records.")


def recorded(name: str, args: argparse.Namespace) -> list[tuple[Cell, Record]]:
    """Return the reported runs of a study that have a record, and the record."""
    task, found = studies.TASKS[name], list[tuple[Cell, Record]]()
    listed = {(place, row.title): row for place in task.partitions for row in task.rows(place)}
    for record in [*committed(name), *committed(f"{name}-defaults")]:
        row = listed.get((record["partition"], record["row"]))
        if row is not None:
            row = replace(row, values=values_of(record, row))
            one = Cell(task, record["partition"], row, record["seed"], None, machine_of(args), "")
            found.append((one, record))
    return found


if __name__ == "__main__":
    main()
