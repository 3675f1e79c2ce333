"""Methods of the gallery, and your own, on one task under one budget.

All rows have the same rounds, clients, batches and initial values, and the same number of tuning
trials. Each finished run is one line of a JSON-lines file, so a killed program continues.
Of several programs that write to one file, each runs all that has no record when it starts: give
them different methods, partitions or rows::

    python examples/compare.py --task digits --methods fedprox,local --seeds 5
    python examples/compare.py --task clip --methods mine.py:my_method,promptfl
    torchrun --nproc-per-node 2 examples/compare.py --methods fedprox,local
    python examples/compare.py --check 3
    python examples/compare.py --task fedotp --verify --partitions fedotp-1-dtd --root DIR
"""

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import tasks
from fedprompt.compare import cells, hyperparameters, ranks, records, tables
from fedprompt.compare.cells import Cell, RunsError
from fedprompt.compare.command import OneLine, count, share
from fedprompt.compare.problems import Record
from fedprompt.compare.results import check_device, check_folder
from fedprompt.compare.rows import HEAD_RATE, Row
from fedprompt.compare.rows import chosen as methods_of
from fedprompt.compare.trials import CompareError
from tasks import estimate, pages, papers, verify
from tasks.core import Machine, Task
from tasks.tuning import two_rates

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "records"


def main(arguments: Sequence[str] | None = None) -> None:
    args = flags().parse_args(arguments)
    chosen = list(tasks.TASKS) if args.task is None else [args.task]
    args.task = args.task or "digits"
    if args.records is None:
        committed = args.tables or args.check is not None
        args.records = RECORDS if committed else args.out / "records"
    if ranks.started():
        args.workers = 1
        ranks.begin()
    try:
        if args.check is not None:
            check(args, chosen)
        elif args.tables:
            write_tables(args, chosen)
        elif args.estimate:
            estimates(args)
        elif args.verify:
            verify_settings(args)
        else:
            compare(args)
    except (CompareError, OSError, RunsError) as error:
        cause = f": {error.__cause__}" if isinstance(error, RunsError) else ""
        print(f"compare.py: {error}{cause}", file=sys.stderr)
        sys.exit(2)


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    parser = OneLine(
        "compare.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--task", choices=list(tasks.TASKS), help="digits, if not --check or --tables")
    add("--methods", help="names, or FILE:NAME for your own, separated by commas")
    add("--rows", help="titles of rows, separated by semicolons")
    add("--partitions", help="names, separated by commas")
    add("--seeds", type=count, default=5, help="number of seeds, from 0 on")
    add("--workers", type=count, default=2, help="number of processes")
    add("--device", default="cpu")
    add("--root", type=Path, default=Path(), help="folder of data sets")
    add("--weights", type=_file_of, action="append", default=[], help="NETWORK=FILE, names of timm")
    add("--pretrained", action="store_true", help="timm downloads the weights")
    add("--defaults", action="store_true", help="default values, no tuning")
    add("--shrink", type=share, default=1.0, help="share of rounds, steps and images; no tuning")
    add("--check", type=count, help="run so many recorded cells again, and compare")
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
    """Return where cells run."""
    return Machine(args.device, args.shrink, args.root, dict(args.weights), args.pretrained)


def compare(args: argparse.Namespace) -> None:
    """Tune and run the rows of a task, and print and write its tables."""
    check_folder(args.out)
    check_device(args.device)
    name = named_records(args)
    task = shown(args.task, name)
    path = args.records / f"{name}.jsonl"
    found = []
    for partition in named("partitions", args.partitions, list(task.partitions)):
        rows = tuned(chosen(args, task, partition), args, partition, path)
        seeds = range(1 if args.shrink != 1 else args.seeds)
        listed = [
            Cell(task, partition, row, seed, None, machine_of(args))
            for seed in seeds
            for row in rows
        ]
        found += cells.run_all(listed, path, workers=args.workers, title=partition)
        if ranks.rank() == 0:
            print(f"\n{tables.report(found, task, partition)}")
    if ranks.rank() > 0:
        return
    pages.save_all(found, name, task, args.out)
    print(f"\nTables and figures: {args.out}/")


def shown(name: str, stem: str) -> Task:
    """Return a task for its tables; those of default values say so, and recommend nothing."""
    task = tasks.TASKS[name]
    if stem == name:
        return task
    return replace(task, title=f"{task.title} ({stem.removeprefix(f'{name}-')})", advice=None)


def named_records(args: argparse.Namespace) -> str:
    """Return the name of the file of records; shrunk runs and those without tuning have others."""
    if args.shrink != 1:
        return f"{args.task}-shrunk"
    tunes = tasks.TASKS[args.task].trials is not None
    return f"{args.task}-defaults" if args.defaults and tunes else str(args.task)


def estimates(args: argparse.Namespace) -> None:
    """Print and write the runs and hours of a task by arithmetic."""
    task = tasks.TASKS[args.task]
    partitions = named("partitions", args.partitions, list(task.partitions))
    text = estimate.table_of(args.task, task, partitions, args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.task}-hours.md").write_text(f"{text}\n")
    print(text)


def verify_settings(args: argparse.Namespace) -> None:
    """Check the first chosen row of a paper's settings; without `--partitions`, of the first one.

    Raises:
        CompareError: If the task is not that of a paper, or a check fails.
    """
    if args.task not in papers.PAPERS:
        raise CompareError(
            f"`--verify` needs `--task` {', '.join(papers.PAPERS)}; got {args.task!r}."
        )
    task = tasks.TASKS[args.task]
    partitions = list(task.partitions)
    for partition in named("partitions", args.partitions or partitions[0], partitions):
        row = chosen(args, task, partition)[0]
        verify.climb(verify.Case(args.task, partition, row, machine_of(args)))


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


def chosen(args: argparse.Namespace, task: Task, partition: str) -> list[Row]:
    """Return the rows of a partition that are wanted."""
    rows = [row for row in task.rows(partition) if row.method is not None]
    given = [] if args.methods is None else args.methods.split(",")
    if own := [name for name in given if ":" in name]:
        both = any(HEAD_RATE in row.values for row in rows)
        new = methods_of(own, task.family(partition))
        rows += map(two_rates, new) if both else new
    if given:
        names = [name.rpartition(":")[2] for name in given]
        methods = dict.fromkeys(str(row.method) for row in rows)
        wanted = named("methods", ",".join(names), list(methods))
        rows = [row for row in rows if row.method in wanted]
    wanted = named("rows", args.rows, [row.title for row in rows], ";")
    return [row for row in rows if row.title in wanted]


def tuned(rows: Sequence[Row], args: argparse.Namespace, partition: str, path: Path) -> list[Row]:
    """Return the rows with the values of their trials that are best on own mixes."""
    task = tasks.TASKS[args.task]
    if task.trials is None or args.defaults or args.shrink != 1:
        return list(rows)

    title = f"{task.tuned_on or partition}, tuning"
    run_all = partial(cells.run_all, path=path, workers=args.workers, title=title)
    return hyperparameters.tuned(task, partition, rows, run_all, path, machine=machine_of(args))


def write_tables(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Write the tables and figures of all records of some tasks.

    Raises:
        CompareError: If there is no folder of records.
    """
    if not args.records.is_dir():
        raise CompareError(f"`--records` must be a folder of records; got {args.records}.")
    for name in names:
        for stem in (name, f"{name}-defaults"):
            if found := list(
                cells.load(args.records / f"{stem}.jsonl", tasks.TASKS[name]).values()
            ):
                pages.save_all(found, stem, shown(name, stem), args.out)


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Run recorded cells again, chosen at random, and require the same figures.

    Cells whose data or weights are missing are left out.

    Raises:
        CompareError: If a figure differs from its record, or no cell can run.
    """
    pairs = [pair for name in names for pair in recorded(name, args)]
    random.Random(args.seeds).shuffle(pairs)
    differ, done = [], 0
    for cell, record in pairs:
        if done == args.check:
            break
        try:
            if cell.named().get("inputs") != record.get("inputs"):
                raise CompareError("other images or weights than those of the record")
            again = records.origin() | records.rounded(cells.run(cell))
        except (CompareError, OSError) as error:
            print(f"not run: {cell.problem.name}, {error}")
            continue
        done += 1
        found = pages.differences(record, again, cell.problem)
        print(f"{cell.named()}: {'; '.join(found) or 'agrees'}")
        differ += found
    if differ or not done:
        raise CompareError(f"{len(differ)} figures differ from {done} records.")


def recorded(name: str, args: argparse.Namespace) -> list[tuple[Cell, Record]]:
    """Return the reported cells of a task that have a record, and the record."""
    task = tasks.TASKS[name]
    rows = {(place, row.title): row for place in task.partitions for row in task.rows(place)}
    found = []
    tuned, defaults = (
        cells.load(args.records / f"{name}{end}.jsonl", task) for end in ("", "-defaults")
    )
    for record in (*tuned.values(), *defaults.values()):
        row = rows.get((record["partition"], record["row"]))
        if row is not None and record["trial"] is None:
            row = replace(row, values=record["values"])
            cell = Cell(task, record["partition"], row, record["seed"], None, machine_of(args))
            found.append((cell, record))
    return found


if __name__ == "__main__":
    main()
