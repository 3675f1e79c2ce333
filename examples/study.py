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
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import studies
from fedprompt import compare
from fedprompt.compare import Results
from studies import STUDIES, pages, papers, verify
from studies.core import Machine, Row, Study
from studies.photos import RANDOM

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "records"
Record = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = flags()
    args = parser.parse_args(arguments)
    wanted = list(STUDIES) if args.study is None else [args.study]
    args.study = args.study or "digits"
    try:
        if args.weights:
            check_weights(args, [args.study] if args.check is None else wanted)
        if args.list:
            for name in wanted:
                print(name, *STUDIES[name].partitions, sep="\n    ")
        elif args.check is not None:
            check(args, wanted)
        elif args.tables:
            write_tables(args, wanted)
        elif args.estimate:
            estimates(args)
        elif args.verify:
            verify_settings(args)
        else:
            run(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"study.py: {error}\n")


def flags() -> argparse.ArgumentParser:
    """Make the parser."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("study.py", description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--list", action="store_true", help="print the studies and their partitions, and stop")
    add("--study", choices=list(STUDIES), help="digits, if not --check, --list or --tables")
    add("--methods", help="names, or FILE:NAME for your own, separated by commas")
    add("--rows", help="titles of rows, separated by semicolons")
    add("--partitions", help="names, separated by commas")
    add("--seeds", type=int, default=5, help="number of seeds, from 0 on")
    add("--workers", type=int, default=2, help="number of processes")
    add("--device", default="cpu")
    add("--root", type=Path, default=Path(), help="folder of data sets")
    add("--weights", type=_file_of, action="append", default=[], help="NETWORK=FILE, of a study")
    add("--pretrained", action="store_true", help="solar, mnist, patches: timm downloads weights")
    add("--defaults", action="store_true", help="default values of all rows")
    add("--shrink", type=float, default=1.0, help="share of rounds, steps and images")
    add("--check", type=int, help="run so many recorded runs again, and compare")
    add("--estimate", action="store_true", help="print runs and hours, and stop")
    add("--verify", action="store_true", help="check a paper's setting, and stop")
    add("--tables", action="store_true", help="write tables from committed records, and stop")
    add("--out", type=Path, default=Path("out"), help="folder of the tables")
    add("--records", type=Path, help="OUT/records; with --tables, the committed ones")
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
        ValueError: If no row has a network of this name, if a name is there twice, or without a
            file.
    """
    read = dict[str, None]()
    unread = args.tables or args.estimate or args.list
    for name in () if unread else names:
        study = STUDIES[name]
        for partition in study.partitions if args.check else partitions_of(args, study):
            for row in study.rows(partition) if args.check else chosen(args, study, partition):
                read |= dict.fromkeys(study.networks(partition, row))
    given = [name for name, _ in args.weights]
    for name, path in args.weights:
        if name not in read or given.count(name) > 1:
            rule = f"name each of {', '.join(read)} at most once" if read else "be left out here"
            raise ValueError(f"`--weights` must {rule}; got {name}.")
        if name != RANDOM and not path.exists():
            raise ValueError(f"`--weights` must name a file that exists; got {path}.")


def run(args: argparse.Namespace) -> None:
    """Run the rows of a study, and print and write its tables."""
    study, first = STUDIES[args.study], os.environ.get("RANK", "0") == "0"
    stem = f"{args.study}{'-shrunk' if args.shrink != 1 else ''}"
    how: dict[str, Any] = {"seeds": 1 if args.shrink != 1 else args.seeds, "device": args.device}
    how |= {"shrink": args.shrink, "workers": args.workers}
    done = list[Results]()
    for partition in partitions_of(args, study):
        rows = [
            row if args.defaults or isinstance(row, str) else recorded(row, args.study, partition)
            for row in chosen(args, study, partition)
        ]
        problem = studies.problem(args.study, partition, machine_of(args))
        place = (args.records or args.out / "records") / stem / partition
        done.append(compare.run(problem, rows, out=place, **how))
        if first:
            shown = pages.view(done[-1], study, partition)
            print(f"\n{pages.report(shown, stem, study, partition)}")
    if first:
        bits = {key: each for results in done for key, each in results.bits.items()}
        found = [record for results in done for record in results.found]
        pages.save(replace(done[0], found=found, bits=bits), stem, study, args.out)
        print(f"\nTables and figures: {args.out}/")
    if failed := {title: text for results in done for title, text in results.failed.items()}:
        raise ValueError("; ".join(f"{title} failed: {text}" for title, text in failed.items()))


@cache
def committed(name: str) -> Results:
    """Return the reported records of a study that are committed, if it has any."""
    return Results.read(RECORDS / f"{name}.jsonl", bits=RECORDS / name)


def recorded(row: Row, name: str, partition: str) -> Row:
    """Return a row with the values that were chosen for it, if it has committed records."""
    for record in reversed(committed(name).found):
        if (record["partition"], record["row"]) == (partition, row.title):
            return replace(row, values=record["values"])
    return row


def estimates(args: argparse.Namespace) -> None:
    """Print and write the runs and hours of a study by arithmetic."""
    study = STUDIES[args.study]
    rows = {each: chosen(args, study, each) for each in partitions_of(args, study)}
    text = pages.hours(args.study, study, rows, args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.study}-hours.md").write_text(f"{text}\n")
    print(text)


def verify_settings(args: argparse.Namespace) -> None:
    """Check the first chosen row of a paper's settings; without `--partitions`, of the first one.

    Raises:
        ValueError: If the study is not that of a paper, or a check fails.
    """
    if args.study not in papers.PAPERS:
        rule = f"`--verify` needs `--study` {', '.join(papers.PAPERS)}"
        raise ValueError(f"{rule}; got {args.study!r}.")
    study = STUDIES[args.study]
    args.partitions = args.partitions or next(iter(study.partitions))
    for partition in partitions_of(args, study):
        row = chosen(args, study, partition)[0]
        verify.climb(verify.Case(args.study, partition, row, machine_of(args)))


def partitions_of(args: argparse.Namespace, study: Study) -> list[str]:
    """Return the partitions that are wanted."""
    return named("partitions", args.partitions, list(study.partitions))


def named(flag: str, given: str | None, allowed: Sequence[str], by: str = ",") -> list[str]:
    """Return the given names, or all that are allowed.

    Raises:
        ValueError: If a name is not allowed, or twice.
    """
    names = list(allowed) if given is None else given.split(by)
    for name in names:
        if name not in allowed:
            raise ValueError(f"`--{flag}` must name {', '.join(allowed)}; got {name!r}.")
        if names.count(name) > 1:
            raise ValueError(f"`--{flag}` must name each once; got {name!r} twice.")
    return names


def chosen(args: argparse.Namespace, study: Study, partition: str) -> list[Any]:
    """Return the rows of a partition that are wanted, and own methods as FILE:NAME."""
    found = [row for row in study.rows(partition) if row.method]
    given = args.methods.split(",") if args.methods else []
    own = [name for name in given if ":" in name]
    if given:
        methods = dict.fromkeys(row.method for row in found)
        names = [name for name in given if name not in own]
        wanted = named("methods", ",".join(names), list(methods)) if names else []
        found = [row for row in found if row.method in wanted]
    titles = named("rows", args.rows, [row.title for row in found], ";")
    return [*(row for row in found if row.title in titles), *own]


def write_tables(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Write the tables and figures of all records of some studies, whatever their stamps.

    Raises:
        ValueError: If there is no folder of records.
    """
    folder = args.records or RECORDS
    if not folder.is_dir():
        raise ValueError(f"`--records` must be a folder of records; got {folder}.")
    for name in names:
        for stem in (name, f"{name}-defaults"):
            found = Results.read(folder / f"{stem}.jsonl", bits=folder / stem)
            title = f"{STUDIES[name].title}{' (defaults)' if stem != name else ''}"
            if found.found:
                pages.save(found, stem, replace(STUDIES[name], title=title), args.out)


def check(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Run recorded runs again, chosen at random, and require the same figures.

    Runs whose data or weights are missing are left out.

    Raises:
        ValueError: If a figure differs from its record, or nothing can run.
    """
    pairs = [(name, *pair) for name in names for pair in known(name)]
    random.Random(args.seeds).shuffle(pairs)
    differ, done = [], 0
    for name, row, record in pairs:
        if done == args.check:
            break
        try:
            problem = studies.problem(name, record["partition"], machine_of(args))
            results = compare.run(problem, [row], seeds=[record["seed"]], device=args.device)
        except (ValueError, OSError) as error:
            print(f"not run: {name}, {error}")
            continue
        done += 1
        again = next((each for each in results.found if each["row"] == row.title), {})
        found = [*pages.differences(record, again, STUDIES[name]), *results.failed.values()]
        where = f"{name}, {record['partition']}, {row.title}, seed {record['seed']}"
        print(f"{where}: {'; '.join(found) or 'agrees'}")
        differ += found
    if differ or not done:
        raise ValueError(f"{len(differ)} figures differ from {done} records.")


def known(name: str) -> list[tuple[Row, Record]]:
    """Return the rows of a study with the values of each record."""
    study, found = STUDIES[name], list[tuple[Row, Record]]()
    listed = {(place, row.title): row for place in study.partitions for row in study.rows(place)}
    for record in [*committed(name).found, *committed(f"{name}-defaults").found]:
        row = listed.get((record["partition"], record["row"]))
        if row is not None:
            found.append((replace(row, values=record["values"]), record))
    return found


if __name__ == "__main__":
    main()
